"""Devices that have equal links to all others form a class, and a stage is then a vector of counts by class.

This makes large clusters small: the devices of one region are mostly interchangeable. The cost of a stage follows
exactly from its counts. The bottleneck matching of two stages becomes a transport problem between their counts
(`geotrain.kernels.transport`). Where a class holds unlike devices, a link between two classes is the cheapest one
between their members, and costs computed on them are lower bounds of the true ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from geotrain.kernels import transport
from geotrain.plan.placement.cost import Floats, Ints, Problem, off_diagonal

MAX_CLASSES = 12  # without the compiled kernels, 2^classes sets are looked at
MAX_VECTORS = 12_000


@dataclass(frozen=True)
class Classes:
    """label: (N,) class of each device; sizes: (K,); gradient_s, activation_s: (K, K) links between classes, on the
    diagonal between two devices of one (inf in a class of one).

    vectors: (V, K) every way to draw a stage of D devices.
    """

    label: Ints
    sizes: Ints
    gradient_s: Floats
    activation_s: Floats
    vectors: Ints


def like_classes(problem: Problem, limit: int = MAX_VECTORS) -> Classes | None:
    """Classes of devices with exactly equal links to all others; None where there are more than MAX_CLASSES, or
    where a stage could be drawn in more than `limit` ways."""
    label = np.full(problem.devices, -1)
    for number in range(MAX_CLASSES):
        first = int(label.argmin())
        alike = label < 0
        for times in (problem.gradient_s, problem.activation_s):
            unlike = times != times[first]
            unlike[:, first] = False
            np.fill_diagonal(unlike, False)  # a device has no link to itself
            alike &= ~unlike.any(axis=1)
        label[alike] = number
        if label.min() >= 0:
            return classes_of(problem, label, limit)
    return None


def classes_of(problem: Problem, label: Ints, limit: int) -> Classes | None:
    """The classes that these labels say; None where a stage could be drawn in more than `limit` ways."""
    sizes = np.bincount(label)
    vectors = stage_vectors(sizes, problem.replicas, limit)
    if vectors is None:
        return None
    links, members = [], [label == k for k in range(len(sizes))]
    for times in (problem.gradient_s, problem.activation_s):  # the cheapest link between each two classes
        by_row = np.array([off_diagonal(times)[mine].min(axis=0) for mine in members])
        links.append(np.array([by_row[:, mine].min(axis=1) for mine in members]).T)
    return Classes(label, sizes, links[0], links[1], vectors)


def stage_vectors(sizes: Ints, total: int, limit: int) -> Ints | None:
    """(V, K) all count vectors with 0 ≤ v ≤ sizes and sum `total`; None if there are more than `limit`."""
    partial = np.zeros((1, 0), dtype=np.int64)
    for k, size in enumerate(sizes):
        rest = int(sizes[k + 1 :].sum())
        counts = np.arange(min(int(size), total) + 1)
        grown = np.concatenate([np.repeat(partial, len(counts), 0), np.tile(counts, len(partial))[:, None]], axis=1)
        used = grown.sum(axis=1)
        partial = grown[(used <= total) & (used + rest >= total)]
        if len(partial) > limit:
            return None
    return partial


def vector_costs(classes: Classes) -> Floats:
    """(V,) data-parallel cost of each stage vector."""
    links = np.where(np.isfinite(classes.gradient_s), classes.gradient_s, 0.0)  # a class of one has no partner
    sums = classes.vectors @ links - np.diag(links)
    return np.asarray(np.where(classes.vectors > 0, sums, -np.inf).max(axis=1))


def bottlenecks(vectors: Ints, sizes: Ints, activation_s: Floats, dearest_s: Floats) -> Floats:
    """(V, V) bottleneck transport times between stage vectors, one of which follows the other: inf where both
    together need more devices of a class than there are.

    dearest_s: (V,); the entry (v, w) is inf where it is more than dearest_s of v or of w.
    """
    times = np.unique(activation_s[np.isfinite(activation_s)])
    rank = np.searchsorted(times, activation_s)  # of inf: all of them
    most = np.searchsorted(times, dearest_s, side="right") - 1
    narrow = [np.ascontiguousarray(each, dtype=np.int32) for each in (vectors, sizes, rank, most)]
    found = transport(narrow[0], narrow[1], narrow[2], narrow[3], len(times))
    return np.append(times, np.inf)[found]
