"""The pace of the outer loop: what a worker waits for, how often a region exchanges, what its links carry.

This is a steady state in closed form; `geotrain.simulate` plays the same loop event by event, and a test compares the
two. The servers' own arithmetic is left out, and so is the queueing of workers that happen to send at the same time.

Asynchronous rules. A worker's job takes its H steps, the interruptions in which its replicas make the weights whole
(`stops`), and the part of its exchanges with the server above that nothing hides. Exchanging one fragment takes
E = (up + down) · 8 / rate + round trip, of which the overlap hides τ steps. A region applies λ = Σ 1/job updates a
second and sends each fragment up after every K of them, one exchange at a time, so its round takes
max(K/λ, trip, bytes/rate): a link that is too slow makes rounds longer and updates staler, but no worker waits for
it.

Synchronous rules wait for everyone: a round is the slowest worker's job and what the overlap leaves of the way up
and down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from geotrain.config import CodecConfig, OuterConfig
from geotrain.layout import fragments_due
from geotrain.outer.codec import make_codec
from geotrain.plan.model.network import Line
from geotrain.plan.model.step import StepTime


@dataclass(frozen=True)
class Payloads:
    """Bytes of each fragment. wide: between regions; local: between a worker and its region's server."""

    wide_up: tuple[int, ...]
    wide_down: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True)
class WorkerTiming:
    """A worker, as the outer loop sees it. The last three: as in
    `geotrain.plan.model.step.StepTime`."""

    name: str
    region: str
    step_s: float
    settle_s: float = 0.0
    refresh_s: float = 0.0
    refreshes_all: bool = False


def worker_timing(name: str, region: str, step: StepTime) -> WorkerTiming:
    return WorkerTiming(name, region, step.step_s, step.settle_s, step.refresh_s, step.refreshes_all)


@dataclass(frozen=True)
class WorkerPace:
    """local_steps: H of this worker. job_s: from the beginning of one job to that of the next. wait_s: the part of it
    that is no step. stop_s: the part of the wait in which the weights are made whole; all replicas get all of them
    `gatherings` times a job."""

    local_steps: int
    job_s: float
    wait_s: float
    stop_s: float
    gatherings: int


@dataclass(frozen=True)
class RegionPace:
    """round_s: between two exchanges of a fragment with the global server. trip_s: of the largest fragment, up and
    down. updates: workers' updates in a round; K, or more where the link does not keep up. busy: share of the time
    that its link to the global server carries payload in its busier direction; 1: the link sets the pace. staleness:
    global versions that pass, on average, between two exchanges, and so between a delta's anchor and its arrival.
    up_bytes, down_bytes: of a round."""

    round_s: float
    trip_s: float
    updates: float
    busy: float
    staleness: float
    up_bytes: int
    down_bytes: int


@dataclass(frozen=True)
class ExchangePace:
    workers: dict[str, WorkerPace]
    regions: dict[str, RegionPace]


def payloads(outer: OuterConfig, numels: Sequence[int]) -> Payloads:
    """numels: elements of each fragment."""

    def coded(config: CodecConfig) -> tuple[int, ...]:
        codec = make_codec(config)
        return tuple(codec.encoded_bytes(n) for n in numels)

    return Payloads(coded(outer.up), coded(outer.down), coded(outer.local))


