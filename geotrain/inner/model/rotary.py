"""The rotary embedding in one pass over memory each way, where Megatron-core makes several.

On a GPU with Transformer Engine its own is taken (`apply_rope_fusion`); everywhere else `kernels.rotate`. In fp32 it
gives Megatron-core's bits; in bf16 it rounds once, where that rounds the cosine, the sine, each product and the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geotrain import kernels
from geotrain.inner.runtime import platform

with platform.quiet_imports():
    from megatron.core.models.common.embeddings import rope_utils

_of_megatron = rope_utils._apply_rotary_pos_emb_bshd


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return kernels.rotate(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0] if gradients[0].stride(3) == 1 else gradients[0].contiguous()
        return kernels.rotate(gradient, *ctx.saved_tensors, inverse=True), None, None


def rotated(
    t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, mscale: float = 1.0, **latent: bool
) -> Tensor:
    """Rotate queries or keys, in place of Megatron-core's function of these arguments.

    t: [sequence, batch, heads, head_dim]. freqs: angles, fp32 [sequence, 1, 1, head_dim], of which the second half
    repeats the first. latent: whether pairs lie as latent attention has them; `multi_latent_attention` in
    Megatron-core 0.16, `mla_rotary_interleaved` from 0.17 on. Other forms, as this one, are left to Megatron-core.
    """
    other_form = rotary_interleaved or any(latent.values()) or mscale != 1.0 or freqs.shape[-1] != t.shape[-1]
    if other_form:
        return _of_megatron(t, freqs, rotary_interleaved=rotary_interleaved, mscale=mscale, **latent)
    tables = getattr(freqs, "_cosine_and_sine", None)
    if tables is None:  # once for all layers: Megatron-core hands them the same tensor
        half = freqs[:, 0, 0, : t.shape[-1] // 2]
        tables = freqs._cosine_and_sine = half.cos(), half.sin()  # type: ignore[attr-defined]
    return _Rotated.apply(t, *tables)
