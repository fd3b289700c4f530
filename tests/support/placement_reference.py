"""DT-FM's cost of a partition (arXiv 2206.01288, section 3), straight from its definition: for a few devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations

from geotrain.plan.placement.cost import Problem


def stage_cost(problem: Problem, group: Sequence[int]) -> float:
    """The slowest device's gradient exchange with all others of its stage."""
    return max(sum(float(problem.gradient_s[i, j]) for j in group if j != i) for i in group)


def matching_cost(problem: Problem, left: Sequence[int], right: Sequence[int]) -> float:
    """Bottleneck perfect matching of two stages: the smallest t for which links of at most t match all devices."""
    times = problem.activation_s

    def matches_all(limit_s: float) -> bool:
        partner: dict[int, int] = {}

        def augment(i: int, seen: set[int]) -> bool:
            for j in right:
                if times[i, j] <= limit_s and j not in seen:
                    seen.add(j)
                    if j not in partner or augment(partner[j], seen):
                        partner[j] = i
                        return True
            return False

        return all(augment(i, set()) for i in left)

    return next(t for t in sorted({float(times[i, j]) for i in left for j in right}) if matches_all(t))


def partition_cost(problem: Problem, groups: Sequence[Sequence[int]]) -> float:
    """DT-FM's cost of a partition, straight from its definition: every order of the groups is tried (few groups!)."""
    edge = {
        (x, y): matching_cost(problem, groups[x], groups[y])
        for x in range(len(groups))
        for y in range(len(groups))
        if x != y
    }
    pipeline = min(sum(edge[pair] for pair in pairwise(order)) for order in permutations(range(len(groups))))
    data_parallel = max(stage_cost(problem, group) for group in groups)
    return data_parallel + 2 * pipeline + max(float(problem.compute_s[i]) for group in groups for i in group)


def partitions(devices: list[int], stages: int, replicas: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way to choose and group stages × replicas of the devices."""
    if stages == 0:
        yield []
        return
    for k in range(len(devices) - stages * replicas + 1):
        later = devices[k + 1 :]
        for others in combinations(later, replicas - 1):
            left = [i for i in later if i not in others]
            for rest in partitions(left, stages - 1, replicas):
                yield [(devices[k], *others), *rest]


def optimum(problem: Problem) -> float:
    """The least cost over every choice and arrangement of devices."""
    every = partitions(list(range(problem.devices)), problem.stages, problem.replicas)
    return min(partition_cost(problem, groups) for groups in every)
