"""The plain torch truth of the coding kernels. Slow, several passes; Triton and C must give the same bits.

Rules that make bits reproducible: IEEE fp32 with one rounding an operation (no fused multiply-add, no estimated
reciprocals), maxima and integer sums instead of ordered sums, rounding half to even written out on integers, and
counter-based random numbers. Only the sum of squares may differ in its last digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geotrain.kernels import reference_topk
from geotrain.kernels.layout import GRIDS, TINY_BITS, Spec
from geotrain.kernels.reference_math import (
    NAN_BITS,
    as_float,
    as_int,
    magnitude_bits,
    narrow_scale,
    random_words,
    round_scale_up,
    widen_scale,
)

MAX_BF16 = 0x7F7F
TO_INTEGER = 8388608.0  # 2^23: adding it rounds a small fp32 to an integer, half to even, in the low bits


def quantize(
    values: Tensor, payload: Tensor, spec: Spec, anchor: Tensor | None, residual: Tensor | None, seed: int
) -> tuple[Tensor, Tensor]:
    """v = (anchor −) values + decay · residual, coded into `payload`; residual becomes v − decoded, in place.

    All 1-D: values fp32 or bf16, anchor and residual fp32, payload uint8 of `spec.encoded_bytes`. Returns (sum of
    v², 0-d fp64; whether all v are finite, 0-d bool). A block that is not finite is coded as zeros with a NaN scale
    and keeps its residual; a fp32 or bf16 element that is not finite does so by itself.
    """
    v = values.float() if anchor is None else anchor - values.float()
    if residual is not None:
        v = v + torch.tensor(spec.error_decay, dtype=torch.float32) * residual
    if spec.format in ("fp32", "bf16"):
        good = torch.isfinite(v)
        decoded = _write_plain(v, payload, spec, seed)
    else:
        rows = _to_rows(v, spec.block)
        finite = torch.isfinite(rows).all(1, keepdim=True)
        good = _from_rows(finite.expand_as(rows), v.numel())
        code = reference_topk.encode if spec.format == "topk2" else _encode_dense
        decoded = code(torch.where(finite, rows, 0.0), finite, v.numel(), payload, spec, seed)
    if residual is not None:
        residual.copy_(torch.where(good, v - decoded, residual))
    return v.double().square().sum(), good.all()


def dequantize(payload: Tensor, out: Tensor, spec: Spec, weight: float | None) -> None:
    """out = decoded, or with a weight: out += weight · decoded. `out`: fp32, 1-D; may be a slice."""
    if spec.format == "fp32":
        decoded = _aligned(payload).view(torch.float32)
    elif spec.format == "bf16":
        decoded = as_float(_aligned(payload).view(torch.int16).to(torch.int32) << 16)
    elif spec.format == "topk2":
        decoded = reference_topk.decode(payload, out.numel(), spec)
    else:
        decoded = _decode_dense(payload, out.numel(), spec)
    if weight is None:
        out.copy_(decoded)
    else:
        out.copy_(out + torch.tensor(weight, dtype=torch.float32) * decoded)


def payload_ok(payload: Tensor, numel: int, spec: Spec) -> Tensor:
    """0-d bool: every value that this payload (of the right size) decodes to is finite, every position exists."""
    if spec.format == "fp32":
        return torch.isfinite(_aligned(payload).view(torch.float32)).all()
    if spec.format == "bf16":
        return torch.isfinite(_aligned(payload).view(torch.bfloat16)).all()
    if spec.format == "topk2":
        return reference_topk.payload_ok(payload, numel, spec)
    stored = _aligned(payload[: spec.blocks(numel) * spec.scale_bytes])
    bits = widen_scale(stored.view(spec.blocks(numel), spec.scale_bytes), spec.scale)
    return ((bits >= 0) & (bits <= spec.max_scale_bits)).all()


def _write_plain(v: Tensor, payload: Tensor, spec: Spec, seed: int) -> Tensor:
    """fp32 and bf16. Rounding to bf16 stops at the largest finite value: the rest stays in the residual."""
    if spec.format == "fp32":
        payload.copy_(v.view(torch.uint8))
        return v
    bits = as_int(v)
    if spec.stochastic:
        increment = random_words(-(-v.numel() // spec.block), spec.block, seed).view(-1)[: v.numel()] >> 16
    else:
        increment = 0x7FFF + ((bits >> 16) & 1)
    magnitude = ((bits & 0x7FFFFFFF) + increment) >> 16
    magnitude = torch.where(torch.isfinite(v), magnitude.clamp(max=MAX_BF16), NAN_BITS >> 16)
    code = (magnitude | ((bits >> 16) & 0x8000)).to(torch.int32)
    payload.copy_(code.to(torch.int16).view(torch.uint8))
    return as_float(code << 16)


def _encode_dense(rows: Tensor, finite: Tensor, numel: int, payload: Tensor, spec: Spec, seed: int) -> Tensor:
    """int8 and the 4-bit formats. rows [blocks, block] fp32, zeros after the end. Returns the decoded values."""
    grid = GRIDS[spec.format]
    rows = _fold_tail(rows, numel, grid.bits)
    amax = magnitude_bits(rows).amax(1, keepdim=True)
    bits = round_scale_up(as_int(as_float(amax) * torch.tensor(1.0 / grid.max_level)), spec.scale)
    bits = torch.where(amax < TINY_BITS, 0, bits.clamp(max=spec.max_scale_bits))
    scale = as_float(bits)
    inverse = torch.where(bits == 0, 0.0, 1.0 / scale)
    random = random_words(len(rows), spec.block, seed) if spec.stochastic else None
    code = to_code(rows.abs() * inverse, grid.mantissa, grid.max_code, random)
    decoded = torch.copysign(to_level(code, grid.mantissa) * scale, rows)
    negative = as_int(rows) < 0
    stored = narrow_scale(torch.where(finite, bits, NAN_BITS), spec.scale).reshape(-1)
    payload.zero_()
    payload[: stored.numel()] = stored
    if grid.bits == 8:
        packed = torch.where(negative, -code, code).to(torch.int8).view(torch.uint8)
    else:
        nibble = (code | (negative.to(torch.int32) << 3)).to(torch.uint8)
        packed = nibble[:, : spec.block // 2] | (nibble[:, spec.block // 2 :] << 4)
    codes = payload[spec.codes_offset(numel) :]
    codes.copy_(packed.reshape(-1)[: codes.numel()])
    return _from_rows(_unfold_tail(decoded, numel, grid.bits), numel)


def _decode_dense(payload: Tensor, numel: int, spec: Spec) -> Tensor:
    grid, blocks = GRIDS[spec.format], spec.blocks(numel)
    scale = as_float(widen_scale(payload[: blocks * spec.scale_bytes].view(blocks, spec.scale_bytes), spec.scale))
    codes = payload[spec.codes_offset(numel) :]
    padded = torch.zeros(blocks, spec.block * grid.bits // 8, dtype=torch.uint8)
    padded.view(-1)[: codes.numel()] = codes
    packed = padded.to(torch.int32)
    if grid.bits == 8:
        signed = (packed << 24) >> 24
        code, negative = signed.abs(), signed < 0
    else:
        nibble = torch.cat([packed & 15, packed >> 4], 1)
        code, negative = nibble & 7, nibble >= 8
    value = to_level(code, grid.mantissa) * scale
    return _from_rows(_unfold_tail(torch.where(negative, -value, value), numel, grid.bits), numel)


def to_code(x: Tensor, mantissa: int, max_code: int, random: Tensor | None) -> Tensor:
    """Index (int32) of the grid's magnitude nearest to x ≥ 0, ties to the even index.

    With `random` (32-bit words as int64): one of the two neighbours, so that the expected magnitude is x.
    """
    bits = as_int(x)
    shift, offset = 23 - mantissa, ((126 + mantissa) << mantissa)
    if random is None:
        small = as_int(x.clamp(max=TO_INTEGER) + TO_INTEGER) & 0x7FFFFF
        increment = (1 << (shift - 1)) - 1 + ((bits >> shift) & 1)
    else:
        whole = x.clamp(max=TO_INTEGER).to(torch.int32)
        uniform = (random >> 8).to(torch.float32) * 2.0**-24
        small = whole + (uniform < x - whole.to(torch.float32)).to(torch.int32)
        increment = (random >> (9 + mantissa)).to(torch.int32)
    large = ((bits + increment) >> shift) - offset
    return torch.where(x < float(1 << mantissa), small, large).clamp(max=max_code)


def to_level(code: Tensor, mantissa: int) -> Tensor:
    """The grid's magnitude (fp32, exact) with that index."""
    large = as_float((code << (23 - mantissa)) + ((126 + mantissa) << 23))
    return torch.where(code < (1 << mantissa), code.to(torch.float32), large)


