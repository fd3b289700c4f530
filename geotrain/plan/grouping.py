"""Groups hosts into workers: within each region, and across regions where the model does not fit into one.

Within a region. Hosts of one kind and size are interchangeable, so a set of workers is a list of host counts. The
fastest parallel layout is known for every count (`layouts`); dynamic programming over (workers, hosts) then gives the
best total for each number of workers. A host belongs to one worker, and hosts that no worker gains from stay idle.

More workers reach slightly more tokens a second, since they reduce gradients over fewer ranks, but they train on
staler weights, and the cost model puts no price on that. So of all numbers of workers the smallest is taken that
comes within SLACK of the best.

Across regions. A region that is too small for the model by itself may be joined with others like it, and with the
nearest one that is large enough. Not all sets of regions are tried (`joinable`), but the best division of the regions
among the sets that are is found exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from scipy.cluster.hierarchy import linkage

from geotrain.config import ConfigError
from geotrain.plan.inventory import Host, PlanTask
from geotrain.plan.layouts import KEPT, ParallelLayout, Refusals, layouts
from geotrain.plan.spanning import spanning_layouts

SLACK = 0.05
MOST_COMBINED = 3  # small regions of which every combination is tried
NO_LINK_S = 1e12


@dataclass(frozen=True)
class Worker:
    """A worker with its parallel layout, and the layouts that came next on the same hosts."""

    layout: ParallelLayout
    others: tuple[ParallelLayout, ...]

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(host.region for host in self.layout.hosts))


Workers = tuple[Worker, ...]


def speed(workers: Iterable[Worker]) -> float:
    """Add up the steps a second of all workers."""
    return sum(1 / worker.layout.step.step_s for worker in workers)


def form_workers(task: PlanTask, refused: Refusals) -> Workers:
    """Form the workers of all regions; returns none when the model fits nowhere."""
    alone: dict[str, Workers] = {}
    for region, hosts in task.hosts.items():
        kinds: dict[tuple[str, int], list[Host]] = {}
        for host in hosts:
            kinds.setdefault((host.kind, host.slots), []).append(host)
        alone[region] = tuple(w for alike in kinds.values() for w in like_workers(task, alike, refused))
    small = [region for region, workers in alone.items() if not workers]
    if not small:
        return tuple(w for workers in alone.values() for w in workers)
    large = [region for region in alone if region not in small]
    sets: dict[frozenset[str], Workers] = {frozenset((region,)): workers for region, workers in alone.items()}
    for chosen in joinable(task, small):
        nearest = sorted(large, key=lambda region: distance_s(task, region, chosen))[:1]
        for joined in {chosen, chosen.union(nearest)}:
            if sets.get(joined):
                continue
            try:
                found = spanning_layouts(task, [h for r in sorted(joined) for h in task.hosts[r]], refused)
            except ConfigError as error:  # a link between the regions has no figure
                found, refused.missing = [], refused.missing or str(error)
            sets[joined] = (Worker(found[0], tuple(found[1:KEPT])),) if found else ()
    return best_division(sets, list(alone))


def joinable(task: PlanTask, small: Sequence[str]) -> list[frozenset[str]]:
    """List the sets of small regions that may be joined: all of them where they are few; else those that an
    average-linkage tree over the links between them joins, near ones first."""
    if len(small) <= MOST_COMBINED:
        return [frozenset(c) for count in range(1, len(small) + 1) for c in combinations(small, count)]
    apart = [distance_s(task, a, frozenset((b,))) for a, b in combinations(small, 2)]
    clusters = [frozenset((region,)) for region in small]
    for one, other, *_ in linkage(np.array(apart), "average"):
        clusters.append(clusters[int(one)] | clusters[int(other)])
    return clusters


def distance_s(task: PlanTask, region: str, others: frozenset[str]) -> float:
    """Seconds to send a step's activations to the nearest of the other regions; NO_LINK_S where no link is known."""
    size = 2 * task.tokens_per_step * task.architecture.hidden_size
    known = (link for other in others if (link := task.network.link(region, other)) is not None)
    return min((link.rtt_ms / 2000 + 8e-9 * size / link.gbps for link in known), default=NO_LINK_S)


def best_division(sets: dict[frozenset[str], Workers], regions: Sequence[str]) -> Workers:
    """Find the division of the regions into sets with the most steps a second. Every region is a set of its own
    too."""
    best: dict[frozenset[str], Workers] = {frozenset(): ()}

    def of(left: frozenset[str]) -> Workers:
        if left not in best:
            first = min(left, key=regions.index)
            fitting = [joined for joined in sets if first in joined and joined <= left]
            options = [(*sets[joined], *of(left - joined)) for joined in fitting]
            best[left] = max(options, key=speed)
        return best[left]

    return of(frozenset(regions))


def like_workers(task: PlanTask, hosts: Sequence[Host], refused: Refusals) -> Workers:
    """Find the best workers on hosts of one kind, size and region."""
    n = len(hosts)
    by_count = {count: found for count in range(1, n + 1) if (found := layouts(task, hosts[:count], refused))}
    if not by_count:
        return ()
    rate = {count: 1 / found[0].step.step_s for count, found in by_count.items()}
    counts = fewest_workers(rate, n)
    workers, used = [], 0
    for count in sorted(counts, reverse=True):
        mine = tuple(hosts[used : used + count])
        used += count
        moved = [replace(layout, hosts=mine) for layout in by_count[count]]  # hosts like those it was made for
        workers.append(Worker(moved[0], tuple(moved[1:])))
    return tuple(workers)


def fewest_workers(rate: Mapping[int, float], hosts: int) -> tuple[int, ...]:
    """Find the host counts of the fewest workers that are within SLACK of the most steps a second.

    rate: steps a second of one worker by its number of hosts. No division does more than every host as part of the
    best count: where that bound is reached to within SLACK, more workers need not be looked at.
    """
    bound = hosts * max(r / count for count, r in rate.items())
    rows: list[list[tuple[float, tuple[int, ...]]]] = [[(0.0, ())] * (hosts + 1)]
    for _ in range(hosts // min(rate)):
        before, row = rows[-1], []
        for h in range(hosts + 1):
            grown = [(before[h - c][0] + r, (*before[h - c][1], c)) for c, r in rate.items() if c <= h]
            row.append(max(grown, default=(0.0, ())))
        rows.append(row)
        if rows[-1][hosts][0] >= (1 - SLACK) * bound:
            break
    totals = [row[hosts] for row in rows[1:]]
    enough = (1 - SLACK) * max(total for total, _ in totals)
    return next(counts for total, counts in totals if total >= enough)
