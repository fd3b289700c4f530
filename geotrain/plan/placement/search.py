"""Which device computes what: search for the cheapest table of stages × pipelines (`geotrain.plan.placement.cost`).

The problem is a graph partition with a bottleneck cost, and NP-hard; the search goes in four phases.

1. Starts. Devices are put in an order in which near ones are neighbours (the leaves of an average-linkage tree over
   their links). This order fills the table tile by tile, for every tile height and width that divides the table. Tall
   tiles keep pipelines local and let gradients travel, wide tiles do the reverse, and others lie between. Where some
   devices stay idle, they are left out of the order at several places, or by their dearest links.
2. Classes. Where the devices fall into few classes of equal links, `plan.placement.exact` finds the optimum, or
   proves that the placement found so far is one, within an allowance of work.
3. Simulated annealing. Many tables are improved side by side, each step being one batch of array operations. A move
   swaps two blocks of stages × pipelines (mostly 1 × 1; or some stages of a pipeline with idle devices), crosses two
   pipelines from some stage on (this improves matchings), or moves a block of stages. The true cost is a maximum and
   so flat nearly everywhere; therefore chains descend on cost + w · (the cost with means in place of maxima), and w
   goes to 0.
4. Polish. The best tables are rearranged with exact matchings and, for few stages, the exact tour.

The same seed gives the same placement; nothing depends on the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from geotrain.plan.placement.classes import like_classes
from geotrain.plan.placement.cost import (
    Floats,
    Ints,
    Placement,
    PlacementError,
    Problem,
    arrange,
    compute_bound,
    link_times,
    off_diagonal,
    placement,
    quick_bound,
    table_costs,
)
from geotrain.plan.placement.exact import TooMuchWorkError, cheapest_below

CHAINS = 24
ROUNDING = 1e-9  # thresholds lie this share below the known cost, so that the cost itself is not "below"
ROUND_STEPS = 250  # between two rounds the worst chains are replaced by copies of the best
POLISHED = 4
IDLE_WINDOWS = 8


@dataclass(frozen=True)
class Effort:
    """How hard to try. steps: moves each chain tries; chains: tables improved side by side; exact_work: the work
    allowed to a complete search over classes (see `geotrain.plan.placement.exact`)."""

    steps: int
    chains: int = CHAINS
    exact_work: int = 1_000_000

    def __post_init__(self) -> None:
        if self.steps < 0 or self.chains < 8 or self.exact_work < 0:
            raise PlacementError(f"{self}: steps and exact_work must be at least 0, chains at least 8")


def search(problem: Problem, seed: int, effort: Effort | None = None) -> Placement:
    """The cheapest placement found. Stops at once where it is proven that nothing is cheaper."""
    # Moves grow with the devices, up to what 1,024 of them allow in well under a minute.
    effort = effort or Effort(steps=int(np.clip(60 * problem.placed, 1000, 15000)))
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
    chains = _initial_chains(ranked, best, effort.chains, rng)
    annealed = polish(problem, Annealer(problem, chains, rng).run(effort.steps, floor))
    if annealed.total_s < best.total_s:  # a lower threshold leaves the complete search less to do
        best, _ = exact_over_classes(problem, annealed, effort.exact_work)
    return best


def exact_over_classes(problem: Problem, best: Placement, max_work: int) -> tuple[Placement, bool]:
    """The better of `best` and the optimum over classes of devices, and whether nothing can be cheaper.

    Does nothing where there are too many classes, or their search takes too much work.
    """
    classes = like_classes(problem)
    if classes is None:
        return best, False
    threshold = (best.total_s - compute_bound(problem)) * (1 - ROUNDING)
    try:
        optimum = cheapest_below(classes, problem.stages, threshold, max_work)
    except TooMuchWorkError:
        return best, False
    if optimum is not None:
        ready = np.argsort(problem.compute_s, kind="stable")  # the fastest of each class first
        waiting = [list(ready[classes.label[ready] == k]) for k in range(len(classes.sizes))]
        rows = [[waiting[k].pop(0) for k, count in enumerate(v) for _ in range(count)] for v in optimum.vectors]
        best = min(best, placement(problem, arrange(problem, np.array(rows))), key=lambda p: p.total_s)
    return best, bool((problem.compute_s == problem.compute_s[0]).all())


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


def _initial_chains(ranked: Ints, best: Placement, chains: int, rng: np.random.Generator) -> Ints:
    """Half of the chains begin at the best placement and starts, a quarter at other starts, a quarter at random."""
    placed = np.array(best.stages).ravel()
    first = np.concatenate([placed, np.setdiff1d(np.arange(ranked.shape[1]), placed)])
    near = ranked[np.arange(chains // 2 - 1) % len(ranked)]
    other = ranked[rng.integers(len(ranked), size=chains // 4)]
    scattered = [rng.permutation(ranked.shape[1]) for _ in range(chains - chains // 2 - len(other))]
    return np.concatenate([first[None], near, other, np.array(scattered)])


# ---------------------------------------------------------------------------------------------- annealing


class Annealer:
    """Chains of orders (chains, N), all moved at once. `_rows` are the row sums of `orders`."""

    def __init__(self, problem: Problem, orders: Ints, rng: np.random.Generator) -> None:
        self.problem, self.rng = problem, rng
        self.orders = orders.copy()
        self._chain = np.arange(len(orders))
        self._rows = self._row_sums(self.orders)
        # Chains differ in how much they look at means, and in how hot they begin: a good start should not be melted.
        self._mean_weight = rng.permutation(np.geomspace(0.01, 1.0, len(orders)))
        self._heat = rng.permutation(np.geomspace(0.0003, 0.03, len(orders)))

    def run(self, steps: int, floor: float) -> Ints:
        """Anneal; return the best order of each chain, cheapest first. Ends early once a cost reaches `floor`."""
        cost, mean = self._cost(self.orders, self._rows)
        best, best_cost = self.orders.copy(), cost.copy()
        hot = self._heat * float(cost.min())
        for step in range(steps):
            left = 1 - step / steps
            weight = self._mean_weight * left
            temperature = hot * left**2 * 0.001 ** (1 - left) + 1e-12
            orders, rows = self._propose()
            new_cost, new_mean = self._cost(orders, rows)
            gain = cost - new_cost + weight * (mean - new_mean)
            taken = gain >= temperature * np.log(self.rng.random(len(gain)))
            self.orders[taken], self._rows[taken] = orders[taken], rows[taken]
            cost, mean = np.where(taken, new_cost, cost), np.where(taken, new_mean, mean)
            better = cost < best_cost
            if better.any():
                best[better], best_cost[better] = self.orders[better], cost[better]
                if best_cost.min() <= floor:
                    break
            if step % ROUND_STEPS == ROUND_STEPS - 1:
                ranks = np.argsort(best_cost, kind="stable")
                few = len(ranks) // 4
                self.orders[ranks[-few:]] = best[ranks[:few]]
                self._rows = self._row_sums(self.orders)
                cost, mean = self._cost(self.orders, self._rows)
        return best[np.argsort(best_cost, kind="stable")]

    # --- moves

    def _propose(self) -> tuple[Ints, Floats]:
        """One move for each chain, of one kind for all. Returns the new orders and their row sums."""
        stages = self.problem.stages
        draw = self.rng.random()
        if stages > 1 and draw < 0.1:
            return self._move_stages()
        if stages > 1 and draw < 0.3:
            return self._cross_pipelines()
        if self.problem.idle and draw < 0.5:
            return self._swap_idle()
        if draw < 0.7:
            return self._swap_blocks(1, 1)
        height = self._length(max(stages // 2, 1))
        return self._swap_blocks(height, self._length(max(self.problem.replicas // height, 1)))

    def _length(self, longest: int) -> int:
        """1 … longest, evenly in the logarithm."""
        return min(longest, int((longest + 1) ** self.rng.random()))

    def _swap_blocks(self, height: int, width: int) -> tuple[Ints, Floats]:
        """Swap a block of `height` stages × `width` pipelines with another of that shape in other stages."""
        s, d, r = self.problem.stages, self.problem.replicas, len(self.orders)
        top = self.rng.integers(0, s - height + 1, size=(2, r, 1))
        left = self.rng.integers(0, d - width + 1, size=(2, r, 1))
        overlap = abs(top[0] - top[1]) < height
        top[1], left[1] = np.where(overlap, top[0], top[1]), np.where(overlap, left[0], left[1])  # nothing moves
        inside = (np.arange(height)[:, None] * d + np.arange(width)).ravel()
        one, two = top * d + left + inside
        orders = self._swapped(one, two)
        sums = self._rows.copy()
        for cells in (one, two):
            self._update(sums, orders, cells.reshape(r, height, width))
        return orders, sums

    def _swap_idle(self) -> tuple[Ints, Floats]:
        """Swap some stages of one pipeline with as many idle devices."""
        s, d, placed, r = self.problem.stages, self.problem.replicas, self.problem.placed, len(self.orders)
        length = self._length(min(s, self.problem.idle))
        rows = self.rng.integers(0, s - length + 1, size=(r, 1)) + np.arange(length)
        one = rows * d + self.rng.integers(0, d, size=(r, 1))
        two = placed + self.rng.integers(0, self.problem.idle - length + 1, size=(r, 1)) + np.arange(length)
        orders, sums = self._swapped(one, two), self._rows.copy()
        self._update(sums, orders, one[:, :, None])
        return orders, sums

    def _swapped(self, one: Ints, two: Ints) -> Ints:
        orders, chain = self.orders.copy(), self._chain[:, None]
        orders[chain, one], orders[chain, two] = self.orders[chain, two], self.orders[chain, one]
        return orders

    def _cross_pipelines(self) -> tuple[Ints, Floats]:
        """From a random stage on, two pipelines take each other's place: stages keep their devices."""
        s, d, r = self.problem.stages, self.problem.replicas, len(self.orders)
        start = self.rng.integers(1, s, size=(r, 1))
        columns = self.rng.integers(0, d, size=(2, r, 1))
        rows = np.arange(s)[None]
        one, two = rows * d + columns
        source = np.where(rows >= start, two, one)
        target = np.where(rows >= start, one, two)
        orders, sums, chain = self.orders.copy(), self._rows.copy(), self._chain[:, None]
        orders[chain, one], orders[chain, two] = self.orders[chain, source], self.orders[chain, target]
        sums[chain, one], sums[chain, two] = self._rows[chain, source], self._rows[chain, target]
        return orders, sums

    def _move_stages(self) -> tuple[Ints, Floats]:
        """A block of stages is taken out and put back elsewhere, or turned around where it is."""
        s, d = self.problem.stages, self.problem.replicas
        cuts = np.sort(self.rng.integers(0, s + 1, size=3))
        a, b, c = (int(x) for x in cuts)
        order = np.arange(s)
        if self.rng.random() < 0.5:
            order[a:c] = order[a:c][::-1]
        else:
            order = np.concatenate([order[:a], order[b:c], order[a:b], order[c:]])
        cells = (order[:, None] * d + np.arange(d)).ravel()
        orders = self.orders.copy()
        orders[:, : len(cells)] = self.orders[:, cells]
        return orders, self._rows[:, cells]

    # --- costs

    def _tables(self, orders: Ints) -> Ints:
        return orders[:, : self.problem.placed].reshape(len(orders), self.problem.stages, self.problem.replicas)

    def _row_sums(self, orders: Ints) -> Floats:
        """(chains, S·D): each placed device's gradient time to the others of its stage."""
        tables = self._tables(orders)
        sums = np.empty(tables.shape)
        for stage in range(self.problem.stages):  # one at a time: all links of a table at once would be too large
            groups = tables[:, stage]
            sums[:, stage] = self.problem.gradient_s[groups[..., :, None], groups[..., None, :]].sum(axis=-1)
        return sums.reshape(len(orders), -1)

    def _update(self, sums: Floats, orders: Ints, cells: Ints) -> None:
        """Row sums, in place, after new devices came into `cells`, (chains, stages, few), of different stages."""
        links, d = self.problem.gradient_s, self.problem.replicas
        chain = self._chain[:, None, None]
        stage = cells[..., :1] // d * d + np.arange(d)
        group, new, old = orders[chain, stage], orders[chain, cells], self.orders[chain, cells]
        change = links[group[..., None], new[..., None, :]] - links[group[..., None], old[..., None, :]]
        sums[chain, stage] += change.sum(axis=-1)
        sums[chain, cells] = links[new[..., None], group[..., None, :]].sum(axis=-1)

    def _cost(self, orders: Ints, sums: Floats) -> tuple[Floats, Floats]:
        """The cost of each chain, and the same with means in place of maxima."""
        tables = self._tables(orders)
        links = link_times(self.problem, tables)
        compute = self.problem.compute_s[orders[:, : self.problem.placed]]
        cost = sums.max(axis=1) + 2 * links.max(axis=2).sum(axis=1) + compute.max(axis=1)
        mean = sums.mean(axis=1) + 2 * links.mean(axis=2).sum(axis=1) + compute.mean(axis=1)
        return cost, mean
