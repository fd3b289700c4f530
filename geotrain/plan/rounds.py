"""How the outer loop paces: what a worker waits for, how often a region exchanges, what its links carry.

A steady state in closed form; `geotrain.simulate` plays the same loop event by event, and a test compares the two.
What servers compute is left out, and so are the queues of workers that happen to send at the same time.

Asynchronous rules. A worker's job takes H steps, what makes its weights whole in between (`stops`; while it waits for
an answer a commit travels on, which is left out) and what its exchanges with the server above leave exposed. Each
fragment's exchange takes E = (up + down) · 8 / rate + round trip; τ steps of it are hidden. A region applies
λ = Σ 1/job updates a second and sends each fragment up every K of them, one at a time, so its round takes
max(K/λ, trip, bytes/rate): links that are too slow make rounds longer, and updates older, but no worker waits.
Synchronous rules wait for everyone: a round is the slowest worker's job and what is left of the way up and down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from geotrain.config import CodecConfig, OuterConfig
from geotrain.outer.codec import make_codec
from geotrain.outer.layout import fragments_due
from geotrain.plan.network import Line
from geotrain.plan.step import StepTime


@dataclass(frozen=True)
class Payloads:
    """Bytes of each fragment. wide: between regions; local: between a worker and its region's server."""

    wide_up: tuple[int, ...]
    wide_down: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True)
class Pacer:
    """A worker, as the outer loop sees it. settle_s, refresh_s: as in `geotrain.plan.step.StepTime`."""

    name: str
    region: str
    step_s: float
    settle_s: float = 0.0
    refresh_s: float = 0.0


def pacer(name: str, region: str, step: StepTime) -> Pacer:
    return Pacer(name, region, step.step_s, step.settle_s, step.refresh_s)


@dataclass(frozen=True)
class WorkerPace:
    """local_steps: H of this worker. job_s: from one job's begin to the next one's. wait_s: of it, what is no step.
    stop_s: of that, what makes the weights whole, `refreshes` times on all replicas."""

    local_steps: int
    job_s: float
    wait_s: float
    stop_s: float
    refreshes: int


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
class Pace:
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
    workers: Sequence[Pacer],
    wide: Mapping[str, Line],
    inside: Mapping[str, Line],
) -> Pace:
    """wide: region → its line to the global server. inside: region → its workers' lines to its server."""
    fastest = min(w.step_s for w in workers)
    steps = {
        w.name: max(1, ceil(outer.local_steps * fastest / w.step_s)) if outer.scale_local_steps else outer.local_steps
        for w in workers
    }
    plain = {}  # of each worker, a job that waits for no answer
    for w in workers:
        settles, refreshes = stops(outer, len(sizes.local), steps[w.name])
        stop_s = settles * w.settle_s + refreshes * w.refresh_s
        plain[w.name] = WorkerPace(steps[w.name], steps[w.name] * w.step_s + stop_s, stop_s, stop_s, refreshes)
    if outer.rule == "sync":
        return _synchronous(outer, sizes, workers, plain, wide, inside)
    return _asynchronous(outer, sizes, workers, plain, wide, inside)


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


def _longer(plain: WorkerPace, job_s: float) -> WorkerPace:
    return replace(plain, job_s=job_s, wait_s=plain.wait_s + job_s - plain.job_s)


