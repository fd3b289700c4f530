"""How cheap any placement can be at best: proven lower bounds on the cost of `geotrain.plan.placement.cost`.

The complete search of `plan.placement.exact` over classes of devices raises `quick_bound`: if no placement lies
below a threshold, the threshold is a bound, and if one does, the cheapest of them is. The first threshold is the cost
of the placement that was found, so the search ends either with a proof that this placement is optimal, or with the
optimum over classes. Where that takes too much work, lower thresholds are tried. Where devices are too unlike to give
few classes, the most alike are joined.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from geotrain.plan.placement.classes import MAX_CLASSES, Classes, classes_of, like_classes
from geotrain.plan.placement.cost import Ints, Problem, compute_bound, link_bound
from geotrain.plan.placement.exact import TooMuchWorkError, cheapest_below
from geotrain.plan.placement.search import ROUNDING

RUNGS = (1.0, 0.85, 0.65, 0.4, 0.2)  # thresholds tried, between the quick bound and the known cost
MAX_JOINED_VECTORS = 2_000  # where classes are joined anyway, few serve nearly as well
OBSERVERS = 128  # devices whose view decides which devices are the likest


def lower_bound(problem: Problem, known_s: float, max_work: int = 30_000_000) -> float:
    """A proven lower bound (s) on the cost of every placement, at most `known_s`, the cost of one that was found.

    Equal to known_s · (1 − 1e-9) when that placement is proven optimal. max_work: see `cheapest_below`; the default
    is some ten seconds a threshold.
    """
    proven, compute = link_bound(problem), compute_bound(problem)
    target = (known_s - compute) * (1 - ROUNDING)
    if proven >= target:
        return min(proven + compute, known_s)
    classes = like_classes(problem) or joined_classes(problem)
    for rung in RUNGS:
        threshold = proven + rung * (target - proven)
        try:
            optimum = cheapest_below(classes, problem.stages, threshold, max_work)
        except TooMuchWorkError:
            continue
        return compute + max(proven, optimum.total_s if optimum else threshold)
    return proven + compute


def joined_classes(problem: Problem) -> Classes:
    """As many classes as the limits allow, each of the likest devices: links are at most the devices' own."""
    for label in _groupings(problem):
        classes = classes_of(problem, label, MAX_JOINED_VECTORS)
        if classes is not None:
            return classes
    raise AssertionError("one class of all devices has one stage vector")


def _groupings(problem: Problem) -> Iterator[Ints]:
    """(N,) labels of ever fewer classes: complete linkage by how differently two devices see others."""
    n = problem.devices
    observers = np.random.default_rng(0).permutation(n)[:OBSERVERS]
    apart = np.zeros((n, n))
    for times in (problem.activation_s, problem.gradient_s):
        for k in observers:
            unlike = np.abs(times[:, k, None] - times[None, :, k]) / max(float(times.max()), 1e-30)
            unlike[k] = unlike[:, k] = 0.0
            np.maximum(apart, unlike, out=apart)
    tree = linkage(squareform(apart, checks=False), "complete") if n > 1 else np.zeros((0, 4))
    for count in range(min(n, MAX_CLASSES), 0, -1):
        yield fcluster(tree, count, "maxclust").astype(np.int64) - 1 if n > 1 else np.zeros(1, dtype=np.int64)
