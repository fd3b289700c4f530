"""Which device computes what: search for the cheapest table of stages × pipelines (`geotrain.plan.placement.cost`).

The problem is a graph partition with a bottleneck cost, and NP-hard; the search goes in three phases.

1. Starts. Devices are put in an order in which near ones are neighbours (the leaves of an average-linkage tree over
   their links). This order fills the table tile by tile, for every tile height and width that divides the table. Tall
   tiles keep pipelines local and let gradients travel, wide tiles do the reverse, and others lie between. Where some
   devices stay idle, they are left out of the order at several places, or by their dearest links.
2. Simulated annealing (`plan.placement.anneal`) in many chains, from random tables and from what was found.
3. Polish. The best tables are rearranged with exact matchings and, for few stages, the exact tour.

The same seed gives the same placement; nothing depends on the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from geotrain.plan.placement.anneal import CHAINS, Annealer
from geotrain.plan.placement.cost import (
    Ints,
    Placement,
    PlacementError,
    Problem,
    arrange,
    off_diagonal,
    placement,
    quick_bound,
    table_costs,
)

POLISHED = 4
MOST_TURNS, MOST_LOOKS = 150_000, 20_000_000  # a turn of one chain looks at all devices
IDLE_WINDOWS = 8
ROUNDING = 1e-9  # a cost within this share of a bound has reached it


@dataclass(frozen=True)
class Effort:
    """Limits on the work of a search. turns: of all chains together."""

    turns: int

    def __post_init__(self) -> None:
        if self.turns < 0:
            raise PlacementError(f"{self}: turns must be at least 0")


def search(problem: Problem, seed: int, effort: Effort | None = None) -> Placement:
    """Search for the cheapest placement. Stops at once where it is proven that nothing is cheaper."""
    effort = effort or Effort(min(MOST_TURNS, MOST_LOOKS // problem.devices))
    rng = np.random.default_rng(seed)
    floor = quick_bound(problem) * (1 + ROUNDING)
    starts, shape = start_orders(problem), (problem.stages, problem.replicas)
    costs = [table_costs(problem, order[: problem.placed].reshape(shape)) for order in starts]
    ranked = starts[np.argsort(np.array(costs), kind="stable")]
    best = polish(problem, ranked)
    if best.total_s <= floor:
        return best
    placed = np.array(best.stages).ravel()
    known = np.concatenate([placed, np.setdiff1d(np.arange(problem.devices), placed)])
    ranked = np.concatenate([known[None], ranked])
    improved = polish(problem, annealed(problem, ranked, effort.turns, floor, rng))
    return min(best, improved, key=lambda p: p.total_s)


def polish(problem: Problem, orders: Ints) -> Placement:
    """Improve the first few orders by exact matchings and an exact tour; returns the best."""
    shape = (problem.stages, problem.replicas)
    tables = [order[: problem.placed].reshape(shape) for order in orders[:POLISHED]]
    return min(
        (placement(problem, table) for raw in tables for table in (raw, arrange(problem, raw))),
        key=lambda p: p.total_s,
    )


# ------------------------------------------------------------------------------------------------- starts


def start_orders(problem: Problem) -> Ints:
    """Make (count, N) permutations of the devices; the first S·D entries are the table row by row, the rest is
    idle."""
    rows, columns = problem.stages, problem.replicas
    tilings = []  # flat cells of the table, tile after tile; tiles and the cells in them by rows or by columns
    for height in (h for h in range(1, rows + 1) if rows % h == 0):
        for width in (w for w in range(1, columns + 1) if columns % w == 0):
            cells = np.arange(rows * columns).reshape(rows // height, height, columns // width, width)
            for order in ((0, 2, 1, 3), (0, 2, 3, 1), (2, 0, 1, 3), (2, 0, 3, 1)):
                tilings.append(cells.transpose(order).ravel())
    orders = []
    for kept, idle in (split for near in near_orders(problem) for split in _leave_out(problem, near)):
        for tiling in tilings:
            table = np.empty(problem.placed, dtype=np.int64)
            table[tiling] = kept
            orders.append(np.concatenate([table, idle]))
    return np.unique(np.array(orders), axis=0)


def near_orders(problem: Problem) -> list[Ints]:
    """Find orders of the devices in which near ones are neighbours: the leaves of an average-linkage tree, and the
    same with well connected devices first (a tree may scatter those that are equally far from everything)."""
    leaves = np.arange(problem.devices)
    if problem.devices > 2:
        apart = problem.activation_s / max(problem.activation_s.mean(), 1e-30)
        apart = apart + problem.gradient_s / max(problem.gradient_s.mean(), 1e-30)
        leaves = leaves_list(linkage(squareform(apart, checks=False), "average")).astype(np.int64)
    nearest = off_diagonal(problem.activation_s).min(axis=1)
    return [leaves, leaves[np.argsort(nearest[leaves], kind="stable")]]


def _leave_out(problem: Problem, near: Ints) -> list[tuple[Ints, Ints]]:
    """List ways to split the order into devices kept and devices idle."""
    if problem.idle == 0:
        return [(near, near[:0])]
    splits = []
    for offset in np.unique(np.linspace(0, problem.placed, IDLE_WINDOWS).astype(int)):
        splits.append((np.delete(near, np.s_[offset : offset + problem.idle]), near[offset : offset + problem.idle]))
    kept = near
    links = problem.gradient_s + problem.activation_s
    total = links.sum(axis=1) + problem.compute_s * problem.devices
    while len(kept) > problem.placed:  # drop the device with the dearest links to those still kept
        worst = kept[total[kept].argmax()]
        total = total - links[worst]
        kept = kept[kept != worst]
    return [*splits, (kept, np.setdiff1d(near, kept))]


def annealed(problem: Problem, ranked: Ints, turns: int, floor: float, rng: Generator) -> Ints:
    """Anneal; returns (CHAINS, N) orders, cheapest first, after `turns` of all chains; ends early once a cost reaches
    `floor`.

    ranked: (few, N) starts, the cheapest first. Every other chain begins at one of them, the rest at random tables.
    """
    orders = np.array([rng.permutation(problem.devices) for _ in range(CHAINS)])
    known = ranked[: CHAINS // 2]
    orders[: 2 * len(known) : 2] = known
    return Annealer(problem, orders, rng).run(turns // CHAINS, floor)
