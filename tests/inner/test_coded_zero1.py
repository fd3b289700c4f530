"""Coded collectives of ZeRO-1: each step against plain torch and the codecs' reference, bit for bit; residuals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from geotrain.checkpoint.state import RESIDUAL, state_of
from geotrain.config import ParallelConfig
from geotrain.inner.zero.codes import Codes
from geotrain.kernels import reference
from geotrain.kernels.payload_format import PayloadFormat
from geotrain.parameters.parameter_map import canonical_parameters
from tests.support.checkpoints import load, save
from tests.support.families import QWEN_MOE
from tests.support.inner_worlds import (
    LLAMA,
    MUON,
    QWEN_2,
    deepspeed_block,
    micro_batches,
    run_world,
    start,
    stop,
    train,
)

SIZES = (1, 127, 128, 300, 5000)
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
WORLDS: dict[str, tuple[dict[str, Any], ParallelConfig, dict[str, Any]]] = {
    "AdamW": (LLAMA, ParallelConfig(), {}),
    "Muon, bf16": (LLAMA, ParallelConfig(), {**MUON, "bf16": {"enabled": True}, **SUMS}),
    "experts": (QWEN_MOE, ParallelConfig(expert=2), {}),
}


def drawn(sizes: Sequence[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) * torch.rand(n, generator=generator) ** 4 for n in sizes]


def through(values: Tensor, bits: int) -> Tensor:
    """What a code says, by the reference."""
    fmt, values = PayloadFormat(f"int{bits}"), values.float()
    payload, decoded = torch.empty(fmt.encoded_bytes(values.numel()), dtype=torch.uint8), torch.empty_like(values)
    reference.quantize(values, payload, fmt, None, None, 0)
    reference.dequantize(payload, decoded, fmt, None)
    return decoded


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("at_once", [128, 1 << 20])
def test_what_was_sent_and_what_is_left_are_all_that_was_given(
    bits: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over many steps; and what is left is less than one code apart."""
    monkeypatch.setattr("geotrain.inner.zero.codes.CODED_AT_ONCE", at_once)
    codes, sums = Codes(bits), [torch.zeros(n) for n in SIZES]
    given, sent = [torch.zeros(n, dtype=torch.float64) for n in SIZES], [torch.zeros(n) for n in SIZES]
    payload = torch.empty(codes.bytes(sums), dtype=torch.uint8)
    for step in range(20):
        for total, whole, new in zip(sums, given, drawn(SIZES, step), strict=True):
            total += new
            whole += new
        largest = [total.abs().max() for total in sums]
        codes.encode_sums(sums, payload)
        codes.decode(payload, sent, first=step == 0)
    for left, said, whole, most in zip(sums, sent, given, largest, strict=True):
        torch.testing.assert_close(said.double() + left, whole, rtol=1e-5, atol=1e-5)
        assert left.abs().max() <= 0.51 * most / (2 ** (bits - 1) - 1) * 1.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_held_come_to_those_wanted(dtype: torch.dtype) -> None:
    codes, wanted = Codes(4), drawn(SIZES, 1)
    held = [torch.zeros(n, dtype=dtype) for n in SIZES]
    payload = torch.empty(codes.bytes(held), dtype=torch.uint8)
    for _ in range(12):
        codes.encode_changes(held, wanted, payload)
        codes.change(payload, held)
    for ours, theirs in zip(held, wanted, strict=True):
        apart = (ours.float() - theirs).abs().max() / theirs.abs().max()
        assert apart < (1e-6 if dtype == torch.float32 else 2**-8)


# ----------------------------------------------------------------------------------------- an engine's steps


