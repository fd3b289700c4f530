"""Small device functions shared by the Triton kernels: the arithmetic of `reference`, one rounding an operation.

Every launch passes enable_fp_fusion=False: a fused multiply-add would change bits.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

ALIGNED = 16  # Triton knows of integers that are multiples of it, and then accesses 16 bytes at once
TINY_BITS = tl.constexpr(27 << 23)
NAN_BITS = tl.constexpr(0x7FC00000)
INFINITY_BITS = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-0x80000000)


def num_warps(threads: int) -> int:
    """Count the warps of so many threads: AMD's have 64."""
    return max(threads // (64 if torch.version.hip else 32), 1)


def aligned_parts(numel: int) -> list[slice]:
    """Split a tensor into what wide accesses reach, and the last few elements, if any.

    With a limit that is no multiple of ALIGNED, every element would be accessed by itself.
    """
    whole = numel - numel % ALIGNED
    return [part for part in (slice(0, whole), slice(whole, numel)) if part.start < part.stop]


@triton.jit
def as_int(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def copy_sign(magnitude, x):
    """Give a magnitude ≥ 0 the sign of x."""
    return as_float(as_int(magnitude) | (as_int(x) & SIGN))


@triton.jit
def read_float(pointer, offset, mask, IS_BF16: tl.constexpr):
    """Load values as fp32; a bf16 tensor is given as int16, so that every target widens it exactly."""
    if IS_BF16:
        value = as_float(tl.load(pointer + offset, mask=mask, other=0).to(tl.int32) << 16)
    else:
        value = tl.load(pointer + offset, mask=mask, other=0.0)
    return value


@triton.jit
def read_meant(
    values, anchor, residual, at, mask, VALUES_BF16: tl.constexpr, ANCHOR: tl.constexpr, RESIDUAL: tl.constexpr
):
    """Load the values to encode: v = (anchor −) values + residual."""
    v = read_float(values, at, mask, VALUES_BF16)
    if ANCHOR:
        v = tl.load(anchor + at, mask=mask, other=0.0) - v
    if RESIDUAL:
        v = v + tl.load(residual + at, mask=mask, other=0.0)
    return v


@triton.jit
def to_bf16(x):
    """Round x to bf16, half to even, as int16 bits; NaN stays NaN."""
    bits = as_int(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & MAGNITUDE) > INFINITY_BITS, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def put(
    base, out, at, mask, value, weight,
    ACCUMULATE: tl.constexpr, BASE_BF16: tl.constexpr = False, OUT_BF16: tl.constexpr = False,
):  # fmt: skip
    """Store out = value, or out = base + weight · value; `base` may be `out`."""
    if ACCUMULATE:
        value = read_float(base, at, mask, BASE_BF16) + weight * value
    if OUT_BF16:
        tl.store(out + at, to_bf16(value), mask=mask)
    else:
        tl.store(out + at, value, mask=mask)


@triton.jit
def note_bad(finite, is_bad):
    """Clear the launch's one flag, which was 1, where any of is_bad is true."""
    found = tl.max(tl.ravel(is_bad.to(tl.int32)), axis=0)
    tl.atomic_and(finite, 0, mask=found != 0, sem="relaxed")


@triton.jit
def to_code(x, MANTISSA: tl.constexpr, MAX_CODE: tl.constexpr):
    """Find the grid's nearest magnitude, ties to the even index; returns its index."""
    code = as_int(x + 8388608.0) & 0x7FFFFF
    if MANTISSA < 3:  # the integer grids never leave their first stretch
        shift: tl.constexpr = 23 - MANTISSA
        bits = as_int(x)
        increment = (1 << (shift - 1)) - 1 + ((bits >> shift) & 1)
        large = ((bits + increment) >> shift) - ((126 + MANTISSA) << MANTISSA)
        code = tl.where(x < (1 << MANTISSA), code, large)
    return tl.minimum(code, MAX_CODE)


@triton.jit
def to_level(code, MANTISSA: tl.constexpr):
    """Look up the grid's magnitude (exact) with that index."""
    level = code.to(tl.float32)
    if MANTISSA < 3:
        large = as_float((code << (23 - MANTISSA)) + ((126 + MANTISSA) << 23))
        level = tl.where(code < (1 << MANTISSA), level, large)
    return level
