"""Devices that have equal links to all others form a class, and a stage is then a vector of counts by class.

This makes large clusters small: the devices of one region are mostly interchangeable. The cost of a stage follows
exactly from its counts. The bottleneck matching of two stages becomes a transport problem between their counts. Where
a class holds unlike devices, a link between two classes is the cheapest one between their members, and costs computed
on them are lower bounds of the true ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from geotrain.plan.placement.cost import Floats, Ints, Problem, alike, off_diagonal

MAX_CLASSES = 12  # Hall's theorem is about all 2^classes sets
MAX_VECTORS = 12_000
CHUNK = 4_000_000  # elements of a temporary


@dataclass(frozen=True)
class Classes:
    """Devices in classes. label: (N,) class of each device; sizes: (K,); gradient_s, activation_s: (K, K) links
    between classes, on the diagonal between two devices of one (inf in a class of one).

    vectors: (V, K) every way to draw a stage of D devices.
    """

    label: Ints
    sizes: Ints
    gradient_s: Floats
    activation_s: Floats
    vectors: Ints


def like_classes(problem: Problem, limit: int = MAX_VECTORS) -> Classes | None:
    """Find the classes of devices with exactly equal links to all others; None where there are more than MAX_CLASSES,
    or where a stage could be drawn in more than `limit` ways."""
    _, label = np.unique(alike(problem).argmax(axis=1), return_inverse=True)
    return classes_of(problem, label, limit) if label.max() < MAX_CLASSES else None


def classes_of(problem: Problem, label: Ints, limit: int) -> Classes | None:
    """Build the classes that these labels say; None where a stage could be drawn in more than `limit` ways."""
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
    """List, (V, K), all count vectors with 0 ≤ v ≤ sizes and sum `total`; None if there are more than `limit`."""
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
    """Compute the (V,) data-parallel cost of each stage vector."""
    links = np.where(np.isfinite(classes.gradient_s), classes.gradient_s, 0.0)  # a class of one has no partner
    sums = classes.vectors @ links - np.diag(links)
    return np.asarray(np.where(classes.vectors > 0, sums, -np.inf).max(axis=1))


def bottlenecks(vectors: Ints, sizes: Ints, activation_s: Floats, dearest_s: Floats) -> Floats:
    """Compute the (V, V) bottleneck transport times between stage vectors, one of which follows the other: inf where
    both together need more devices of a class than there are.

    dearest_s: (V,); the entry (v, w) is inf where it is more than dearest_s of v or of w. Links of at most t carry
    every device of one stage to a device of its own of the next if and only if every set of classes reaches at least
    as many devices as it has (Hall's theorem).
    """
    found = np.full((len(vectors), len(vectors)), np.inf)
    possible = np.ones(found.shape, dtype=bool)
    for counts, size in zip(vectors.T, sizes, strict=True):
        possible &= counts[:, None] + counts <= size
    one, two = np.nonzero(np.triu(possible))
    allowed_s = np.minimum(dearest_s[one], dearest_s[two])
    for time in np.unique(activation_s[np.isfinite(activation_s)]):
        left = allowed_s >= time
        one, two, allowed_s = one[left], two[left], allowed_s[left]
        sets, reached = hall_sets(activation_s <= time)
        supply, demand = vectors @ sets.T, vectors @ reached.T
        step = max(1, CHUNK // len(sets))
        parts = [np.s_[low : low + step] for low in range(0, len(one), step)]
        fits = [(supply[one[part]] <= demand[two[part]]).all(axis=1) for part in parts]
        done = np.concatenate([np.zeros(0, dtype=bool), *fits])
        found[one[done], two[done]] = found[two[done], one[done]] = time
        one, two, allowed_s = one[~done], two[~done], allowed_s[~done]
    return found


def hall_sets(linked: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Sets of classes, (n, K) 0/1, that Hall's condition must be checked on, and the classes that they reach.

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
    keep[bits[reach == 0]] = True  # a class that reaches nothing: a stage cannot have it
    chosen = masks[keep]
    return (chosen[:, None] & bits > 0).astype(np.int64), (reached[chosen][:, None] & bits > 0).astype(np.int64)
