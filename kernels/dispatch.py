"""The one place that picks an implementation: Triton for CUDA tensors, C for CPU tensors, else the reference.

Every op gives the same bits from each of them (sums of squares: to 1e-5).
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from geotrain.kernels import cpu, reference, reference_update
from geotrain.kernels.layout import Spec
from geotrain.kernels.steps import AdamStep, OuterStep

LOW_PRECISION = (torch.float32, torch.bfloat16)


def quantize(
    values: Tensor, spec: Spec, *, anchor: Tensor | None = None, residual: Tensor | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Code v = (anchor −) values + decay · residual in one pass; residual becomes v − decoded, in place.

    values: fp32 or bf16; anchor and residual: fp32, of the same size. Returns (payload: uint8, 1-D; sum of v², 0-d;
    whether all was finite, 0-d bool). A block that is not finite gets a NaN scale and keeps its residual.
    """
    values = values.detach()
    _check("quantize", values, {"values": (values, LOW_PRECISION), "anchor": anchor, "residual": residual})
    payload = torch.empty(spec.encoded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    flat_anchor, flat_residual = (None if t is None else t.view(-1) for t in (anchor, residual))
    op = _pick(values, reference).quantize
    return payload, *op(values.view(-1), payload, spec, flat_anchor, flat_residual, seed)


def dequantize(payload: Tensor, out: Tensor, spec: Spec, *, weight: float | None = None) -> None:
    """out = decoded, or with a weight: out += weight · decoded. `out`: fp32, contiguous; may be a slice."""
    _check("dequantize", out, {"out": out})
    wanted = spec.encoded_bytes(out.numel())
    if payload.dtype != torch.uint8 or payload.numel() != wanted or payload.device != out.device:
        raise ValueError(f"dequantize: payload must be {wanted} bytes (uint8) on {out.device}, is {_tell(payload)}")
    _pick(out, reference).dequantize(payload, out.view(-1), spec, weight)


def payload_ok(payload: Tensor, numel: int, spec: Spec) -> Tensor:
    """0-d bool: every value that a payload (of the right size) decodes to is finite, every position exists."""
    return _pick(payload, reference).payload_ok(payload, numel, spec)


def outer_update(
    weights: Tensor, delta: Tensor, momentum: Tensor, step: OuterStep, accumulator: Tensor | None = None
) -> None:
    """One server update (see `OuterStep`) in place and in one pass; all fp32 and of one size.

    accumulator: needed by steps that do not move the momentum; without it a step's own delta does.
    """
    _check(
        "outer_update",
        weights,
        {"weights": weights, "delta": delta, "momentum": momentum, "accumulator": accumulator},
    )
    if accumulator is None and not step.moves_momentum:
        raise ValueError("outer_update: a step that does not move the momentum needs an accumulator")
    _pick(weights, reference_update).outer_update(weights, delta, momentum, accumulator, step)


def merge(weights: Tensor, base: Tensor, incoming: Tensor, alpha: float, sent: Tensor | None = None) -> None:
    """base = (1−α)·sent + α·incoming ; weights = base − (sent − weights); all fp32. Without `sent`: the weights."""
    _check("merge", weights, {"weights": weights, "base": base, "incoming": incoming, "sent": sent})
    _pick(weights, reference_update).merge(weights, base, incoming, sent, alpha)


def adam_step(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: AdamStep,
    *,
    out: Tensor | None = None,
    look_ahead: AdamStep | None = None,
) -> None:
    """AdamW in place on fp32 weights and moments, in one pass; `grad` and `out` fp32 or bf16.

    `out` gets the new weights, or with `look_ahead` what one more step with the same gradient would make of them.
    """
    _check_adam("adam_step", weights, exp_avg, exp_avg_sq, grad, out)
    if look_ahead is not None and out is None:
        raise ValueError("adam_step: look_ahead needs out")
    _pick(weights, reference_update).adam_step(weights, exp_avg, exp_avg_sq, grad, step, out, look_ahead)


def adam_estimate(
    weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, step: AdamStep, out: Tensor
) -> None:
    """`out` (fp32 or bf16) gets the weights that AdamW would give; weights and moments stay as they are."""
    _check_adam("adam_estimate", weights, exp_avg, exp_avg_sq, grad, out)
    _pick(weights, reference_update).adam_estimate(weights, exp_avg, exp_avg_sq, grad, step, out)


def _pick(tensor: Tensor, fallback: ModuleType) -> ModuleType:
    if tensor.device.type == "cuda":
        from geotrain.kernels import triton_ops  # imports triton, which not every machine has

        return triton_ops
    if tensor.device.type != "cpu":
        raise ValueError(f"geotrain.kernels: no kernels for device {tensor.device}; use cuda or cpu")
    return fallback if cpu.library() is None else cpu


def _check_adam(op: str, weights: Tensor, m: Tensor, v: Tensor, grad: Tensor, out: Tensor | None) -> None:
    low = None if out is None else (out, LOW_PRECISION)
    _check(
        op,
        weights,
        {"weights": weights, "exp_avg": m, "exp_avg_sq": v, "grad": (grad, LOW_PRECISION), "out": low},
    )


def _check(op: str, like: Tensor, tensors: dict[str, Tensor | tuple[Tensor, tuple[torch.dtype, ...]] | None]) -> None:
    """The kernels work on raw memory: refuse what does not fit."""
    for name, entry in tensors.items():
        if entry is None:
            continue
        tensor, dtypes = entry if isinstance(entry, tuple) else (entry, (torch.float32,))
        if tensor.dtype not in dtypes or not tensor.is_contiguous():
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{op}: {name} must be contiguous {wanted}, is {_tell(tensor)}")
        if tensor.numel() != like.numel() or tensor.device != like.device:
            raise ValueError(f"{op}: {name} must have {like.numel()} elements on {like.device}, is {_tell(tensor)}")


def _tell(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} of shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
