"""Attention inside documents: a packed sample gives what its documents give one by one."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from geotrain.config import ParallelConfig, architecture_from_hf
from geotrain.inner.model.documents import cu_seqlens, suits_varlen
from geotrain.parallelism import checks
from geotrain.parallelism.memory import mask_elements, memory_per_rank
from tests.support.families import MISTRAL
from tests.support.inner_worlds import LLAMA, QWEN_2, SEQUENCE, deepspeed_block, run_world, start, stop
from tests.support.inner_worlds import batch as random_batch

END = 0
# The versions that are pinned have it; below, masks are used.
VARLEN = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="its varlen_attn knows no windows and groups"
)
MODELS = {"llama": {**LLAMA, "num_hidden_layers": 2}, "qwen": QWEN_2, "mistral": {**MISTRAL, "num_hidden_layers": 2}}


def packed() -> torch.Tensor:
    """Two samples of three documents each, of other lengths; one ends with its sample."""
    tokens = random_batch(0)[:2].clamp(min=1)
    tokens[0, [3, 9]] = END
    tokens[1, [0, 11, 15]] = END
    return tokens


def pieces(row: torch.Tensor) -> list[tuple[int, int]]:
    ends = [i + 1 for i in range(SEQUENCE) if row[i] == END or i == SEQUENCE - 1]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def beside_single_documents() -> dict[str, Any]:
    """Train each model; returns (losses of the packed tokens, of its documents alone; gradients of both)."""
    from geotrain.inner.runtime import platform

    results = {}
    for name, config in MODELS.items():
        engine = start(config, ParallelConfig(), deepspeed_block(0))
        tokens, parameters = packed(), list(engine.module.parameters())
        with platform.megatron_runtime():
            engine.end_of_document = END
            together = engine._losses(engine.module, tokens)
            engine.end_of_document = None
            whole = engine._losses(engine.module, tokens).detach()
            alone = torch.zeros_like(together)
            for i, row in enumerate(tokens):
                for begin, end in pieces(row):
                    alone[i, begin:end] = engine._losses(engine.module, row[None, begin : end + 1])[0]
            gradients = [torch.autograd.grad(losses.mean(), parameters) for losses in (together, alone)]
        results[name] = together.detach(), alone.detach(), whole, gradients
        stop(engine)
    return results


def by_segment(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, *most: int,
    scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """What torch documents of `varlen_attn`, which has no kernel for processors: [tokens, heads, head_dim], segment
    by segment; window_size: (tokens before, after), −1: all."""
    assert torch.equal(cu_q, cu_k) and window_size[1] == 0 and cu_q.dtype == torch.int32
    assert int(cu_q.diff().max()) <= min(most) and int(cu_q[-1]) == len(query)
    out = []
    for begin, end in pairwise(cu_q.tolist()):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        places = torch.arange(end - begin)
        back = places[:, None] - places
        seen = (back >= 0) & ((back <= window_size[0]) | (window_size[0] == -1))
        part = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        out.append(part.transpose(0, 1))
    return torch.cat(out)


@VARLEN
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("window", [None, 5, SEQUENCE + 1])
@pytest.mark.parametrize(("groups", "scale"), [(4, None), (2, 0.3)])
def test_attention_without_a_mask_is_that_with_one(inside, window, groups, scale, monkeypatch) -> None:
    """On a GPU from 16 bits on; what it is given is what the dense mask stands for, and torch takes it."""
    from geotrain.inner.model import attention as module

    config = SimpleNamespace(num_query_groups=groups, num_attention_heads=4)
    attention = module.CausalAttention(config, scale, window)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    qkv = [
        torch.randn(SEQUENCE, 2, heads, 8, generator=generator, requires_grad=True) for heads in (4, groups, groups)
    ]
    boundaries = cu_seqlens(packed()[:, :-1], END) if inside else None

    def played() -> tuple[torch.Tensor, ...]:
        out = attention(*qkv, boundaries)
        return out, *torch.autograd.grad(out.square().sum(), qkv)

    masked, calls = played(), []
    monkeypatch.setattr(module, "suits_varlen", lambda query, value: calls.append(1) or True)
    with monkeypatch.context() as patched:
        patched.setattr("torch.nn.attention.varlen.varlen_attn", by_segment)
        for one, other in zip(played(), masked, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert bool(calls) == (inside or window == 5), "without either it is torch's causal attention"
    meta = [x.detach().to("meta", torch.bfloat16).requires_grad_() for x in qkv]
    out = attention(*meta, None if boundaries is None else boundaries.to("meta"))
    assert out.shape == (SEQUENCE, 2, 32) and [g.shape for g in torch.autograd.grad(out.sum(), meta)] == [
        x.shape for x in qkv
    ]


def test_which_attention_needs_no_mask(monkeypatch) -> None:
    for installed, widths, wanted in (
        ("2.13.0+cu130", (128, 128, 2), True),
        ("2.11.0a0+nv26.1", (128, 128, 2), False),
        ("2.13.0", (128, 128, 4), False),
        ("2.13.0", (192, 128, 2), False),
        ("2.14.0", (288, 288, 2), False),
    ):
        monkeypatch.setattr(checks, "version", lambda name, installed=installed: installed)
        assert checks.attends_without_masks(*widths) is wanted, (installed, widths)
    assert not suits_varlen(*torch.zeros(2, 8, 2, 4, 64, dtype=torch.bfloat16)), "of a processor"


@VARLEN
@pytest.mark.parametrize(("window", "inside"), [(4, False), (None, True), (4, True)])
def test_the_estimate_knows_the_masks_that_attention_keeps(window, inside) -> None:
    """In fp32, where masks are dense: what autograd keeps of a layer's attention beyond that of a causal one."""
    from geotrain.inner.model.attention import CausalAttention

    qkv = [torch.randn(SEQUENCE, 2, 4, 8, requires_grad=True) for _ in range(3)]
    kept: list[int] = []
    for near, boundaries in ((None, None), (window, cu_seqlens(packed()[:, :-1], END) if inside else None)):
        config = SimpleNamespace(num_query_groups=4, num_attention_heads=4)
        held: dict[int, int] = {}

        def keep(tensor: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = CausalAttention(config, window=near)(*qkv, boundaries)  # type: ignore[arg-type]
        kept.append(sum(held.values()))
        del out
    block, parallel = deepspeed_block(0, micro=2), ParallelConfig()
    raw = {**(LLAMA if window is None else {**MISTRAL, "sliding_window": window}), "head_dim": 8}
    raw["num_hidden_layers"] = 3
    plain = {**raw, "sliding_window": None}
    none, full = (
        [memory_per_rank(architecture_from_hf(c), parallel, 1, block, SEQUENCE, recompute, False, d).activations_bytes
         for c, d in ((plain, False), (raw, inside))]
        for recompute in ("none", "full")
    )  # fmt: skip
    mask = kept[1] - kept[0]
    assert mask == 4 * SEQUENCE**2 * (2 if inside else 1)
    assert none[1] - none[0] == 3 * mask + mask // 2 and full[1] - full[0] == mask + mask // 2
    in_bf16 = deepspeed_block(1, micro=2, bf16={"enabled": True})
    assert mask_elements(architecture_from_hf(raw), in_bf16, SEQUENCE, inside) == 0


def test_a_packed_sample_gives_what_its_documents_give_alone() -> None:
    (found,) = run_world(1, beside_single_documents)
    for name, (together, alone, whole, (ours, theirs)) in found.items():
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5, msg=name)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(whole[0, :4], together[0, :4], rtol=1e-5, atol=1e-5)
        assert (whole[0, 4:] - together[0, 4:]).abs().max() > 1e-3, "documents must matter"
