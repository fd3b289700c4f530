"""The pace of the outer loop: what a worker waits for, how often a region exchanges, what its links carry.

This is a steady state in closed form; `geotrain.simulate` plays the same loop event by event, and a test compares the
two. The queueing of workers that happen to send at the same time is left out.

Asynchronous rules. A worker's job takes its H steps, the interruptions in which its replicas make the weights whole
(`stops`), and the part of its exchanges with the server above that nothing hides. Exchanging one fragment takes
E = (up + down) · 8 / rate + round trip + the server's time for it, of which the overlap hides τ steps. A region
applies λ = Σ 1/job updates a second and sends each fragment up after every K of them, one exchange at a time, so its
round takes max(K/λ, trip, bytes/rate): a link that is too slow makes rounds longer and updates staler, but no worker
waits for it. A region's server that has more than a second's work in a second slows its workers' jobs; the global
server, the rounds.

Synchronous rules wait for everyone: a round is the slowest worker's job and what the overlap leaves of the way up
and down, with what the servers do for all members one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from geotrain.config import OuterConfig
from geotrain.outer.server.leases import ALIKE
from geotrain.parameters.parameter_map import fragments_due
from geotrain.plan.model.answering import updates_per_send, waits
from geotrain.plan.model.network import Line
from geotrain.plan.model.server_rates import MEASURED, ServerRates
from geotrain.plan.model.servers import ServerSeconds, place_of, server_seconds
from geotrain.plan.model.sizes import Sizes
from geotrain.plan.model.step import StepTime


@dataclass(frozen=True)
class ServerTimes:
    """Seconds that servers take for each fragment, shards side by side. near: region servers; top: the global one."""

    near: Mapping[str, ServerSeconds]
    top: ServerSeconds

    @staticmethod
    def none(regions: Iterable[str], fragments: int) -> ServerTimes:
        zero = ServerSeconds(*([(0.0,) * fragments] * 3))
        return ServerTimes(dict.fromkeys(regions, zero), zero)


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
    """The pace of one worker. local_steps: its H. job_s: from the beginning of one job to that of the next. wait_s:
    the part of it that is no step. stop_s: the part of the wait in which the weights are made whole; all replicas get
    all of them `gatherings` times a job."""

    local_steps: int
    job_s: float
    wait_s: float
    stop_s: float
    gatherings: int


@dataclass(frozen=True)
class RegionPace:
    """The pace of one region. round_s: between two exchanges of a fragment with the global server. trip_s: of the
    largest fragment, up and down. answer_s: from a worker's update to its answer, if the global server takes that at
    once and answers it. updates: workers' updates in a round; K, or more where the link does not keep up.
    busy: share of the time that its link to the global server carries payload in its busier direction; 1: the link
    sets the pace. server_busy: that its server works; 1: the server does. staleness: global versions that pass, on
    average, between two exchanges, and so between a delta's anchor and its arrival. up_bytes, down_bytes: of a
    round."""

    round_s: float
    trip_s: float
    answer_s: float
    updates: float
    busy: float
    server_busy: float
    staleness: float
    up_bytes: int
    down_bytes: int


@dataclass(frozen=True)
class ExchangePace:
    """The pace of the whole outer loop. global_busy: share of the time that the global server works."""

    workers: dict[str, WorkerPace]
    regions: dict[str, RegionPace]
    global_busy: float


def server_times(
    outer: OuterConfig, sizes: Sizes, shares: Mapping[str, float], top_share: float, rates: ServerRates = MEASURED
) -> ServerTimes:
    """Compute the seconds that servers take for each fragment. shares: of the model, that the fullest shard of each
    region's server has; top_share: of the global one's."""
    near = server_seconds(place_of("region", outer, 1), sizes, rates)
    top = server_seconds(place_of("global", outer, 1), sizes, rates)
    return ServerTimes({region: near.over(share) for region, share in shares.items()}, top.over(top_share))


def pace(
    outer: OuterConfig,
    sizes: Sizes,
    workers: Sequence[WorkerTiming],
    wide: Mapping[str, Line],
    inside: Mapping[str, Line],
    servers: ServerTimes | None = None,
) -> ExchangePace:
    """Compute the steady pace of workers and regions. wide: region → its line to the global server. inside: region →
    its workers' lines to its server. servers: None: they take no time."""
    fastest, steered = min(w.step_s for w in workers), waits(outer) and outer.overlap.late == "continue"
    alone = {}  # of each worker, a job that waits for no answer
    for w in workers:
        steps = outer.local_steps
        if outer.scale_local_steps or (steered and w.step_s <= ALIKE * fastest):  # to end with the fastest's
            steps = max(1, ceil(steps * fastest / w.step_s))
        settles, refreshes = stops(outer, len(sizes.numels), steps)
        gatherings = refreshes if w.refreshes_all else 1  # each fragment is adopted once
        stop_s = settles * w.settle_s + gatherings * w.refresh_s
        alone[w.name] = WorkerPace(steps, steps * w.step_s + stop_s, stop_s, stop_s, gatherings)

    members = {r: [w for w in workers if w.region == r] for r in dict.fromkeys(w.region for w in workers)}
    loop = _Loop(outer, sizes, members, wide, inside, servers or ServerTimes.none(members, len(sizes.numels)))
    own_s = {name: worker.job_s for name, worker in alone.items()}
    if outer.rule.synchronous:
        jobs, rounds, loads = loop.together(own_s, max(workers, key=lambda w: own_s[w.name]))
    else:
        jobs, rounds, loads = loop.each_by_itself(own_s)
    global_load = sum(loop.flows[r] / rounds[r] for r in members) * sum(loop.servers.top.update)
    if global_load > 1:
        rounds = {r: round_s * global_load for r, round_s in rounds.items()}
        if outer.flat:
            jobs = {name: job * global_load for name, job in jobs.items()}

    versions_per_s = sum(loop.flows[r] / rounds[r] for r in members)
    return ExchangePace(
        {name: replace(p, job_s=jobs[name], wait_s=p.wait_s + jobs[name] - p.job_s) for name, p in alone.items()},
        {
            r: RegionPace(
                round_s=rounds[r],
                trip_s=loop.trip_s[r],
                answer_s=loop.trip_s[r] + loop.near_s(r),
                updates=sum(rounds[r] / jobs[w.name] for w in mine),
                busy=min(1.0, loop.carried_s[r] / rounds[r]),
                server_busy=min(1.0, loads[r]),
                staleness=0.0 if outer.rule.synchronous else (versions_per_s - 1 / rounds[r]) * rounds[r],
                up_bytes=loop.flows[r] * sum(sizes.wide.up),
                down_bytes=loop.flows[r] * sum(sizes.wide.down),
            )
            for r, mine in members.items()
        },
        min(1.0, global_load),
    )


