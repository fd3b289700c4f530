"""Groups hosts into workers: like hosts of a region, and unlike ones where the model does not fit on like ones.

Like hosts. Those of one region, kind and size are interchangeable, so a set of workers is a list of host counts. The
fastest parallel layout is known for every count (`layouts`); dynamic programming over (workers, hosts) then gives the
best total for each number of workers. A host belongs to one worker, and hosts that no worker gains from stay idle.

More workers reach slightly more tokens a second, since they reduce gradients over fewer ranks, but they train on
staler weights. So of all numbers of workers the smallest is taken that comes within SLACK of the best, and no more
than the user wants. Which of them are worth their place beside the others `choice.py` says.

Unlike hosts. A group of like hosts that is too small for the model by itself may be joined with others like it, of
the same region or not, and with the nearest one that is large enough. Groups that are large enough are joined, too,
where links are fast and the one worker is faster than any of its parts: one worker of unlike stages trains on fresher
weights than several. Not all sets of groups are tried (`joinable`), but of each number of workers the best division
of the groups among the sets that are is found exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import log2

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage

from geotrain.config import ConfigError
from geotrain.plan.inventory import MOST_WORKERS, Host, PlanTask
from geotrain.plan.layouts import KEPT, ParallelLayout, Refusals
from geotrain.plan.spanning import found_layouts, spanning_layouts

SLACK = 0.05  # of the tokens: about what twice as many workers cost in loss (`geotrain.plan.model.loss`)
MOST_COMBINED = 3  # small groups of which every combination is tried
NO_LINK_S = 1e12


@dataclass(frozen=True)
class Worker:
    """A worker with its parallel layout, and the layouts that came next on the same hosts."""

    layout: ParallelLayout
    others: tuple[ParallelLayout, ...]

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(host.region for host in self.layout.hosts))

    @property
    def unlike(self) -> bool:
        """Whether its replicas may be unlike in speed."""
        return self.layout.replicas > 1 and len({(host.region, host.kind) for host in self.layout.hosts}) > 1

    @property
    def available(self) -> float:
        """Share of the time that no spot host of it has been taken back and not replaced."""
        hosts = [host.offer for host in self.layout.hosts if host.spot]
        return 1 / (1 + sum(offer.preemptions_per_hour * offer.replaced_after_s / 3600 for offer in hosts))

    def on(self, hosts: tuple[Host, ...]) -> Worker:
        """The same worker on other hosts, which are like its own."""
        others = (other for other in self.others if other.hosts == self.layout.hosts)
        return Worker(replace(self.layout, hosts=hosts), tuple(replace(other, hosts=hosts) for other in others))


Workers = tuple[Worker, ...]
Group = list[Workers]  # alternatives on the same hosts, the fastest first
Groups = list[Group]
Known = dict[object, list[ParallelLayout]]
Find = Callable[[PlanTask, Sequence[Host], Refusals, int], list[ParallelLayout]]
Alike = tuple[str, str, int, bool]  # region, kind, accelerators of a host, whether on the spot market
Division = tuple[frozenset[Alike], ...]


def speed(workers: Iterable[Worker]) -> float:
    """Add up the steps a second of all workers."""
    return sum(worker.available / worker.layout.step.step_s for worker in workers)


def form_workers(
    task: PlanTask,
    refused: Refusals,
    partial: bool = False,
    most_workers: int = MOST_WORKERS,
    find: Find = found_layouts,
) -> list[Groups]:
    """Form the workers of all hosts: divisions of the hosts into groups (`divisions`), of each group the
    alternatives, the fastest first. Returns none when the model fits nowhere. partial: workers on fewer hosts of a
    group are alternatives, too. most_workers: as in `Wish`. find: layouts of one worker, on like hosts or not."""
    known: Known = {}
    every = sum(map(len, task.hosts.values()))
    hosts: dict[Alike, list[Host]] = {}
    for host in (host for every in task.hosts.values() for host in every):
        hosts.setdefault((host.region, host.kind, host.slots, host.spot), []).append(host)
    alone: dict[Alike, Group] = {}
    for alike, of in hosts.items():
        most = max(1, most_workers * len(of) // every)
        alone[alike] = like_workers(task, of, refused, known, partial, most, find)
    small = [alike for alike, found in alone.items() if not found]
    large = [alike for alike in alone if alike not in small]
    sets: dict[frozenset[Alike], Group] = {frozenset((alike,)): found for alike, found in alone.items()}

    def joint(find: Callable[..., list[ParallelLayout]], joined: frozenset[Alike], *most: int) -> Group:
        try:
            found = find(task, [host for alike in sorted(joined) for host in hosts[alike]], refused, *most)
        except ConfigError as error:  # a link between the regions has no figure
            found, refused.missing = [], refused.missing or str(error)
        return [(Worker(found[0], tuple(found[1:KEPT])),)] if found else []

    for chosen in joinable(task, small) if small else ():
        nearest = sorted(large, key=lambda alike: distance_s(task, alike, chosen))[:1]
        for joined in {chosen, chosen.union(nearest)}:
            if not sets.get(joined):
                sets[joined] = joint(spanning_layouts, joined)
    for joined in (joined for joined in joinable(task, list(alone)) if len(joined) > 1):
        parts = [sets[each] for each in ({joined} | {frozenset((alike,)) for alike in joined}) if sets.get(each)]
        fastest = max((speed(found[0]) for found in parts), default=0.0)
        apart_s = max(distance_s(task, alike, joined - {alike}) for alike in joined)
        mixed = joint(find, joined, KEPT) if fastest * apart_s < 1 else []
        if mixed and speed(mixed[0]) > fastest:
            sets[joined] = mixed
    divided = ([sets[chosen] for chosen in division if sets[chosen]] for division in divisions(sets, list(alone)))
    return [groups for groups in divided if groups]


def joinable(task: PlanTask, small: Sequence[Alike]) -> list[frozenset[Alike]]:
    """List the sets of small groups that may be joined: all of them where they are few; else those that an
    average-linkage tree over the links between them joins, near ones first."""
    if len(small) <= MOST_COMBINED:
        return [frozenset(c) for count in range(1, len(small) + 1) for c in combinations(small, count)]
    apart = [distance_s(task, a, frozenset((b,))) for a, b in combinations(small, 2)]
    clusters = [frozenset((alike,)) for alike in small]
    for one, other, *_ in linkage(np.array(apart), "average"):
        clusters.append(clusters[int(one)] | clusters[int(other)])
    return clusters


def distance_s(task: PlanTask, alike: Alike, others: frozenset[Alike]) -> float:
    """Seconds to send a step's activations to the nearest of the other groups; NO_LINK_S where no link is known."""
    size, region = 2 * task.tokens_per_step * task.architecture.hidden_size, alike[0]
    if any(other[0] == region for other in others):
        return 0.0
    known = (link for other in others if (link := task.network.link(region, other[0])) is not None)
    return min((link.rtt_ms / 2000 + 8e-9 * size / link.gbps for link in known), default=NO_LINK_S)


