"""Predicts how long the pipelines of a step take: Megatron-core's one-forward-one-backward schedule, as a timetable;
and how many micro-batches each data-parallel replica computes.

Stage s of p does p − s − 1 forwards, then alternates forward and backward, then does the backwards that are left
(PipeDream-Flush; Narayanan et al., arXiv 2104.04473, section 2.2). A stage computes or communicates, never both:
Megatron-core waits for every transfer, and a transfer begins when both its ends have come to it. With equal stages
and free transfers the whole takes (m + p − 1) · t.

Each replica is a pipeline. Without `acco.balance` all compute equally many micro-batches; with it, a replica takes
the next one as soon as it is done (`geotrain.inner.acco.engine`), so a fast one takes more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace

Transfer = tuple[str, int, int]  # "forward" or "backward"; the edge, counted from its upper stage; the micro-batch


@dataclass(frozen=True)
class Stages:
    """Times of a pipeline's stages. forward_s, backward_s: of one micro-batch, by stage. edge_s: one transfer between
    stage s and s + 1."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    edge_s: tuple[float, ...]


def pipeline_seconds(stages: Stages, micro_batches: int) -> float:
    """Seconds until the last stage has ended."""
    p = len(stages.forward_s)
    few = 8 * p
    if p == 1:
        return micro_batches * (stages.forward_s[0] + stages.backward_s[0])
    if micro_batches <= few:
        return timetable(stages, micro_batches)
    # A long timetable repeats itself: it goes on as the last 2p micro-batches of a short one do.
    settled, before = timetable(stages, few), timetable(stages, few - 2 * p)
    return settled + (micro_batches - few) * (settled - before) / (2 * p)


@lru_cache(maxsize=4096)
def timetable(stages: Stages, micro_batches: int) -> float:
    """Plays every operation of every stage; returns when the last one ends (s)."""
    work_s = {"forward": stages.forward_s, "backward": stages.backward_s}
    now, ends = [0.0] * len(stages.forward_s), list[float]()
    for s, number, work in _program(len(now), micro_batches):
        if work:
            now[s] += work_s[work][s]
        elif number is None:
            one, other = now[s], now[s + 1]
            ends.append((one if one > other else other) + stages.edge_s[s])
        elif ends[number] > now[s]:
            now[s] = ends[number]
    return max(now)


@lru_cache(maxsize=64)  # of many stages' times the planner asks the same
def _program(p: int, micro_batches: int) -> list[tuple[int, int | None, str]]:
    """List what the stages do, in an order in which each time follows from those before it: (stage, None, the way
    that it computes); (edge, None, "") for a transfer, numbered from 0 as they come; (stage, number, "") for the wait
    for one.

    A stage runs until it needs a transfer whose other end has not come yet. The end that comes second begins the
    transfer, and puts the stage at the first end back on the list of those that can go on.
    """
    operations = [_operations(s, p, micro_batches) for s in range(p)]
    program: list[tuple[int, int | None, str]] = []
    at, runnable = [0] * p, list(range(p))
    came: set[Transfer] = set()  # one end waits for it
    numbers: dict[Transfer, int] = {}  # both ends have come
    computed = [False] * p  # the arithmetic of the stage's current operation is done
    while runnable:
        s = runnable.pop()
        while at[s] < len(operations[s]):
            work, transfers = operations[s][at[s]]
            if not computed[s]:
                program += [(s, None, work)] if work else []
                computed[s] = True
                for transfer in transfers:
                    edge = transfer[1]
                    if transfer in came:
                        numbers[transfer] = len(numbers)
                        program.append((edge, None, ""))
                        runnable.append(edge if s == edge + 1 else edge + 1)
                    else:
                        came.add(transfer)
            if any(transfer not in numbers for transfer in transfers):
                break
            program += [(s, numbers[transfer], "") for transfer in transfers]
            at[s] += 1
            computed[s] = False
    return program


def _operations(s: int, p: int, m: int) -> list[tuple[str, tuple[Transfer, ...]]]:
    """Operations of a stage in order: (forward or backward that it computes, the transfers that it then waits
    for)."""

    def transfer(way: str, edge: int, i: int) -> tuple[Transfer, ...]:
        """Return a transfer, in a tuple; an empty one beyond the first and the last stage, and for a micro-batch that
        does not exist."""
        return ((way, edge, i),) if 0 <= edge < p - 1 and i < m else ()

    warm = min(p - s - 1, m)
    done: list[tuple[str, tuple[Transfer, ...]]] = []
    for i in range(warm):
        done += [("", transfer("forward", s - 1, i)), ("forward", transfer("forward", s, i))]
    if warm < m:
        done.append(("", transfer("forward", s - 1, warm)))
    for i in range(m - warm):
        done.append(("forward", transfer("forward", s, i + warm) + transfer("backward", s, i)))
        done.append(("backward", transfer("backward", s - 1, i) + transfer("forward", s - 1, i + warm + 1)))
    for i in range(m - warm, m):
        done += [("", transfer("backward", s, i)), ("backward", transfer("backward", s - 1, i))]
    return done


@dataclass(frozen=True)
class Shares:
    """The replicas' shares of a step. micro_batches: of each replica in a step. part_s: seconds of each part of it,
    until all replicas are done."""

    micro_batches: tuple[int, ...]
    part_s: tuple[float, ...]


def even_shares(replicas: tuple[Stages, ...], parts: tuple[int, ...]) -> Shares:
    """Give all replicas equal numbers of micro-batches; a step is one pipeline, which its parts divide. parts:
    micro-batches of a replica."""
    whole = sum(parts)
    slowest = max(pipeline_seconds(stages, whole) for stages in dict.fromkeys(replicas))
    return Shares((whole,) * len(replicas), tuple(part / whole * slowest for part in parts))


@lru_cache(maxsize=256)
def claimed_shares(replicas: tuple[Stages, ...], parts: tuple[int, ...]) -> Shares:
    """Predict the micro-batches of each replica under `acco.balance`: part i of a step is a pool of parts[i] a
    replica. A pipeline claims as many at once as it has stages, all begin with one claim, and whoever is done first
    claims next."""
    taken, part_s = [0] * len(replicas), list[float]()
    for part in parts:
        if not part:
            part_s.append(0.0)
            continue
        claim = min(len(replicas[0].forward_s), part)
        left = (part - claim) * len(replicas)
        taken = [count + claim for count in taken]
        done = [(pipeline_seconds(stages, claim), d) for d, stages in enumerate(replicas)]
        heapify(done)
        while left:
            (now, d), count = done[0], min(claim, left)
            heapreplace(done, (now + pipeline_seconds(replicas[d], count), d))
            taken[d] += count
            left -= count
        part_s.append(max(done)[0])
    return Shares(tuple(taken), tuple(part_s))
