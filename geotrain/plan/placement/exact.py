"""The cheapest placement over classes of devices, by a complete search below a threshold.

This is a label-setting search for a shortest path with resources, from both ends. Devices of one class are
interchangeable, so a stage is a vector that counts how many devices it takes of each class, and a placement is a
sequence of such stage vectors; the edge between two neighbours costs their bottleneck matching.

Meeting in the middle. Every edge costs at least as much as the cheapest edge of all; call what a path costs above
that its excess. Some edge of a path has at most half of the excess on either side. So it suffices to know every
beginning whose excess is at most half of what the threshold allows, and to join beginnings to reversed beginnings
that use exactly the other devices.

Placements are looked through by *bands*, by how dear their dearest stage is: within a band, dearer stages cannot be
used, and every path has only what the band's cheapest stage leaves of the threshold. What is left of both together is
far less than what either leaves alone: bands of cheap stages have few stages, those of dear ones short paths.

Beginnings (*labels*) grow stage by stage. One is dropped when its dearest stage and its path leave too little for the
stages to come, or when it is dominated: another label used the same devices, ends in the same stage and is nowhere
worse. The least that the stages to come must cost follows from connected components: edges cheaper than the time at
which two parts of the cluster become connected cannot change how many devices a stage has in each part. If that
number does not suit the remaining devices, at least one expensive edge must follow, and if no single change makes it
suit, two.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.sparse.csgraph import connected_components

from geotrain.plan.placement.classes import CHUNK, Classes, bottlenecks, vector_costs
from geotrain.plan.placement.cost import Floats, Ints

BANDS, VECTORS_A_BAND = 16, 16  # at most, and at least: few vectors are soon looked through
MAX_KEPT = 6_000  # stage vectors cheap enough to matter; their edges are a table of that size squared
# Work is counted in some ten nanoseconds: of an edge between two stages, and of a label that is looked at; of pairs
# of a label and a stage several take one.
EDGE_WORK, LABEL_WORK, PAIRS_A_WORK = 8, 16, 8
ROUNDING = 1e-9  # thresholds lie this share below a known cost, so that the cost itself is not "below"


class TooMuchWorkError(Exception):
    """The complete search would look at more pairs of labels and stages than allowed."""


@dataclass(frozen=True)
class Optimum:
    """data parallel + 2 · pipeline of the cheapest sequence of stage vectors, (S, K), over classes."""

    total_s: float
    vectors: Ints


@dataclass(frozen=True)
class _Labels:
    """Beginnings of placements, all of the same number of stages, sorted by their last stage vector."""

    used: Ints  # (n, K) devices of each class
    last: Ints  # (n,) index of the last stage vector
    stage_s: Floats  # (n,) dearest stage
    path_s: Floats  # (n,) sum of edges
    parent: Ints  # (n,) index of the label it grew from

    def __getitem__(self, chosen: Ints) -> _Labels:
        return _Labels(*(values[chosen] for values in vars(self).values()))

    def __len__(self) -> int:
        return len(self.last)


def cheapest_below(classes: Classes, stages: int, threshold: float, max_work: int) -> tuple[Optimum | None, bool]:
    """Search for the cheapest placement over classes below the threshold (s); returns it and whether it is proven
    that nothing below the threshold is cheaper.

    max_work: about ten nanoseconds each, but counted; a band has at most a third of what is left.
    """
    best, complete, left = None, True, max_work
    for band in bands(classes, stages, threshold):
        below = best.total_s * (1 - ROUNDING) if best else threshold
        search = BandSearch(classes, stages, below, left // 3, band)
        try:
            best = search.run() or best
        except TooMuchWorkError:
            complete = False
        left -= left // 3 - max(search.work_left, 0)
    return best, complete


def bands(classes: Classes, stages: int, threshold: float) -> list[tuple[float, float]]:
    """List (least, most) of a placement's dearest stage (s), ascending: together all that cost less than the
    threshold."""
    costs = vector_costs(classes)
    least = float(costs.min())
    most = threshold - 2 * (stages - 1) * float(classes.activation_s.min()) if stages > 1 else threshold
    if most <= least:
        return []
    ends = np.linspace(least, most, min(BANDS, 1 + int((costs < most).sum()) // VECTORS_A_BAND) + 1)
    return [(float(low), float(high)) for low, high in pairwise(ends)]


class BandSearch:
    """The cheapest placement below a threshold whose dearest stage is at most `band`[1]; one whose dearest stage is
    cheaper than `band`[0] counts as if it were not. work_left: of max_work, below 0 where that did not do."""

    def __init__(
        self, classes: Classes, stages: int, threshold: float, max_work: int, band: tuple[float, float]
    ) -> None:
        self.stages, self.threshold, self.work_left = stages, threshold, max_work
        self.sizes = classes.sizes
        self.uses_all = int(self.sizes.sum()) == stages * int(classes.vectors[0].sum())
        times = classes.activation_s
        self.times = times
        self.least = float(times.min()) if stages > 1 else 0.0
        self.base = 2 * (stages - 1) * self.least  # what any path costs, both ways
        self.replicas = int(classes.vectors[0].sum())
        merged_s, self.parts = _merges(times)
        self.over_s = merged_s - self.least
        cost = vector_costs(classes)
        kept = np.flatnonzero(cost <= band[1])
        cost = np.maximum(cost[kept], band[0])
        self.vectors = classes.vectors[kept]
        order = self._possible(np.arange(len(cost)), self.vectors, stages - 1, (threshold - self.base - cost) / 2)
        order = order[np.argsort(cost[order], kind="stable")]
        self.vectors, self.stage_s = self.vectors[order], cost[order]

    def _spend(self, work: int) -> None:
        self.work_left -= work
        if self.work_left < 0:
            raise TooMuchWorkError

    def run(self) -> Optimum | None:
        if not len(self.vectors):
            return None
        if len(self.vectors) > MAX_KEPT:
            raise TooMuchWorkError
        if self.stages == 1:
            return Optimum(float(self.stage_s[0]), self.vectors[:1])
        self._spend(len(self.vectors) ** 2 // 2 * EDGE_WORK)
        dearest = self.least + (self.threshold - self.base - self.stage_s) / 2
        self.edges = bottlenecks(self.vectors, self.sizes, self.times, dearest)
        halves = self._halves()
        best: Optimum | None = None
        for placed in range(1, self.stages // 2 + 1):
            best = self._join(halves, placed, best)
        return best

    def _possible(self, last: Ints, used: Ints, rest: int, spare_s: Floats) -> Ints:
        """Labels that can end in time: `rest` edges follow, and may take `spare_s` (n,) more than the least.

        Where a part of the cluster has not as many devices left as stages like the last one would use, an edge that
        leaves the part must follow, and where no single change of the stages uses them, two.
        """
        alive = np.flatnonzero(spare_s > 0)
        dearest = np.zeros(len(spare_s))  # what the dearest edge to come takes above the least
        for over, part in zip(self.over_s, self.parts, strict=True):
            inside = np.eye(len(self.sizes), dtype=np.int64)[part]
            have, left = (self.vectors @ inside)[last[alive]], (self.sizes - used[alive]) @ inside
            wrong = (left != rest * have if self.uses_all else left < rest * have).any(axis=1)
            dearest[alive] = np.where(wrong & (dearest[alive] == 0), over, dearest[alive])
            dead = dearest[alive] >= spare_s[alive]
            twice = np.flatnonzero(~dead & wrong & (dearest[alive] + over >= spare_s[alive]))
            for stay in range(rest):  # stages like the last one before the only change
                then = left[twice] - stay * have[twice]
                each, remainder = np.divmod(then, rest - stay)
                enough = ~remainder.any(axis=1) if self.uses_all else each.sum(axis=1) >= self.replicas
                twice = twice[~enough | (then < 0).any(axis=1)]
            dead[twice] = True
            alive = alive[~dead]
        return alive

    def _halves(self) -> list[_Labels]:
        """Labels by number of stages: every beginning that has at most half of a path's dispensable time."""
        every = np.arange(len(self.vectors))
        first = _Labels(self.vectors, every, self.stage_s, np.zeros(len(every)), every)
        halves = [first[every[:0]], first]
        for placed in range(1, self.stages - 1):
            grown = self._grow(halves[placed], placed)
            halves.append(_undominated(grown) if grown else halves[0])
        return halves

    def _grow(self, labels: _Labels, placed: int) -> list[_Labels]:
        """Append one stage to each label, in parts."""
        self._spend(len(labels) * len(self.vectors) // PAIRS_A_WORK)
        limit = self.threshold - self.base + 4 * placed * self.least  # half of what is dispensable, both ways
        grown, step = [], max(1, CHUNK // self.vectors.size)
        for low in range(0, len(labels), step):
            part = np.s_[low : low + step]
            path = labels.path_s[part, None] + self.edges[labels.last[part]]
            one, two = np.nonzero(np.maximum(labels.stage_s[part, None], self.stage_s) + 4 * path < limit)
            one += low
            fits = (labels.used[one] + self.vectors[two] <= self.sizes).all(axis=1)
            one, two = one[fits], two[fits]
            new = _Labels(
                labels.used[one] + self.vectors[two],
                two,
                np.maximum(labels.stage_s[one], self.stage_s[two]),
                labels.path_s[one] + self.edges[labels.last[one], two],
                one,
            )
            spare_s = (self.threshold - self.base - new.stage_s) / 2 - (new.path_s - placed * self.least)
            grown.append(new[self._possible(new.last, new.used, self.stages - placed - 1, spare_s)])
            self._spend(LABEL_WORK * len(one))
        return grown

    def _join(self, halves: list[_Labels], placed: int, best: Optimum | None) -> Optimum | None:
        """Find the cheapest below `best` and the threshold that is made of a beginning and a reversed ending."""
        one, two = halves[placed], halves[self.stages - placed]
        if not len(one) or not len(two):
            return best
        # Candidates for label i of `one` are order[begin[i] : begin[i] + count[i]] of `two`. Where every device is
        # used they are those whose devices are the complement, found by a random hash of the counts; the exact
        # condition is checked below.
        order, begin, count = np.arange(len(two)), np.zeros(len(one), dtype=np.int64), np.full(len(one), len(two))
        if self.uses_all:
            weights = np.random.default_rng(0).integers(1, 2**40, size=len(self.sizes))
            wanted, offered = (self.sizes - one.used) @ weights, two.used @ weights
            order = np.argsort(offered, kind="stable")
            begin = np.searchsorted(offered[order], wanted, "left")
            count = np.searchsorted(offered[order], wanted, "right") - begin
        total = np.cumsum(count)
        self._spend(int(total[-1]))
        low = 0
        while low < len(one):
            done = total[low - 1] if low else 0
            high = max(low + 1, int(np.searchsorted(total, done + CHUNK // len(self.sizes), "right")))
            left = np.repeat(np.arange(low, high), count[low:high])
            within = np.arange(len(left)) - np.repeat(total[low:high] - count[low:high] - done, count[low:high])
            right = order[begin[left] + within]
            value = np.maximum(one.stage_s[left], two.stage_s[right])
            value = value + 2 * (one.path_s[left] + two.path_s[right] + self.edges[one.last[left], two.last[right]])
            near = np.flatnonzero(value < (best.total_s if best else self.threshold))
            near = near[(one.used[left[near]] + two.used[right[near]] <= self.sizes).all(axis=1)]
            if len(near):
                cheapest = near[value[near].argmin()]
                ends = self._trace(halves, placed, left[cheapest])[::-1]
                ends += self._trace(halves, self.stages - placed, right[cheapest])
                best = Optimum(float(value[cheapest]), self.vectors[ends])
            low = high
        return best

    def _trace(self, halves: list[_Labels], placed: int, label: int) -> list[int]:
        """Indices of a label's stage vectors, last to first."""
        found = []
        for count in range(placed, 0, -1):
            found.append(int(halves[count].last[label]))
            label = int(halves[count].parent[label])
        return found


def _merges(activation_s: Floats) -> tuple[Floats, Ints]:
    """Return (M,) times from the dearest down, and (M, K) the part of the cluster that each class lies in, parts
    being what only edges of that time or more join."""
    merges: list[tuple[float, Ints]] = []
    for time in np.unique(activation_s[np.isfinite(activation_s)]):
        found, part = connected_components(activation_s < time, directed=False)
        if merges and merges[-1][1].max() + 1 == found:
            merges.pop()
        if found > 1:
            merges.append((float(time), part.astype(np.int64)))
    times, parts = [time for time, _ in reversed(merges)], [part for _, part in reversed(merges)]
    return np.array(times), np.array(parts, dtype=np.int64).reshape(len(parts), len(activation_s))


def _undominated(parts: list[_Labels]) -> _Labels:
    """Labels sorted by last vector; of those with equal `used` and `last`, only the ones nowhere worse."""
    labels = _Labels(*(np.concatenate(values) for values in zip(*(vars(p).values() for p in parts), strict=True)))
    code = _row_codes(np.concatenate([labels.last[:, None], labels.used], axis=1))
    order = np.lexsort((labels.path_s, labels.stage_s, code))
    _, rank = np.unique(labels.path_s[order], return_inverse=True)
    _, code = np.unique(code[order], return_inverse=True)
    key = rank - code * (len(rank) + 1)  # later codes always lie lower: the running minimum starts afresh
    before = np.concatenate([[np.iinfo(np.int64).max], np.minimum.accumulate(key)[:-1]])
    return labels[order[key < before]]


def _row_codes(rows: Ints) -> Ints:
    """One integer a row: equal for equal rows only, and ordered by the first column first."""
    code, span = rows[:, 0].copy(), int(rows[:, 0].max(initial=0)) + 1
    for column in rows.T[1:]:
        size = int(column.max(initial=0)) + 1
        if span * size >= 2**62:
            values, code = np.unique(code, return_inverse=True)
            span = len(values)
        code, span = code * size + column, span * size
    return code
