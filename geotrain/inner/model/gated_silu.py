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


class SquaredRelu(GatedSilu):
    """Computes max(x, 0)², without a gate."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x).square()


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _clamped(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Compute again what forward would have had to keep: six tensors of half the size."""
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            return torch.autograd.grad(_clamped(again), again, gradients)[0]


def _clamped(x: Tensor) -> Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class ClampedSwish(GatedSilu):
    """Computes GPT-OSS's gate · sigmoid(1.702 gate) · (up + 1) of clamped gates and ups, which come in turn."""

    def forward(self, x: Tensor) -> Tensor:
        return _Clamped.apply(x)
