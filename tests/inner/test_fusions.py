"""Fused functions: Megatron-core's cross entropy and our SwiGLU have the numbers of the unfused ones."""

from __future__ import annotations

import torch

from geotrain.inner.model.gated_silu import GatedSilu


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
