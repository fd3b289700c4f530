"""AdamW in one pass: in place (with an optional look-ahead), or as an estimate that leaves all state untouched."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from geotrain.kernels.steps import AdamStep
from geotrain.kernels.triton_math import read_float, to_bf16

ELEMENTS = 1024  # of one program


@triton.jit
def adamw(x, m, v, grad, grad_scale, beta1, rest1, beta2, rest2, root_scale, eps, rate, shrink):
    g = grad * grad_scale
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    direction = tl.div_rn(m, tl.sqrt_rn(v) * root_scale + eps)
    return (x - shrink * x) - rate * direction, m, v


@triton.jit(
    do_not_specialize=[
        *("grad_scale", "beta1", "rest1", "beta2", "rest2", "eps", "root_scale", "rate", "shrink"),
        *("next_root_scale", "next_rate", "next_shrink"),
    ]
)
def adam_kernel(
    weights, exp_avg, exp_avg_sq, grad, out, numel,
    grad_scale, beta1, rest1, beta2, rest2, eps, root_scale, rate, shrink, next_root_scale, next_rate, next_shrink,
    ELEMENTS: tl.constexpr, COMMIT: tl.constexpr, AHEAD: tl.constexpr, GRAD_BF16: tl.constexpr,
    OUT: tl.constexpr, OUT_BF16: tl.constexpr,
):  # fmt: skip
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


def adam_step(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: AdamStep,
    out: Tensor | None,
    look_ahead: AdamStep | None,
) -> None:
    """As `reference_update.adam_step`."""
    _launch(weights, exp_avg, exp_avg_sq, grad, step, out, look_ahead, commit=True)


def adam_estimate(
    weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, step: AdamStep, out: Tensor
) -> None:
    """As `reference_update.adam_estimate`."""
    _launch(weights, exp_avg, exp_avg_sq, grad, step, out, None, commit=False)


def _launch(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: AdamStep,
    out: Tensor | None,
    look_ahead: AdamStep | None,
    commit: bool,
) -> None:
    if not weights.numel():
        return
    after = look_ahead or step
    grad_bf16, out_bf16 = grad.dtype == torch.bfloat16, out is not None and out.dtype == torch.bfloat16
    adam_kernel[(triton.cdiv(weights.numel(), ELEMENTS),)](
        weights, exp_avg, exp_avg_sq, grad.view(torch.int16) if grad_bf16 else grad,
        out.view(torch.int16) if out is not None and out_bf16 else out, weights.numel(),
        step.grad_scale, step.beta1, 1 - step.beta1, step.beta2, 1 - step.beta2, step.eps,
        step.root_scale, step.rate, step.shrink, after.root_scale, after.rate, after.shrink,
        ELEMENTS=ELEMENTS, COMMIT=commit, AHEAD=look_ahead is not None, GRAD_BF16=grad_bf16,
        OUT=out is not None, OUT_BF16=out_bf16, enable_fp_fusion=False,
    )  # fmt: skip
