"""Attention inside documents: a packed sample gives what its documents give one by one."""

from __future__ import annotations

from typing import Any

import torch

from geotrain.config import ParallelConfig
from tests.support.families import MISTRAL
from tests.support.inner_worlds import LLAMA, QWEN_2, SEQUENCE, deepspeed_block, run_world, start, stop
from tests.support.inner_worlds import batch as random_batch

END = 0
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


def test_a_packed_sample_gives_what_its_documents_give_alone() -> None:
    (found,) = run_world(1, beside_single_documents)
    for name, (together, alone, whole, (ours, theirs)) in found.items():
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5, msg=name)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
        torch.testing.assert_close(whole[0, :4], together[0, :4], rtol=1e-5, atol=1e-5)
        assert (whole[0, 4:] - together[0, 4:]).abs().max() > 1e-3, "documents must matter"
