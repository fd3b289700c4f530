"""Encoding of fp32, bf16, int8 and the 4-bit formats: one pass, each program takes ROWS blocks.

A block is four streams of a quarter each: nibbles pair stream 0 with 2 and 1 with 3. The shorter last block gets a
launch of its own, so that the common one keeps aligned wide accesses.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from geotrain.kernels import triton_topk
from geotrain.kernels.payload_format import GRIDS, SCALE_BYTES, PayloadFormat
from geotrain.kernels.triton_math import (
    INFINITY_BITS,
    MAGNITUDE,
    NAN_BITS,
    TINY_BITS,
    as_float,
    as_int,
    copy_sign,
    note_bad,
    num_warps,
    read_meant,
    to_code,
    to_level,
)

ELEMENTS, THREADS = 2048, 128  # of one program: 16 a thread, four of each stream; with 32, sm_80 spills


@triton.jit
def stream_at(start, j, length, S: tl.constexpr, QUARTER: tl.constexpr, FOLD: tl.constexpr, TAIL: tl.constexpr):
    """Find (element offsets, mask) of stream S of the rows; FOLD: halves of a shorter block are of equal length."""
    if FOLD and TAIL:
        half = (length + 1) // 2
        if S < 2:
            inside, limit = S * QUARTER + j, half
        else:
            inside, limit = half + (S - 2) * QUARTER + j, length
    else:
        inside, limit = S * QUARTER + j, length
    if TAIL:
        mask = inside < limit
    else:
        mask = (length > 0) & (j >= 0)
    return start + inside, mask


@triton.jit
def code_stream(v, inverse, scale, MANTISSA: tl.constexpr, MAX_CODE: tl.constexpr):
    """Encode; returns (code without sign, what is left of v)."""
    code = to_code(tl.abs(v) * inverse, MANTISSA, MAX_CODE)
    return code, v - copy_sign(to_level(code, MANTISSA) * scale, v)


@triton.jit
def nibble(code, v):
    return code | ((as_int(v) >> 28) & 8)


@triton.jit(do_not_specialize=["first", "rows"])
def quantize_dense(
    values, anchor, residual, scales, codes, all_finite,
    first, rows, numel, padding, inverse_level,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, MANTISSA: tl.constexpr, MAX_CODE: tl.constexpr,
    MAX_SCALE_BITS: tl.constexpr, VALUES_BF16: tl.constexpr,
    ANCHOR: tl.constexpr, RESIDUAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Encode blocks [first, first + rows). all_finite: cleared where a block was not finite."""
    QUARTER: tl.constexpr = BLOCK // 4
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    block = (first + row).to(tl.int64)
    j = tl.arange(0, QUARTER)[None, :]
    start = block * BLOCK
    length = tl.where(row < rows, tl.minimum(numel - start, BLOCK), 0)

    at0, mask0 = stream_at(start, j, length, 0, QUARTER, PACKED, TAIL)
    at1, mask1 = stream_at(start, j, length, 1, QUARTER, PACKED, TAIL)
    at2, mask2 = stream_at(start, j, length, 2, QUARTER, PACKED, TAIL)
    at3, mask3 = stream_at(start, j, length, 3, QUARTER, PACKED, TAIL)
    v0 = read_meant(values, anchor, residual, at0, mask0, VALUES_BF16, ANCHOR, RESIDUAL)
    v1 = read_meant(values, anchor, residual, at1, mask1, VALUES_BF16, ANCHOR, RESIDUAL)
    v2 = read_meant(values, anchor, residual, at2, mask2, VALUES_BF16, ANCHOR, RESIDUAL)
    v3 = read_meant(values, anchor, residual, at3, mask3, VALUES_BF16, ANCHOR, RESIDUAL)

    m01 = tl.maximum(as_int(v0) & MAGNITUDE, as_int(v1) & MAGNITUDE)
    m23 = tl.maximum(as_int(v2) & MAGNITUDE, as_int(v3) & MAGNITUDE)
    largest = tl.max(tl.maximum(m01, m23), axis=1)[:, None]
    finite = largest < INFINITY_BITS
    note_bad(all_finite, ~finite)

    bits = (as_int(as_float(largest) * inverse_level) + 0xFFFF) & ~0xFFFF  # rounded up to bf16
    bits = tl.where(finite & (largest >= TINY_BITS), tl.minimum(bits, MAX_SCALE_BITS), 0)
    scale = as_float(bits)
    one = tl.full(scale.shape, 1.0, tl.float32)
    inverse = tl.where(bits != 0, tl.div_rn(one, tl.where(bits != 0, scale, one)), 0.0)
    tl.store(scales + block, tl.where(finite, bits, NAN_BITS) >> 16, mask=row < rows)

    v0, v1 = tl.where(finite, v0, 0.0), tl.where(finite, v1, 0.0)
    v2, v3 = tl.where(finite, v2, 0.0), tl.where(finite, v3, 0.0)
    c0, left0 = code_stream(v0, inverse, scale, MANTISSA, MAX_CODE)
    c1, left1 = code_stream(v1, inverse, scale, MANTISSA, MAX_CODE)
    c2, left2 = code_stream(v2, inverse, scale, MANTISSA, MAX_CODE)
    c3, left3 = code_stream(v3, inverse, scale, MANTISSA, MAX_CODE)

    if PACKED:
        byte = block * (BLOCK // 2) + j
        tl.store(codes + byte, nibble(c0, v0) | (nibble(c2, v2) << 4), mask=mask0)
        tl.store(codes + byte + QUARTER, nibble(c1, v1) | (nibble(c3, v3) << 4), mask=mask1)
    else:
        tl.store(codes + at0, tl.where(as_int(v0) < 0, -c0, c0), mask=mask0)
        tl.store(codes + at1, tl.where(as_int(v1) < 0, -c1, c1), mask=mask1)
        tl.store(codes + at2, tl.where(as_int(v2) < 0, -c2, c2), mask=mask2)
        tl.store(codes + at3, tl.where(as_int(v3) < 0, -c3, c3), mask=mask3)
    if RESIDUAL:
        tl.store(residual + at0, left0, mask=mask0 & finite)
        tl.store(residual + at1, left1, mask=mask1 & finite)
        tl.store(residual + at2, left2, mask=mask2 & finite)
        tl.store(residual + at3, left3, mask=mask3 & finite)
    if tl.program_id(0) == 0:  # the bytes between scales and codes
        pad = tl.arange(0, 16)
        tl.store(codes - 1 - pad, tl.zeros((16,), tl.int32), mask=pad < padding)


@triton.jit
def code_plain(v, WIDE: tl.constexpr):
    """Encode fp32 (WIDE) or bf16, whose largest finite value stands for infinity; returns (code, what is left of
    v)."""
    bits = as_int(v)
    if WIDE:
        code = bits
        left = v - v
    else:
        magnitude = bits & MAGNITUDE
        rounded = tl.minimum((magnitude + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7F7F)
        code = tl.where(magnitude < INFINITY_BITS, rounded, NAN_BITS >> 16) | ((bits >> 16) & 0x8000)
        left = v - as_float(code << 16)
    return code, left


@triton.jit(do_not_specialize=["first", "rows"])
def quantize_plain(
    values, anchor, residual, codes, all_finite, first, rows, numel,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, WIDE: tl.constexpr,
    VALUES_BF16: tl.constexpr, ANCHOR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Encode blocks [first, first + rows) of fp32 or bf16. all_finite: cleared where an element was not finite."""
    QUARTER: tl.constexpr = BLOCK // 4
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    block = (first + row).to(tl.int64)
    for S in tl.static_range(4):
        at = block * BLOCK + S * QUARTER + tl.arange(0, QUARTER)[None, :]
        mask = (row < rows) & (at >= 0)
        if TAIL:
            mask = mask & (at < numel)
        v = read_meant(values, anchor, residual, at, mask, VALUES_BF16, ANCHOR, RESIDUAL)
        finite = (as_int(v) & MAGNITUDE) < INFINITY_BITS
        code, left = code_plain(v, WIDE)
        tl.store(codes + at, code, mask=mask)
        # What stays is written, too: a mask that changes from one element to the next allows no wide store.
        if RESIDUAL:
            left = tl.where(finite, left, tl.load(residual + at, mask=mask, other=0.0))
            tl.store(residual + at, left, mask=mask)
        note_bad(all_finite, mask & ~finite)


def warps(block: int, length: int) -> int:
    """Choose warps for at most 16 elements a thread; for 8 of a shorter block, whose masks would spill on sm_120."""
    return num_warps(max(THREADS, block // (16 if length == block else 8)))


def quantize(
    values: Tensor, payload: Tensor, fmt: PayloadFormat, anchor: Tensor | None, residual: Tensor | None, _seed: int
) -> Tensor:
    """Encode into `payload`, on the current stream, without waiting for the device."""
    numel, bf16, blocks = values.numel(), values.dtype == torch.bfloat16, fmt.blocks(values.numel())
    inputs = values.view(torch.int16) if bf16 else values, anchor, residual
    all_finite = torch.ones(1, dtype=torch.int32, device=values.device)
    common = {
        "BLOCK": fmt.block, "VALUES_BF16": bf16, "ANCHOR": anchor is not None, "RESIDUAL": residual is not None,
        "enable_fp_fusion": False,
    }  # fmt: skip
    rows_each = max(ELEMENTS // fmt.block, 1)
    if fmt.name == "topk2":
        triton_topk.launch_quantize(inputs, payload, all_finite, numel, fmt, common)
    elif fmt.name in ("fp32", "bf16"):
        wide = fmt.name == "fp32"
        codes = payload.view(torch.int32 if wide else torch.int16)
        for first, rows, length in fmt.groups(numel):
            rows_of = rows_each if length == fmt.block else 1
            quantize_plain[(triton.cdiv(rows, rows_of),)](
                *inputs, codes, all_finite, first, rows, numel,
                ROWS=rows_of, TAIL=length < fmt.block, WIDE=wide, num_warps=warps(fmt.block, length), **common,
            )  # fmt: skip
    else:
        grid, offset, scale_bytes = GRIDS[fmt.name], fmt.codes_offset(numel), blocks * SCALE_BYTES
        scales, codes = payload[:scale_bytes].view(torch.int16), payload[offset:]
        for first, rows, length in fmt.groups(numel):
            rows_of = rows_each if length == fmt.block else 1
            quantize_dense[(triton.cdiv(rows, rows_of),)](
                *inputs, scales, codes, all_finite, first, rows, numel, offset - scale_bytes,
                inverse_level=1.0 / grid.max_level, ROWS=rows_of, TAIL=length < fmt.block,
                MANTISSA=grid.mantissa, MAX_CODE=grid.max_code,
                MAX_SCALE_BITS=fmt.max_scale_bits, PACKED=grid.bits == 4,
                num_warps=warps(fmt.block, length), **common,
            )  # fmt: skip
    return all_finite.view(torch.bool)[0]  # its lowest byte: a comparison would be a launch of its own
