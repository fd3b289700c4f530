"""Describes the world that is simulated, as plain data: who computes where and how fast, over which links, and what
goes wrong at what time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from geotrain.config import Address, ClusterConfig, ConfigError, RunConfig
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.plan.model.server_hosts import fullest_share
from geotrain.plan.predict import RunPrediction
from geotrain.simulate.links import LinkSpec, Star

LOCAL = LinkSpec(gbps=100.0, shared=False)


@dataclass(frozen=True)
class WorkerSpec:
    """A simulated worker. step_s: seconds of one inner step. away: (from_s, to_s) spans in which the worker is dead;
    at to_s it starts again, as a new incarnation. A first span that begins at 0 makes it join late. The last three:
    as in `geotrain.plan.model.step.StepTime`."""

    name: str
    step_s: float
    away: tuple[tuple[float, float], ...] = ()
    settle_s: float = 0.0
    refresh_s: float = 0.0
    refreshes_all: bool = False


@dataclass(frozen=True)
class RegionSpec:
    """A simulated region. link: to the global server. local: between its workers and its region server. share: of
    the model, that the fullest of that server's shards has."""

    name: str
    workers: tuple[WorkerSpec, ...]
    link: LinkSpec
    local: LinkSpec = LOCAL
    share: float = 1.0


@dataclass(frozen=True)
class WorldSpec:
    """A simulated world. home: the region that the global server stands in, if in any. speeds_known: measured before
    the run: the first leases are cut by all workers' speeds already. Otherwise, as in production, a speed is known
    once its worker has trained a job. share: as of a region. encrypted: whether links are."""

    regions: tuple[RegionSpec, ...]
    home: str | None = None
    speeds_known: bool = True
    share: float = 1.0
    encrypted: bool = False

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        return tuple(w for r in self.regions for w in r.workers)

    def links(self) -> Star:
        """Lay the links between regions and the global server."""
        links = {r.name: r.link for r in self.regions}
        link_of = {m: r.name for r in self.regions for m in (r.name, *(w.name for w in r.workers))}
        return Star(links, link_of)

    def without(self, region: str) -> WorldSpec:
        """Return this world with one region less. Raises ValueError for the last one, or one that is not there."""
        left = tuple(r for r in self.regions if r.name != region)
        if len(left) == len(self.regions) or not left:
            names = ", ".join(r.name for r in self.regions)
            raise ValueError(f"cannot leave out region {region!r}; regions: {names}")
        return replace(self, regions=left)


def world_of_cluster(
    run: RunConfig, cluster: ClusterConfig, step_s: Mapping[str, float], predicted: RunPrediction | None = None
) -> WorldSpec:
    """Build the world of a cluster file. step_s: seconds of an inner step of each worker. predicted: gives what stops
    workers between steps, and the links inside regions; None: nothing does, and these are `LOCAL`.

    Raises ConfigError when a region's link to "global" is not described.
    """
    parameter_map = parameter_map_of(run)

    def share(shards: Sequence[Address]) -> float:
        return fullest_share(parameter_map, max(1, len(shards)))

    links = {name: link for link in cluster.links for name in link.regions if "global" in link.regions}
    regions = []
    for region in cluster.serving:
        if region.name not in links:
            raise ConfigError(
                f"cluster {cluster.name!r}: no link between region {region.name!r} and 'global' is described; "
                'add {"regions": ["' + region.name + '", "global"], "gbps": …, "rtt_ms": …} to `links`'
            )
        link = links[region.name]
        workers, local = tuple(WorkerSpec(w.name, step_s[w.name]) for w in region.workers), LOCAL
        if predicted is not None:
            steps = {w.name: predicted.workers[w.name].step for w in workers}
            workers = tuple(
                replace(w, settle_s=s.settle_s, refresh_s=s.refresh_s, refreshes_all=s.refreshes_all)
                for w, s in zip(workers, steps.values(), strict=True)
            )
            if line := predicted.inside.get(region.name):
                local = LinkSpec(line.gbps, line.latency_s)
        wide = LinkSpec(link.gbps, link.rtt_ms / 2000)
        regions.append(RegionSpec(region.name, workers, wide, local, share(region.shards)))
    encrypted = cluster.security is not None
    return WorldSpec(tuple(regions), share=share(cluster.global_shards), encrypted=encrypted)
