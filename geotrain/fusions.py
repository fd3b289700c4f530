"""Parts of the model in fewer passes over memory than Megatron-core's, by torch alone, on a CPU and on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Rotation(torch.autograd.Function):
    """(x₁, x₂) → (x₁·c₁ − x₂·s₁, x₂·c₂ + x₁·s₂), where x₁ and x₂ are the halves of the last dimension."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        (x1, x2), (c1, c2), (s1, s2) = (x.chunk(2, dim=-1) for x in (t, cos, sin))
        return _rotated(x1, x2, c1, c2, -s1, s2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (c1, c2), (s1, s2) = (x.chunk(2, dim=-1) for x in ctx.saved_tensors)
        g1, g2 = gradients[0].chunk(2, dim=-1)
        return _rotated(g1, g2, c1, c2, s2, -s1), None, None


def _rotated(x1: Tensor, x2: Tensor, c1: Tensor, c2: Tensor, s1: Tensor, s2: Tensor) -> Tensor:
    """(x₁·c₁ + x₂·s₁, x₂·c₂ + x₁·s₂) as one contiguous tensor: four passes over halves, and no copy."""
    out = x1.new_empty((*x1.shape[:-1], 2 * x1.shape[-1]))
    for half, own, other, c, s in zip(out.chunk(2, dim=-1), (x1, x2), (x2, x1), (c1, c2), (s1, s2), strict=True):
        torch.mul(own, c, out=half)
        half.addcmul_(other, s)
    return out


def rotate(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> Tensor:
    """Rotary embedding by halves, in place of Megatron-core's, whose arguments it takes.

    t: [sequence, ..., d]; of its last dimension as much is rotated as freqs has, and the rest stays. freqs: the angles,
    [sequence, 1, 1, r], r ≤ d. mscale: factor of the rotated part.
    """
    assert not (rotary_interleaved or multi_latent_attention), "no model here pairs neighbouring dimensions"
    r = freqs.shape[-1]
    cos, sin = ((function(freqs) * mscale).to(t.dtype) for function in (torch.cos, torch.sin))
    if r == t.shape[-1]:
        return _Rotation.apply(t, cos, sin)
    return torch.cat((_Rotation.apply(t[..., :r], cos, sin), t[..., r:]), dim=-1)


def token_losses(labels: Tensor, logits: Tensor) -> Tensor:
    """Cross entropy of each token, fp32 [batch, sequence]. labels: int64 [batch, sequence]. logits: of the whole
    vocabulary, [sequence, batch, vocabulary]."""
    sequence, batch, vocabulary = logits.shape
    flat = nn.functional.cross_entropy(
        logits.reshape(-1, vocabulary).float(), labels.t().reshape(-1), reduction="none"
    )
    return flat.view(sequence, batch).t().contiguous()
