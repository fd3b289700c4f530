"""Fused functions: Megatron-core's cross entropy and our SwiGLU have the numbers of the unfused ones."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from geotrain.config import ParallelConfig
from geotrain.inner.model.gated_silu import GatedSilu
from tests.support.inner_worlds import QWEN_2, deepspeed_block, micro_batches, run_world, start, stop, train


def with_and_without() -> list[Any]:
    """(curve, all-reduces of a step) of a vocabulary on two tensor ranks, in bf16."""
    seen = []
    for fused in (True, False):
        engine = start(QWEN_2, ParallelConfig(tensor=2), deepspeed_block(1, bf16={"enabled": True}))
        assert engine.module.config.cross_entropy_loss_fusion, "bf16 runs have it"
        engine.module.config.cross_entropy_loss_fusion = fused
        curve = train(engine, range(4))
        with mock.patch.object(dist, "all_reduce", mock.Mock(side_effect=dist.all_reduce)) as reduced:
            engine.train_step(micro_batches(engine, 4), 4)
        seen.append((curve, reduced.call_count))
        stop(engine)
    return seen


def test_the_fused_loss_is_the_unfused_one() -> None:
    for (fused, few), (unfused, more) in run_world(2, with_and_without):
        assert fused == unfused, "to the bit: its gradients are bf16 in either"
        assert few == more - 4, "one of three less for each micro-batch"


def test_swiglu_has_autograds_bits_and_no_copy() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, gradient = torch.randn(7, 3, 22).to(dtype), torch.randn(7, 3, 11).to(dtype)
        plain, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
        gate, up = plain.chunk(2, dim=-1)
        expected, found = torch.nn.functional.silu(gate) * up, GatedSilu(None)(ours)
        assert torch.equal(expected, found)
        expected.backward(gradient)
        with torch.profiler.profile() as seen:
            found.backward(gradient)
        assert torch.equal(plain.grad, ours.grad)
        assert "aten::cat" not in {event.key for event in seen.key_averages()}
