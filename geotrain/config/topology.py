"""A run on a cluster: who takes part, who speaks to whom, and with which settings.

It follows from the two configuration files alone, so every process computes the same one. Nobody else asks how many
levels a run has (tests/project/test_architecture.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.config.block import ConfigError
from geotrain.config.cluster import Address, ClusterConfig, WorkerConfig
from geotrain.config.deepspeed import completed
from geotrain.config.run import ParallelConfig, PrecisionConfig, RunConfig


@dataclass(frozen=True)
class WorkerSetup:
    """A worker's effective settings: those of its own in the cluster file, laid over the run's; without "auto"."""

    config: WorkerConfig
    parallel: ParallelConfig
    deepspeed: dict[str, Any]
    precision: PrecisionConfig

    @staticmethod
    def of(run: RunConfig, worker: WorkerConfig) -> WorkerSetup:
        # DeepSpeed's blocks are replaced whole, not merged key by key.
        block = completed({**run.deepspeed, **worker.deepspeed}, run.total_steps)
        return WorkerSetup(worker, worker.parallel or run.parallel, block, worker.precision or run.precision)


class Topology:
    """The members of a run, their servers and their settings.

    With two levels, workers speak to their region's server, and region servers to the global server. With one level
    (a flat run) workers speak to the global server, and there are no region servers.

    regions: region with workers → names of its workers. home: worker → its region. members: member of the global
    server → the workers that it speaks for. servers: name of each server → its address, the global one first.
    """

    def __init__(self, run: RunConfig, cluster: ClusterConfig) -> None:
        self.run, self.cluster, self.flat = run, cluster, run.outer.flat
        self.regions = {r.name: tuple(w.name for w in r.workers) for r in cluster.serving}
        self.home = {worker: region for region, workers in self.regions.items() for worker in workers}
        self.members = {worker: (worker,) for worker in self.home} if self.flat else self.regions
        self.servers: dict[str, Address] = {GLOBAL: cluster.global_server}
        if not self.flat:
            self.servers.update({region.name: region.server for region in cluster.serving})

    @property
    def workers(self) -> dict[str, WorkerSetup]:
        """The workers by name, in the cluster file's order."""
        return {w.name: WorkerSetup.of(self.run, w) for region in self.cluster.serving for w in region.workers}

    def region_of(self, member: str) -> str:
        """Region of a worker; of a region, itself. Raises ConfigError."""
        if member not in self.home and member not in self.regions:
            names = ", ".join(name for region, workers in self.regions.items() for name in (region, *workers))
            raise ConfigError(f"{member!r} is no worker or region of this run; there are {names}")
        return self.home.get(member, member)

    def server_of(self, member: str) -> str:
        """Name of the server that this worker or region speaks to. Raises ConfigError."""
        region = self.region_of(member)
        return GLOBAL if self.flat or member == region else region
