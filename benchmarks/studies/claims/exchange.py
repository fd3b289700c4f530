"""Describe what each method of the published environment exchanges over, and how many bytes cross between its
regions.

The methods themselves are run files of configs/runs/baselines.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from benchmarks.studies.environments import Environment, ring_factor
from geotrain.config import OuterConfig
from geotrain.outer.codec import make_codec
from geotrain.simulate.links import LinkSpec, Star, Way
from geotrain.simulate.spec import RegionSpec, WorkerSpec, WorldSpec

Exchange = Literal["servers", "worker-a-region", "ring", "one-worker"]

AT_ONCE = LinkSpec(gbps=1e9, shared=False)  # stands for no link: the only worker holds its own server

# Methods of configs/runs/baselines that do not exchange through servers, or whose workers are not one device each.
EXCHANGE: dict[str, Exchange] = {
    "data-parallel": "one-worker",
    "diloco": "ring",
    "diloco-dylu": "ring",
    "region-momentum-one-worker": "worker-a-region",
    "region-momentum-one-worker-2bit": "worker-a-region",
}


def world_for(method: str, outer: OuterConfig, environment: Environment) -> WorldSpec:
    """The environment's world with the links that the method exchanges over."""
    exchange = EXCHANGE.get(method, "servers")
    if exchange == "ring":
        return ring_world(environment)
    if exchange == "one-worker":
        return data_parallel_world(outer, environment)
    if exchange == "worker-a-region":
        return regional_world(outer, environment)
    return environment.world


def devices_of_a_worker(exchange: Exchange, environment: Environment) -> int:
    """Number of the environment's devices that a worker of the method's world stands for. Raises ValueError when they
    are not as many in each region."""
    regions = environment.world.regions
    if exchange == "one-worker":
        return len(environment.world.workers)
    if exchange == "worker-a-region":
        (devices,) = {len(region.workers) for region in regions}
        return devices
    return 1


class Ring(Star):
    """A flat ring all-reduce of all workers, who hand in together: nothing waits on its way up, and the way down
    takes the ring's time."""

    def arrival(self, way: Way, now: float, member: str, size_bytes: int) -> float:
        return now if way == "up" else super().arrival(way, now, member, size_bytes)

    def control_arrival(self, way: Way, now: float, member: str) -> float:
        return now


class RingWorld(WorldSpec):
    """A world whose workers exchange over the ring that is the link of each region."""

    def links(self) -> Star:
        link = self.regions[0].link
        return Ring({"ring": link}, {w.name: "ring" for w in self.workers})


def ring_world(environment: Environment) -> RingWorld:
    """The environment's workers on the best flat ring through all regions."""
    members, world = len(environment.world.workers), environment.world
    link = LinkSpec(
        gbps=environment.ring_gbps / ring_factor(members),
        latency_s=2 * (members - 1) * max(r.link.latency_s for r in world.regions),
        shared=False,
    )
    return RingWorld(**vars(replace(world, regions=tuple(replace(region, link=link) for region in world.regions))))


def data_parallel_world(outer: OuterConfig, environment: Environment) -> WorldSpec:
    """Synchronous data parallelism over all devices: one worker, whose step is the slowest device's and a flat ring
    all-reduce of its gradient, coded as `outer.up` says."""
    size_bytes = make_codec(outer.up).encoded_bytes(environment.numel)
    ring = ring_world(environment).regions[0].link
    reduce_s = size_bytes / ring.bytes_per_s + ring.latency_s
    step_s = max(w.step_s for w in environment.world.workers) + reduce_s
    region = RegionSpec("everywhere", (WorkerSpec("everything", step_s),), AT_ONCE, AT_ONCE)
    return WorldSpec((region,))


def regional_world(outer: OuterConfig, environment: Environment) -> WorldSpec:
    """Make every region one worker, whose devices share each step's batch by their speed (as uneven micro-batches
    do), then all-reduce its gradient over the region's own network, coded as `outer.local` says."""
    size_bytes = make_codec(outer.local).encoded_bytes(environment.numel)

    def joined(region: RegionSpec) -> RegionSpec:
        members = len(region.workers)
        ring_s = ring_factor(members) * size_bytes / region.local.bytes_per_s
        ring_s += 2 * (members - 1) * region.local.latency_s
        compute_s = members / sum(1 / w.step_s for w in region.workers)
        return replace(region, workers=(WorkerSpec(f"{region.name}-whole", compute_s + ring_s),))

    return replace(environment.world, regions=tuple(joined(region) for region in environment.world.regions))


def wide_bytes(exchange: Exchange, report: dict[str, Any], outer: OuterConfig, environment: Environment) -> float:
    """Bytes that crossed from one region to another, counted alike for all methods. report: of the world that ran.

    A ring goes around region by region, so that as many of its hops cross as there are regions. Of messages to and
    from the global server those count that its own region did not send or receive.
    """
    regions = environment.world.regions
    members = len(environment.world.workers)
    crossing = len(regions) if len(regions) > 1 else 0
    links = report["links"]
    if exchange == "ring":
        return ring_factor(members) * links["ring down"]["sent_bytes"] * crossing / members
    if exchange == "one-worker":  # the ring is a part of the worker's step, and no message
        hop_bytes = ring_factor(members) * make_codec(outer.up).encoded_bytes(environment.numel)
        return report["committed_steps"] * hop_bytes * crossing
    far = {f"{r.name} {way}" for r in regions for way in ("up", "down") if r.name != environment.world.home}
    return sum(usage["sent_bytes"] for name, usage in links.items() if name in far)
