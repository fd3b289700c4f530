"""Activations of gated MLPs. On CPUs SwiGLU's backward writes both gradients into one tensor; on GPUs Megatron-core's
is compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        opened = nn.functional.silu(gate)
        ctx.save_for_backward(x, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Write both halves into one tensor: autograd would compute them apart and copy them together."""
        (gradient,), (x, opened) = gradients, ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        whole = torch.empty_like(x)
        of_gate, of_up = whole.chunk(2, dim=-1)
        torch.mul(gradient, opened, out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return whole


class GatedSilu(nn.Module):
    """Computes silu(gate) · up of [..., gate and up], in place of an activation that Megatron-core builds."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Apply to x, [..., 2 · size]; returns [..., size]."""
        return _Gated.apply(x)


class GatedGelu(GatedSilu):
    """Computes gelu(gate) · up, with GELU by tanh."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.gelu(gate, approximate="tanh") * up
