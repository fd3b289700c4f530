"""Muon: its arithmetic against torch's and a plain one, how matrices are packed, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from geotrain.config import ConfigError, ParallelConfig
from geotrain.optimizers.inner_optimizer import InnerOptimizer
from geotrain.optimizers.updates import MOMENTUM, OwnedMatrix
from geotrain.parallelism.checks import check_layout
from geotrain.parallelism.optimizer_settings import MuonSettings
from geotrain.parallelism.whole_matrices import LocalMatrix, pack
from tests.support.acco_reference import muon_step
from tests.support.inner_worlds import LLAMA, SEQUENCE, architecture, deepspeed_block, run_world, start, stop


def muon_block(stage: int, mode: str = "duplicated", **more: Any) -> dict[str, Any]:
    params = {"lr": 5e-3, "adam_lr": 4e-3, "weight_decay": 0.1, "tp_mode": mode}
    return deepspeed_block(stage, **{"optimizer": {"type": "Muon", "params": params}, **more})


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("shape", [(12, 32), (32, 12), (16, 16)])
def test_the_arithmetic_is_that_of_the_definition_and_of_torch(shape: tuple[int, int], rows: bool) -> None:
    """torch has no normalized rows."""
    generator = torch.Generator().manual_seed(0)
    start_weights = torch.randn(shape, generator=generator)
    ours, theirs = (nn.Parameter(start_weights.clone()) for _ in range(2))
    plain, momentum = start_weights.double(), torch.zeros(shape, dtype=torch.float64)
    group = {"params": [ours], "lr": 0.02, "weight_decay": 0.1, "is_matrices": True, "moments": (MOMENTUM,)}
    muon = InnerOptimizer([group], MuonSettings(lr=0.02, weight_decay=0.1, normalize_rows=rows))
    muon.bind([(ours, OwnedMatrix(LocalMatrix(((0, ours.numel()),), *shape, None), 0))], None)
    torchs = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        gradient = torch.randn(shape, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        muon.step()
        torchs.step()
        muon_step(plain, momentum, gradient.double(), 0.02, 0.1, rows)
    torch.testing.assert_close(ours.data.double(), plain, rtol=1e-5, atol=1e-6)
    if not rows:
        torch.testing.assert_close(ours.data, theirs.data, rtol=0, atol=5e-3)  # torch's iterates in bf16
    assert (ours.data - start_weights).abs().max() > 0.02


@pytest.mark.parametrize("shape", [(32, 12), (12, 32)])
def test_normalized_rows_have_one_norm_and_the_matrix_keeps_its_own(shape: tuple[int, int]) -> None:
    """Rows beyond the columns differ in norm without it. One of zeros stays one, and makes no NaN."""
    moved = []
    for normalize in (False, True):
        weights = nn.Parameter(torch.zeros(shape))
        group = {"params": [weights], "lr": 1.0, "weight_decay": 0.0, "is_matrices": True, "moments": (MOMENTUM,)}
        muon = InnerOptimizer([group], MuonSettings(lr=1.0, normalize_rows=normalize))
        muon.bind([(weights, OwnedMatrix(LocalMatrix(((0, weights.numel()),), *shape, None), 0))], None)
        weights.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        weights.grad[0] = 0
        muon.step()
        moved.append(weights.detach())
    plain, rows = (each[1:].norm(dim=1) for each in moved)
    assert plain.max() / plain.min() > 1.15
    torch.testing.assert_close(rows, rows.mean().expand(len(rows)), rtol=1e-5, atol=0)
    torch.testing.assert_close(moved[1].norm(), moved[0].norm() * (len(rows) / shape[0]) ** 0.5, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        moved[1] / moved[1].norm(dim=1, keepdim=True).clamp(min=1e-8),
        moved[0] / moved[0].norm(dim=1, keepdim=True).clamp(min=1e-8),
    )
    assert not moved[1][0].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {"type": "Muon", "params": {"muon_lr": 0.1}}}, "write lr = 0.1"),
        ({"optimizer": {"type": "Muon", "params": {"ns_step": 5}}}, "did you mean 'ns_steps'"),
        ({"optimizer": {"type": "Muon", "params": {"momentum": 1.0}}}, "momentum = 1.0"),
        ({"optimizer": {"type": "Muon", "params": {"tp_mode": "distributed"}}}, "tp_mode"),
        ({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}}, "momentum: unknown key"),
        (
            {"scheduler": {"type": "WarmupLR"}, "optimizer": {"type": "Muon", "params": {"lr": 0.1, "adam_lr": 0.2}}},
            "gives all parameters one rate",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(architecture(LLAMA), ParallelConfig(), 2, {**muon_block(1), **change}, SEQUENCE)


def test_more_ranks_than_matrices_are_refused() -> None:
    block = {**muon_block(1), "train_batch_size": 128}
    with pytest.raises(ConfigError, match="64 data-parallel ranks are too many"):
        check_layout(architecture(LLAMA), ParallelConfig(), 64, block, SEQUENCE)
    tiny = {**LLAMA, "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 2, "vocab_size": 4}
    assert check_layout(architecture(tiny), ParallelConfig(), 1, muon_block(1), SEQUENCE) == 1, "whatever gaps it has"


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    st.integers(1, 9),
    st.integers(0, 40),
    st.integers(1, 130),
)
def test_no_shard_cuts_an_item(sizes: list[int], ranks: int, head: int, multiple: int) -> None:
    packing = pack(sizes, ranks, head * multiple, multiple)
    shard, position, seen = packing.shard_numel, head * multiple, []
    for entry in packing.sequence:
        length = sizes[entry] if entry >= 0 else -entry
        if entry >= 0:
            assert position // shard == (position + length - 1) // shard, "a boundary cuts it"
            assert position % multiple == 0
            seen.append(entry)
        position += length
    assert sorted(seen) == list(range(len(sizes)))
    assert position == shard * ranks and shard % multiple == 0
    rounded = [-(-size // multiple) * multiple for size in sizes]
    least = max((head * multiple + sum(rounded)) / ranks, *rounded, 0)
    assert shard < least + max(rounded) + multiple, "no worse than filling ranks in turn"


def blockwise() -> Any:
    """TP 2: what each rank's part becomes, and the part's start and gradients' stand-ins."""
    engine = start(LLAMA, ParallelConfig(tensor=2), muon_block(0, "blockwise"))
    muon = engine.basic_optimizer
    before = {place.name: (p.detach().clone(), place) for p, place in engine._placed}
    generator = torch.Generator().manual_seed(engine.mesh.tp_rank)
    gradients = {}
    for p, place in engine._placed:
        p.grad = gradients[place.name] = torch.randn(p.shape, generator=generator)
    for group in muon.param_groups:
        group["lr"] = 0.01
    muon.step()
    after = {place.name: p.detach().clone() for p, place in engine._placed}
    stop(engine)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    return before[name][0], gradients[name], after[name]


@pytest.mark.slow
def test_blockwise_each_tensor_rank_takes_its_own_part_for_a_matrix() -> None:
    for weights, gradient, after in run_world(2, blockwise):
        expected, momentum = weights.double(), torch.zeros_like(weights, dtype=torch.float64)
        muon_step(expected, momentum, gradient.double(), 0.01, 0.1)
        torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-6)
