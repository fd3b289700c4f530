"""The outer step, the merge and AdamW, each in one pass and in place."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from geotrain.kernels.steps import AdamStep, OuterStep
from geotrain.kernels.triton_math import aligned_parts, read_float, to_bf16

ELEMENTS = 1024  # of one program


@triton.jit
def outer_update_kernel(
    weights, delta, momentum, accumulator, numel, keep, gain, from_momentum, from_delta,
    ELEMENTS: tl.constexpr, MOVES: tl.constexpr, ACCUMULATES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = at < numel
    x, d = tl.load(weights + at, mask=mask), tl.load(delta + at, mask=mask)
    total = d
    if ACCUMULATES:
        total = tl.load(accumulator + at, mask=mask) + d
        tl.store(accumulator + at, tl.zeros_like(total) if MOVES else total, mask=mask)
    change = from_delta * d
    if MOVES:
        m = keep * tl.load(momentum + at, mask=mask) + gain * total
        tl.store(momentum + at, m, mask=mask)
        change = from_momentum * m + change
    tl.store(weights + at, x - change, mask=mask)


@triton.jit
def merge_kernel(weights, base, incoming, numel, keep, alpha, ELEMENTS: tl.constexpr, LEDGER: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = at < numel
    x, g = tl.load(weights + at, mask=mask), tl.load(incoming + at, mask=mask)
    if LEDGER:
        s = tl.load(base + at, mask=mask)
        merged = keep * s + alpha * g
        x = merged - (s - x)
    else:
        merged = keep * x + alpha * g
        x = merged
    tl.store(base + at, merged, mask=mask)
    tl.store(weights + at, x, mask=mask)


def outer_update(
    weights: Tensor, delta: Tensor, momentum: Tensor | None, accumulator: Tensor | None, step: OuterStep
) -> None:
    """As `reference.outer_update`."""
    for part in aligned_parts(weights.numel()):
        count = part.stop - part.start
        outer_update_kernel[(triton.cdiv(count, ELEMENTS),)](
            *_cut(part, weights, delta, momentum, accumulator), count,
            step.keep, step.gain, step.from_momentum, step.from_delta,
            ELEMENTS=ELEMENTS, MOVES=step.moves_momentum, ACCUMULATES=accumulator is not None, enable_fp_fusion=False,
        )  # fmt: skip


def merge(weights: Tensor, base: Tensor, incoming: Tensor, ledger: bool, alpha: float) -> None:
    """As `reference.merge`."""
    for part in aligned_parts(weights.numel()):
        count = part.stop - part.start
        merge_kernel[(triton.cdiv(count, ELEMENTS),)](
            *_cut(part, weights, base, incoming), count, 1 - alpha, alpha,
            ELEMENTS=ELEMENTS, LEDGER=ledger, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit
def adamw(x, m, v, grad, grad_scale, beta1, rest1, beta2, rest2, root_scale, eps, rate, shrink):
    g = grad * grad_scale
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    direction = tl.div_rn(m, tl.sqrt_rn(v) * root_scale + eps)
    return (x - shrink * x) - rate * direction, m, v


@triton.jit
def adam_kernel(
    weights, exp_avg, exp_avg_sq, grad, out, numel,
    grad_scale, beta1, rest1, beta2, rest2, root_scale, eps, rate, shrink, next_root_scale, next_rate, next_shrink,
    ELEMENTS: tl.constexpr, COMMIT: tl.constexpr, AHEAD: tl.constexpr, GRAD_BF16: tl.constexpr,
    OUT: tl.constexpr, OUT_BF16: tl.constexpr,
):  # fmt: skip
    """A look-ahead differs from the step in what depends on the step's number: the last three coefficients."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = at < numel
    x, m = tl.load(weights + at, mask=mask, other=0.0), tl.load(exp_avg + at, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=mask, other=0.0)
    g = read_float(grad, at, mask, GRAD_BF16)
    x, m, v = adamw(x, m, v, g, grad_scale, beta1, rest1, beta2, rest2, root_scale, eps, rate, shrink)
    if COMMIT:
        tl.store(weights + at, x, mask=mask)
        tl.store(exp_avg + at, m, mask=mask)
        tl.store(exp_avg_sq + at, v, mask=mask)
    if AHEAD:
        x, m, v = adamw(
            x, m, v, g, grad_scale, beta1, rest1, beta2, rest2, next_root_scale, eps, next_rate, next_shrink
        )
    if OUT:
        if OUT_BF16:
            tl.store(out + at, to_bf16(x), mask=mask)
        else:
            tl.store(out + at, x, mask=mask)


def adam(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    step: AdamStep,
    look_ahead: AdamStep | None,
    commit: bool,
) -> None:
    """As `reference.adam`."""
    next_root_scale, _, next_rate, next_shrink = (look_ahead or step).coefficients[5:]
    grad_bf16, out_bf16 = grad.dtype == torch.bfloat16, out is not None and out.dtype == torch.bfloat16
    grad, out = (
        grad.view(torch.int16) if grad_bf16 else grad,
        out.view(torch.int16) if out_bf16 and out is not None else out,
    )
    for part in aligned_parts(weights.numel()):
        count = part.stop - part.start
        adam_kernel[(triton.cdiv(count, ELEMENTS),)](
            *_cut(part, weights, exp_avg, exp_avg_sq, grad, out), count,
            *step.coefficients, next_root_scale, next_rate, next_shrink,
            ELEMENTS=ELEMENTS, COMMIT=commit, AHEAD=look_ahead is not None, GRAD_BF16=grad_bf16,
            OUT=out is not None, OUT_BF16=out_bf16, enable_fp_fusion=False,
        )  # fmt: skip


def _cut(part: slice, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.view(-1)[part] for tensor in tensors]
