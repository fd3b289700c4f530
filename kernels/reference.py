"""The plain torch truth of every kernel. Slow, several passes; Triton and C must give the same bits.

Rules that make bits reproducible: IEEE fp32 with one rounding an operation (no fused multiply-add, no
reciprocal estimates), maxima and counts instead of ordered sums, rounding half to even written out on integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geotrain.kernels.layout import Spec

INFINITY_BITS = 0x7F800000
MAX_BF16 = 0x7F7F


def quantize(
    values: Tensor, payload: Tensor, spec: Spec, anchor: Tensor | None, residual: Tensor | None, seed: int
) -> tuple[Tensor, Tensor]:
    """v = (anchor −) values + decay · residual, coded into `payload`; residual becomes v − decoded, in place.

    Returns (sum of v² as 0-d fp64, whether all v are finite as 0-d bool). A block that is not finite gets a NaN
    scale and keeps its residual.
    """
    v = _meant(values, anchor, residual, spec)
    finite = torch.isfinite(v)
    decoded = torch.empty_like(v)
    if spec.format == "fp32":
        payload.copy_(v.view(torch.uint8))
        decoded.copy_(v)
    elif spec.format == "bf16":
        bits = v.view(torch.int32)
        increment = 0x7FFF + ((bits >> 16) & 1)
        magnitude = ((bits & 0x7FFFFFFF) + increment) >> 16
        # the largest finite bf16 instead of infinity: what is missing stays in the residual
        magnitude = torch.where(finite, magnitude.clamp(max=MAX_BF16), magnitude.clamp(min=0x7FC0))
        code = magnitude | ((bits >> 16) & 0x8000)
        payload.copy_(code.to(torch.int16).view(torch.uint8))
        decoded.copy_((code << 16).view(torch.float32))
    else:
        raise NotImplementedError(spec.format)
    if residual is not None:
        residual.copy_(torch.where(finite, v - decoded, residual))
    return v.double().square().sum(), finite.all()


def dequantize(payload: Tensor, out: Tensor, spec: Spec, weight: float | None) -> None:
    """out = decoded, or with a weight: out += weight · decoded (fp32, in place)."""
    if spec.format == "fp32":
        decoded = payload.view(torch.float32)
    elif spec.format == "bf16":
        decoded = (payload.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    else:
        raise NotImplementedError(spec.format)
    if weight is None:
        out.copy_(decoded)
    else:
        out.copy_(out + weight * decoded)


def payload_ok(payload: Tensor, numel: int, spec: Spec) -> Tensor:
    """0-d bool: every scale (of fp32 and bf16: every value) is finite and in range."""
    if spec.format == "fp32":
        return torch.isfinite(payload.view(torch.float32)).all()
    if spec.format == "bf16":
        return torch.isfinite(payload.view(torch.bfloat16)).all()
    raise NotImplementedError(spec.format)


def _meant(values: Tensor, anchor: Tensor | None, residual: Tensor | None, spec: Spec) -> Tensor:
    v = values.float() if anchor is None else anchor - values.float()
    return v if residual is None else v + spec.error_decay * residual
