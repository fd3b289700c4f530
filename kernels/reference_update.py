"""The plain torch truth of the update kernels: the outer step with its merge, and AdamW. Bits as in `reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from geotrain.kernels.steps import AdamStep, OuterStep


def outer_update(
    weights: Tensor, delta: Tensor, momentum: Tensor, accumulator: Tensor | None, step: OuterStep
) -> None:
    """`OuterStep` on fp32 tensors of one size, in place. Without an accumulator acc is Δ itself."""
    total = delta if accumulator is None else accumulator + delta
    change = _f(step.from_delta) * delta
    if step.moves_momentum:
        momentum.copy_(_f(step.keep) * momentum + _f(step.gain) * total)
        change = _f(step.from_momentum) * momentum + change
    if accumulator is not None:
        accumulator.copy_(torch.zeros_like(total) if step.moves_momentum else total)
    weights.sub_(change)


def merge(weights: Tensor, base: Tensor, incoming: Tensor, sent: Tensor | None, alpha: float) -> None:
    """A region adopts global weights (algorithms: HALoS merge), in place on fp32 `weights` x and `base`.

    base = (1−α)·s + α·incoming ;  x = base − (s − x), where s is `sent`: the weights when the last update left, so
    that what was committed since stays. Without `sent`, s = x: the published rule.
    """
    start = weights if sent is None else sent
    pending = None if sent is None else sent - weights
    base.copy_(_f(1 - alpha) * start + _f(alpha) * incoming)
    weights.copy_(base if pending is None else base - pending)


def adam_step(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: AdamStep,
    out: Tensor | None,
    look_ahead: AdamStep | None,
) -> None:
    """AdamW in place on fp32 weights and moments; `grad` fp32 or bf16. `out` (fp32 or bf16) gets the new weights.

    With `look_ahead`, `out` gets the weights that one more step with the same gradient would give.
    """
    result = _adamw(weights, exp_avg, exp_avg_sq, grad, step)
    for tensor, new in zip((weights, exp_avg, exp_avg_sq), result, strict=True):
        tensor.copy_(new)
    if out is not None:
        out.copy_(_adamw(*result, grad, look_ahead)[0] if look_ahead else weights)


def adam_estimate(
    weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, step: AdamStep, out: Tensor
) -> None:
    """`out` (fp32 or bf16) gets the weights that AdamW would give; nothing else changes."""
    out.copy_(_adamw(weights, exp_avg, exp_avg_sq, grad, step)[0])


def _adamw(x: Tensor, m: Tensor, v: Tensor, grad: Tensor, step: AdamStep) -> tuple[Tensor, Tensor, Tensor]:
    g = grad.float() * _f(step.grad_scale)
    m = _f(step.beta1) * m + _f(1 - step.beta1) * g
    v = _f(step.beta2) * v + _f(1 - step.beta2) * (g * g)
    root = torch.sqrt(v.double()).float()  # fp32 torch.sqrt may come from MKL, which is an ulp off at times
    direction = m / (root * _f(step.root_scale) + _f(step.eps))
    return (x - _f(step.shrink) * x) - _f(step.rate) * direction, m, v


def _f(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float32)