def play(name: str) -> dict[str, Any]:
    """Three steps. Of each bucket: this rank's sums as they are encoded, and what it has afterwards."""
    from geotrain.inner.zero.buckets import Bucket

    model, parallel, more = WORLDS[name]
    block = deepspeed_block(1, micro=1) | more
    block["zero_optimization"] = {"stage": 1, "gradient_bits": 8, "weight_bits": 4}
    engine = start(model, parallel, block)
    optimizer, begin = engine.optimizer, Bucket.begin_reduction
    finish, steps, sums, reduced = Bucket.finish_reduction, [], dict[Any, Any](), dict[Any, Any]()

    def watched_begin(bucket: Any) -> None:
        sums[bucket] = copies(bucket._gradients)
        begin(bucket)

    def watched_finish(bucket: Any) -> None:
        finish(bucket)
        if bucket.codes is not None:  # a step scales them later
            (reduced[bucket],) = copies([bucket.codes.reduced])

    coded = [bucket for bucket in optimizer._forward if bucket.codes is not None]
    # All gradients that backward gives, laid out as the sums.
    sums_of_groups = optimizer.fp32_groups_gradients_flat
    given = {t.untyped_storage().data_ptr(): torch.zeros_like(t, dtype=torch.float64) for t in sums_of_groups}

    def beside(view: Tensor) -> Tensor:
        return given[view.untyped_storage().data_ptr()][view.storage_offset() :][: view.numel()]

    def watch(into: Tensor, gradient: Tensor) -> None:
        into += gradient.flatten()

    for parameter, gradient in optimizer._gradients.items():
        parameter.register_hook(partial(watch, beside(gradient.sum.view(-1))))
    Bucket.begin_reduction, Bucket.finish_reduction = watched_begin, watched_finish  # type: ignore[method-assign]
    for step in range(3):
        optimizer.wait_for_weights()
        held = [copies(bucket.codes.held) for bucket in coded]
        engine.train_step(micro_batches(engine, step), step)
        optimizer.wait_for_weights()
        steps.append(
            [
                {
                    "sums": sums[bucket],
                    "left": copies(bucket._gradients),
                    "reduced": reduced[bucket],
                    "before": before,
                    "held": copies(bucket.codes.held),
                    "wanted": copies([bucket.codes.wanted])[0],
                }
                for bucket, before in zip(coded, held, strict=True)
            ]
        )
    Bucket.begin_reduction, Bucket.finish_reduction = begin, finish  # type: ignore[method-assign]
    total = [t.clone() for t in optimizer.fp32_groups_gradients_flat]
    optimizer.move_residuals()
    moved = [t.clone() for t in optimizer.fp32_groups_gradients_flat]
    before = [p.detach().clone() for p in engine.module.parameters()]
    loss = engine.evaluate(micro_batches(engine, 0))
    optimizer.wait_for_weights()
    after = [p.detach() for p in engine.module.parameters()]
    kept = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    engine._weights_differ = False  # from here on it evaluates at what it holds
    at_held = engine.evaluate(micro_batches(engine, 0))
    engine.refresh()
    at_masters = engine.evaluate(micro_batches(engine, 0))
    losses = {"ours": loss, "held": at_held, "masters": at_masters}
    seen = {"steps": steps, "total": total, "moved": moved, "losses": losses, "kept": kept}
    seen["coded"] = optimizer._coded
    seen["given"] = [[[beside(view) for view in views] for views in bucket._gradients] for bucket in coded]
    stop(engine)
    return seen


def copies(tensors: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[t.clone() for t in views] for views in tensors]


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_world(2, play, request.param)


def test_a_step_is_that_of_the_reference(ranks: list[dict[str, Any]]) -> None:
    for step, of_ranks in enumerate(zip(*(rank["steps"] for rank in ranks), strict=True)):
        for buckets in zip(*of_ranks, strict=True):
            for owner, mine in enumerate(buckets):
                for i, reduced in enumerate(mine["reduced"]):
                    said = [through(theirs["sums"][owner][i], 8) for theirs in buckets]
                    assert torch.equal(reduced, said[0] + said[1])
                    for theirs, word in zip(buckets, said, strict=True):
                        assert torch.equal(theirs["left"][owner][i], theirs["sums"][owner][i] - word)
                    before, wanted = mine["before"][owner][i], mine["wanted"][i]
                    expected = (before.float() + through(wanted - before.float(), 4)).to(before.dtype)
                    for theirs in buckets:
                        assert torch.equal(theirs["held"][owner][i], expected), step


