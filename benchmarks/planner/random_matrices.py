"""The search on random matrices of ten kinds, against plain annealing of ten times its time.

A kind is a way to draw links (`KINDS` says how), ten matrices each, in the five shapes of SHAPES by turns. The rival
(`plain_annealing.py`) exchanges two devices at a time in many chains, in numpy as the search is, for ten times the
processor time that the search took on the same matrix, measured in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from statistics import median
from typing import Any

import numpy as np
from numpy.random import Generator

from benchmarks.planner.plain_annealing import anneal_for
from geotrain.plan.placement.cost import Floats, Ints, Problem, problem_from_links
from geotrain.plan.placement.search import search

SHAPES = ((4, 6), (8, 4), (6, 6), (6, 8), (8, 8))  # stages, replicas
ALL = 10  # matrices of each kind
RIVAL_TIMES = 10.0
GIGABYTES = {"gradient_gigabytes": 0.65, "activation_gigabytes": 0.47}  # of DT-FM's task


def _divided(rng: Generator, devices: int, regions: int) -> Ints:
    """(devices,) the region of each: unequal ones, none empty."""
    more = rng.choice(regions, size=devices - regions, p=rng.dirichlet(np.full(regions, 3.0)))
    return np.sort(np.concatenate([np.arange(regions), more]))


def _symmetric(values: Floats) -> Floats:
    return np.triu(values) + np.triu(values, 1).T


def _unlike(rng: Generator, regions: int) -> tuple[Floats, Floats]:
    """Delay (s) and rate (Gbit/s) between regions that have nothing in common, and inside each."""
    delay = _symmetric(rng.uniform(0.005, 0.15, (regions, regions)))
    gbps = _symmetric(np.exp(rng.uniform(np.log(0.3), np.log(2.0), (regions, regions))))
    np.fill_diagonal(delay, 2e-4)
    np.fill_diagonal(gbps, rng.choice([2.0, 5.0, 10.0], regions))
    return delay, gbps


def on_a_globe(rng: Generator, regions: int) -> tuple[Floats, Floats]:
    """Delay (s) and rate (Gbit/s) between and inside regions strewn over a globe; links get slower with distance."""
    place = rng.standard_normal((regions, 3))
    place /= np.linalg.norm(place, axis=1, keepdims=True)
    delay = 0.002 + 0.09 * np.arccos(np.clip(place @ place.T, -1, 1))
    gbps = np.clip(0.25 / (delay + 0.01), 0.3, 5)
    np.fill_diagonal(delay, 2e-4)
    np.fill_diagonal(gbps, 10.0)
    return delay, gbps


def regions(
    count: int,
    between: Callable[[Generator, int], tuple[Floats, Floats]] = _unlike,
    spare: float = 0.0,
    speeds: tuple[float, ...] = (),
    hosts_of: int = 0,
    noise: float = 0.0,
) -> Callable[[Generator, int, int], Problem]:
    """spare: a share of devices that stay idle; speeds: compute seconds of a region, one of these; hosts_of: devices
    of a host, inside which links are fast; noise: of each link's own rate (standard deviation of its logarithm)."""

    def draw(rng: Generator, stages: int, replicas: int) -> Problem:
        devices = stages * replicas + round(spare * stages * replicas)
        region = _divided(rng, devices, count)
        delay, gbps = (values[np.ix_(region, region)] for values in between(rng, count))
        if hosts_of:
            within = np.arange(devices) - np.searchsorted(region, region)
            host = region * devices + within // hosts_of
            same = host[:, None] == host
            delay, gbps = np.where(same, 1e-5, delay), np.where(same, 100.0, gbps)
        if noise:
            gbps = gbps * np.exp(noise * _symmetric(rng.standard_normal(gbps.shape)))
        compute = rng.choice(speeds, count)[region] if speeds else None
        return problem_from_links(delay, gbps, stages=stages, replicas=replicas, compute_s=compute, **GIGABYTES)

    return draw


def without_structure(rng: Generator, stages: int, replicas: int) -> Problem:
    devices = stages * replicas
    delay = _symmetric(rng.uniform(0.0, 0.2, (devices, devices)))
    gbps = np.exp(_symmetric(rng.standard_normal((devices, devices))))
    return problem_from_links(delay, gbps, stages=stages, replicas=replicas, **GIGABYTES)


KINDS: dict[str, Callable[[Generator, int, int], Problem]] = {  # (random numbers, stages, replicas) → problem
    **{f"regions_{n}": regions(n) for n in (6, 8, 10, 12)},
    "globe": regions(12, on_a_globe),
    "idle": regions(8, spare=0.25),
    "compute": regions(8, speeds=(1.0, 1.5, 3.0)),
    "hosts": regions(6, hosts_of=4),
    "noise": regions(8, noise=0.2),
    "none": without_structure,
}


def matrices(each: int = ALL) -> Iterator[tuple[str, int]]:
    """(kind, number) of so many of each kind. Kinds by turns, so that two processes end at about the same time; each
    begins with another number, so that few are of several shapes."""
    yield from ((kind, (turn + first) % ALL) for turn in range(each) for first, kind in enumerate(KINDS))


def problem_of(kind: str, number: int) -> Problem:
    rng = np.random.default_rng([number, *kind.encode()])
    return KINDS[kind](rng, *SHAPES[number % len(SHAPES)])


def measure_matrix(matrix: tuple[str, int], times: float) -> dict[str, float]:
    """One of them: costs of the search and of the rival, and seconds of processor time. times: the rival's time, over
    the search's."""
    problem = problem_of(*matrix)
    began = time.process_time()
    cost = search(problem, 0).total_s
    took = time.process_time() - began
    rival, rival_took = anneal_for(problem, times * took, cost, seed=matrix[1])
    return {
        "cost": cost,
        "over_annealing": round(cost / rival, 9),  # costs by differences differ in their last bits
        "cpu_seconds": took,
        "annealing_cpu_seconds": rival_took,
    }


def measure(each: int, quick: bool = False, processes: int = 2) -> dict[str, Any]:
    """The worst and the median of all, and the same by kind. each: matrices of a kind."""
    chosen = list(matrices(each))
    with ProcessPoolExecutor(processes) as pool:
        of_each = pool.map(measure_matrix, chosen, repeat(1.0 if quick else RIVAL_TIMES))
        found = dict(zip(chosen, of_each, strict=True))
    by_kind = {kind: [f for (k, _), f in found.items() if k == kind] for kind in KINDS}
    detail = {
        kind: {
            "worst_over_annealing": max(f["over_annealing"] for f in group),
            "median_over_annealing": median(f["over_annealing"] for f in group),
            "cpu_seconds": max(f["cpu_seconds"] for f in group),
        }
        for kind, group in by_kind.items()
    }
    every = list(found.values())
    return {
        "matrices": len(every),
        "worst_over_annealing": max(f["over_annealing"] for f in every),
        "median_over_annealing": median(f["over_annealing"] for f in every),
        "annealing_over_search_time": median(f["annealing_cpu_seconds"] / f["cpu_seconds"] for f in every),
        "kinds": detail,
    }
