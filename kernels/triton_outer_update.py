"""The outer step (delayed Nesterov, Nesterov, region momentum) and the merge, each in one pass and in place."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from geotrain.kernels.steps import OuterStep

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
def merge_kernel(weights, base, incoming, sent, numel, keep, alpha, ELEMENTS: tl.constexpr, PENDING: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = at < numel
    x, g = tl.load(weights + at, mask=mask), tl.load(incoming + at, mask=mask)
    if PENDING:
        s = tl.load(sent + at, mask=mask)
        merged = keep * s + alpha * g
        x = merged - (s - x)
    else:
        merged = keep * x + alpha * g
        x = merged
    tl.store(base + at, merged, mask=mask)
    tl.store(weights + at, x, mask=mask)


def outer_update(
    weights: Tensor, delta: Tensor, momentum: Tensor, accumulator: Tensor | None, step: OuterStep
) -> None:
    """As `reference_update.outer_update`."""
    if weights.numel():
        outer_update_kernel[(triton.cdiv(weights.numel(), ELEMENTS),)](
            weights, delta, momentum, accumulator, weights.numel(),
            step.keep, step.gain, step.from_momentum, step.from_delta,
            ELEMENTS=ELEMENTS, MOVES=step.moves_momentum, ACCUMULATES=accumulator is not None, enable_fp_fusion=False,
        )  # fmt: skip


def merge(weights: Tensor, base: Tensor, incoming: Tensor, sent: Tensor | None, alpha: float) -> None:
    """As `reference_update.merge`."""
    if weights.numel():
        merge_kernel[(triton.cdiv(weights.numel(), ELEMENTS),)](
            weights, base, incoming, sent, weights.numel(), 1 - alpha, alpha,
            ELEMENTS=ELEMENTS, PENDING=sent is not None, enable_fp_fusion=False,
        )  # fmt: skip
