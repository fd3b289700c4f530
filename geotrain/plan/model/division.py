"""Divides a model's layers among the stages of a pipeline whose devices differ in speed and in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

Layers = tuple[int, ...]  # that each stage holds
EVEN = 1e-6  # weight of the squares of stages' times beside their sum: of equal divisions the most even one
EQUAL = 1 + 1e-9


def divide(sums_s: Sequence[NDArray[np.float64]], most: Sequence[int], behind: int = 0) -> Layers | None:
    """Find the division whose slowest stage is the fastest and, of those, whose stages take least together.

    sums_s: by stage, seconds that its devices take for all layers before each: running sums, one more than layers.
    most: layers that a stage may hold; each holds one at least, and the last one more than `behind`, which are behind
    the decoder's. Returns None where they cannot hold all. Complete search by dynamic programming over (stages,
    layers).
    """
    begin, end = np.indices((len(sums_s[0]), len(sums_s[0])))
    took = [
        np.where((begin < end) & (end - begin <= limit), sums - sums[:, None], np.inf)
        for sums, limit in zip(sums_s, most, strict=True)
    ]
    took[-1] = np.where(end - begin > behind, took[-1], np.inf)
    none = np.where(np.arange(len(begin)) == 0, 0.0, np.inf)  # by layers that the stages so far hold
    slowest, total, starts = none, none, []
    for each in took:
        slowest = np.maximum(slowest[:, None], each).min(0)
    worst = slowest[-1]
    if not np.isfinite(worst):
        return None
    for each in took:
        costs = total[:, None] + np.where(each <= EQUAL * worst, each + EVEN * each * each / worst, np.inf)
        starts.append(costs.argmin(0))
        total = costs.min(0)
    layers, at = list[int](), len(begin) - 1
    for start in reversed(starts):
        layers.insert(0, at - int(start[at]))
        at = int(start[at])
    return tuple(layers)


def divide_within(
    sums_s: Sequence[NDArray[np.float64]], needs: Callable[[Layers], Sequence[tuple[float, float]]], behind: int = 0
) -> Layers | None:
    """Find the best division, as `divide` has it, whose stages all fit. needs: bytes that each stage takes, and has.

    A stage that does not fit is next given as many layers at most as would fit if it held nothing else, or one fewer:
    where bytes grow with layers that is never too few, so that no division that fits is passed over.
    """
    most = [len(sums_s[0]) - 1] * len(sums_s)
    while (layers := divide(sums_s, most, behind)) is not None:
        full = [(s, room / need) for s, (need, room) in enumerate(needs(layers)) if need > room]
        if not full:
            return layers
        for s, share in full:
            most[s] = min(layers[s] - 1, ceil(layers[s] * share))
    return None
