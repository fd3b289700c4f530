"""Encoding and decoding of topk2, one program a block. Bits as in `reference_topk`."""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from geotrain.kernels.payload_format import PayloadFormat, TopkRecord
from geotrain.kernels.triton_math import (
    INFINITY_BITS,
    MAGNITUDE,
    NAN_BITS,
    TINY_BITS,
    as_float,
    as_int,
    copy_sign,
    num_warps,
    put,
    read_meant,
)


@triton.jit
def put_bits(words, first, value, mask):
    """Or `value` (int32 ≥ 0, up to 16 bits) into the bit string at `first`."""
    shift = first & 31
    word = words + (first >> 5)
    low, high = value << shift, (value >> 1) >> (31 - shift)
    tl.atomic_or(word, low, mask=mask & (low != 0), sem="relaxed")
    tl.atomic_or(word + 1, high, mask=mask & (high != 0), sem="relaxed")


@triton.jit
def get_bits(words, first, mask, COUNT: tl.constexpr):
    """Read COUNT ≤ 16 bits of the bit string at `first`, as int32."""
    low = tl.load(words + first // 32, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
    crosses = mask & (first % 32 + COUNT > 32)
    high = tl.load(words + first // 32 + 1, mask=crosses, other=0).to(tl.int64)
    return (((high << 32) | low) >> (first % 32).to(tl.int64)).to(tl.int32) & ((1 << COUNT) - 1)


@triton.jit
def round_scale(x, MAX_SCALE_BITS: tl.constexpr):
    """Round x ≥ 0 to a scale, half to even; returns fp32 bits."""
    bits = as_int(x)
    return tl.minimum(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16, MAX_SCALE_BITS)


@triton.jit
def counted_so_far(flags, BLOCK: tl.constexpr):
    """Count the flags (int32 sums) up to and with each.

    By rows of a warp: a scan of all has each thread load the sums of all warps, up to 32 registers.
    """
    ROWS: tl.constexpr = min(BLOCK, 32)
    rows = tl.reshape(flags, (ROWS, BLOCK // ROWS))
    sums, row = tl.sum(rows, axis=1), tl.arange(0, ROWS)
    before = tl.sum(tl.where(row[None, :] < row[:, None], sums[None, :], 0), axis=1)
    return tl.reshape(tl.cumsum(rows, axis=1) + before[:, None], (BLOCK,))


@triton.jit(do_not_specialize=["first"])
def quantize_topk(
    values, anchor, residual, words, all_finite, first,
    BLOCK: tl.constexpr, LENGTH: tl.constexpr, KEPT: tl.constexpr, LOW_BITS: tl.constexpr, LOWS_AT: tl.constexpr,
    HIGHS_AT: tl.constexpr, VALUES_AT: tl.constexpr, FULL_WORDS: tl.constexpr,
    MAX_SCALE_BITS: tl.constexpr, VALUES_BF16: tl.constexpr, ANCHOR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Encode block first + program. `words`: the payload as int32, zeros. all_finite: cleared where a block was
    not."""
    block = (first + tl.program_id(0)).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    mask = inside < LENGTH
    words += block * FULL_WORDS
    values += block * BLOCK  # by the program's own offset: 64 bits for each element would cost registers
    if ANCHOR:
        anchor += block * BLOCK
    if RESIDUAL:
        residual += block * BLOCK

    v = read_meant(values, anchor, residual, inside, mask, VALUES_BF16, ANCHOR, RESIDUAL)
    largest = tl.max(as_int(v) & MAGNITUDE, axis=0)
    finite = largest < INFINITY_BITS
    tl.atomic_and(all_finite, 0, mask=largest >= INFINITY_BITS, sem="relaxed")
    v = tl.where(finite, v, 0.0)
    largest = tl.where(finite, largest, 0)

    # the largest threshold that at least KEPT magnitudes reach, by bisection on their bits
    bits = tl.where(mask, as_int(v) & MAGNITUDE, -1)
    low, high = largest * 0, largest + 1
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = tl.sum((bits >= middle).to(tl.int32), axis=0) >= KEPT
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    above = bits > low
    tie = (bits == low).to(tl.int32)
    wanted_ties = KEPT - tl.sum(above.to(tl.int32), axis=0)
    counted = counted_so_far(above.to(tl.int32) | (tie << 16), BLOCK)  # both at once: a block has 4096 at most
    ties = counted >> 16
    kept = above | ((tie == 1) & (ties <= wanted_ties))
    rank = (counted & 0xFFFF) + tl.minimum(ties, wanted_ties) - 1

    # two magnitudes: the means above and below the common mean, in fixed point (integer sums have no order)
    exponent = tl.maximum(largest, TINY_BITS) >> 23
    fixed = tl.where(kept, (tl.abs(v) * as_float((269 - exponent) << 23)).to(tl.int32), 0)
    total = tl.sum(fixed, axis=0)
    is_high = kept & (fixed > total // KEPT)
    sum_high = tl.sum(tl.where(is_high, fixed, 0), axis=0)
    count_high = tl.sum(is_high.to(tl.int32), axis=0)
    unit = as_float((exponent - 15) << 23)
    low_mean = tl.div_rn((total - sum_high).to(tl.float32), (KEPT - count_high).to(tl.float32)) * unit
    high_mean = tl.div_rn(sum_high.to(tl.float32), tl.maximum(count_high, 1).to(tl.float32)) * unit
    high_mean = tl.where(count_high > 0, high_mean, low_mean)
    low_bits = tl.where(largest < TINY_BITS, 0, round_scale(low_mean, MAX_SCALE_BITS))
    high_bits = tl.where(largest < TINY_BITS, 0, round_scale(high_mean, MAX_SCALE_BITS))
    low_level, high_level = as_float(low_bits), as_float(high_bits)

    magnitude = tl.abs(v)
    which = magnitude > low_level * 0.5 + high_level * 0.5
    left = v - copy_sign(tl.where(which, high_level, low_level), v)
    if RESIDUAL:
        tl.store(residual + inside, tl.where(kept, left, v), mask=inside < tl.where(finite, LENGTH, 0))

    scales = (tl.where(finite, low_bits, NAN_BITS) >> 16) | tl.where(finite, high_bits, NAN_BITS)
    tl.atomic_or(words, scales, sem="relaxed")  # high bits end in as many zeros as low ones have bits
    if LOW_BITS > 0:
        put_bits(words, LOWS_AT + rank * LOW_BITS, inside & ((1 << LOW_BITS) - 1), kept)
    if KEPT < LENGTH:
        put_bits(words, HIGHS_AT + (inside >> LOW_BITS) + rank, kept.to(tl.int32), kept)
    code = which.to(tl.int32) | ((as_int(v) >> 30) & 2)
    put_bits(words, VALUES_AT + 2 * rank, code, kept)


@triton.jit(do_not_specialize=["first"])
def dequantize_topk(
    words, out, first, weight,
    BLOCK: tl.constexpr, LENGTH: tl.constexpr, KEPT: tl.constexpr, LOW_BITS: tl.constexpr, LOWS_AT: tl.constexpr,
    HIGHS_AT: tl.constexpr, VALUES_AT: tl.constexpr, FULL_WORDS: tl.constexpr,
    HIGH_BITS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Add (or write) the kept elements of block first + program.

    HIGH_BITS: power of two ≥ the number of highs, or of elements where all are kept.
    """
    block = (first + tl.program_id(0)).to(tl.int64)
    words += block * FULL_WORDS
    head = tl.load(words)
    low_level, high_level = as_float(head << 16), as_float((head >> 16) << 16)

    j = tl.arange(0, HIGH_BITS)
    if KEPT == LENGTH:
        rank, position, kept = j, j, j < LENGTH
    else:
        inside = j < VALUES_AT - HIGHS_AT
        is_set = get_bits(words, HIGHS_AT + j, inside, 1)
        rank = tl.cumsum(is_set, axis=0) - 1
        kept = inside & (is_set == 1) & (rank < KEPT)
        position = (j - rank) << LOW_BITS
        if LOW_BITS > 0:
            position |= get_bits(words, LOWS_AT + rank * LOW_BITS, kept, LOW_BITS)
        kept = kept & (position < LENGTH)
    code = get_bits(words, VALUES_AT + 2 * rank, kept, 2)
    value = tl.where(code % 2 == 1, high_level, low_level)
    value = as_float(as_int(value) ^ ((code >> 1) << 31))
    put(out, out, block * BLOCK + position, kept, value, weight, ACCUMULATE)


def launch_quantize(
    inputs: tuple[Tensor | None, ...],
    payload: Tensor,
    all_finite: Tensor,
    numel: int,
    fmt: PayloadFormat,
    common: dict[str, Any],
) -> None:
    """Launch the encoding of a payload."""
    payload.zero_()  # the kernel ors bits in
    for first, rows, length in fmt.groups(numel):
        quantize_topk[(rows,)](
            *inputs, payload.view(torch.int32), all_finite, first, MAX_SCALE_BITS=fmt.max_scale_bits,
            num_warps=num_warps(threads(fmt.block)), **_constants(fmt.record(length), fmt), **common,
        )  # fmt: skip


def threads(block: int) -> int:
    """Choose threads for one block: four elements each.

    With more than eight, the bisection's values no longer fit into registers; with fewer, its 31 sums wait for more
    warps than they have work for.
    """
    return min(max(block // 4, 32), 1024)


def launch_dequantize(payload: Tensor, out: Tensor, fmt: PayloadFormat, common: dict[str, Any]) -> None:
    """Launch the decoding of a payload."""
    if not common["ACCUMULATE"]:
        out.zero_()
    for first, rows, length in fmt.groups(out.numel()):
        record = fmt.record(length)
        high_bits = triton.next_power_of_2(max(record.values_at - record.highs_at, length))
        dequantize_topk[(rows,)](
            payload.view(torch.int32), out, first, BLOCK=fmt.block, HIGH_BITS=high_bits,
            **_constants(record, fmt), **common,
        )  # fmt: skip


def _constants(record: TopkRecord, fmt: PayloadFormat) -> dict[str, int]:
    return {
        "LENGTH": record.length, "KEPT": record.kept, "LOW_BITS": record.low_bits, "LOWS_AT": record.lows_at,
        "HIGHS_AT": record.highs_at, "VALUES_AT": record.values_at,
        "FULL_WORDS": fmt.record(fmt.block).bytes // 4,
    }  # fmt: skip