def _asynchronous(
    outer: OuterConfig,
    sizes: Payloads,
    workers: Sequence[Pacer],
    plain: Mapping[str, WorkerPace],
    wide: Mapping[str, Line],
    inside: Mapping[str, Line],
) -> Pace:
    regions = list(dict.fromkeys(w.region for w in workers))
    flat = outer.levels == 1
    up, down = (sizes.wide_up, sizes.wide_down) if flat else (sizes.local, sizes.local)
    paces: dict[str, WorkerPace] = {}
    for region in regions:
        members = [w for w in workers if w.region == region]
        line = wide[region] if flat else inside[region]
        alone = {w.name: plain[w.name].job_s + _exposed(outer, up, down, line, w.step_s) for w in members}
        # The line carries every member's payload: if that takes longer than their jobs, it sets the pace.
        carried = max(sum(up), sum(down)) * 8e-9 / line.gbps
        slower = max(1.0, carried * sum(1 / job for job in alone.values()))
        for w in members:
            paces[w.name] = _longer(plain[w.name], alone[w.name] * slower)
    rates = {r: sum(1 / paces[w.name].job_s for w in workers if w.region == r) for r in regions}
    counts = {r: sum(w.region == r for w in workers) for r in regions}
    rounds, trips = {}, {}
    for region in regions:
        line = wide[region]
        trips[region] = max(_trip(u, d, line) for u, d in zip(sizes.wide_up, sizes.wide_down, strict=True))
        carried = max(sum(sizes.wide_up), sum(sizes.wide_down)) * 8e-9 / line.gbps
        if flat:
            rounds[region] = counts[region] / rates[region]
        else:
            rounds[region] = max(outer.updates_per_send / rates[region], trips[region], carried)
    found = {}
    for region in regions:
        times = counts[region] if flat else 1
        up_bytes, down_bytes = times * sum(sizes.wide_up), times * sum(sizes.wide_down)
        arrivals = {r: (counts[r] if flat else 1) / rounds[r] for r in regions}
        others = sum(arrivals.values()) - 1 / rounds[region]
        found[region] = RegionPace(
            rounds[region],
            trips[region],
            rates[region] * rounds[region],
            min(1.0, max(up_bytes, down_bytes) * 8e-9 / wide[region].gbps / rounds[region]),
            others * rounds[region],
            up_bytes,
            down_bytes,
        )
    return Pace(paces, found)


def _synchronous(
    outer: OuterConfig,
    sizes: Payloads,
    workers: Sequence[Pacer],
    plain: Mapping[str, WorkerPace],
    wide: Mapping[str, Line],
    inside: Mapping[str, Line],
) -> Pace:
    regions = list(dict.fromkeys(w.region for w in workers))
    counts = {r: sum(w.region == r for w in workers) for r in regions}
    flat = outer.levels == 1
    slowest = max(workers, key=lambda w: plain[w.name].job_s)
    hidden = outer.overlap.steps * slowest.step_s
    exposed = 0.0
    for wide_up, wide_down, local in zip(sizes.wide_up, sizes.wide_down, sizes.local, strict=True):
        up, down = [], []
        for r in regions:
            share = counts[r] if flat else 1
            near = 0.0 if flat else inside[r].seconds(local, counts[r])
            up.append(near + wide[r].seconds(wide_up, share))
            down.append(near + wide[r].seconds(wide_down, share))
        late = max(0.0, max(up) + max(down) - hidden)
        exposed += 0.0 if outer.overlap.late == "continue" else late
    carried = max(
        (counts[r] if flat else 1) * max(sum(sizes.wide_up), sum(sizes.wide_down)) * 8e-9 / wide[r].gbps
        for r in regions
    )
    round_s = max(plain[slowest.name].job_s + exposed, carried)
    paces = {w.name: _longer(plain[w.name], round_s) for w in workers}
    found = {}
    for r in regions:
        times = counts[r] if flat else 1
        up_bytes, down_bytes = times * sum(sizes.wide_up), times * sum(sizes.wide_down)
        trip = max(_trip(u, d, wide[r]) for u, d in zip(sizes.wide_up, sizes.wide_down, strict=True))
        busy = max(up_bytes, down_bytes) * 8e-9 / wide[r].gbps / round_s
        found[r] = RegionPace(round_s, trip, counts[r], busy, 0.0, up_bytes, down_bytes)
    return Pace(paces, found)


def _exposed(outer: OuterConfig, up: Sequence[int], down: Sequence[int], line: Line, step_s: float) -> float:
    """Of a job's exchanges, what the overlap does not hide."""
    if outer.overlap.late == "continue":
        return 0.0
    hidden = outer.overlap.steps * step_s
    return sum(max(0.0, _trip(u, d, line) - hidden) for u, d in zip(up, down, strict=True))


def _trip(up_bytes: int, down_bytes: int, line: Line) -> float:
    return line.seconds(up_bytes) + line.seconds(down_bytes)
