"""Cost of a placement: the cost model of DT-FM (arXiv 2206.01288, section 3), exactly.

A pipeline of S stages is trained by D pipelines side by side, so S·D devices are placed as a table: row s is a
stage (its D devices hold the same layers and reduce their gradients with each other), column p is a pipeline (its
S devices hand activations from row to row). With delay d (s) and bandwidth b (Gbit/s) between two devices:

    gradient link     g = 2·(d + 8·gradient_gigabytes / (D·b))
    activation link   a = d + 8·activation_gigabytes / b
    data parallel     max over stages, max over the stage's devices, of the sum of g to the stage's other devices
    pipeline          sum over neighbouring stages of the largest a among the D pipelines
    total             data parallel + 2·pipeline + the slowest placed device's compute time (0 if not given)

DT-FM states it of a *partition* into groups: the edge between two groups is their bottleneck perfect matching, and
the pipeline is the cheapest open tour through all groups. `arrange` turns a partition into the table whose `total_s`
is the partition's cost, so a placement that is written out costs what was claimed (the tests compute DT-FM's
definition plainly and compare).

Everything goes both ways (gradients are scattered and gathered, activations return as gradients), so of unequal
directions g takes the sum and 2·a takes the sum; with equal directions this is the published formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EXACT_TOUR_STAGES = 12  # the subset table of the tour has 2^S · S entries


class PlacementError(ValueError):
    """The links or the shape asked for cannot be placed. Says which entry, its value and the rule."""


@dataclass(frozen=True)
class Problem:
    """A placement problem: S stages × D replicas onto N ≥ S·D devices; the rest stay idle.

    gradient_s: (N, N) float64, symmetric, zero diagonal: seconds between two devices of one stage.
    activation_s: (N, N) float64, symmetric, zero diagonal: seconds between neighbours in one pipeline.
    compute_s: (N,) float64: seconds a device computes for one stage in one step.
    """

    stages: int
    replicas: int
    gradient_s: Floats
    activation_s: Floats
    compute_s: Floats

    @property
    def devices(self) -> int:
        return len(self.compute_s)

    @property
    def placed(self) -> int:
        return self.stages * self.replicas

    @property
    def idle(self) -> int:
        return self.devices - self.placed


def problem_from_links(
    delay_s: ArrayLike,
    bandwidth_gbps: ArrayLike,
    *,
    stages: int,
    replicas: int,
    gradient_gigabytes: float,
    activation_gigabytes: float,
    compute_s: ArrayLike | None = None,
) -> Problem:
    """Read (N, N) matrices of one-way delay (s) and bandwidth (Gbit/s); row = sender. Diagonals are not read.

    gradient_gigabytes: one stage's gradients; activation_gigabytes: what one pipeline sends on in a step.
    Raises PlacementError naming the entry, its value and the rule.
    """
    for name, count in (("stages", stages), ("replicas", replicas)):
        if count < 1:
            raise PlacementError(f"{name} = {count}: must be at least 1")
    for name, amount in (("gradient_gigabytes", gradient_gigabytes), ("activation_gigabytes", activation_gigabytes)):
        if not (np.isfinite(amount) and amount >= 0):
            raise PlacementError(f"{name} = {amount}: must be finite and at least 0")
    delay, bandwidth = _square("delay_s", delay_s), _square("bandwidth_gbps", bandwidth_gbps)
    n = len(delay)
    if len(bandwidth) != n:
        raise PlacementError(f"delay_s is {n} × {n} but bandwidth_gbps is {len(bandwidth)} × {len(bandwidth)}")
    if n < stages * replicas:
        raise PlacementError(
            f"{stages} stages × {replicas} replicas need {stages * replicas} devices, the links describe {n}: "
            "lower replicas or stages, or add devices"
        )
    between = ~np.eye(n, dtype=bool)
    _check_entries("delay_s", delay, between & ~(np.isfinite(delay) & (delay >= 0)), "must be finite and at least 0")
    _check_entries("bandwidth_gbps", bandwidth, between & ~(bandwidth > 0), "must be a number above 0")
    compute = np.zeros(n) if compute_s is None else np.asarray(compute_s, dtype=np.float64)
    if compute.shape != (n,):
        raise PlacementError(f"compute_s has shape {compute.shape}, the links describe {n} devices")
    _check_entries("compute_s", compute, ~(np.isfinite(compute) & (compute >= 0)), "must be finite and at least 0")
    delay, bandwidth = np.where(between, delay, 0.0), np.where(between, bandwidth, np.inf)
    gradient = delay + 8 * gradient_gigabytes / (replicas * bandwidth)
    activation = delay + 8 * activation_gigabytes / bandwidth
    return Problem(stages, replicas, gradient + gradient.T, (activation + activation.T) / 2, compute)


def _square(name: str, values: ArrayLike) -> Floats:
    try:
        matrix = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PlacementError(f"{name}: not a matrix of numbers: {error}") from None
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise PlacementError(f"{name} has shape {matrix.shape}: must be square, one row and one column a device")
    return matrix


def _check_entries(name: str, values: Floats, bad: NDArray[np.bool_], rule: str) -> None:
    if bad.any():
        where = [int(i) for i in np.argwhere(bad)[0]]
        raise PlacementError(f"{name}{where} = {values[tuple(where)]}: {rule} ({int(bad.sum())} such entries)")


def off_diagonal(matrix: Floats) -> Floats:
    """Return the matrix with inf on its diagonal."""
    out = matrix.copy()
    np.fill_diagonal(out, np.inf)
    return out


def alike(problem: Problem) -> NDArray[np.bool_]:
    """Return, (N, N), whether two devices have equal links to all others, to nine digits: compared by a random
    projection."""
    weights, unlike = np.random.default_rng(0).random(problem.devices), np.zeros((problem.devices,) * 2, dtype=bool)
    for times in (problem.gradient_s, problem.activation_s):
        total = times @ weights
        # the two devices' link to each other stands in both sums, with another weight
        difference = total[:, None] - total + (weights[:, None] - weights) * times
        unlike |= np.abs(difference) > 1e-9 * times.max()
    return ~unlike


def stage_costs(problem: Problem, groups: Ints) -> Floats:
    """Compute each stage's data-parallel cost: (…, D) device ids → (…,)."""
    links = np.take(problem.gradient_s, groups[..., :, None] * problem.devices + groups[..., None, :])
    return np.asarray(links.sum(axis=-1).max(axis=-1))


