"""Decoding, plain and accumulating with a weight: one pass, each program takes ROWS blocks."""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from geotrain.kernels import triton_topk
from geotrain.kernels.payload_format import GRIDS, SCALE_BYTES, PayloadFormat
from geotrain.kernels.triton_math import ALIGNED, aligned_parts, as_float, as_int, put, to_level

ELEMENTS = 4096  # of one program


@triton.jit
def signed_value(code, scale, MANTISSA: tl.constexpr):
    """Decode a 4-bit code."""
    return as_float(as_int(to_level(code & 7, MANTISSA) * scale) ^ ((code & 8) << 28))


@triton.jit(do_not_specialize=["first", "rows"])
def dequantize_dense(
    scales, codes, base, out, first, rows, numel, weight,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TAIL: tl.constexpr, MANTISSA: tl.constexpr,
    PACKED: tl.constexpr, ACCUMULATE: tl.constexpr, BASE_BF16: tl.constexpr, OUT_BF16: tl.constexpr,
):  # fmt: skip
    """Decode blocks [first, first + rows)."""
    WIDTH: tl.constexpr = BLOCK // 2 if PACKED else BLOCK
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    block = (first + row).to(tl.int64)
    j = tl.arange(0, WIDTH)[None, :]
    start = block * BLOCK
    scale_bits = tl.load(scales + block, mask=row < rows, other=0).to(tl.int32) << 16
    scale = as_float(scale_bits)
    mask = (row < rows) & (j >= 0)
    if PACKED:
        half = BLOCK // 2
        low_mask, high_mask = mask, mask
        if TAIL:
            length = (numel - start).to(tl.int32)
            half = (length + 1) // 2
            low_mask, high_mask = mask & (j < half), mask & (half + j < length)
        byte = tl.load(codes + block * WIDTH + j, mask=low_mask, other=0).to(tl.int32)
        low, high = signed_value(byte & 15, scale, MANTISSA), signed_value(byte >> 4, scale, MANTISSA)
        put(base, out, start + j, low_mask, low, weight, ACCUMULATE, BASE_BF16, OUT_BF16)
        put(base, out, start + half + j, high_mask, high, weight, ACCUMULATE, BASE_BF16, OUT_BF16)
    else:
        if TAIL:
            mask = mask & (start + j < numel)
        code = tl.load(codes + start + j, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        put(base, out, start + j, mask, code * scale, weight, ACCUMULATE, BASE_BF16, OUT_BF16)


@triton.jit
def dequantize_plain(codes, out, numel, weight, ELEMENTS: tl.constexpr, WIDE: tl.constexpr, ACCUMULATE: tl.constexpr):
    """Decode fp32 (WIDE, given as int32) or bf16 (given as int16)."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    code = tl.load(codes + at, mask=at < numel, other=0).to(tl.int32)
    if WIDE:
        value = as_float(code)
    else:
        value = as_float(code << 16)
    put(out, out, at, at < numel, value, weight, ACCUMULATE)


def dequantize(payload: Tensor, out: Tensor, fmt: PayloadFormat, weight: float | None) -> None:
    """Decode into `out`, or onto it with a weight, on the current stream, without waiting for the device."""
    payload = payload if payload.data_ptr() % 16 == 0 else payload.clone()  # a slice of a received buffer
    numel, common = out.numel(), _common(weight)
    if fmt.name == "topk2":
        triton_topk.launch_dequantize(payload, out, fmt, common)
    elif fmt.name in ("fp32", "bf16"):
        wide = fmt.name == "fp32"
        codes = payload.view(torch.int32 if wide else torch.int16)
        for part in aligned_parts(numel):
            count = part.stop - part.start
            elements = ELEMENTS if count >= ALIGNED else ALIGNED  # masks of so many would spill on sm_120
            dequantize_plain[(triton.cdiv(count, elements),)](
                codes[part], out[part], count, ELEMENTS=elements, WIDE=wide, **common
            )
    else:
        _launch_dense(payload, out, out, fmt, common)


def add_decoded(payload: Tensor, base: Tensor, out: Tensor, fmt: PayloadFormat, weight: float) -> None:
    """Decode onto a base, on the current stream, without waiting for the device."""
    payload = payload if payload.data_ptr() % 16 == 0 else payload.clone()
    _launch_dense(payload, base, out, fmt, _common(weight))


def _common(weight: float | None) -> dict[str, Any]:
    return {"weight": weight or 0.0, "ACCUMULATE": weight is not None, "enable_fp_fusion": False}


def _launch_dense(payload: Tensor, base: Tensor, out: Tensor, fmt: PayloadFormat, common: dict[str, Any]) -> None:
    """Launch the decoding of int8 or a 4-bit format."""
    grid, numel = GRIDS[fmt.name], out.numel()
    scales = payload[: fmt.blocks(numel) * SCALE_BYTES].view(torch.int16)
    codes = payload[fmt.codes_offset(numel) :]
    base_bf16, out_bf16 = base.dtype == torch.bfloat16, out.dtype == torch.bfloat16
    base, out = base.view(torch.int16) if base_bf16 else base, out.view(torch.int16) if out_bf16 else out
    for first, rows, length in fmt.groups(numel):
        rows_of = max(ELEMENTS // fmt.block, 1) if length == fmt.block else 1
        dequantize_dense[(triton.cdiv(rows, rows_of),)](
            scales, codes, base, out, first, rows, numel, BLOCK=fmt.block, ROWS=rows_of, TAIL=length < fmt.block,
            MANTISSA=grid.mantissa, PACKED=grid.bits == 4,
            BASE_BF16=base_bf16, OUT_BF16=out_bf16, **common,
        )  # fmt: skip
