"""Which device computes what: search for the cheapest table of stages × pipelines (`geotrain.plan.placement.cost`).

The problem is a graph partition with a bottleneck cost, and NP-hard; the search goes in four phases.

1. Starts. Devices are put in an order in which near ones are neighbours (the leaves of an average-linkage tree over
   their links). This order fills the table tile by tile, for every tile height and width that divides the table. Tall
   tiles keep pipelines local and let gradients travel, wide tiles do the reverse, and others lie between. Where some
   devices stay idle, they are left out of the order at several places, or by their dearest links.
2. Classes. Where the devices fall into few classes of equal links, `plan.placement.exact` finds the optimum, or
   proves that the placement found so far is one, within an allowance of work.
3. Simulated annealing (`geotrain.kernels.anneal`), in several chains, from random tables and from what was found. In
   most turns one device looks at all others and changes places with the first that the temperature allows. Others
   exchange some stages of a pipeline for as many elsewhere (the best tables have runs of stages that are alike, which
   single exchanges would have to break up), let two pipelines change their ends (this improves matchings), or move or
   turn a block of stages.
4. Polish. The best tables are rearranged with exact matchings and, for few stages, the exact tour.

The same seed gives the same placement; nothing depends on the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from geotrain.kernels import Annealing, anneal
from geotrain.plan.placement.classes import like_classes
from geotrain.plan.placement.cost import (
    Ints,
    Placement,
    PlacementError,
    Problem,
    arrange,
    compute_bound,
    off_diagonal,
    placement,
    quick_bound,
    table_costs,
)
from geotrain.plan.placement.exact import ROUNDING, cheapest_below

CHAINS = 8
HOT, COLD = 0.7, 0.3  # temperatures, as shares of what links cost, over the number of devices placed
SHIFT = 4  # see `geotrain.kernels.Annealing`
POLISHED = 4
MOST_TURNS, MOST_LOOKS = 3_000_000, 200_000_000  # in a turn a device looks at all others
IDLE_WINDOWS = 8


@dataclass(frozen=True)
class Effort:
    """How hard to try. turns: of all annealing together; exact_work: the work allowed to a complete search over
    classes (see `geotrain.plan.placement.exact`)."""

    turns: int
    exact_work: int = 10_000_000

    def __post_init__(self) -> None:
        if self.turns < 0 or self.exact_work < 0:
            raise PlacementError(f"{self}: turns and exact_work must be at least 0")


def search(problem: Problem, seed: int, effort: Effort | None = None) -> Placement:
    """The cheapest placement found. Stops at once where it is proven that nothing is cheaper."""
    effort = effort or Effort(min(MOST_TURNS, MOST_LOOKS // problem.devices))
    rng = np.random.default_rng(seed)
    floor = quick_bound(problem) * (1 + ROUNDING)
    starts, shape = start_orders(problem), (problem.stages, problem.replicas)
    costs = [table_costs(problem, order[: problem.placed].reshape(shape)) for order in starts]
    ranked = starts[np.argsort(np.array(costs), kind="stable")]
    best = polish(problem, ranked)
    if best.total_s <= floor:
        return best
    best, proven = exact_over_classes(problem, best, effort.exact_work)
    if proven:
        return best
    placed = np.array(best.stages).ravel()
    first = np.concatenate([placed, np.setdiff1d(np.arange(problem.devices), placed)])
    scale_s = best.total_s - best.compute_s
    orders = annealed(problem, np.concatenate([first[None], ranked]), scale_s, effort.turns, floor, rng)
    improved = polish(problem, orders)
    if improved.total_s < best.total_s:  # a lower threshold leaves the complete search less to do
        best, _ = exact_over_classes(problem, improved, effort.exact_work)
    return best


def exact_over_classes(problem: Problem, best: Placement, max_work: int) -> tuple[Placement, bool]:
    """The better of `best` and the optimum over classes of devices, and whether nothing can be cheaper.

    Does nothing where there are too many classes.
    """
    classes = like_classes(problem)
    if classes is None:
        return best, False
    threshold = (best.total_s - compute_bound(problem)) * (1 - ROUNDING)
    optimum, complete = cheapest_below(classes, problem.stages, threshold, max_work)
    if optimum is not None:
        ready = np.argsort(problem.compute_s, kind="stable")  # the fastest of each class first
        waiting = [list(ready[classes.label[ready] == k]) for k in range(len(classes.sizes))]
        rows = [[waiting[k].pop(0) for k, count in enumerate(v) for _ in range(count)] for v in optimum.vectors]
        best = min(best, placement(problem, arrange(problem, np.array(rows))), key=lambda p: p.total_s)
    return best, complete and bool((problem.compute_s == problem.compute_s[0]).all())


def polish(problem: Problem, orders: Ints) -> Placement:
    """The best of the first few orders, after exact matchings and tour."""
    shape = (problem.stages, problem.replicas)
    tables = [order[: problem.placed].reshape(shape) for order in orders[:POLISHED]]
    return min(
        (placement(problem, table) for raw in tables for table in (raw, arrange(problem, raw))),
        key=lambda p: p.total_s,
    )


# ------------------------------------------------------------------------------------------------- starts


def start_orders(problem: Problem) -> Ints:
    """(count, N): permutations of the devices; the first S·D entries are the table row by row, the rest is idle."""
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
    """Devices in orders in which near ones are neighbours: the leaves of an average-linkage tree, and the same with
    well connected devices first (a tree may scatter those that are equally far from everything)."""
    leaves = np.arange(problem.devices)
    if problem.devices > 2:
        apart = problem.activation_s / max(problem.activation_s.mean(), 1e-30)
        apart = apart + problem.gradient_s / max(problem.gradient_s.mean(), 1e-30)
        leaves = leaves_list(linkage(squareform(apart, checks=False), "average")).astype(np.int64)
    nearest = off_diagonal(problem.activation_s).min(axis=1)
    return [leaves, leaves[np.argsort(nearest[leaves], kind="stable")]]


def _leave_out(problem: Problem, near: Ints) -> list[tuple[Ints, Ints]]:
    """Ways to split the order into devices kept and devices idle."""
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


# ---------------------------------------------------------------------------------------------- annealing


def annealed(problem: Problem, ranked: Ints, scale_s: float, turns: int, floor: float, rng: Generator) -> Ints:
    """(few, N) orders, cheapest first, after that many turns in all. Ends early once a cost reaches `floor`.

    ranked: starts, the cheapest first. scale_s: what links cost at the end, or more; temperatures are shares of the
    least that they were found to cost.
    """
    found, shape = [], (problem.stages, problem.replicas)
    for i in range(CHAINS + 1):
        # Every other chain begins at a start, the others at random. The first is short, and says how hot others are.
        order = ranked[(i // 2 - 1) % len(ranked)] if i % 2 == 0 and i else rng.permutation(problem.devices)
        how = Annealing(
            *shape,
            steps=turns // CHAINS if i else turns // (4 * CHAINS),
            heat=HOT * scale_s / problem.placed,
            cold=COLD * scale_s / problem.placed,
            seed=int(rng.integers(2**62)),
            dear_s=2 * scale_s,
            shift=SHIFT,
        )
        order = anneal(problem.gradient_s, problem.activation_s, problem.compute_s, order.astype(np.int32), how)
        table = order[: problem.placed].reshape(shape)
        cost = float(table_costs(problem, table))
        found.append((cost, order))
        if cost <= floor:
            break
        scale_s = min(scale_s, cost - float(problem.compute_s[table].max()))
    return np.array([order for _, order in sorted(found, key=lambda each: each[0])], dtype=np.int64)
