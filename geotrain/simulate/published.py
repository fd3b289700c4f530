"""The published environment's worlds: what each baseline exchanges over. The methods themselves are run files."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from geotrain.config import OuterConfig
from geotrain.outer.codec import make_codec
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import Environment, RegionSpec, RingSpec, WorkerSpec, WorldSpec, ring_factor

Exchange = Literal["servers", "ring", "one-worker"]

AT_ONCE = LinkSpec(gbps=1e9, shared=False)  # no link at all: a server within its only worker

# Over what each method of configs/runs/baselines exchanges; all others go through servers.
EXCHANGE: dict[str, Exchange] = {"data-parallel": "one-worker", "diloco": "ring", "diloco-dylu": "ring"}


def world_for(method: str, outer: OuterConfig, environment: Environment) -> WorldSpec:
    """The environment's world as that method sees it."""
    exchange = EXCHANGE.get(method, "servers")
    if exchange == "ring":
        return replace(environment.world, ring=_ring(environment))
    if exchange == "one-worker":
        return data_parallel_world(outer, environment)
    return environment.world


def data_parallel_world(outer: OuterConfig, environment: Environment) -> WorldSpec:
    """Synchronous data parallelism over all devices: one worker, whose step is the slowest device's and a flat ring
    all-reduce of its gradient, coded as `outer.up` says. Raises ValueError for a world with outages or deaths,
    which one worker cannot show."""
    workers = environment.world.workers
    if _outages(environment.world) or any(w.away for w in workers):
        raise ValueError("data parallelism as one worker knows no outages and no deaths")
    size_bytes = make_codec(outer.up).encoded_bytes(environment.numel)
    ring = _ring(environment)
    reduce_s = ring.factor * size_bytes / ring.link.bytes_per_s + ring.hops * ring.link.latency_s
    step_s = max(w.step_s for w in workers) + reduce_s
    region = RegionSpec("everywhere", (WorkerSpec("everything", step_s),), AT_ONCE, AT_ONCE)
    return WorldSpec((region,), environment.world.seed)


def _ring(environment: Environment) -> RingSpec:
    members = len(environment.world.workers)
    latency_s = max(r.link.latency_s for r in environment.world.regions)
    link = LinkSpec(environment.ring_gbps, latency_s, outages=_outages(environment.world))
    return RingSpec(link, ring_factor(members), 2 * (members - 1))


def _outages(world: WorldSpec) -> tuple[tuple[float, float], ...]:
    """When some region is cut off, and with it a ring through all of them."""
    merged: list[tuple[float, float]] = []
    for begin, back in sorted(span for region in world.regions for span in region.link.outages):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(back, merged[-1][1]))
        else:
            merged.append((begin, back))
    return tuple(merged)
