"""Outer settings that links and servers bear: where the global server stands, the outer loop's H, K, codecs and
overlap, and how many shards a server has.

The global server goes where the slowest region exchanges the whole model soonest (every region is compared; of
equals, the one with the least sum of times wins).

The outer settings are then found among all combinations of the tables below, except for what is pinned, in the order
of a bound on their steps between exchanges. A setting
is good enough when the workers reach the utilization asked for, the links stay below BUSY, and traffic costs no more
than TRAFFIC of the accelerators' price. Among those the best has the fewest inner steps between two exchanges with
the global server (the freshest weights; docs/algorithms.md), then the more precise codecs, then less overlap, then
the smaller H. In a run so short that answers wait for others' deltas, settings with which regions exchange every job
are tried, too: τ steps have to leave an update and its answer the time to travel. Where no setting is good enough,
the nearest one is taken, and the plan says so.

A server's shards are as few as keep it at rest for half of the time, since members do not send evenly spread, and
fit the memory of their hosts (`geotrain.plan.model.server_hosts`); each fragment is cut into as many pieces, so that
all of them share its work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import inf
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.config import (
    Architecture,
    ClusterConfig,
    ConfigError,
    FragmentConfig,
    OuterConfig,
    OverlapConfig,
    codec_config,
)
from geotrain.parameters.parameter_map import ParameterMap, canonical_parameters
from geotrain.plan.grouping import Workers
from geotrain.plan.inventory import PlanError, PlanTask
from geotrain.plan.layouts import home_of
from geotrain.plan.model.answering import settled, updates_per_send, waits
from geotrain.plan.model.network import Line
from geotrain.plan.model.rounds import WorkerTiming, pace, server_times, worker_timing
from geotrain.plan.model.server_hosts import PER_HOST, fullest_share
from geotrain.plan.model.server_rates import MEASURED
from geotrain.plan.model.sizes import Sizes

BUSY = 0.8  # of a link's rate that payload may take
TRAFFIC = 0.1  # of the accelerators' price that traffic may cost
LOCAL_STEPS = (4, 8, 16, 32, 64, 128, 256, 512)
UPDATES = (2, 4, 8, 16, 32)
WIDE = tuple(codec_config(name) for name in ("bf16", "int8", "int4"))  # the more precise first
LOCAL = tuple(codec_config(name) for name in ("fp32", "bf16"))
OVERLAPS = (1, 2, 4, 8, 16)  # τ, or 0; from 1 on, the model is streamed in fragments
FRAGMENTS = 8
SHARDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # 1: in the server's own process
RANKED = 2.0  # times the steps of the best: further settings are not looked at
WAITING = 0.98  # steps between exchanges, where answers wait: of as many, they end lower than H / 2 and K 2
SERVER_BUSY = 0.5  # of its time that a server may work


@dataclass(frozen=True)
class Setting:
    """An outer block with what it leads to. utilization: the share of its time that the worst worker does not wait.
    busy: of the fullest link. steps: inner steps between two exchanges with the global server, of the region that
    makes most. traffic_usd_per_hour: between regions and the global server. misses: by how much the limits are
    missed, 0 if they are not. shards: of each server. server_busy: of the busiest server, the time that it works."""

    outer: OuterConfig
    shards: int
    utilization: float
    busy: float
    server_busy: float
    steps: float
    traffic_usd_per_hour: float
    misses: float

    @property
    def order(self) -> tuple[Any, ...]:
        o = self.outer
        coarse = (WIDE.index(o.up) if o.up in WIDE else 0, o.local != LOCAL[0])
        steps = round(self.steps * (WAITING if waits(o) else 1.0), 6)
        return round(self.misses, 6), steps, coarse, self.shards, o.overlap.steps, o.local_steps


@dataclass(frozen=True)
class ServerPlace:
    """The global server in a region: seconds of a whole-model exchange, of the slowest region and of all together."""

    region: str
    worst_s: float
    total_s: float


def places(task: PlanTask, homes: Sequence[str], model_bytes: int) -> list[ServerPlace]:
    """List where the global server could stand, the best first: each region, and, if the cluster file has links to
    "global", where it is now; only that if `global_ssh` is set.

    homes: regions with workers. Raises PlanError when a link's figure is missing wherever it would stand.
    """
    cluster, pinned = task.cluster, task.pins.global_region
    allowed = [region.name for region in cluster.regions] if pinned is None else [pinned]
    if cluster.global_ssh is not None:
        if pinned is not None and cluster.region(pinned).ssh != cluster.global_ssh:
            raise PlanError(
                f"--pin-global {pinned} contradicts cluster {cluster.name!r}, which has the global server on "
                f"global_ssh = {cluster.global_ssh!r}; leave one of the two out"
            )
        allowed = [GLOBAL]
    elif pinned is None and any(GLOBAL in link.regions for link in cluster.links):
        allowed.append(GLOBAL)
    found, missing = [], ""
    for region in allowed:
        try:
            times = [2 * line_to(task, home, region).seconds(model_bytes) for home in homes]
        except ConfigError as error:
            missing = missing or str(error)
            continue
        found.append(ServerPlace(region, max(times), sum(times)))
    if not found:
        raise PlanError(missing)
    return sorted(found, key=lambda place: (place.worst_s, place.total_s))


def line_to(task: PlanTask, home: str, place: str) -> Line:
    """Find the line from a region to the global server, were that in region `place`; "global": where the cluster file
    puts it."""
    return task.network.between_regions(home, place) if home != place else task.network.inside(home)


def settings(
    task: PlanTask, workers: Workers, place: str, target: float, usd_per_hour: float | None, each_steps: float
) -> list[Setting]:
    """Rank all outer settings, the best first. target: utilization. usd_per_hour: of the accelerators, if they have
    prices. each_steps: inner steps of a worker in the run."""
    timings = [worker_timing(str(i), home_of(w.layout.hosts), w.layout.step) for i, w in enumerate(workers)]
    homes = list(dict.fromkeys(t.region for t in timings))
    wide = {home: line_to(task, home, place) for home in homes}
    near = {home: task.network.inside(home) for home in homes}
    rates = MEASURED.over(task.cluster.security is not None)
    hosts = min(len(shard_hosts(task.cluster, region)) for region in (place, *homes))
    found, most = list[Setting](), inf
    for least, outer in sorted(
        ((least_steps(o, timings), o) for o in outers(task, each_steps)), key=lambda entry: entry[0]
    ):
        if least > most:
            break
        numels = fragment_sizes(task.architecture, outer.fragments.layers_per_fragment)
        sizes = Sizes(outer, numels)
        for shards in numbers_of_shards(task, outer, numels, hosts):
            share = _share(task.architecture, cut(task, outer, shards).fragments, shards)
            servers = server_times(outer, sizes, dict.fromkeys(homes, share), share, rates)
            paced = pace(outer, sizes, timings, wide, near, servers)
            server_busy = max(paced.global_busy, *(region.server_busy for region in paced.regions.values()))
            if server_busy <= SERVER_BUSY:
                break
        utilization = min(1 - w.wait_s / w.job_s for w in paced.workers.values())
        busy = max(region.busy for region in paced.regions.values())
        steps = max(paced.regions[t.region].round_s / t.step_s for t in timings)
        traffic = sum(
            (r.up_bytes + r.down_bytes) / r.round_s * 3600 / 1e9 * wide[name].usd_per_gb
            for name, r in paced.regions.items()
        )
        dear = 0.0 if not usd_per_hour else max(0.0, traffic / usd_per_hour - TRAFFIC)
        late = max(0.0, server_busy - SERVER_BUSY)
        if waits(outer):
            tau = outer.overlap.steps
            late += max(0.0, *(paced.regions[t.region].answer_s / (tau * t.step_s) - 1 for t in timings))
        misses = max(0.0, target - utilization) + max(0.0, busy - BUSY) + dear + late
        outer = cut(task, outer, shards)
        found.append(Setting(outer, shards, utilization, busy, server_busy, steps, traffic, misses))
        if misses <= 0:
            most = min(most, RANKED * steps)
    return sorted(found, key=lambda setting: setting.order)


def least_steps(outer: OuterConfig, workers: Sequence[WorkerTiming]) -> float:
    """Bound from below the inner steps between two exchanges with the global server: no worker ever waits."""
    fastest, found = min(w.step_s for w in workers), 0.0
    for region in dict.fromkeys(w.region for w in workers):
        mine = [w.step_s for w in workers if w.region == region]
        rate = sum(1 / (outer.local_steps * (fastest if outer.scale_local_steps else step_s)) for step_s in mine)
        each = None if outer.flat else updates_per_send(outer)
        found = max(found, (each or len(mine)) / rate / min(mine))
    return found


def shard_hosts(cluster: ClusterConfig, region: str) -> tuple[str, ...]:
    """Hosts that shards of servers in this region may be on; "global": where the cluster file puts the global
    server. Without a list the server's own."""
    site = cluster.sites[region]
    listed = cluster.global_hosts if region == GLOBAL else cluster.region(region).server_hosts
    return tuple(host.host for host in listed) or (site.server.host,)


