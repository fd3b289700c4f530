"""Updates whose norm is far above the usual: how a server knows them.

The usual is learned from the updates that were applied, for each fragment, as median and deviation of the norms'
logarithms: one wild update moves neither. A region's updates are unequal by themselves, since delayed Nesterov moves
its weights by the momentum of many updates at every N-th: so what is not above twice the largest that was remembered
passes as well. All members of a server are of one kind (workers, or regions), so their updates are alike. Pure, and
the same bits on replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import exp, fsum, inf, log, sqrt
from statistics import median
from typing import Any

import torch
from torch import Tensor

from geotrain.config import LimitsConfig
from geotrain.outer.messages import Refused

MEMORY = 64  # accepted updates of each member, on average, from which the usual is taken
PEAK = 2.0  # times the largest remembered
LEAST_DEVIATION = 0.25  # of the logarithm: norms that hardly vary may double all the same
NORMAL = 1.4826  # standard deviation over median absolute deviation of normal numbers
ROW, STEP_ROWS = 4096, 4096


def norm(vector: Tensor) -> float:
    """Euclidean norm of an fp32 vector: the same bits however many threads compute it, since each row of ROW elements
    is summed by one, and the rows' sums exactly."""
    whole = vector.numel() // ROW * ROW
    rows = vector[:whole].view(-1, ROW)
    pieces = [rows[start : start + STEP_ROWS] for start in range(0, len(rows), STEP_ROWS)]
    pieces += [vector[whole:].view(1, -1)]
    sums = [s for piece in pieces for s in piece.square().sum(1, dtype=torch.float64).tolist()]
    return sqrt(fsum(sums)) if all(s < inf for s in sums) else inf


class Usual:
    """The usual size of a positive number, from the last ones."""

    def __init__(self, memory: int, logs: Sequence[float] = ()) -> None:
        self.logs: deque[float] = deque(logs, maxlen=memory)

    def limit(self, deviations: float) -> float:
        """Above it lies what is more than so many deviations above the usual, and above all peaks so far."""
        centre = median(self.logs)
        deviation = NORMAL * median(abs(value - centre) for value in self.logs)
        exponent = max(centre + deviations * max(deviation, LEAST_DEVIATION), max(self.logs) + log(PEAK))
        return exp(exponent) if exponent < 700 else inf


class NormLimits:
    """What was usual so far, for each fragment.

    A region's update stands for `weight` workers' updates, more of them after a partition, fewer at the end: it is
    refused only when both its norm and its norm over its weight are unusual.
    """

    def __init__(self, config: LimitsConfig, fragments: int, members: int) -> None:
        self.deviations, self.free = config.norm_deviations, config.norm_free_updates * members
        self._memory = max(MEMORY * members, self.free)
        self._usual = [(Usual(self._memory), Usual(self._memory)) for _ in range(fragments)]  # norms; over weights

    def check(self, member: str, fragment: int, size: float, weight: int) -> None:
        """Raises Refused. size: the norm."""
        if self.deviations is None or (size < inf and len(self._usual[fragment][0].logs) < self.free):
            return
        if size < inf:
            limits = [usual.limit(self.deviations) for usual in self._usual[fragment]]
            if size <= limits[0] or size / weight <= limits[1]:
                return
            usually = f"; up to {limits[0]:.3g} is usual here"
        else:
            usually = ""
        raise Refused(
            f"{member}: fragment {fragment}: the update's norm of {size:.3g} is far out of the ordinary{usually}. "
            "Look for a diverged loss; to allow it, raise outer.limits.norm_deviations or set it to null"
        )

    def note(self, fragment: int, size: float, weight: int) -> None:
        """An update was applied."""
        if size > 0:
            for usual, value in zip(self._usual[fragment], (size, size / weight), strict=True):
                usual.logs.append(log(value))

    def state(self) -> list[Any]:
        return [[list(usual.logs) for usual in pair] for pair in self._usual]

    def load(self, state: list[Any]) -> None:
        self._usual = [(Usual(self._memory, norms), Usual(self._memory, rates)) for norms, rates in state]