def link_times(problem: Problem, tables: Ints) -> Floats:
    """Look up activation links, pipeline by pipeline: (…, S, D) device ids → (…, S−1, D)."""
    return np.take(problem.activation_s, tables[..., :-1, :] * problem.devices + tables[..., 1:, :])


def table_costs(problem: Problem, tables: Ints) -> Floats:
    """Compute each table's total cost as it stands, (…, S, D) device ids → (…,): rows in order, columns as
    pipelines."""
    data_parallel = stage_costs(problem, tables).max(axis=-1)
    pipeline = link_times(problem, tables).max(axis=-1).sum(axis=-1)
    compute = problem.compute_s[tables].max(axis=(-1, -2))
    return np.asarray(data_parallel + 2 * pipeline + compute)


def match_stages(times: Floats) -> Ints:
    """Bottleneck perfect matching of a (D, D) matrix: column for each row. Bisects over the distinct times."""
    levels = np.unique(times)
    low, high = 0, len(levels) - 1
    best = None
    while low < high or best is None:
        middle = (low + high) // 2
        partner = maximum_bipartite_matching(csr_array(times <= levels[middle]), perm_type="column")
        if (partner >= 0).all():
            high, best = middle, partner
        else:
            low = middle + 1
    return best.astype(np.int64)


def open_tour(edges: Floats) -> list[int]:
    """Order of the cheapest open path through all S nodes of a symmetric (S, S) matrix (Held and Karp's table).

    Time grows as 2^S: for S up to EXACT_TOUR_STAGES.
    """
    count = len(edges)
    best = np.full((1 << count, count), np.inf)  # best[visited, last]
    best[1 << np.arange(count), np.arange(count)] = 0.0
    masks = np.arange(1 << count)
    sizes = np.array([int(m).bit_count() for m in masks])
    before = np.zeros((1 << count, count), dtype=np.int64)
    for size in range(2, count + 1):
        for last in range(count):
            visited = masks[(sizes == size) & (masks >> last & 1 == 1)]
            through = best[visited ^ (1 << last)] + edges[:, last]
            before[visited, last] = through.argmin(axis=1)
            best[visited, last] = through.min(axis=1)
    mask, last = (1 << count) - 1, int(best[-1].argmin())
    order = [last]
    while len(order) < count:
        mask, last = mask ^ (1 << last), int(before[mask, last])
        order.append(last)
    return order


