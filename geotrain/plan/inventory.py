"""The planner's inputs: the hosts of each region, and the settings that the user has fixed (pins)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from geotrain.config import (
    Architecture,
    ClusterConfig,
    ConfigError,
    DeviceConfig,
    HostConfig,
    RegionConfig,
    RunConfig,
)
from geotrain.plan.model.network import LinkTable

CUTS = ("tensor", "pipeline", "sequence", "context", "expert")  # keys of `parallel` that a plan chooses
Objective = Literal["speed", "cost"]


class PlanError(ConfigError):
    """No plan is possible. Says what stands in the way, by how much, and what would help."""


@dataclass(frozen=True)
class Pins:
    """Keys that the user wrote into the run file; the plan keeps them. outer: keys of the outer block."""

    tensor: int | None = None
    pipeline: int | None = None
    sequence: bool | None = None
    context: int | None = None
    expert: int | None = None
    recompute: str | None = None
    outer: frozenset[str] = frozenset()
    global_region: str | None = None

    @property
    def cuts(self) -> list[str]:
        """Pinned keys of the parallel layout."""
        return [cut for cut in CUTS if getattr(self, cut) is not None]

    def without_parallel(self) -> Pins:
        return replace(self, tensor=None, pipeline=None, sequence=None, context=None, expert=None)


def pins_of(raw: Mapping[str, Any], global_region: str | None = None) -> Pins:
    """Find the pins of a run file. raw: its JSON. The micro-batch is no pin: DeepSpeed's block must always state
    one."""
    parallel, outer = raw.get("parallel", {}), raw.get("outer", {})
    return Pins(
        **{cut: parallel.get(cut) for cut in CUTS},
        recompute=raw.get("model", {}).get("recompute"),
        outer=frozenset(outer) | {f"rule.{key}" for key in outer.get("rule", {})},
        global_region=global_region,
    )


@dataclass(frozen=True)
class Host:
    """A host that may be used. slots: accelerators that it has."""

    region: str
    host: str
    slots: int
    kind: str
    device: DeviceConfig = field(compare=False)

    def config(self, home: str, slots: int) -> HostConfig:
        """Cluster file entry of this host for a worker whose region is `home`."""
        return HostConfig(
            host=self.host, slots=slots, device=self.kind, region=None if self.region == home else self.region
        )


@dataclass(frozen=True)
class PlanTask:
    """The planner's inputs. run: settings that are not pinned are replaced. imbalance: load of the fullest expert
    rank over the mean (`geotrain.plan.model.work.Work`)."""

    run: RunConfig
    pins: Pins
    cluster: ClusterConfig
    architecture: Architecture
    network: LinkTable
    hosts: Mapping[str, Sequence[Host]]
    imbalance: float = 1.0

    @property
    def batch(self) -> int:
        return self.run.samples_per_step

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.run.data.sequence_length

    def with_recompute(self, recompute: str) -> PlanTask:
        model = self.run.model.model_copy(update={"recompute": recompute})
        return replace(self, run=self.run.model_copy(update={"model": model}))


def hosts_of(region: RegionConfig) -> tuple[HostConfig, ...]:
    """List the hosts that a plan may use in a region: its inventory; without one, the hosts of its workers."""
    return region.hosts or tuple(h for w in region.workers for h in w.hosts)


def task_of(run: RunConfig, pins: Pins, cluster: ClusterConfig, imbalance: float = 1.0) -> PlanTask:
    """Build the planner's inputs. Raises ConfigError where a host names no device, UnsupportedModelError."""
    network = LinkTable(cluster)
    found: dict[str, list[Host]] = {}
    for region in cluster.regions:
        hosts = hosts_of(region)
        names = [h.host for h in hosts]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise PlanError(f"region {region.name!r}: hosts names {', '.join(twice)} twice; add up its slots")
        for host in hosts:
            device = network.device(host, f"region {region.name!r}")
            place = host.region or region.name
            found.setdefault(place, []).append(Host(place, host.host, host.slots, str(host.device), device))
    known = [r.name for r in cluster.regions]
    if pins.global_region is not None and pins.global_region not in known:
        raise PlanError(f"--pin-global {pins.global_region}: no such region; regions: {', '.join(known)}")
    return PlanTask(run, pins, cluster, run.architecture, network, found, imbalance)
