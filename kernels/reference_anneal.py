"""Simulated annealing of a placement in plain numpy: the truth that `csrc/anneal.c` reproduces, table for table.

A table of stages × replicas of devices, whose cost `geotrain.plan.placement.cost` defines, is annealed, in whole
units. In most turns one device looks at all others, and changes places with the one with which that seems cheapest,
if the temperature allows it: what that adds is drawn once a turn, as simulated annealing draws it. In other turns
pipelines change their ends, runs of stages of two pipelines change places, or stages are put in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from geotrain.kernels.steps import AT_ONE_HEAT, LUCK, MOST_HEAT, ONE_DEVICE, REORDER, TAILS, TURNS, Annealing

_BITS = 2**64 - 1
Table = NDArray[np.int64]  # (N,): the table row by row, then idle devices


def anneal(
    gradient: NDArray[np.int32],
    activation: NDArray[np.int32],
    compute: NDArray[np.int32],
    order: NDArray[np.int32],
    how: Annealing,
    heat: float,
) -> NDArray[np.int32]:
    """As `dispatch.anneal`, in whole units; heat: the first temperature, in them."""
    pulls, links, computed, start = (array.astype(np.int64) for array in (gradient, activation, compute, order))
    return _Chain(pulls, links, computed, start, how, heat).run().astype(np.int32)


def _below(bits: int, bound: int) -> int:
    return ((bits & 0xFFF) * bound) >> 12


@dataclass
class _Chain:
    gradient: NDArray[np.int64]
    activation: NDArray[np.int64]
    compute: NDArray[np.int64]
    order: Table
    how: Annealing
    heat: float

    def run(self) -> Table:
        how, self.s, self.d = self.how, self.how.stages, self.how.replicas
        self.random, heat, best, found = how.seed & _BITS, self.heat, None, self.order
        self.stage = 0  # whose device looked last
        for step in range(how.steps):
            if step % AT_ONE_HEAT == 0:
                heat *= how.cool
            bits = self._draw()
            more = int(min(heat * LUCK[bits % len(LUCK)], MOST_HEAT)) << self.how.shift
            self.limit = self._costs([self.order])[1][0] + more
            tables = self._looked_at(how.turns[step % TURNS], bits)
            costs, annealed = self._costs([*tables, self.order])
            allowed = np.flatnonzero(annealed <= self.limit)  # the last at least
            self.order = [*tables, self.order][allowed[0]]
            if best is None or costs[allowed[0]] < best:
                best, found = costs[allowed[0]], self.order
        return found

    def _draw(self) -> int:
        """splitmix64"""
        self.random = (self.random + 0x9E3779B97F4A7C15) & _BITS
        z = self.random
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
        return z ^ (z >> 31)

    def _costs(self, orders: Sequence[Table]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(K, N) → (K,) the cost itself, and what is annealed, 2^shift times."""
        table = np.array(orders)[:, : self.s * self.d].reshape(-1, self.s, self.d)
        rows = self.gradient[table[..., :, None], table[..., None, :]].sum(axis=-1).max(axis=-1)
        path = self.activation[table[:, :-1], table[:, 1:]].max(axis=-1).sum(axis=-1)
        compute = self.compute[table]
        cost = rows.max(axis=-1) + 2 * path + compute.max(axis=(-1, -2))
        return cost, (cost << self.how.shift) + rows.sum(axis=-1) + compute.sum(axis=(-1, -2))

    # --- each kind of turn: tables, of which the first that is cheap enough is taken

    def _looked_at(self, kind: int, bits: int) -> list[Table]:
        s, d, x, y, z = self.s, self.d, bits >> 12, bits >> 24, bits >> 36
        if kind == ONE_DEVICE:
            self.stage = (self.stage + 1) % s
            return self._one_device(self.stage * d + _below(y, d), z & 0xFFFFFF)
        if kind == TAILS:
            return self._tails(1 + _below(x, s - 1), _below(y, d), _below(z, d))
        if kind == REORDER:
            return [self._reorder(_below(x, s), _below(y, s), _below(z, s), bits >> 63 == 1)]
        length, more = 1 + _below(x, s // 2), self._draw()
        one, two = _below(more, s - length + 1), _below(more >> 12, s - length + 1)
        return self._runs(min(one, two), _below(y, d), max(one, two), _below(z, d), length)

    def _swapped(self, cells: Sequence[int], others: Sequence[int]) -> Table:
        order = self.order.copy()
        order[list(cells)], order[list(others)] = self.order[list(others)], self.order[list(cells)]
        return order

    def _one_device(self, mine: int, bits: int) -> list[Table]:
        """What seems cheapest comes first; of what seems alike the first from a random device on."""
        first = bits * len(self.order) >> 24
        cells = [(first + i) % len(self.order) for i in range(len(self.order))]
        others = [other for other in cells if not self._alike(mine, other)]
        tables = [self._swapped([mine], [other]) for other in others]
        seems = [self._seems(table, mine, other) for table, other in zip(tables, others, strict=True)]
        return [tables[i] for i in np.argsort(seems, kind="stable")]

    def _seems(self, table: Table, mine: int, other: int) -> int:
        """By how much the cost seems above the limit, if stages that have a newcomer cost no more than that pays."""
        s, d, shift, placed = self.s, self.d, self.how.shift, self.s * self.d
        grid, compute = table[:placed].reshape(s, d), self.compute[table[:placed]]
        rows = self.gradient[grid[:, :, None], grid[:, None, :]].sum(axis=-1)
        most, newcomers, slowest = rows.max(axis=-1), 0, self.compute[self.order[:placed]].max()
        touched = {cell // d: cell for cell in (mine, other) if cell < placed}
        if len(touched) == 2 or other >= placed:
            for stage, cell in touched.items():
                most[stage] = rows.flat[cell]
                newcomers += most[stage]
        if other >= placed:
            newcomers += compute[mine]
            slowest = max(compute[mine], slowest if self.compute[self.order[mine]] < slowest else 0)
        path = self.activation[grid[:-1], grid[1:]].max(axis=-1).sum()
        rest = most.sum() + compute.sum() - newcomers
        return int(most.max() + 2 * path + slowest + (newcomers >> shift) - ((self.limit - rest) >> shift))

    def _alike(self, mine: int, other: int) -> bool:
        """Whether it makes no difference which of two devices lies where."""
        x, y = self.order[mine], self.order[other]
        others = np.delete(np.arange(len(self.order)), [x, y])
        links = (np.array_equal(m[x, others], m[y, others]) for m in (self.activation, self.gradient))
        return bool(self.compute[x] == self.compute[y]) and all(links)

    def _pipelines(self, stages: range, p: int, q: int) -> Table:
        return self._swapped([r * self.d + p for r in stages], [r * self.d + q for r in stages])

    def _tails(self, stage: int, p: int, first: int) -> list[Table]:
        """Pipeline p goes on from a stage as another does, the cheapest first; the shorter ends change places."""
        stages = range(stage, self.s) if 2 * stage > self.s else range(stage)
        others = ((first + i) % self.d for i in range(self.d))
        tables = [self._pipelines(stages, p, q) for q in others if q != p]
        return [tables[i] for i in np.argsort(self._costs(tables)[1], kind="stable")]

    def _runs(self, u: int, p: int, v: int, q: int, length: int) -> list[Table]:
        """`length` stages of p from u on and of q from v on, or of both from u on if these overlap."""
        if v - u < length:
            return [self._pipelines(range(u, u + length), p, q)] if p != q else []
        cells = [(u + i) * self.d + p for i in range(length)]
        return [self._swapped(cells, [(v + i) * self.d + q for i in range(length)])]

    def _reorder(self, x: int, y: int, z: int, turned: bool) -> Table:
        """Stages x … y are turned around, or moved to stand behind z of the others."""
        x, y = min(x, y), max(x, y)
        every = list(range(self.s))
        before, block, behind = every[:x], every[x : y + 1], every[y + 1 :]
        others, z = before + behind, z % (self.s - (y - x))
        stages = before + block[::-1] + behind if turned else others[:z] + block + others[z:]
        placed = self.s * self.d
        table = self.order[:placed].reshape(self.s, self.d)[stages]
        return np.concatenate([table.ravel(), self.order[placed:]])