def arrange(problem: Problem, groups: Ints) -> Ints:
    """Arrange an (S, D) partition as a table with its stages in tour order and its pipelines as columns.

    Up to EXACT_TOUR_STAGES stages the table's total is the partition's cost; beyond, the order of rows is kept.
    """
    count = len(groups)
    if 1 < count <= EXACT_TOUR_STAGES:
        edges = np.zeros((count, count))
        for x in range(count):
            for y in range(x):
                times = problem.activation_s[np.ix_(groups[x], groups[y])]
                edges[x, y] = edges[y, x] = times[np.arange(len(times)), match_stages(times)].max()
        groups = groups[open_tour(edges)]
    rows = [groups[0]]
    for row in groups[1:]:
        rows.append(row[match_stages(problem.activation_s[np.ix_(rows[-1], row)])])
    return np.array(rows)


@dataclass(frozen=True)
class Placement:
    """A table of device ids and its cost. stages[s][p]: the device of stage s, in pipeline order, in pipeline p."""

    stages: tuple[tuple[int, ...], ...]
    data_parallel_s: float
    pipeline_s: float
    compute_s: float

    @property
    def total_s(self) -> float:
        return self.data_parallel_s + 2 * self.pipeline_s + self.compute_s


def placement(problem: Problem, table: Ints) -> Placement:
    """Evaluate one (S, D) table. Raises PlacementError unless it places S·D different known devices."""
    if table.shape != (problem.stages, problem.replicas):
        raise PlacementError(f"table has shape {table.shape}, wanted ({problem.stages}, {problem.replicas})")
    if len(np.unique(table)) != table.size or table.min() < 0 or table.max() >= problem.devices:
        raise PlacementError(f"a table holds {table.size} different devices out of 0…{problem.devices - 1}")
    return Placement(
        stages=tuple(tuple(int(i) for i in row) for row in table),
        data_parallel_s=float(stage_costs(problem, table).max()),
        pipeline_s=float(link_times(problem, table).max(axis=-1).sum()),
        compute_s=float(problem.compute_s[table].max()),
    )


# --------------------------------------------------------------------- what every placement costs at least


def quick_bound(problem: Problem) -> float:
    """Lower bound on the cost (s) from each device's cheapest links alone.

    A stage's device pays at least its D−1 cheapest gradient links, and with n devices left idle at least the n+1-th
    dearest such sum is paid. If more than e·D + n devices have no activation link below t, then more than e stages
    hold one of them, so at least e + 1 (at most S−1) edges of the path cost t or more.
    """
    return _quick_gradients(problem) + _quick_activations(problem) + compute_bound(problem)


def quick_bound_of_hidden(problem: Problem, shared: bool) -> float:
    """Lower bound on the cost (s) where gradients travel while devices compute, as with ACCO. shared: replicas take
    of a step's work as they get to it (`acco.balance`), at best with the S·D fastest devices' rates together, over
    the cheapest links."""
    if not shared:
        return max(_quick_gradients(problem), _quick_activations(problem) + compute_bound(problem))
    computed = problem.placed / float((1 / np.sort(problem.compute_s)[: problem.placed]).sum())
    edges = 2 * (problem.stages - 1)
    passed_on = edges * float(off_diagonal(problem.activation_s).min()) if edges else 0.0
    return max(_quick_gradients(problem), passed_on + computed)


def compute_bound(problem: Problem) -> float:
    """Lower bound on the slowest placed device's compute time: at best that of the S·D-th fastest."""
    return float(np.sort(problem.compute_s)[problem.placed - 1])


def _quick_gradients(problem: Problem) -> float:
    sums = np.sort(off_diagonal(problem.gradient_s), axis=1)[:, : problem.replicas - 1].sum(axis=1)
    return float(np.sort(sums)[problem.placed - 1])


def _quick_activations(problem: Problem) -> float:
    if problem.stages == 1:
        return 0.0
    dearest_first = np.sort(off_diagonal(problem.activation_s).min(axis=1))[::-1]
    return 2 * float(dearest_first[problem.idle :: problem.replicas][: problem.stages - 1].sum())
