"""A world as plain data: who computes where and how fast, over which links, and what goes wrong when."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from geotrain.config import ClusterConfig, ConfigError
from geotrain.simulate.links import LinkSpec, StepShape

LOCAL = LinkSpec(gbps=100.0, shared=False)


@dataclass(frozen=True)
class WorkerSpec:
    """step_s: seconds of one inner step. away: (from_s, to_s) spans in which it is dead; first span from 0: it joins
    late. Its next life begins at to_s."""

    name: str
    step_s: float
    away: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class RegionSpec:
    """link: to the global server. local: between its workers and its region server."""

    name: str
    workers: tuple[WorkerSpec, ...]
    link: LinkSpec
    local: LinkSpec = LOCAL


@dataclass(frozen=True)
class RingSpec:
    """Exchanges are a ring all-reduce of all workers: `geotrain.simulate.links.Ring`."""

    link: LinkSpec
    factor: float
    hops: int = 1
    shape: StepShape | None = None


@dataclass(frozen=True)
class WorldSpec:
    """home: the region that the global server stands in, if in any. trunk: a link that all other regions share on
    their way to it.
    ring: what a flat synchronous run exchanges over, in place of links to the global server.
    speeds_known: measured before the run: the first leases are cut by all workers' speeds already. Otherwise, as in
    production, a speed is known once its worker has trained a job.
    """

    regions: tuple[RegionSpec, ...]
    seed: int = 0
    home: str | None = None
    trunk: LinkSpec | None = None
    ring: RingSpec | None = None
    speeds_known: bool = True

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        return tuple(w for r in self.regions for w in r.workers)

    def with_links(self, **changes: Any) -> WorldSpec:
        """Every region's link changed alike."""
        return replace(self, regions=tuple(replace(r, link=replace(r.link, **changes)) for r in self.regions))

    def without(self, region: str) -> WorldSpec:
        """One region less. Raises ValueError for the last one, or one that is not there."""
        left = tuple(r for r in self.regions if r.name != region)
        if len(left) == len(self.regions) or not left:
            raise ValueError(
                f"cannot leave out region {region!r}; regions: {', '.join(r.name for r in self.regions)}"
            )
        return replace(self, regions=left)


@dataclass(frozen=True)
class Environment:
    """A published environment: a world, and what is trained in it.

    numel: parameters of the model. steps: inner steps of all workers together. ring_gbps: the slowest hop of the
    best flat ring through all regions.
    """

    world: WorldSpec
    numel: int
    samples_per_step: int
    steps: int
    ring_gbps: float

    @property
    def compute_bound_s(self) -> float:
        return self.steps / sum(1 / w.step_s for w in self.world.workers)


def load_environment(path: str | Path) -> Environment:
    """HALoS's simulated environment (arXiv 2506.04531). Its step time is that of the fastest worker; the others'
    follow from their speeds relative to it. A message has its region pair's whole bandwidth for itself."""
    data = json.loads(Path(path).read_text())
    fastest = max(speed for row in data["worker_speed"] for speed in row)
    home, latency_s = data["global_server_region"], data["latency_s"]
    gbps = data["bandwidth_gbps"]
    regions = tuple(
        RegionSpec(
            f"region-{r}",
            tuple(
                WorkerSpec(f"worker-{r}-{i}", data["step_time_s_at_speed_1"] * fastest / speed)
                for i, speed in enumerate(row)
            ),
            LinkSpec(gbps[r][home], latency_s, shared=False),
            LinkSpec(gbps[r][r], latency_s if r != home else 0.0, shared=False),
        )
        for r, row in enumerate(data["worker_speed"])
    )
    count = len(regions)
    around = [gbps[r][(r + 1) % count] for r in range(count)]
    workers = sum(len(r.workers) for r in regions)
    return Environment(
        WorldSpec(regions, home=f"region-{home}"),
        data["model_parameters"],
        data["local_batch"],
        data["iterations"] * workers,
        min(around),
    )


def ring_factor(members: int) -> float:
    """Bytes that each hop of a ring all-reduce carries, over the bytes that are reduced."""
    return 2 * (members - 1) / members


def world_of_cluster(cluster: ClusterConfig, step_s: dict[str, float], seed: int = 0) -> WorldSpec:
    """The world of a cluster file. step_s: seconds of an inner step of each worker.

    Raises ConfigError when a region's link to "global" is not described.
    """
    links = {name: link for link in cluster.links for name in link.regions if "global" in link.regions}
    regions = []
    for region in cluster.serving:
        if region.name not in links:
            raise ConfigError(
                f"cluster {cluster.name!r}: no link between region {region.name!r} and 'global' is described; "
                'add {"regions": ["' + region.name + '", "global"], "gbps": …, "rtt_ms": …} to `links`'
            )
        link = links[region.name]
        workers = tuple(WorkerSpec(w.name, step_s[w.name]) for w in region.workers)
        regions.append(RegionSpec(region.name, workers, LinkSpec(link.gbps, link.rtt_ms / 2000)))
    return WorldSpec(tuple(regions), seed)


def synthetic_world(
    regions: int, workers: int, step_s: float, link: LinkSpec, spread: float = 1.0, seed: int = 0
) -> WorldSpec:
    """Regions of equal size. spread: the slowest worker's step time over the fastest's; evenly in between."""
    total = max(regions * workers - 1, 1)

    def worker(r: int, i: int) -> WorkerSpec:
        place = (r * workers + i) * 7919 % (total + 1) / total  # speeds are dealt over the regions
        return WorkerSpec(f"worker-{r}-{i}", step_s * (1 + (spread - 1) * place))

    return WorldSpec(
        tuple(RegionSpec(f"region-{r}", tuple(worker(r, i) for i in range(workers)), link) for r in range(regions)),
        seed,
    )
