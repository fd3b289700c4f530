"""Worlds that studies simulate: HALoS's published environment, and synthetic worlds of equal regions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks import DATA
from geotrain.parameters.parameter_map import Parameter, ParameterMap
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import RegionSpec, WorkerSpec, WorldSpec

HALOS = DATA / "halos_environment.json"


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
        return self.bound_s(self.steps)

    def bound_s(self, steps: float) -> float:
        """Seconds that all workers together need for so many inner steps if nobody ever waits."""
        return steps / sum(1 / w.step_s for w in self.world.workers)


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


def synthetic_world(regions: int, workers: int, step_s: float, link: LinkSpec, spread: float = 1.0) -> WorldSpec:
    """Regions of equal size. spread: the slowest worker's step time over the fastest's; evenly in between."""
    total = max(regions * workers - 1, 1)

    def worker(r: int, i: int) -> WorkerSpec:
        place = (r * workers + i) * 7919 % (total + 1) / total  # speeds are dealt over the regions
        return WorkerSpec(f"worker-{r}-{i}", step_s * (1 + (spread - 1) * place))

    return WorldSpec(
        tuple(RegionSpec(f"region-{r}", tuple(worker(r, i) for i in range(workers)), link) for r in range(regions))
    )


def one_block(numel: int) -> ParameterMap:
    """The layout of a model of which only the size is known."""
    return ParameterMap([Parameter("model", (numel,), None, "normal")])
