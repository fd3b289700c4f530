"""The rotary embedding in one pass."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from geotrain.kernels.triton_math import read_float, to_bf16

HEADS = 8  # of one program


@triton.jit
def rotate_kernel(
    x, out, cosine, sine, batch, heads, half, by_token, by_sample, by_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one token. HALF: `half`, up to the next power of two."""
    row = tl.program_id(0).to(tl.int64)
    token, sample = row // batch, row % batch
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, HALF)[None, :]
    mask = (head < heads) & (i < half)
    at = token * by_token + sample * by_sample + head * by_head + i
    a, b = read_float(x, at, mask, BF16), read_float(x, at + half, mask, BF16)
    c = tl.load(cosine + token * half + i, mask=i < half, other=0.0)
    s = tl.load(sine + token * half + i, mask=i < half, other=0.0)
    if INVERSE:
        s = -s
    first, second = a * c - b * s, b * c + a * s
    to = (row * heads + head) * 2 * half + i
    if BF16:
        first, second = to_bf16(first), to_bf16(second)
    tl.store(out + to, first, mask=mask)
    tl.store(out + to + half, second, mask=mask)


def rotate(x: Tensor, out: Tensor, cosine: Tensor, sine: Tensor, inverse: bool) -> None:
    """Apply the rotary embedding, on the current stream, without waiting for the device."""
    length, batch, heads, size = x.shape
    bf16 = x.dtype == torch.bfloat16
    padded = triton.next_power_of_2(size // 2)
    rotate_kernel[(length * batch, triton.cdiv(heads, HEADS))](
        x.view(torch.int16) if bf16 else x, out.view(torch.int16) if bf16 else out, cosine, sine,
        batch, heads, size // 2, *x.stride()[:3],
        HEADS=HEADS, HALF=padded, INVERSE=inverse, BF16=bf16, enable_fp_fusion=False,
        num_warps=max(1, HEADS * padded // 512),  # so few that a thread has whole 16 bytes in a row
    )  # fmt: skip
