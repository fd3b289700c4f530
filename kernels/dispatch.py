"""Ops on tensors, and the one place that picks an implementation: Triton for CUDA tensors, C for CPU tensors, else
the reference. Every op gives the same bits from each of them.

What only servers do has no implementation for GPUs: their vectors are in host memory. `orthogonalize` has bounds
instead of equal bits, since matrix products round in the order of their sums.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from geotrain.kernels import cpu, newton_schulz, reference
from geotrain.kernels.payload_format import GRIDS, SQUARES_BLOCK, PayloadFormat
from geotrain.kernels.steps import QUINTIC, AdamStep, Coefficients, OuterStep

LOW_PRECISION = (torch.float32, torch.bfloat16)


def quantize(
    values: Tensor,
    fmt: PayloadFormat,
    *,
    anchor: Tensor | None = None,
    residual: Tensor | None = None,
    seed: int = 0,
    payload: Tensor | None = None,
    moves_anchor: bool = False,
) -> tuple[Tensor, Tensor]:
    """Encode v = (anchor −) values + decay · residual in one pass; residual becomes v − decoded, in place.

    values: fp32 or bf16; anchor: fp32; residual: fp32, on hosts also bf16, which is rounded up or down by chance; all
    of one size. Returns (payload: uint8, 1-D; whether all was finite, 0-d bool). A block that is not finite gets a
    NaN scale and keeps its residual.
    payload: where to write it, of the right size; None: to new memory.
    moves_anchor: the anchor becomes the values, which must be fp32; on hosts only.
    """
    values = values.detach()
    kept = None if residual is None else (residual, LOW_PRECISION if residual.is_cpu else LOW_PRECISION[:1])
    kinds = LOW_PRECISION[:1] if moves_anchor else LOW_PRECISION
    _check("quantize", values, {"values": (values, kinds), "anchor": anchor, "residual": kept})
    if payload is None:
        payload = values.new_empty(fmt.encoded_bytes(values.numel()), dtype=torch.uint8)
    _check_payload("quantize", payload, values, fmt)
    flat_anchor, flat_residual = (None if t is None else t.view(-1) for t in (anchor, residual))
    moved = (True,) if moves_anchor and anchor is not None else ()
    ops = _pick(values, on_gpu=not moved)
    return payload, ops.quantize(values.view(-1), payload, fmt, flat_anchor, flat_residual, seed, *moved)


def dequantize(
    payload: Tensor, out: Tensor, fmt: PayloadFormat, *, weight: float | None = None, squares: Tensor | None = None
) -> None:
    """Decode a payload: out = decoded, or with a weight out += weight · decoded. `out`: fp32, contiguous, or a slice.

    squares: fp64, on hosts only; gets the sum of squares of each SQUARES_BLOCK elements that `out` then has, the last
    block being shorter. They are finite exactly when these elements are. Bits depend on neither threads nor vector
    width.
    """
    _check("dequantize", out, {"out": out})
    _check_payload("dequantize", payload, out, fmt)
    if squares is not None:
        like = out.view(-1)[::SQUARES_BLOCK]  # one for each of them
        _check("dequantize", like, {"squares": (squares, (torch.float64,))})
    measured = () if squares is None else (squares,)
    _pick(out, on_gpu=squares is None).dequantize(payload, out.view(-1), fmt, weight, *measured)


def add_decoded(payload: Tensor, base: Tensor, out: Tensor, fmt: PayloadFormat, weight: float) -> None:
    """Decode int8 or a 4-bit format onto a base: out = base + weight · decoded, summed in fp32.

    base, out: fp32 or bf16, contiguous, apart or the same. On a GPU it is one pass, where `dequantize` takes fp32
    only.
    """
    _check("add_decoded", out, {"base": (base, LOW_PRECISION), "out": (out, LOW_PRECISION)})
    _check_payload("add_decoded", payload, out, fmt)
    if fmt.name not in GRIDS:
        raise ValueError(f"add_decoded: format {fmt.name!r} is not one of {', '.join(GRIDS)}")
    ops = _pick(out)
    if out.device.type == "cpu":
        wide = base.view(-1).to(torch.float32, copy=True)
        ops.dequantize(payload, wide, fmt, weight)
        out.view(-1).copy_(wide)
    else:
        ops.add_decoded(payload, base.view(-1), out.view(-1), fmt, weight)


def payload_ok(payload: Tensor, numel: int, fmt: PayloadFormat) -> bool:
    """Check that every value that a payload (of the right size) decodes to is finite, and every position exists.

    Payloads are checked in host memory, where they arrive; one on a GPU is copied there.
    """
    payload = payload.cpu()
    return bool(_pick(payload).payload_ok(payload, numel, fmt))


def outer_update(
    weights: Tensor,
    delta: Tensor,
    momentum: Tensor | None,
    step: OuterStep,
    accumulator: Tensor | None = None,
    seed: int = 0,
) -> None:
    """Apply one server update (`OuterStep`) in place and in one pass, on hosts; all of one size.

    momentum: None for steps that know none. accumulator: needed by a step that has a momentum and does not move it;
    without one, a step's own delta moves it. Weights and delta are fp32; momentum and accumulator both fp32, or both
    bf16: then they are rounded up or down by chance, with random bits that `seed` chooses, and are right on average.
    """
    if not weights.numel():
        return
    kept = None if momentum is None else (momentum, LOW_PRECISION)
    summed = (
        None if accumulator is None else (accumulator, LOW_PRECISION[:1] if momentum is None else (momentum.dtype,))
    )
    _check("outer_update", weights, {"weights": weights, "delta": delta, "momentum": kept, "accumulator": summed})
    if momentum is None and step.moves_momentum:
        raise ValueError("outer_update: a step that moves the momentum needs one")
    if momentum is not None and accumulator is None and not step.moves_momentum:
        raise ValueError("outer_update: a step that does not move the momentum needs an accumulator")
    _pick(weights, on_gpu=False).outer_update(weights, delta, momentum, accumulator, step, seed)


def merge(weights: Tensor, base: Tensor, incoming: Tensor, alpha: float, ledger: bool) -> None:
    """Merge global weights into a region's, in place, on hosts; all fp32 and of one size:

    base = (1−α)·s + α·incoming ;  weights = base − (s − weights)

    s: what `base` holds before; without the ledger, the weights.
    """
    if not weights.numel():
        return
    _check("merge", weights, {"weights": weights, "base": base, "incoming": incoming})
    _pick(weights, on_gpu=False).merge(weights, base, incoming, ledger, alpha)


def adam_step(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: AdamStep,
    *,
    out: Tensor | None = None,
    look_ahead: AdamStep | None = None,
    commit: bool = True,
) -> None:
    """Step fp32 weights and moments by AdamW, in one pass; `grad` and `out` fp32 or bf16. `out` may be `grad`.

    `out` gets the new weights, or with `look_ahead` what one more step with the same gradient would make of them.
    commit: whether weights and moments change; without it only `out` does.
    """
    low = None if out is None else (out, LOW_PRECISION)
    state = {"weights": weights, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    _check("adam_step", weights, {**state, "grad": (grad, LOW_PRECISION), "out": low})
    if out is None and (look_ahead is not None or not commit):
        raise ValueError("adam_step: look_ahead, or a step that is not committed, needs out")
    _pick(weights).adam(weights, exp_avg, exp_avg_sq, grad, out, step, look_ahead, commit)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, inverse: bool = False) -> Tensor:
    """Apply the rotary embedding (Su et al., arXiv 2104.09864), each pair a half of a head apart, as Llama has it: in
    fp32, rounded once.

    x: fp32 or bf16 [sequence, batch, heads, size], of any strides but 1 in the last dimension. cosine, sine: fp32
    [sequence, size / 2]. inverse: by the negative angles, which is also the way of gradients. Returns a new tensor
    without gaps.
    """
    x = x.detach()
    if x.dim() != 4 or x.shape[3] % 2 or x.dtype not in LOW_PRECISION or (x.numel() and x.stride(3) != 1):
        raise ValueError(f"rotate: x must be fp32 or bf16 [sequence, batch, heads, even size], is {_form(x)}")
    for name, table in (("cosine", cosine), ("sine", sine)):
        if table.shape != (x.shape[0], x.shape[3] // 2) or table.device != x.device:
            raise ValueError(f"rotate: {name} must be [{x.shape[0]}, {x.shape[3] // 2}], is {_form(table)}")
    _check("rotate", cosine, {"cosine": cosine, "sine": sine})
    out = x.new_empty(x.shape)
    if x.numel():
        _pick(x).rotate(x, out, cosine, sine, inverse)
    return out


def orthogonalize(matrices: Tensor, coefficients: Coefficients = QUINTIC) -> Tensor:
    """Compute the nearly orthogonal factor of each matrix: its singular vectors, with all singular values near 1.

    matrices: fp32 or bf16 [batch, rows, columns], contiguous; returns a new tensor like it. For each matrix G by
    itself, X = G / ‖G‖ (Frobenius), then for each (a, b, c) of the coefficients X ← aX + (bA + cA²)X with A = XXᵀ; a
    matrix that has more rows than columns is taken transposed (Bernstein and Newhouse, arXiv 2409.20325; Jordan,
    https://kellerjordan.github.io/posts/muon). Coefficients that expect X = G / (s·‖G‖) take s in: their first step
    becomes (a/s, b/s³, c/s⁵).

    A matrix of zeros gives zeros; one that is not finite gives NaN everywhere; the others of the batch do not notice.
    CPU tensors are computed in fp32; on a GPU products take bf16 and are summed in fp32, whatever the dtype given.
    Raises ValueError for another shape, dtype or layout, and for coefficients that are none or not finite.
    """
    matrices = matrices.detach()
    if matrices.dim() != 3:
        raise ValueError(f"orthogonalize: matrices must be [batch, rows, columns], is {_form(matrices)}")
    _check("orthogonalize", matrices, {"matrices": (matrices, LOW_PRECISION)})
    steps = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    if not steps or not all(math.isfinite(x) for step in steps for x in step):
        raise ValueError(f"orthogonalize: coefficients must be finite triples, one a step, at least one; are {steps}")
    if not matrices.numel():
        return torch.empty_like(matrices)
    products = torch.float32 if matrices.device.type == "cpu" else torch.bfloat16
    return newton_schulz.orthogonalize(matrices, steps, products)


def _pick(tensor: Tensor, on_gpu: bool = True) -> ModuleType:
    """The implementation for the tensor's device. on_gpu: whether the op has one for GPUs."""
    if tensor.device.type == "cuda" and on_gpu:
        from geotrain.kernels import triton_ops  # imports triton, which not every machine has

        return triton_ops
    if tensor.device.type != "cpu":
        raise ValueError(f"geotrain.kernels: no kernel of this op for device {tensor.device}")
    return reference if cpu.library() is None else cpu


def _check(op: str, like: Tensor, tensors: dict[str, Tensor | tuple[Tensor, tuple[torch.dtype, ...]] | None]) -> None:
    """Refuse tensors that do not fit: the kernels work on raw memory."""
    for name, entry in tensors.items():
        if entry is None:
            continue
        tensor, dtypes = entry if isinstance(entry, tuple) else (entry, (torch.float32,))
        if tensor.dtype not in dtypes or not tensor.is_contiguous():
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{op}: {name} must be contiguous {wanted}, is {_form(tensor)}")
        if tensor.numel() != like.numel() or tensor.device != like.device:
            raise ValueError(f"{op}: {name} must have {like.numel()} elements on {like.device}, is {_form(tensor)}")


def _check_payload(op: str, payload: Tensor, like: Tensor, fmt: PayloadFormat) -> None:
    wanted = fmt.encoded_bytes(like.numel())
    if payload.dtype != torch.uint8 or payload.shape != (wanted,) or payload.device != like.device:
        raise ValueError(f"{op}: payload must be {wanted} bytes (uint8) on {like.device}, is {_form(payload)}")


def _form(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} of shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
