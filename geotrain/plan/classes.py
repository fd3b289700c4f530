"""Devices that see the same links are one class, and a stage is then a vector of class counts.

A count vector's stage cost is exact, and the bottleneck matching of two stages is a transport between their counts,
feasible with links of at most t if and only if every set of classes reaches at least as many devices as it has
(Hall). Where devices are too unlike for few classes, the likest are joined, and a link between joined classes is the
cheapest between their members: what is computed on them then bounds the true costs from beneath.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from geotrain.plan.cost import Floats, Ints, Problem

MAX_CLASSES = 10  # Hall's condition looks at up to 2^classes sets
MAX_VECTORS = 12_000
CHUNK = 4_000_000  # elements of a temporary


@dataclass(frozen=True)
class Classes:
    """label: (N,) class of each device; sizes: (K,); gradient_s, activation_s: (K, K) links between classes, on the
    diagonal between two devices of one (inf in a class of one).

    vectors: (V, K) every way to draw a stage of D devices. exact: the links are the devices' own, not lower.
    """

    label: Ints
    sizes: Ints
    gradient_s: Floats
    activation_s: Floats
    vectors: Ints
    exact: bool


def off_diagonal(matrix: Floats) -> Floats:
    """The matrix with inf on its diagonal."""
    out = matrix.copy()
    np.fill_diagonal(out, np.inf)
    return out


def classes_of(problem: Problem) -> Classes:
    """As many classes as the limits allow: exact ones where devices are alike, else the likest joined."""
    for label in _groupings(problem):
        sizes = np.bincount(label)
        vectors = stage_vectors(sizes, problem.replicas, MAX_VECTORS) if len(sizes) <= MAX_CLASSES else None
        if vectors is not None:
            break
    else:
        raise AssertionError("one class of all devices has one stage vector")
    gradient, dearer_gradient = _block_links(problem.gradient_s, label)
    activation, dearer_activation = _block_links(problem.activation_s, label)
    return Classes(label, sizes, gradient, activation, vectors, not (dearer_gradient or dearer_activation))


def _block_links(times: Floats, label: Ints) -> tuple[Floats, bool]:
    """The cheapest link between each two classes, and whether any is cheaper than another of its block."""
    members = [np.flatnonzero(label == k) for k in range(label.max() + 1)]
    least = np.full((len(members), len(members)), np.inf)
    between, unequal = off_diagonal(times), False
    for x, one in enumerate(members):
        for y, two in enumerate(members):
            block = between[np.ix_(one, two)]
            block = block[np.isfinite(block)]
            if block.size:
                least[x, y] = block.min()
                unequal = unequal or bool(block.max() > least[x, y])
    return least, unequal


def _groupings(problem: Problem) -> list[Ints]:
    """(N,) labels, from most to fewest classes: complete linkage on how differently two devices see all others."""
    n = problem.devices
    if n == 1:
        return [np.zeros(1, dtype=np.int64)]
    apart = np.zeros((n, n))
    for times in (problem.activation_s, problem.gradient_s):
        scale = max(float(times.max()), 1e-30)
        for i in range(n):
            unlike = np.abs(times - times[i])
            unlike[:, i] = 0.0  # a device has no link to itself
            np.fill_diagonal(unlike, 0.0)
            apart[i] = np.maximum(apart[i], unlike.max(axis=1) / scale)
    tree = linkage(squareform(np.maximum(apart, apart.T), checks=False), "complete")
    alike = 1e-12
    few = np.unique(tree[-MAX_CLASSES:, 2])
    return [fcluster(tree, height, "distance").astype(np.int64) - 1 for height in (alike, *few[few > alike])]


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


def bottlenecks(vectors: Ints, activation_s: Floats, dearest_s: Floats) -> Floats:
    """(V, V) bottleneck transport times between stage vectors.

    dearest_s: (V,) descending; the entry (v, w) is inf where it is more than dearest_s of v or of w.
    """
    count = len(vectors)
    found = np.full((count, count), np.inf)
    for level in np.unique(activation_s[activation_s <= dearest_s[0]]):
        few = int((dearest_s >= level).sum())
        sets, reached = hall_sets(activation_s <= level)
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
