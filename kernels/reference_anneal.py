"""Simulated annealing of a placement in plain Python: the truth that `csrc/anneal.c` reproduces bit for bit.

A table of stages × replicas of devices, whose cost `geotrain.plan.placement.cost` defines, is annealed. The cost is
made of maxima, and so flat nearly everywhere; p-norms stand in their place, p = 2^power. The power rises from level
to level while the temperature falls: at first every device pulls, at last nearly only the dearest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geotrain.kernels.steps import Annealing

AFRESH = 4096  # steps between two evaluations from nothing: what is updated by differences gathers rounding
_BITS = 2**64 - 1


def anneal(
    gradient: NDArray[np.float64],
    activation: NDArray[np.float64],
    compute: NDArray[np.float64],
    order: NDArray[np.int32],
    how: Annealing,
) -> tuple[float, NDArray[np.int32]]:
    """As `dispatch.anneal`."""
    return _Chain(gradient.tolist(), activation.tolist(), compute.tolist(), order.tolist(), how).run()


def _raised(x: float, power: int) -> float:
    for _ in range(power):
        x *= x
    return x


def _root(x: float, power: int) -> float:
    for _ in range(power):
        x = math.sqrt(x)
    return x


@dataclass
class _Chain:
    gradient: list[list[float]]
    activation: list[list[float]]
    compute: list[float]
    order: list[int]
    how: Annealing

    def run(self) -> tuple[float, NDArray[np.int32]]:
        how, self.n, self.d = self.how, self.how.stages, self.how.replicas
        placed, self.random = self.n * self.d, how.seed & _BITS
        idle, heat, best, found = len(self.order) > placed, how.heat, math.inf, list(self.order)
        for self.power in range(how.first_power, how.last_power + 1):
            self.linked = [[_raised(x, self.power) for x in row] for row in self.activation]
            self.computed = [_raised(x, self.power) for x in self.compute]
            cost = 0.0
            for step in range(how.steps):
                if step % AFRESH == 0:
                    cost = self._afresh()
                limit, before = cost - heat * math.log(self._uniform()), cost
                heat *= how.cool
                kind = self._draw() >> 60
                if kind == 0 and self.n > 1:
                    cost = self._cross(cost, limit)
                elif kind == 1 and self.n > 1:
                    cost = self._reorder(cost, limit)
                else:
                    cost = self._exchange(cost, limit, kind < 6, kind > 12 and idle)
                if cost == before and step:
                    continue
                true = self._true_cost(best)
                if true < best:
                    best, found = true, list(self.order)
        return best, np.array(found, dtype=np.int32)

    # --- random numbers: splitmix64

    def _draw(self) -> int:
        self.random = (self.random + 0x9E3779B97F4A7C15) & _BITS
        z = self.random
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
        return z ^ (z >> 31)

    def _below(self, bound: int) -> int:
        return ((self._draw() >> 32) * bound) >> 32

    def _uniform(self) -> float:
        return ((self._draw() >> 11) + 0.5) * 2.0**-53

    # --- costs; sums from the left, as C adds them

    def _stage_power(self, stage: int) -> float:
        total = 0.0
        for i in range(stage * self.d, (stage + 1) * self.d):
            total += _raised(self.row[i], self.power)
        return total

    def _edge_norm(self, above: int, under: int) -> float:
        total = 0.0
        for i in range(self.d):
            total += self.linked[self.order[above * self.d + i]][self.order[under * self.d + i]]
        return _root(total, self.power)

    def _norms(self, edge: list[float]) -> float:
        rows = edges = 0.0
        for x in self.stage:
            rows += x
        for x in edge:
            edges += x
        return _root(rows, self.power) + 2 * edges + _root(self.placed_compute, self.power)

    def _afresh(self) -> float:
        self.row, self.placed_compute = [], 0.0
        for i in range(self.n * self.d):
            link, total = self.gradient[self.order[i]], 0.0
            first = i // self.d * self.d
            for other in self.order[first : first + self.d]:
                total += link[other]
            self.row.append(total)
            self.placed_compute += self.computed[self.order[i]]
        self.stage = [self._stage_power(i) for i in range(self.n)]
        self.edge = [self._edge_norm(i, i + 1) for i in range(self.n - 1)]
        return self._norms(self.edge)

    def _true_cost(self, known: float) -> float:
        """The cost itself, or something above `known` if it is."""
        placed = self.order[: self.n * self.d]
        cost = max(self.row) + max(self.compute[i] for i in placed)
        for e in range(self.n - 1):
            if cost >= known:
                break
            above, under = (placed[s * self.d : (s + 1) * self.d] for s in (e, e + 1))
            cost += 2 * max(self.activation[i][j] for i, j in zip(above, under, strict=True))
        return cost

    # --- moves: each returns the new cost, or the old one if the move was taken back

    def _cross(self, cost: float, limit: float) -> float:
        """From a stage on, two pipelines take each other's place: only one edge changes."""
        start, x, y = 1 + self._below(self.n - 1), self._below(self.d), self._below(self.d)

        def swap(values: list[Any]) -> None:
            for r in range(start, self.n):
                p, q = r * self.d + x, r * self.d + y
                values[p], values[q] = values[q], values[p]

        swap(self.order)
        norm = self._edge_norm(start - 1, start)
        then = cost + 2 * (norm - self.edge[start - 1])
        if then > limit:
            swap(self.order)
            return cost
        swap(self.row)
        self.edge[start - 1] = norm
        return then

    def _reorder(self, cost: float, limit: float) -> float:
        """Stages x … y are turned around, or moved to stand behind z of the others."""
        x, y, z = self._below(self.n), self._below(self.n), self._below(self.n)
        x, y = min(x, y), max(x, y)
        every, block = list(range(self.n)), list(range(x, y + 1))
        if self._draw() >> 63:
            stages = every[:x] + block[::-1] + every[y + 1 :]
        else:
            others = every[:x] + every[y + 1 :]
            z %= self.n - (y - x)
            stages = others[:z] + block + others[z:]
        edge = []
        for one, two in pairwise(stages):
            near = two == one + 1 or one == two + 1
            edge.append(self.edge[min(one, two)] if near else self._edge_norm(one, two))
        then = self._norms(edge)  # a sum over stages in the order in which they stood
        if then > limit:
            return cost
        cells = [s * self.d + i for s in stages for i in range(self.d)]
        self.order[: len(cells)] = [self.order[c] for c in cells]
        self.row = [self.row[c] for c in cells]
        self.stage, self.edge = [self.stage[s] for s in stages], edge
        return then

    def _put(self, cell: int, device: int) -> None:
        first = cell // self.d * self.d
        link, gone, total = self.gradient[device], self.gradient[self.order[cell]], 0.0
        self.order[cell] = device
        for i in range(first, first + self.d):
            other = self.order[i]
            total += link[other]
            self.row[i] += link[other] - gone[other]
        self.row[cell] = total

    def _exchange(self, cost: float, limit: float, long_ones: bool, with_idle: bool) -> float:
        """Devices change places: one with another or an idle one, or some stages of a pipeline with as many
        others."""
        placed, length = self.n * self.d, 1
        if with_idle:
            x = self._below(placed)
            y = placed + self._below(len(self.order) - placed)
        else:
            if long_ones and self.n > 3:
                length = 1 + self._below(self.n // 2)
            one, two = self._below(self.n - length + 1), self._below(self.n - length + 1)
            two = one if abs(one - two) < length else two
            x = one * self.d + self._below(self.d)
            y = two * self.d + self._below(self.d)
        above, under = x // self.d, y // self.d
        within = above == under
        if x == y or (within and length == 1 and self.n == 1):
            return cost
        kept = list(self.row), list(self.stage), list(self.edge), self.placed_compute
        touched = {above} if with_idle or within else {above, under}
        for i in range(length):
            p, q = x + i * self.d, y + i * self.d
            first, second = self.order[p], self.order[q]
            if within:
                self.order[p], self.order[q] = second, first
                self.row[p], self.row[q] = self.row[q], self.row[p]
                continue
            self._put(p, second)
            self.stage[above + i] = self._stage_power(above + i)
            if with_idle:
                self.order[q] = first
                self.placed_compute += self.computed[second] - self.computed[first]
            else:
                self._put(q, first)
                self.stage[under + i] = self._stage_power(under + i)
        for stage in touched:
            for e in range(max(stage - 1, 0), min(stage + length, self.n - 1)):
                self.edge[e] = self._edge_norm(e, e + 1)
        then = self._norms(self.edge)
        if then <= limit:
            return then
        for i in range(length):
            p, q = x + i * self.d, y + i * self.d
            self.order[p], self.order[q] = self.order[q], self.order[p]
        self.row, self.stage, self.edge, self.placed_compute = kept
        return cost
