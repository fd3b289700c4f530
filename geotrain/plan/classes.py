"""Devices that see the same links are one class, and a stage is then a vector of class counts.

A count vector's stage cost is exact, and the bottleneck matching of two stages is a transport between their counts,
feasible with links of at most t if and only if every set of classes reaches at least as many devices as it has
(Hall). Where devices are too unlike for few classes, the likest are joined, and a link between joined classes is the
cheapest between their members: what is computed on them then bounds the true costs from beneath.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from geotrain.plan.cost import Floats, Ints, Problem

MAX_CLASSES = 10  # Hall's condition looks at up to 2^classes sets
MAX_VECTORS = 12_000
MAX_JOINED_VECTORS = 2_000  # where classes are joined anyway, few serve nearly as well
OBSERVERS = 128  # devices whose view decides which devices are the likest
CHUNK = 4_000_000  # elements of a temporary


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


def off_diagonal(matrix: Floats) -> Floats:
    """The matrix with inf on its diagonal."""
    out = matrix.copy()
    np.fill_diagonal(out, np.inf)
    return out


def like_classes(problem: Problem) -> Classes | None:
    """Classes of devices with exactly equal links to all others; None where the limits do not allow as many."""
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
            return _classes(problem, label, MAX_VECTORS)
    return None


def joined_classes(problem: Problem) -> Classes:
    """As many classes as the limits allow, each of the likest devices: links are at most the devices' own."""
    for label in _groupings(problem):
        classes = _classes(problem, label, MAX_JOINED_VECTORS)
        if classes is not None:
            return classes
    raise AssertionError("one class of all devices has one stage vector")


def _classes(problem: Problem, label: Ints, limit: int) -> Classes | None:
    sizes = np.bincount(label)
    vectors = stage_vectors(sizes, problem.replicas, limit)
    if vectors is None:
        return None
    links = [_block_links(times, label) for times in (problem.gradient_s, problem.activation_s)]
    return Classes(label, sizes, links[0], links[1], vectors)


def _block_links(times: Floats, label: Ints) -> Floats:
    """(K, K) the cheapest link between each two classes."""
    between = off_diagonal(times)
    by_row = np.array([between[label == k].min(axis=0) for k in range(label.max() + 1)])
    return np.array([by_row[:, label == k].min(axis=1) for k in range(label.max() + 1)]).T


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


def bottlenecks(
    vectors: Ints, activation_s: Floats, dearest_s: Floats, spend: Callable[[int], None] = lambda work: None
) -> Floats:
    """(V, V) bottleneck transport times between stage vectors.

    dearest_s: (V,) descending; the entry (v, w) is inf where it is more than dearest_s of v or of w.
    spend: told before each pass how many sums it will compare; may raise to stop.
    """
    count = len(vectors)
    found = np.full((count, count), np.inf)
    for level in np.unique(activation_s[activation_s <= dearest_s[0]]):
        few = int((dearest_s >= level).sum())
        sets, reached = hall_sets(activation_s <= level)
        spend(few * few * len(sets))
        supply = (vectors[:few] @ sets.T).astype(np.int16)
        demand = (vectors[:few] @ reached.T).astype(np.int16)
        step = max(1, CHUNK // (few * len(sets)))
        for low in range(0, few, step):
            fits = (supply[low : low + step, None, :] <= demand[None, :, :]).all(axis=2)
            part = found[low : min(low + step, few), :few]
            part[fits & (part > level)] = level
    return found


def hall_sets(linked: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Sets of classes, (n, K) 0/1, that Hall's condition must be checked on, and the classes they reach.

    Left out: sets that could grow without reaching more, and unions of sets that reach nothing in common.
    """
    k = len(linked)
    bits = 1 << np.arange(k)
    reach = (linked * bits).sum(axis=1)
    masks = np.arange(1 << k)
    reached, grown = np.zeros_like(masks), np.zeros_like(masks)
    for c in range(k):
        reached |= np.where(masks & bits[c], reach[c], 0)
    for c in range(k):
        grown |= np.where((reach[c] & ~reached) | (reach[c] == 0), 0, bits[c])
    keep = (masks > 0) & (grown == masks)
    for mask in masks[keep]:
        inside = [c for c in range(k) if mask >> c & 1]
        joined, wider = 0, int(bits[inside[0]])
        while wider != joined:
            joined = wider
            wider = sum(int(bits[c]) for c in inside if reach[c] & reached[joined])
        keep[mask] = joined == mask
    keep[bits[reach == 0]] = True  # nothing is in reach: there must be none
    chosen = masks[keep]
    return (chosen[:, None] & bits > 0).astype(np.int64), (reached[chosen][:, None] & bits > 0).astype(np.int64)
