"""The reference of topk2: the largest elements of each block, each as a sign and one of two magnitudes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from geotrain.kernels.payload_format import SCALE_BYTES, TINY_BITS, PayloadFormat, TopkRecord
from geotrain.kernels.reference_math import (
    NAN_BITS,
    as_float,
    as_int,
    magnitude_bits,
    narrow_scale,
    round_scale_nearest,
    widen_scale,
)


def encode(rows: Tensor, finite: Tensor, numel: int, payload: Tensor, fmt: PayloadFormat) -> Tensor:
    """Encode rows [blocks, block] of fp32, zeros after the end, into `payload`; returns the decoded values [numel].

    Kept are the `kept` largest magnitudes; among equals, the earlier. The two magnitudes are the means of the kept
    elements above and not above their common mean, found in 16-bit fixed point: integer sums have no order.
    """
    decoded = torch.zeros_like(rows)
    size = fmt.record(fmt.block).bytes
    for first, count, length in fmt.groups(numel):
        record, group = fmt.record(length), slice(first, first + count)
        records, decoded[group, :length] = _encode_rows(rows[group, :length], finite[group], record, fmt)
        payload[first * size : first * size + records.numel()] = records.view(-1)
    return decoded.view(-1)[:numel]


def decode(payload: Tensor, numel: int, fmt: PayloadFormat, left_out: float) -> Tensor:
    """left_out: the value of elements that the payload does not keep."""
    out = torch.full((fmt.blocks(numel), fmt.block), left_out)
    for first, records, record in _records(payload, numel, fmt):
        low, high = (as_float(bits) for bits in _scales(records))
        position, which, negative = _positions(records, record)
        level = torch.where(which, high, low)
        out[first : first + len(records)].scatter_(1, position, torch.where(negative, -level, level))
    return out.view(-1)[:numel]


def payload_ok(payload: Tensor, numel: int, fmt: PayloadFormat) -> Tensor:
    ok = torch.tensor(True)
    for _, records, record in _records(payload, numel, fmt):
        for bits in _scales(records):
            ok = ok & ((bits >= 0) & (bits <= fmt.max_scale_bits)).all()
        if record.kept == record.length:
            continue
        ok = ok & (_high_bits(records, record).sum(1) == record.kept).all()
        if bool(ok):
            ok = ok & (_positions(records, record)[0] < record.length).all()
    return ok


def _records(payload: Tensor, numel: int, fmt: PayloadFormat) -> Iterator[tuple[int, Tensor, TopkRecord]]:
    """Split a payload into groups of blocks of one length; yields (first block, records [blocks, bytes], their
    form)."""
    for first, count, length in fmt.groups(numel):
        record, begin = fmt.record(length), first * fmt.record(fmt.block).bytes
        yield first, payload[begin : begin + count * record.bytes].view(count, record.bytes), record


def _encode_rows(rows: Tensor, finite: Tensor, record: TopkRecord, fmt: PayloadFormat) -> tuple[Tensor, Tensor]:
    order = torch.sort(magnitude_bits(rows), dim=1, descending=True, stable=True).indices
    position = torch.sort(order[:, : record.kept], dim=1).values
    kept = torch.gather(rows, 1, position)
    magnitude = kept.abs()
    low, high = _two_magnitudes(magnitude, record.kept, fmt)
    which = magnitude > as_float(low) * 0.5 + as_float(high) * 0.5
    value = torch.copysign(torch.where(which, as_float(high), as_float(low)), kept)
    decoded = torch.zeros_like(rows).scatter_(1, position, value)

    high_bits = torch.zeros(len(rows), record.values_at - record.highs_at, dtype=torch.int64)
    if record.kept < record.length:
        high_bits.scatter_(1, (position >> record.low_bits) + torch.arange(record.kept), 1)
    low_bits = (position[:, :, None] >> torch.arange(record.low_bits)) & 1
    value_bits = torch.stack([which, as_int(kept) < 0], 2)
    scales = [narrow_scale(torch.where(finite, bits, NAN_BITS)) for bits in (low, high)]
    strings = [_unpack(torch.cat(scales, 1)), *(b.reshape(len(rows), -1) for b in (low_bits, high_bits, value_bits))]
    bits = torch.zeros(len(rows), record.bytes * 8, dtype=torch.int32)  # zeros after the end
    string = torch.cat(strings, 1)
    bits[:, : string.shape[1]] = string
    return (bits.view(len(rows), record.bytes, 8) << torch.arange(8)).sum(2).to(torch.uint8), decoded


def _two_magnitudes(magnitude: Tensor, kept: int, fmt: PayloadFormat) -> tuple[Tensor, Tensor]:
    """Compute the low and the high magnitude, fp32 bits [rows, 1], rounded to the scale's type."""
    amax = magnitude_bits(magnitude).amax(1, keepdim=True)
    exponent = (amax >> 23).clamp(min=TINY_BITS >> 23)
    fixed = (magnitude * as_float((269 - exponent) << 23)).to(torch.int32)  # the largest lies in [2^15, 2^16)
    above = fixed > fixed.sum(1, keepdim=True, dtype=torch.int32) // kept
    count_high = above.sum(1, keepdim=True, dtype=torch.int32)
    sum_high = torch.where(above, fixed, 0).sum(1, keepdim=True, dtype=torch.int32)
    sum_low = fixed.sum(1, keepdim=True, dtype=torch.int32) - sum_high
    unit = as_float((exponent - 15) << 23)
    low = sum_low.float() / (kept - count_high).float() * unit
    high = torch.where(count_high > 0, sum_high.float() / count_high.clamp(min=1).float() * unit, low)
    rounded = [round_scale_nearest(as_int(x)).clamp(max=fmt.max_scale_bits) for x in (low, high)]
    return torch.where(amax < TINY_BITS, 0, rounded[0]), torch.where(amax < TINY_BITS, 0, rounded[1])


def _scales(records: Tensor) -> tuple[Tensor, Tensor]:
    low, high = records[:, : 2 * SCALE_BYTES].split(SCALE_BYTES, 1)
    return widen_scale(low), widen_scale(high)


def _high_bits(records: Tensor, record: TopkRecord) -> Tensor:
    return _unpack(records)[:, record.highs_at : record.values_at]


def _positions(records: Tensor, record: TopkRecord) -> tuple[Tensor, Tensor, Tensor]:
    """Read (position, whether the high magnitude, whether negative) of each kept element, all [rows, kept]."""
    rows, bits = len(records), _unpack(records)
    values = bits[:, record.values_at : record.values_at + 2 * record.kept].reshape(rows, record.kept, 2)
    if record.kept == record.length:
        position = torch.arange(record.kept).expand(rows, -1)
    else:
        set_bits = _high_bits(records, record).nonzero()[:, 1].view(rows, record.kept)
        high = set_bits - torch.arange(record.kept)
        lows = bits[:, record.lows_at : record.highs_at].reshape(rows, record.kept, record.low_bits)
        position = (high << record.low_bits) + (lows << torch.arange(record.low_bits)).sum(2)
    return position, values[:, :, 0] == 1, values[:, :, 1] == 1


def _unpack(packed: Tensor) -> Tensor:
    """Unpack [rows, bytes] to [rows, 8 · bytes] of 0 and 1, least significant bit first."""
    bits = (packed[:, :, None].to(torch.int64) >> torch.arange(8)) & 1
    return bits.reshape(len(packed), packed.shape[1] * 8)