def pace(
    outer: OuterConfig,
    sizes: Payloads,
    workers: Sequence[WorkerTiming],
    wide: Mapping[str, Line],
    inside: Mapping[str, Line],
) -> ExchangePace:
    """wide: region → its line to the global server. inside: region → its workers' lines to its server."""
    fastest = min(w.step_s for w in workers)
    alone = {}  # of each worker, a job that waits for no answer
    for w in workers:
        steps = outer.local_steps
        if outer.scale_local_steps:
            steps = max(1, ceil(steps * fastest / w.step_s))
        settles, refreshes = stops(outer, len(sizes.local), steps)
        gatherings = refreshes if w.refreshes_all else 1  # each fragment is adopted once
        stop_s = settles * w.settle_s + gatherings * w.refresh_s
        alone[w.name] = WorkerPace(steps, steps * w.step_s + stop_s, stop_s, stop_s, gatherings)

    flat, waits_for_all = outer.flat, outer.rule.synchronous
    members = {r: [w for w in workers if w.region == r] for r in dict.fromkeys(w.region for w in workers)}
    # In a flat run every worker exchanges with the global server by itself, over its region's link.
    flows = {r: len(mine) if flat else 1 for r, mine in members.items()}
    largest_bytes = max(sum(sizes.wide_up), sum(sizes.wide_down))  # of a round, in the busier direction
    carried_s = {r: flows[r] * largest_bytes * 8e-9 / wide[r].gbps for r in members}
    trip_s = {r: max(_trips(sizes.wide_up, sizes.wide_down, wide[r])) for r in members}

    jobs: dict[str, float] = {}
    rounds: dict[str, float] = {}
    if waits_for_all:
        slowest = max(workers, key=lambda w: alone[w.name].job_s)
        exposed_s = 0.0
        for wide_up, wide_down, local in zip(sizes.wide_up, sizes.wide_down, sizes.local, strict=True):
            up, down = [], []
            for r, mine in members.items():
                near_s = 0.0 if flat else inside[r].seconds(local, len(mine))
                up.append(near_s + wide[r].seconds(wide_up, flows[r]))
                down.append(near_s + wide[r].seconds(wide_down, flows[r]))
            exposed_s += _exposed(outer, [max(up) + max(down)], slowest.step_s)
        round_s = max(alone[slowest.name].job_s + exposed_s, *carried_s.values())
        jobs, rounds = dict.fromkeys(alone, round_s), dict.fromkeys(members, round_s)
    else:
        up_bytes, down_bytes = (sizes.wide_up, sizes.wide_down) if flat else (sizes.local, sizes.local)
        for r, mine in members.items():
            line = wide[r] if flat else inside[r]
            trips = _trips(up_bytes, down_bytes, line)
            own_s = {w.name: alone[w.name].job_s + _exposed(outer, trips, w.step_s) for w in mine}
            # The line carries every member's payload: if that takes longer than their jobs, it sets the pace.
            one_s = max(sum(up_bytes), sum(down_bytes)) * 8e-9 / line.gbps
            slower = max(1.0, one_s * sum(1 / job for job in own_s.values()))
            jobs |= {name: job * slower for name, job in own_s.items()}
            rate = sum(1 / jobs[w.name] for w in mine)  # updates a second
            rounds[r] = (
                len(mine) / rate
                if flat
                else max((outer.rule.updates_per_send or len(mine)) / rate, trip_s[r], carried_s[r])
            )

    versions_per_s = sum(flows[r] / rounds[r] for r in members)
    return ExchangePace(
        {name: replace(p, job_s=jobs[name], wait_s=p.wait_s + jobs[name] - p.job_s) for name, p in alone.items()},
        {
            r: RegionPace(
                round_s=rounds[r],
                trip_s=trip_s[r],
                updates=sum(rounds[r] / jobs[w.name] for w in mine),
                busy=min(1.0, carried_s[r] / rounds[r]),
                staleness=0.0 if waits_for_all else (versions_per_s - 1 / rounds[r]) * rounds[r],
                up_bytes=flows[r] * sum(sizes.wide_up),
                down_bytes=flows[r] * sum(sizes.wide_down),
            )
            for r, mine in members.items()
        },
    )


def stops(outer: OuterConfig, fragments: int, steps: int) -> tuple[int, int]:
    """How often a job settles and refreshes, as `geotrain.outer.exchange` does.

    Every delta that leaves settles, and so does every answer that is adopted, which then refreshes. What happens
    after the same inner step is settled once: the second finds nothing under way. No answer is taken to be late.
    """
    return _stops(fragments, steps, min(steps, outer.overlap.steps))  # adopted before the next delta, at the latest


@lru_cache(maxsize=4096)
def _stops(fragments: int, steps: int, tau: int) -> tuple[int, int]:
    sent = [step for step in range(1, steps + 1) if fragments_due(fragments, steps, step)]
    return len({(step + after) % steps for step in sent for after in (0, tau)}), len(sent)


def _trips(up_bytes: Sequence[int], down_bytes: Sequence[int], line: Line) -> list[float]:
    """Seconds that each fragment's exchange takes, up and down."""
    return [line.seconds(up) + line.seconds(down) for up, down in zip(up_bytes, down_bytes, strict=True)]


def _exposed(outer: OuterConfig, trips_s: Sequence[float], step_s: float) -> float:
    """What the overlap does not hide of these exchanges; nothing where training goes on without a late answer."""
    if outer.overlap.late == "continue":
        return 0.0
    return sum(max(0.0, trip_s - outer.overlap.steps * step_s) for trip_s in trips_s)
