"""How many micro-batches of a step each replica computes, and until when: as many each, or as they get to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace

from geotrain.plan.pipeline import Stages, pipeline_seconds


@dataclass(frozen=True)
class Shares:
    """micro_batches: of each replica in a step. part_s: seconds of each part of it, until all replicas are done."""

    micro_batches: tuple[int, ...]
    part_s: tuple[float, ...]


def even_shares(replicas: tuple[Stages, ...], parts: tuple[int, ...]) -> Shares:
    """As many each; a step is one pipeline, which its parts divide. parts: micro-batches of a replica."""
    whole = sum(parts)
    slowest = max(pipeline_seconds(stages, whole) for stages in dict.fromkeys(replicas))
    return Shares((whole,) * len(replicas), tuple(part / whole * slowest for part in parts))


@lru_cache(maxsize=256)
def claimed_shares(replicas: tuple[Stages, ...], parts: tuple[int, ...]) -> Shares:
    """`acco.balance` (`geotrain.inner.acco_claims`): each part of a step is a pool, of parts[i] micro-batches
    a replica. Whoever is done takes the next, a pipeline as many at once as it has stages; all begin with as many."""
    taken, part_s = [0] * len(replicas), list[float]()
    for part in parts:
        if not part:
            part_s.append(0.0)
            continue
        width, free = min(len(replicas[0].forward_s), part), part * len(replicas)
        done = []
        for d, stages in enumerate(replicas):
            done.append((pipeline_seconds(stages, width), d))
            taken[d] += width
            free -= width
        heapify(done)
        while free:
            (now, d), chunk = done[0], min(width, free)
            heapreplace(done, (now + pipeline_seconds(replicas[d], chunk), d))
            taken[d] += chunk
            free -= chunk
        part_s.append(max(done)[0])
    return Shares(tuple(taken), tuple(part_s))
