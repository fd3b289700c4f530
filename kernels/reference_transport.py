"""The complete search's kernels in numpy: the truth that `csrc/transport.c` reproduces.

Links of at most t can carry every device of one stage to a device of its own of the next if and only if every set of
classes reaches at least as many devices as it has (Hall's theorem)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from geotrain.kernels.steps import Beginnings, Endings, Pairs, StageVectors

CHUNK = 4_000_000  # elements of a temporary
Ints = NDArray[np.int64]


def transport(
    vectors: NDArray[np.int32], sizes: NDArray[np.int32], rank: NDArray[np.int32], most: NDArray[np.int32], never: int
) -> NDArray[np.int32]:
    """As `dispatch.transport`."""
    count = len(vectors)
    found = np.full((count, count), never, dtype=np.int32)
    one, two = np.nonzero((vectors[:, None] + vectors[None] <= sizes).all(axis=2))
    allowed = np.minimum(most[one], most[two])
    for level in range(never):
        open_ = np.flatnonzero(allowed >= level)
        one, two, allowed = one[open_], two[open_], allowed[open_]
        sets, reached = hall_sets(rank <= level)
        supply, demand = vectors @ sets.T, vectors @ reached.T
        step = max(1, CHUNK // len(sets))
        parts = [np.s_[low : low + step] for low in range(0, len(one), step)]
        fits = [(supply[one[part]] <= demand[two[part]]).all(axis=1) for part in parts]
        done = np.concatenate([np.zeros(0, dtype=bool), *fits])
        found[one[done], two[done]] = level
        one, two, allowed = one[~done], two[~done], allowed[~done]
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


def extend(stages: StageVectors, labels: Beginnings, limit: float) -> Iterator[Pairs]:
    """As `dispatch.extend`."""
    step = max(1, CHUNK // stages.vectors.size)
    for low in range(0, len(labels.last), step):
        part = np.s_[low : low + step]
        path = labels.label_path[part, None] + stages.edges[labels.last[part]]
        stage = np.maximum(labels.label_stage[part, None], stages.stage)
        fits = (labels.used[part, None] + stages.vectors <= stages.sizes).all(axis=2)
        one, two = np.nonzero((stage + 4 * path < limit) & fits)
        yield (one + low).astype(np.int32), two.astype(np.int32)


def possible(
    vectors: NDArray[np.int32],
    sizes: NDArray[np.int32],
    used: NDArray[np.int32],
    last: NDArray[np.int32],
    spare: NDArray[np.float64],
    what: Endings,
) -> NDArray[np.bool_]:
    """As `dispatch.possible`."""
    alive = np.flatnonzero(spare > 0)
    first = np.zeros(len(spare))  # what the dearest edge to come takes above the least
    rest = what.rest
    for over, part in zip(what.over, what.part, strict=True):
        parts = np.eye(len(sizes), dtype=np.int64)[part]
        have, want = vectors[last[alive]] @ parts, (sizes - used[alive]) @ parts
        wrong = (want != rest * have if what.uses_all else want < rest * have).any(axis=1)
        first[alive] = np.where(wrong & (first[alive] == 0), over, first[alive])
        dead = first[alive] >= spare[alive]
        ask = np.flatnonzero(~dead & wrong & (first[alive] + over >= spare[alive]))
        for stay in range(rest):  # stages like the last one before the only change
            then = want[ask] - stay * have[ask]
            each, over_all = np.divmod(then, rest - stay)
            enough = ~over_all.any(axis=1) if what.uses_all else each.sum(axis=1) >= what.replicas
            ask = ask[~enough | (then < 0).any(axis=1)]
        dead[ask] = True
        alive = alive[~dead]
    found = np.zeros(len(spare), dtype=np.bool_)
    found[alive] = True
    return found