Paced = tuple[dict[str, float], dict[str, float], dict[str, float]]


class _Loop:
    """Base of the cost models of both kinds of rules. Both return seconds of each worker's job, of each region's
    round, and of the work that a region's server has in a second."""

    def __init__(
        self,
        outer: OuterConfig,
        sizes: Sizes,
        members: Mapping[str, Sequence[WorkerTiming]],
        wide: Mapping[str, Line],
        inside: Mapping[str, Line],
        servers: ServerTimes,
    ) -> None:
        self.outer, self.sizes, self.members, self.servers = outer, sizes, members, servers
        self.wide, self.inside = wide, inside
        # In a flat run every worker exchanges with the global server by itself, over its region's link.
        self.flows = {r: len(mine) if outer.flat else 1 for r, mine in members.items()}
        largest_bytes = max(sum(sizes.wide.up), sum(sizes.wide.down))  # of a round, in the busier direction
        self.carried_s = {r: self.flows[r] * largest_bytes * 8e-9 / wide[r].gbps for r in members}
        self.near = ServerTimes.none(members, len(sizes.numels)).near if outer.flat else servers.near
        # What a region's server does to exchange each fragment.
        self.beyond_s = {r: _added(self.near[r].send, self.near[r].merge) for r in members}
        self.trip_s = {
            r: max(_added(_trips(sizes.wide.up, sizes.wide.down, wide[r]), self.beyond_s[r], servers.top.update))
            for r in members
        }

    def near_s(self, region: str) -> float:
        """Seconds of an update, and its answer, between a worker and its region's server."""
        if self.outer.flat:
            return 0.0
        local, line = self.sizes.local, self.inside[region]
        return max(_added(_trips(local.up, local.down, line), self.near[region].update))

    def together(self, own_s: Mapping[str, float], slowest: WorkerTiming) -> Paced:
        sizes, near, top, flows = self.sizes, self.near, self.servers.top.update, self.flows
        exposed_s = 0.0
        for f, local in enumerate(sizes.local.up):
            arrivals, after_s = [], []  # at the global server; from there until a region's workers have the answer
            for r, mine in self.members.items():
                near_s = 0.0 if self.outer.flat else self.inside[r].seconds(local, len(mine))
                before_s = near_s + len(mine) * near[r].update[f] + near[r].send[f]
                arrivals.append((before_s + self.wide[r].seconds(sizes.wide.up[f], flows[r]), flows[r] * top[f]))
                after_s.append(self.wide[r].seconds(sizes.wide.down[f], flows[r]) + near[r].merge[f] + near_s)
            taken_s = 0.0  # it takes them one after another, as they come
            for at_s, work_s in sorted(arrivals):
                taken_s = max(taken_s, at_s) + work_s
            exposed_s += _exposed(self.outer, [taken_s + max(after_s)], slowest.step_s)
        works_s = {r: len(mine) * sum(near[r].update) + sum(self.beyond_s[r]) for r, mine in self.members.items()}
        busiest_s = max(*works_s.values(), sum(flows.values()) * sum(top))
        round_s = max(own_s[slowest.name] + exposed_s, busiest_s, *self.carried_s.values())
        loads = {r: work_s / round_s for r, work_s in works_s.items()}
        return dict.fromkeys(own_s, round_s), dict.fromkeys(self.members, round_s), loads

    def each_by_itself(self, own_s: Mapping[str, float]) -> Paced:
        sizes, flat = self.sizes, self.outer.flat
        up_bytes, down_bytes = (sizes.wide.up, sizes.wide.down) if flat else (sizes.local.up, sizes.local.down)
        jobs: dict[str, float] = {}
        rounds: dict[str, float] = {}
        loads: dict[str, float] = {}
        for r, mine in self.members.items():
            line = self.wide[r] if flat else self.inside[r]
            update_s = self.servers.top.update if flat else self.near[r].update
            trips = _added(_trips(up_bytes, down_bytes, line), update_s)
            mine_s = {w.name: own_s[w.name] + _exposed(self.outer, trips, w.step_s) for w in mine}
            # The line carries every member's payload: if that takes longer than their jobs, it sets the pace.
            one_s = max(sum(up_bytes), sum(down_bytes)) * 8e-9 / line.gbps
            slower = max(1.0, one_s * sum(1 / job for job in mine_s.values()))
            rate = sum(1 / job for job in mine_s.values()) / slower  # updates a second
            if flat:
                rounds[r], loads[r] = len(mine) / rate, 0.0
            else:
                updates = updates_per_send(self.outer) or len(mine)
                # A fragment's exchanges follow each other, and the link carries all fragments.
                shortest_s = max(self.trip_s[r], self.carried_s[r])
                rounds[r] = max(updates / rate, shortest_s)
                loads[r] = rate * sum(update_s) + sum(self.beyond_s[r]) / rounds[r]
                if loads[r] > 1:  # its workers wait for it
                    slower *= loads[r]
                    rounds[r] = max(updates / rate * loads[r], shortest_s)
            jobs |= {name: job * slower for name, job in mine_s.items()}
        return jobs, rounds, loads


