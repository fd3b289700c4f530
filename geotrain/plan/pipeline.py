"""When a pipeline's micro-batches are where: Megatron-core's one-forward-one-backward schedule, as a timetable.

Stage s of p does p − s − 1 forwards, then alternates forward and backward, then does the backwards that are left
(PipeDream-Flush; Narayanan et al., arXiv 2104.04473, section 2.2). A stage computes or communicates, never both:
Megatron-core waits for every transfer, and a transfer begins when both its ends have come to it. With equal stages
and free transfers the whole takes (m + p − 1) · t.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

Transfer = tuple[str, int, int]  # "forward" or "backward"; the edge, counted from its upper stage; the micro-batch


@dataclass(frozen=True)
class Stages:
    """forward_s, backward_s: of one micro-batch, by stage. edge_s: one transfer between stage s and s + 1."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    edge_s: tuple[float, ...]


def pipeline_seconds(stages: Stages, micro_batches: int) -> float:
    """Until the last stage to end has ended. Many micro-batches go on as the last ones of a timetable of few do."""
    p = len(stages.forward_s)
    few = 8 * p
    if p == 1:
        return micro_batches * (stages.forward_s[0] + stages.backward_s[0])
    if micro_batches <= few:
        return timetable(stages, micro_batches)
    settled, before = timetable(stages, few), timetable(stages, few - 2 * p)
    return settled + (micro_batches - few) * (settled - before) / (2 * p)


@lru_cache(maxsize=4096)
def timetable(stages: Stages, micro_batches: int) -> float:
    """Every operation of every stage, one after the other (s)."""
    p = len(stages.forward_s)
    operations = [_operations(s, p, micro_batches) for s in range(p)]
    at, now = [0] * p, [0.0] * p
    ready: dict[Transfer, float] = {}  # a transfer whose one end waits → since when
    ends: dict[Transfer, float] = {}
    announced = [False] * p
    waiting = list(range(p))
    while waiting:
        s = waiting.pop()
        while at[s] < len(operations[s]):
            work, transfers = operations[s][at[s]]
            if not announced[s]:
                now[s] += {"": 0.0, "forward": stages.forward_s[s], "backward": stages.backward_s[s]}[work]
                announced[s] = True
                for transfer in transfers:
                    if transfer in ready:
                        ends[transfer] = max(ready.pop(transfer), now[s]) + stages.edge_s[transfer[1]]
                        other = transfer[1] if s == transfer[1] + 1 else transfer[1] + 1
                        waiting.append(other)
                    else:
                        ready[transfer] = now[s]
            if any(transfer not in ends for transfer in transfers):
                break
            now[s] = max([now[s], *(ends[transfer] for transfer in transfers)])
            at[s] += 1
            announced[s] = False
    return max(now)


def _operations(s: int, p: int, m: int) -> list[tuple[str, tuple[Transfer, ...]]]:
    """What a stage does, in order: (what it computes, the transfers that it then waits for together)."""
    first, last = s == 0, s == p - 1
    warm = min(p - s - 1, m)

    def receive(i: int) -> tuple[Transfer, ...]:
        return () if first else (("forward", s - 1, i),)

    def send(i: int) -> tuple[Transfer, ...]:
        return () if last else (("forward", s, i),)

    def receive_back(i: int) -> tuple[Transfer, ...]:
        return () if last else (("backward", s, i),)

    def send_back(i: int) -> tuple[Transfer, ...]:
        return () if first else (("backward", s - 1, i),)

    done: list[tuple[str, tuple[Transfer, ...]]] = []
    for i in range(warm):
        done += [("", receive(i)), ("forward", send(i))]
    if warm < m:
        done.append(("", receive(warm)))
    for i in range(m - warm):
        done.append(("forward", send(i + warm) + receive_back(i)))
        following = receive(i + warm + 1) if i + warm + 1 < m else ()
        done.append(("backward", send_back(i) + following))
    for i in range(m - warm, m):
        done += [("", receive_back(i)), ("backward", send_back(i))]
    return done


def bubble_free_seconds(stages: Stages, micro_batches: int) -> float:
    """What the busiest stage computes."""
    return micro_batches * max(f + b for f, b in zip(stages.forward_s, stages.backward_s, strict=True))