def numbers_of_shards(task: PlanTask, outer: OuterConfig, numels: Sequence[int], hosts: int = 1) -> list[int]:
    """List the numbers of shards to try, the smallest first: that of the cluster file, or while each has a whole
    chunk and a fragment, and hosts no more than PER_HOST of a server. hosts: of the server that has fewest."""
    if given := len(task.cluster.global_shards):
        return [given]
    chunks = sum(numels) // outer.fragments.chunk_elements
    numbers = [number for number in SHARDS if number <= min(max(1, chunks), PER_HOST * hosts)]
    of = {number: _map_of(task.architecture, cut(task, outer, number).fragments).fragments for number in numbers}
    return [number for number in numbers if number <= len(of[number])]


def cut(task: PlanTask, outer: OuterConfig, shards: int) -> OuterConfig:
    """Cut each fragment into as many pieces as servers have shards, unless the run file cuts them."""
    if task.run.outer.fragments.pieces > 1:
        return outer
    return outer.model_copy(update={"fragments": outer.fragments.model_copy(update={"pieces": shards})})


def outers(task: PlanTask, each_steps: float) -> Iterator[OuterConfig]:
    """List the outer blocks that keep the pinned keys, for workers of so many steps in the run."""
    base, pins = task.run.outer, task.pins.outer
    layers = base.fragments.layers_per_fragment or max(1, -(-task.architecture.layers // FRAGMENTS))
    overlaps: list[dict[str, Any]] = []
    for steps, late in [(0, "wait"), *product(OVERLAPS, ("wait", "continue"))]:
        block: dict[str, Any] = {}
        if "overlap" not in pins:
            adopt = "rebase" if steps else "replace"
            block["overlap"] = OverlapConfig.model_validate({"steps": steps, "late": late, "adopt": adopt})
        if "fragments" not in pins and steps:
            block["fragments"] = FragmentConfig(layers_per_fragment=layers)
        if block not in overlaps:
            overlaps.append(block)
    wide: list[dict[str, Any]] = [{}]
    if not {"up", "down"} & pins:
        codecs = WIDE[:1] if base.flat else WIDE  # ranks that share a parameter take no coarser weights
        wide = [{"up": codec, "down": codec} for codec in codecs]
    local: list[dict[str, Any]] = [{}]
    if "local" not in pins and not base.flat:
        local = [{"local": codec} for codec in LOCAL]
    jobs: list[dict[str, Any]] = [{}] if "local_steps" in pins else [{"local_steps": h} for h in LOCAL_STEPS]
    once = "rule.updates_per_send" in pins or updates_per_send(base) is None or base.flat
    updates: list[dict[str, Any]] = (
        [{}] if once else [{"rule": base.rule.model_copy(update={"updates_per_send": k})} for k in UPDATES]
    )
    for parts in product(overlaps, wide, local, jobs, updates):
        outer = base.model_copy(update={key: value for part in parts for key, value in part.items()})
        known = settled(outer, each_steps / outer.local_steps)
        if waits(known):
            outer = outer if "rule.answers" in pins else known  # of a run that is on it was settled as it began
            if not outer.overlap.steps:
                continue
        elif "overlap" not in pins and outer.overlap.late == "continue":
            continue
        whole = {outer.down.name, outer.local.name} <= {"fp32", "bf16"}  # which leaves no mirrors
        if outer.overlap.steps < outer.local_steps and not (whole and outer.mirrors == "disk"):
            yield outer


@lru_cache(maxsize=64)
def fragment_sizes(architecture: Architecture, layers_per_fragment: int | None) -> tuple[int, ...]:
    """Count the elements of each fragment."""
    return tuple(f.numel for f in ParameterMap(canonical_parameters(architecture), layers_per_fragment).fragments)


@lru_cache(maxsize=64)
def _map_of(architecture: Architecture, fragments: FragmentConfig) -> ParameterMap:
    f = fragments
    return ParameterMap(canonical_parameters(architecture), f.layers_per_fragment, f.chunk_elements, f.pieces)


@lru_cache(maxsize=64)
def _share(architecture: Architecture, fragments: FragmentConfig, shards: int) -> float:
    return fullest_share(_map_of(architecture, fragments), shards)
