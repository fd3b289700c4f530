"""How cheap any placement can be at best: proven lower bounds on the cost of `geotrain.plan.placement.cost`.

The complete search of `plan.placement.exact` over classes of devices raises `quick_bound`: if no placement lies
below a threshold, the threshold is a bound, and if one does, the cheapest of them is. The first threshold is a little
below the cost that was found; it falls where most of what is left of the work did not do, and rises where it did. So
the search ends with a proof that this placement is optimal, with the optimum over classes, or where the work allowed
is spent, with the last threshold that was proven. Where devices are too unlike to give few classes, the most alike
are joined."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from geotrain.plan.placement.classes import MAX_CLASSES, Classes, classes_of, like_classes
from geotrain.plan.placement.cost import Ints, Problem, compute_bound, link_bound
from geotrain.plan.placement.exact import ROUNDING, BandSearch, TooMuchWorkError, bands

FIRST = 0.955  # of the known cost is tried first; then all of it, or halves of what is left below
SHARE = 0.75  # of the work that is left, for each threshold
NEAR = 0.01  # thresholds that are less than that share of the known cost apart are not told apart
MAX_LIKE_VECTORS = 100_000
MAX_JOINED_VECTORS = 12_000  # the more, the less unlike devices are joined, but the sooner the work is spent
OBSERVERS = 128  # devices whose view decides which devices are the likest


def lower_bound(problem: Problem, known_s: float, max_work: int = 600_000_000) -> float:
    """A proven lower bound (s) on the cost of every placement, at most `known_s`, the cost of one that was found.

    Within 1e-9 of known_s when that placement is proven optimal. max_work: of all thresholds together, see
    `BandSearch`; the default is some ten seconds.
    """
    proven, compute = link_bound(problem), compute_bound(problem)
    target = (known_s - compute) * (1 - ROUNDING)
    if proven >= target:
        return min(proven + compute, known_s)
    classes = like_classes(problem, MAX_LIKE_VECTORS) or joined_classes(problem)
    high, left = target, max_work  # what took too much, or the target
    while left > 1:
        near = high - proven < NEAR * target or proven >= FIRST * target
        if near and high < target:
            break
        threshold = high if near else (proven + high) / 2 if high < target else FIRST * target
        allowed = int(SHARE * left)
        optimum, unused = _cheapest_below(classes, problem.stages, threshold, allowed)
        left -= allowed - max(unused, 0)
        if unused >= 0:
            proven = max(proven, optimum)
            if near or optimum < threshold:
                break
        elif near:
            break
        else:
            high = threshold
    return min(proven + compute, known_s)


def _cheapest_below(classes: Classes, stages: int, threshold: float, work: int) -> tuple[float, int]:
    """What the cheapest placement costs (s), or the threshold if that is less; and the work that is left, below 0
    where it did not do and the first figure says nothing."""
    cheapest = threshold
    for band in bands(classes, stages, threshold):
        search = BandSearch(classes, stages, cheapest, work, band)
        try:
            found = search.run()
        except TooMuchWorkError:
            return cheapest, -1
        cheapest, work = found.total_s * (1 - ROUNDING) if found else cheapest, search.work_left
    return cheapest, work


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
