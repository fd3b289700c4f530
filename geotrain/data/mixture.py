"""A mixture of data sets: chooses one for each sample of a run, in shares exact to within one sample at every moment.

Weights become whole parts n_1 + … + n_k = D. The choice of a set repeats every D samples and is, within a period, the
schedule of k tasks of which each is to get n_j of D time slots as evenly as possible: the m-th turn of set j falls
into the slots from ⌊m·D/n_j⌋ to ⌈(m+1)·D/n_j⌉ − 1, and of the turns whose window has begun the one that ends first is
taken (Baruah, Cohen, Plaxton, Varvel, "Proportionate Progress", Algorithmica 15, 1996). So at every prefix of N
samples each set has had less than one sample more or less than N·n_j / D, which random draws would miss by √N.

A table of one period answers for any sample of the run, so that memory does not grow with the run, and a lease of a
range of samples means the same to every worker.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, gcd, lcm
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_PARTS = 1 << 20  # of a period: weights that need more, as 0.1234567, are rounded to parts of so many
_Ints = npt.NDArray[np.int64]


def parts_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Find the smallest whole numbers in the ratio of these weights, taken as decimals: (0.7, 0.3) → (7, 3).

    Where their sum would exceed MOST_PARTS they are rounded to it, every weight above 0 to at least one part.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    common = lcm(*(each.denominator for each in exact))
    whole = [int(each * common) for each in exact]
    divisor = gcd(*whole)
    whole = [each // divisor for each in whole]
    total = sum(whole)
    if total <= MOST_PARTS:
        return tuple(whole)
    wanted = [Fraction(each * MOST_PARTS, total) for each in whole]
    rounded = [max(floor(each), 1) if each else 0 for each in wanted]
    # The largest remainders get what is missing; where many tiny weights took too much, the largest weights give it.
    order = sorted(range(len(wanted)), key=lambda j: (floor(wanted[j]) - wanted[j], j))
    missing = MOST_PARTS - sum(rounded)
    for j in order[: max(missing, 0)]:
        rounded[j] += 1
    rounded[max(range(len(rounded)), key=rounded.__getitem__)] += min(missing, 0)
    return tuple(rounded)


@dataclass(frozen=True)
class Period:
    """One period of a mixture.

    sets: int64 [D], the set of each sample. turns: int64 [D], how many samples of that set come before it in the
    period. parts: int64 [k], samples of each set.
    """

    sets: _Ints
    turns: _Ints
    parts: _Ints


def period_of(parts: Sequence[int]) -> Period:
    """Schedule these parts by earliest deadline; equal deadlines go to the earlier set."""
    length = sum(parts)
    sets, turns = np.empty(length, np.int64), np.empty(length, np.int64)
    # Each set has one turn at a time in one of the heaps: (begin of its window, set, turn), or (end, set, turn).
    coming = [(0, j, 0) for j, part in enumerate(parts) if part]
    ready: list[tuple[int, int, int]] = []
    for slot in range(length):
        while coming and coming[0][0] <= slot:
            _, j, turn = heapq.heappop(coming)
            heapq.heappush(ready, (-(-(turn + 1) * length // parts[j]), j, turn))
        _, j, turn = heapq.heappop(ready)
        sets[slot], turns[slot] = j, turn
        if turn + 1 < parts[j]:
            heapq.heappush(coming, ((turn + 1) * length // parts[j], j, turn + 1))
    return Period(sets, turns, np.array(parts, np.int64))


class Mixture:
    """The set of every sample of a run, and its number among the samples of that set.

    phases: (first sample of the next phase, weights of the sets) in the order of the run; the last one does not end.
    The same phases give the same answers on every machine, for ever.
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[float]]]) -> None:
        self._periods = [period_of(parts_of(weights)) for _, weights in phases]
        ends = [end for end, _ in phases]
        self._starts = np.array([0, *ends[:-1]], np.int64)
        # How many samples of each set earlier phases have used: int64 [phases, sets].
        before = np.zeros_like(self._periods[0].parts)
        self._before = [before]
        for period, start, end in zip(self._periods, self._starts.tolist(), ends[:-1], strict=False):
            before = before + _counts(period, end - start)
            self._before.append(before)

    def places(self, samples: npt.NDArray[Any]) -> tuple[_Ints, _Ints]:
        """Find (set, number in the set) of samples of the run: int64, ≥ 0, of the shape of `samples`."""
        samples = np.asarray(samples, np.int64)
        sets, numbers = np.empty_like(samples), np.empty_like(samples)
        phases = np.searchsorted(self._starts, samples, side="right") - 1
        for phase in np.unique(phases).tolist():
            period, chosen = self._periods[phase], phases == phase
            rounds, slots = np.divmod(samples[chosen] - self._starts[phase], len(period.sets))
            which = period.sets[slots]
            sets[chosen] = which
            numbers[chosen] = self._before[phase][which] + rounds * period.parts[which] + period.turns[slots]
        return sets, numbers


def _counts(period: Period, samples: int) -> _Ints:
    """Count how many of the phase's first samples each set has."""
    rounds, rest = divmod(samples, len(period.sets))
    return rounds * period.parts + np.bincount(period.sets[:rest], minlength=len(period.parts))
