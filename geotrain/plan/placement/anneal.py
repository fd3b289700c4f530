"""Simulated annealing of placements: many chains side by side, as one numpy computation.

A chain holds a table of stages × replicas (`plan.placement.cost`) and its idle devices, row by row. In most turns one
device of each chain estimates the cost of changing places with every other device at once, and proposes the cheapest
exchange. In other turns a run of stages of one pipeline changes places with as many stages elsewhere (cheap tables
have runs of stages that are alike, which single exchanges would have to break up), or a block of stages is reversed.
A proposal is accepted by Metropolis' rule on its exact cost. Now and then the better half of the chains replaces the
other half. The estimate of an exchange is a lower bound: of either stage it knows the newcomer's row, not all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from geotrain.plan.placement.cost import Floats, Ints, Problem, alike, link_times, stage_costs

CHAINS, SELECTIONS = 96, 7
# The first and last temperature, as shares of the cheapest cost known over the number of devices placed.
HOT, COLD = 1.0, 0.3
# A share of the sum of all stages' costs and all compute is added to the cost: not only the dearest is to count.
SUM_WEIGHT = 1 / 16
EXCHANGE, RUNS, REVERSE = range(3)
MIX = {EXCHANGE: 8, RUNS: 4, REVERSE: 1}  # shares of turns


@dataclass
class _Tables:
    """Chains' tables with what their costs are made of. orders: (B, N) devices, row by row, then the idle ones;
    rows: (B, S) dearest row of each stage; links: (B, S−1, D) activation links."""

    orders: Ints
    rows: Floats
    links: Floats

    def __getitem__(self, chosen: Ints | NDArray[np.bool_]) -> _Tables:
        return _Tables(*(values[chosen] for values in vars(self).values()))

    def __setitem__(self, chosen: Ints | NDArray[np.bool_], other: _Tables) -> None:
        for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True):
            mine[chosen] = theirs


class Annealer:
    """Chains that begin at `orders` (B, N), each a permutation of the devices."""

    def __init__(self, problem: Problem, orders: Ints, rng: Generator) -> None:
        self.problem, self.rng = problem, rng
        self.chains, self.devices = orders.shape
        self.every = np.arange(self.chains)
        self.alike = alike(problem) & (problem.compute_s == problem.compute_s[:, None])
        stages = np.arange(problem.stages)
        # [u, v, w]: whether stage w is neither u nor v
        self.third = (stages != stages[:, None, None]) & (stages != stages[:, None])
        self.now = self._tables(orders)
        cost, self.energy = self._costs(self.now)
        self.best, self.best_cost = orders.copy(), cost

    def run(self, steps: int, floor: float) -> Ints:
        """Anneal and return the cheapest order of each chain (B, N), cheapest first. Ends early at cost `floor`."""
        stages, placed = self.problem.stages, self.problem.placed
        kinds = np.resize(np.repeat(list(MIX), list(MIX.values())), steps)
        self.rng.shuffle(kinds)
        for step, kind in enumerate(kinds if stages > 1 else np.zeros(steps)):
            if self.best_cost.min() <= floor:
                break
            heat = HOT * (COLD / HOT) ** (step / steps) * self.best_cost.min() / placed
            self._decide(self._proposed(kind, step % stages), heat)
            if (step + 1) % (steps // (SELECTIONS + 1) + 1) == 0:
                self._select()
        return self.best[np.argsort(self.best_cost, kind="stable")]

    def _tables(self, orders: Ints) -> _Tables:
        table = self._grid(orders)
        return _Tables(orders, stage_costs(self.problem, table), link_times(self.problem, table))

    def _costs(self, tables: _Tables) -> tuple[Floats, Floats]:
        """Compute the (B,) cost of each table, and what is annealed: the cost with a share of the sums."""
        compute = self.problem.compute_s[tables.orders[:, : self.problem.placed]]
        cost = tables.rows.max(1) + 2 * tables.links.max(2).sum(1) + compute.max(1)
        return cost, cost + SUM_WEIGHT * (tables.rows.sum(1) + compute.sum(1))

    def _decide(self, proposed: _Tables, heat: float) -> None:
        cost, energy = self._costs(proposed)
        accepted = energy <= self.energy + heat * self.rng.exponential(size=self.chains)
        self.now[accepted], self.energy[accepted] = proposed[accepted], energy[accepted]
        better = accepted & (cost < self.best_cost)
        self.best[better], self.best_cost[better] = proposed.orders[better], cost[better]

    def _select(self) -> None:
        """Select chains: the better half goes on twice, from the cheapest tables that they found."""
        chosen = np.resize(np.argsort(self.best_cost, kind="stable")[: (self.chains + 1) // 2], self.chains)
        self.best, self.best_cost = self.best[chosen], self.best_cost[chosen]
        self.now = self._tables(self.best.copy())
        self.energy = self._costs(self.now)[1]

    # --- proposals: one for each chain

    def _proposed(self, kind: int, stage: int) -> _Tables:
        stages, replicas, before = self.problem.stages, self.problem.replicas, self.now
        if kind == REVERSE:
            first, last = np.sort(self.rng.integers(stages, size=(2, self.chains, 1)), axis=0)
            order = np.arange(stages)
            order = np.where((order >= first) & (order <= last), first + last - order, order)
            orders = before.orders.copy()
            orders[:, : self.problem.placed] = self._grid(before.orders)[self.every[:, None], order].reshape(
                self.chains, -1
            )
            return _Tables(orders, before.rows[self.every[:, None], order], self._links(orders))
        one, two = self._exchange(stage) if kind == EXCHANGE else self._runs()
        orders, every = before.orders.copy(), self.every[:, None]
        orders[every, one], orders[every, two] = before.orders[every, two], before.orders[every, one]
        changed = np.minimum(np.concatenate([one, two], axis=1) // replicas, stages - 1)  # idle cells lie behind
        rows = before.rows.copy()
        rows[every, changed] = stage_costs(self.problem, self._grid(orders)[every, changed])
        return _Tables(orders, rows, self._links(orders))

    def _runs(self) -> tuple[Ints, Ints]:
        """Draw the (B, length) cells of two runs of stages in a pipeline each; of the same stages where they would
        overlap."""
        stages, replicas = self.problem.stages, self.problem.replicas
        length = int(self.rng.integers(stages // 2)) + 1
        first, second = np.sort(self.rng.integers(stages - length + 1, size=(2, self.chains)), axis=0)
        second = np.where(second - first < length, first, second)
        pipelines = self.rng.integers(replicas, size=(2, self.chains))
        one, two = np.stack([first, second]) * replicas + pipelines
        steps = np.arange(length) * replicas
        return one[:, None] + steps, two[:, None] + steps

    def _exchange(self, stage: int) -> tuple[Ints, Ints]:
        """Find the (B, 1) cells of a device of `stage`, and of the device with which changing places seems
        cheapest."""
        problem, orders, rows = self.problem, self.now.orders, self.now.rows
        pipeline = self.rng.integers(problem.replicas, size=(self.chains,))
        mine = stage * problem.replicas + pipeline
        device = orders[self.every, mine]
        pull = self._to_cells(problem.gradient_s, device)
        newcomer = problem.gradient_s[self._grid(orders)[:, stage]].sum(1)  # what each device would pay in the stage
        here = np.take_along_axis(newcomer, orders, 1) - pull
        there = self._grid(pull).sum(2, keepdims=True) - self._grid(pull)
        path = self._paths(stage, pipeline, device)
        sums = rows.sum(1, keepdims=True)
        unchanged = np.where(self.third[stage], rows[:, None], 0.0).max(2)
        seems = np.maximum(np.maximum(self._grid(here), there), unchanged[..., None])
        seems += SUM_WEIGHT * (self._grid(here) + there + (sums - rows[:, [stage]] - rows)[..., None])
        seems[:, stage] = rows.max(1, keepdims=True) + SUM_WEIGHT * sums
        seems = seems.reshape(self.chains, -1)
        if problem.idle:
            idle = np.s_[:, problem.placed :]
            compute, own = problem.compute_s[orders], problem.compute_s[device][:, None]
            slowest = compute[:, : problem.placed].max(1, keepdims=True)
            most = np.maximum(
                here[idle], np.where(np.arange(problem.stages) == stage, 0.0, rows).max(1, keepdims=True)
            )
            slower = np.maximum(compute[idle], np.where(own < slowest, slowest, 0.0)) - slowest
            more = here[idle] + sums - rows[:, [stage]] + compute[idle] - own
            seems = np.concatenate([seems, most + slower + SUM_WEIGHT * more], axis=1)
        seems += 2 * path
        seems[self.alike[device[:, None], orders]] = np.inf
        seems *= 1 + 1e-9 * self.rng.random(self.devices)  # of equal ones any
        return mine[:, None], seems.argmin(1)[:, None]

    def _paths(self, stage: int, pipeline: Ints, device: Ints) -> Floats:
        """Compute, (B, N), the pipeline's time if `device` of this stage and pipeline changed places with the one of
        a cell.

        Edge e joins stages e − 1 and e; edges 0 and S join nothing and cost nothing. An edge costs the dearest of the
        links that change and of those that remain: `remaining`, without that of one pipeline.
        """
        problem, orders, every = self.problem, self.now.orders, self.every
        stages, replicas = problem.stages, problem.replicas
        edges = np.zeros((self.chains, stages + 1, replicas))
        edges[:, 1:-1] = self.now.links
        dearest = edges.max(2)
        second = np.partition(edges, -2, axis=2)[..., -2:-1] if replicas > 1 else np.zeros_like(edges)
        remaining = np.where(edges == dearest[..., None], second, dearest[..., None])
        cell = stage * replicas + pipeline
        nothing = np.zeros(orders.shape)
        above = self._to_cells(problem.activation_s, orders[every, cell - replicas]) if stage else nothing
        under = (
            self._to_cells(problem.activation_s, orders[every, cell + replicas]) if stage + 1 < stages else nothing
        )
        own = np.zeros((self.chains, stages + 2, replicas))  # from `device` to each cell; a row before and behind
        own[:, 1:-1] = self._grid(self._to_cells(problem.activation_s, device))
        # by edge, of what comes to the device's place; and of the device where it goes
        up, down = (remaining[every, e, pipeline][:, None] for e in (stage, stage + 1))
        comes_up, comes_down = np.maximum(above, up), np.maximum(under, down)
        goes_up, goes_down = np.maximum(own[:, :-2], remaining[:, :-1]), np.maximum(own[:, 2:], remaining[:, 1:])
        rest = (dearest.sum(1) - dearest[:, stage] - dearest[:, stage + 1])[:, None]
        path = rest + comes_up + comes_down
        table = self._grid(path) + goes_up + goes_down - (dearest[:, :-1] + dearest[:, 1:])[..., None]
        above, under = self._grid(above), self._grid(under)
        both_up, both_down = np.minimum(up, remaining[:, stage]), np.minimum(down, remaining[:, stage + 1])
        table[:, stage] = rest + np.maximum(np.maximum(above[:, stage], own[:, stage]), both_up)
        table[:, stage] += np.maximum(np.maximum(under[:, stage], own[:, stage + 2]), both_down)
        same = np.arange(replicas) == pipeline[:, None]  # neighbours in a pipeline keep their link
        # Stages next to this one share an edge with it; the one beyond changes as in any other.
        goes = goes_up - dearest[:, :-1, None], goes_down - dearest[:, 1:, None]
        sides = (above, both_up, goes[0], comes_down), (under, both_down, goes[1], comes_up)
        for side, (near, both, far, comes) in enumerate(sides):
            next_ = stage + 2 * side - 1
            if 0 <= next_ < stages:
                shared = np.maximum(np.maximum(near[:, next_], own[:, stage + 1]), both)
                shared = np.where(same, dearest[:, [stage + side]], shared)
                table[:, next_] = rest + shared + far[:, next_] + self._grid(comes)[:, next_]
        path[:, : problem.placed] = table.reshape(self.chains, -1)
        return path

    def _grid(self, by_cell: NDArray[Any]) -> NDArray[Any]:
        """Reshape (B, N) to (B, S, D), without the idle cells."""
        shape = self.problem.stages, self.problem.replicas
        return by_cell[:, : self.problem.placed].reshape(self.chains, *shape)

    def _to_cells(self, times: Floats, device: Ints) -> Floats:
        """Return the (B, N) link of each chain's device to the device of each cell."""
        return np.take(times, device[:, None] * self.devices + self.now.orders)

    def _links(self, orders: Ints) -> Floats:
        return link_times(self.problem, self._grid(orders))