def divisions(sets: Mapping[frozenset[Alike], Group], groups: Sequence[Alike]) -> list[Division]:
    """Find, for each number of workers, the division of the groups into sets with the most steps a second, the
    fastest first. Every group is a set of its own too."""
    best: dict[frozenset[Alike], dict[int, Division]] = {frozenset(): {0: ()}}  # by the number of workers

    def total(division: Division) -> float:
        return sum(speed(sets[chosen][0]) for chosen in division if sets[chosen])

    def of(left: frozenset[Alike]) -> dict[int, Division]:
        if left not in best:
            first, found = min(left, key=groups.index), dict[int, Division]()
            for joined in (joined for joined in sets if first in joined and joined <= left):
                mine = len(sets[joined][0]) if sets[joined] else 0
                for count, others in of(left - joined).items():
                    found[mine + count] = max(found.get(mine + count, ()), (joined, *others), key=total)
            best[left] = found
        return best[left]

    return sorted(of(frozenset(groups)).values(), key=total, reverse=True)


def like_workers(
    task: PlanTask, hosts: Sequence[Host], refused: Refusals, known: Known, partial: bool, most: int, find: Find
) -> Group:
    """Find the best workers on hosts of one kind, size and region; where `partial`, also on each smaller number of
    them. known: gets the layouts that were found, for regions whose hosts are linked as fast. most: workers."""
    n, inside = len(hosts), task.network.link(hosts[0].region, hosts[0].region)
    linked = None if inside is None else (inside.gbps, inside.rtt_ms, inside.usd_per_gb)

    def best(count: int, kept: int) -> list[ParallelLayout]:
        key = (hosts[0].kind, hosts[0].slots, linked, count, kept)
        if key not in known:
            known[key] = find(task, hosts[:count], refused, kept)
        return known[key]

    rate = {count: 1 / found[0].step.step_s for count in range(1, n + 1) if (found := best(count, 1))}
    group: Group = []
    for number in range(n, 0, -1) if partial else (n,):
        if number < min(rate, default=n + 1):
            break
        workers, used = [], 0
        for count in sorted(
            fewest_workers({c: r for c, r in rate.items() if c <= number}, number, most), reverse=True
        ):
            mine = tuple(hosts[used : used + count])
            used += count
            first, *others = best(count, KEPT)
            workers.append(Worker(first, tuple(others)).on(mine))
        if tuple(workers) not in group:
            group.append(tuple(workers))
    # Where one host that is taken back stops a whole worker, small workers lose less.
    for count in rate if hosts[0].offer.preemptions_per_hour else ():
        first, *others = best(count, KEPT)
        each = [tuple(hosts[begin : begin + count]) for begin in range(0, n - count + 1, count)]
        if len(each) <= most:
            group.append(tuple(Worker(first, tuple(others)).on(mine) for mine in each))
    return sorted(group, key=lambda workers: -speed(workers) * (1 - SLACK) ** log2(len(workers)))


def fewest_workers(rate: Mapping[int, float], hosts: int, most: int = MOST_WORKERS) -> tuple[int, ...]:
    """Find the host counts of the fewest workers that are within SLACK of the most steps a second.

    rate: steps a second of one worker by its number of hosts. most: workers. No division does more than every host as
    part of the best count: where that bound is reached to within SLACK, more workers need not be looked at.
    """
    bound = hosts * max(r / count for count, r in rate.items())
    counts, each = np.array(list(rate)), np.array(list(rate.values()))
    totals = [np.zeros(hosts + 1)]  # by hosts: of the best so many workers
    taken: list[NDArray[np.intp]] = []  # likewise, the last one of these
    for _ in range(min(most, hosts // min(rate))):
        left = np.arange(hosts + 1)[:, None] - counts
        grown = np.where(left >= 0, totals[-1][np.maximum(left, 0)] + each, -np.inf)
        taken.append(grown.argmax(1))
        totals.append(grown.max(1))
        if totals[-1][hosts] >= (1 - SLACK) * bound:
            break
    best = [total[hosts] for total in totals[1:]]
    number = next(k for k, total in enumerate(best, 1) if total >= (1 - SLACK) * max(best))
    found, left_over = list[int](), hosts
    for row in reversed(taken[:number]):
        found.append(int(counts[row[left_over]]))
        left_over -= found[-1]
    return tuple(found)