def _to_rows(v: Tensor, block: int) -> Tensor:
    rows = torch.zeros(-(-v.numel() // block), block)
    rows.view(-1)[: v.numel()] = v
    return rows


def _from_rows(rows: Tensor, numel: int) -> Tensor:
    return rows.reshape(-1)[:numel]


def _fold_tail(rows: Tensor, numel: int, bits: int) -> Tensor:
    """4 bits: lay the second half of a shorter last block where the high nibbles are taken from."""
    tail = numel % rows.shape[1] if rows.numel() else 0
    if bits == 8 or not tail:
        return rows
    half, low = rows.shape[1] // 2, (tail + 1) // 2
    folded = torch.zeros_like(rows)
    folded[:-1] = rows[:-1]
    folded[-1, :low] = rows[-1, :low]
    folded[-1, half : half + tail - low] = rows[-1, low:tail]
    return folded


def _unfold_tail(rows: Tensor, numel: int, bits: int) -> Tensor:
    tail = numel % rows.shape[1] if rows.numel() else 0
    if bits == 8 or not tail:
        return rows
    half, low = rows.shape[1] // 2, (tail + 1) // 2
    unfolded = rows.clone()
    unfolded[-1, low:tail] = rows[-1, half : half + tail - low]
    return unfolded


def _aligned(payload: Tensor) -> Tensor:
    """Payloads may be slices of received buffers: a wider view needs its own alignment."""
    return payload if payload.data_ptr() % 4 == 0 and payload.storage_offset() % 4 == 0 else payload.clone()
