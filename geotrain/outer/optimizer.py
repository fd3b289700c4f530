"""Outer optimizers: plain functions on fp32 vectors, in place. Δ (delta) is anchor − current.

Symbols and their order follow the papers named in each docstring.
"""

from __future__ import annotations

from torch import Tensor


def delayed_nesterov(
    x: Tensor, delta: Tensor, m: Tensor, acc: Tensor, arrival: int, *, lr_per_update: float, beta: float, buffer: int
) -> None:
    """Delayed Nesterov (HALoS, arXiv 2506.04531, Alg. 1; Async Local-SGD, arXiv 2401.09135).

    acc += Δ;  at every N-th arrival: m = β·m + acc/N, x −= lr·(β·m + Δ/N), acc = 0;  else x −= lr·Δ/N,
    with N = buffer and lr = lr_per_update · N. `arrival` counts from 1. All tensors fp32, equal length.
    """
    lr = lr_per_update * buffer
    acc.add_(delta)
    if arrival % buffer == 0:
        m.mul_(beta).add_(acc, alpha=1 / buffer)
        x.add_(m, alpha=-lr * beta).add_(delta, alpha=-lr / buffer)
        acc.zero_()
    else:
        x.add_(delta, alpha=-lr / buffer)


def nesterov(x: Tensor, delta: Tensor, m: Tensor, *, lr: float, momentum: float) -> None:
    """DiLoCo's outer step (arXiv 2311.08105): m = μ·m + Δ;  x −= lr·(Δ + μ·m)."""
    m.mul_(momentum).add_(delta)
    x.add_(delta, alpha=-lr).add_(m, alpha=-lr * momentum)


def momentum_average(x: Tensor, delta: Tensor, m: Tensor, *, decay: float, gain: float, weight: float) -> None:
    """The region-momentum rule: m = k·m + (1−k)·Δ;  x −= w·(Δ + c·m), with k = decay, c = gain, w = weight."""
    m.mul_(decay).add_(delta, alpha=1 - decay)
    x.add_(delta, alpha=-weight).add_(m, alpha=-weight * gain)


def merge(x: Tensor, x_global: Tensor, alpha: float) -> None:
    """x = (1−α)·x + α·x_global: α weighs the global weights (HALoS's code; its help text says the opposite)."""
    x.mul_(1 - alpha).add_(x_global, alpha=alpha)