def test_over_steps_all_gradients_arrive_but_what_the_last_codes_lost(ranks: list[dict[str, Any]]) -> None:
    for b, of_ranks in enumerate(zip(*(rank["given"] for rank in ranks), strict=True)):
        for owner, rank in enumerate(ranks):
            for i, first in enumerate(rank["steps"][0][b]["reduced"]):
                arrived = first + sum(step[b]["reduced"][i] for step in rank["steps"][1:])
                left = sum(theirs["steps"][-1][b]["left"][owner][i] for theirs in ranks)
                given = sum(theirs[owner][i] for theirs in of_ranks)
                atol = 1e-6 * float(given.abs().max())
                torch.testing.assert_close(arrived.double() + left, given, rtol=1e-5, atol=atol)


def test_residuals_move_to_the_owners_and_none_is_lost(ranks: list[dict[str, Any]]) -> None:
    for i, coded in enumerate(ranks[0]["coded"]):
        if not coded:
            continue
        one, other = (rank["total"][i] for rank in ranks)
        own = [rank["moved"][i].chunk(2) for rank in ranks]
        torch.testing.assert_close(torch.cat((own[0][0], own[1][1])), one + other, rtol=1e-6, atol=1e-9)
        assert not own[0][1].any() and not own[1][0].any() and one.any()
    assert any(ranks[0]["coded"])


def test_an_evaluation_is_at_the_masters_and_leaves_weights_as_they_are(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        losses = rank["losses"]
        assert losses["ours"] == losses["masters"] != losses["held"] and rank["kept"]


# ------------------------------------------------------------------------------------------- another layout

LAYOUTS = ParallelConfig(tensor=2), ParallelConfig(pipeline=2), ParallelConfig(), ParallelConfig(tensor=2)


def resume_in_turn(folder: str) -> list[dict[str, Tensor]]:
    """Of each layout, which resumes from the one before: what codes lost, as the next sums of gradients count it, of
    the parameters whose gradients several ranks of a replica add up in some layout."""
    import torch.distributed as dist

    found = []
    for i, parallel in enumerate(LAYOUTS):
        block = deepspeed_block(1, micro=1)
        block["zero_optimization"] = {"stage": 1, "gradient_bits": 8, "weight_bits": 4}
        engine = start(QWEN_2, parallel, block)
        if i:
            load(engine, f"{folder}/{i - 1}")
        else:
            train(engine, range(2))
        save(engine, f"{folder}/{i}", "it", {}, keep=1)
        lost = {p.name: torch.zeros(p.shape) for p in canonical_parameters(engine.architecture)}
        partial_ones = {id(gradient) for gradients in engine._partial_gradients() for gradient in gradients}
        summed = {run.parameter for p, x in engine._placed for run in x.runs if id(p._hp_grad) in partial_ones}
        for shard in engine.shards():
            if not shard.pushes and shard.runs[0].parameter not in summed:
                continue  # a copy of what another rank counts
            values, offset = state_of(engine, shard)[RESIDUAL], 0
            for run in shard.runs:
                rows = values[offset : offset + run.numel].view(run.count, run.length)
                lost[run.parameter].view(-1).as_strided(rows.shape, (run.stride, 1), run.start).add_(rows)
                offset += run.numel
        for values in lost.values():
            dist.all_reduce(values)
        found.append({name: values for name, values in lost.items() if "norm" in name or "embed" in name})
        stop(engine)
    return found


@pytest.mark.slow
def test_what_codes_lost_is_resumed_once_in_whatever_layout(tmp_path: Path) -> None:
    first, *others = run_world(4, resume_in_turn, str(tmp_path))[0]
    assert any("q_norm" in name for name in first) and all(values.any() for values in first.values())
    for layout, other in zip(LAYOUTS[1:], others, strict=True):
        for name, values in first.items():
            torch.testing.assert_close(other[name], values, rtol=1e-6, atol=1e-9, msg=f"{layout}: {name}")
