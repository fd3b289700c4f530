"""Helpers of the reference: bit views, scale types, random words."""

from __future__ import annotations

import torch
from torch import Tensor

from geotrain.kernels.payload_format import SCALE_SHIFT

NAN_BITS = 0x7FC00000


def as_int(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def as_float(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def magnitude_bits(x: Tensor) -> Tensor:
    """View fp32 magnitudes as int32, in the same order; infinities and NaN are the largest."""
    return as_int(x) & 0x7FFFFFFF


def round_scale_up(bits: Tensor) -> Tensor:
    """Round fp32 bits up to a scale."""
    mask = (1 << SCALE_SHIFT) - 1
    return (bits + mask) & ~mask


def round_scale_nearest(bits: Tensor) -> Tensor:
    """Round fp32 bits to the nearest scale, ties to even."""
    increment = (1 << (SCALE_SHIFT - 1)) - 1 + ((bits >> SCALE_SHIFT) & 1)
    return ((bits + increment) >> SCALE_SHIFT) << SCALE_SHIFT


def narrow_scale(bits: Tensor) -> Tensor:
    """Convert fp32 bits [..., 1] to stored bytes [..., SCALE_BYTES]."""
    return torch.cat([(bits >> shift) & 0xFF for shift in (SCALE_SHIFT, SCALE_SHIFT + 8)], -1).to(torch.uint8)


def widen_scale(stored: Tensor) -> Tensor:
    """Convert stored bytes [..., SCALE_BYTES] to fp32 bits [..., 1]; a set sign bit makes them negative."""
    low, high = stored.to(torch.int32).split(1, -1)
    return (low << SCALE_SHIFT) | (high << SCALE_SHIFT + 8)


def random_words(blocks: int, block: int, seed: int) -> Tensor:
    """Draw 32 random bits (as int64) for each element, [blocks, block], from Philox-4x32-10 keyed with `seed`.

    Position p of block b takes word p // quarter of counter b · quarter + p mod quarter, quarter = block / 4.
    """
    counter = torch.arange(blocks * (block // 4), dtype=torch.int64)
    words = philox(counter & 0xFFFFFFFF, counter >> 32, seed)
    return torch.cat([word.view(blocks, block // 4) for word in words], 1)


def philox(low: Tensor, high: Tensor, seed: int) -> list[Tensor]:
    """Compute Philox-4x32-10 of counter (low, high, 0, 0): Salmon et al., "Parallel random numbers", SC 2011.

    Arguments and the four words of the answer are 32-bit numbers in int64.
    """
    mask = 0xFFFFFFFF
    c = [low, high, torch.zeros_like(low), torch.zeros_like(low)]
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57  # wraps: only the 64 bits matter
        c = [((p1 >> 32) & mask) ^ c[1] ^ k0, p1 & mask, ((p0 >> 32) & mask) ^ c[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c
