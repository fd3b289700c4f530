"""AdamW in one pass and in place."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from geotrain.kernels.steps import AdamStep
from geotrain.kernels.triton_math import aligned_parts, read_float, to_bf16

ELEMENTS = 1024  # of one program


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
    """Step ELEMENTS elements. A look-ahead differs from the step in what depends on the step's number: the last three
    coefficients."""
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
    """Step weights and moments by AdamW, on the current stream, without waiting for the device."""
    next_root_scale, _, next_rate, next_shrink = (look_ahead or step).coefficients[5:]
    grad_bf16, out_bf16 = grad.dtype == torch.bfloat16, out is not None and out.dtype == torch.bfloat16
    grad, out = (
        grad.view(torch.int16) if grad_bf16 else grad,
        out.view(torch.int16) if out_bf16 and out is not None else out,
    )
    tensors = weights, exp_avg, exp_avg_sq, grad, out
    for part in aligned_parts(weights.numel()):
        count = part.stop - part.start
        adam_kernel[(triton.cdiv(count, ELEMENTS),)](
            *(None if tensor is None else tensor.view(-1)[part] for tensor in tensors), count,
            *step.coefficients, next_root_scale, next_rate, next_shrink,
            ELEMENTS=ELEMENTS, COMMIT=commit, AHEAD=look_ahead is not None, GRAD_BF16=grad_bf16,
            OUT=out is not None, OUT_BF16=out_bf16, enable_fp_fusion=False,
        )  # fmt: skip