def stops(outer: OuterConfig, fragments: int, steps: int) -> tuple[int, int]:
    """Count how often a job settles and refreshes, as `geotrain.outer.exchange` does.

    Every delta that leaves settles, and so does every answer that is adopted, which then refreshes. What happens
    after the same inner step is settled once: the second finds nothing under way. No answer is taken to be late.
    """
    return _stops(fragments, steps, min(steps, outer.overlap.steps))  # adopted before the next delta, at the latest


@lru_cache(maxsize=4096)
def _stops(fragments: int, steps: int, tau: int) -> tuple[int, int]:
    sent = [step for step in range(1, steps + 1) if fragments_due(range(fragments), steps, step)]
    return len({(step + after) % steps for step in sent for after in (0, tau)}), len(sent)


def _added(*columns: Sequence[float]) -> list[float]:
    """Add up the numbers of each fragment."""
    return [sum(each) for each in zip(*columns, strict=True)]


def _trips(up_bytes: Sequence[int], down_bytes: Sequence[int], line: Line) -> list[float]:
    """Seconds that each fragment's exchange takes, up and down."""
    return [line.seconds(up) + line.seconds(down) for up, down in zip(up_bytes, down_bytes, strict=True)]


def _exposed(outer: OuterConfig, trips_s: Sequence[float], step_s: float) -> float:
    """Seconds of these exchanges that the overlap does not hide; nothing where training goes on without a late
    answer."""
    if outer.overlap.late == "continue":
        return 0.0
    return sum(max(0.0, trip_s - outer.overlap.steps * step_s) for trip_s in trips_s)
