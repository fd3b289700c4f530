"""Whether a simulation is right: what a real run's servers applied, and when, beside what its simulation's did."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from geotrain.config import ClusterConfig, RunConfig
from geotrain.outer.layout import Layout
from geotrain.outer.messages import UpdatePart
from geotrain.outer.server import Server
from geotrain.simulate.clock import Clock
from geotrain.simulate.spec import world_of_cluster
from geotrain.simulate.world import World, timing_task


@dataclass(frozen=True)
class Applied:
    """seconds: Unix time of a real run; virtual ones since training began in a simulated run. site: the server."""

    seconds: float
    site: str
    member: str
    sequence: int


def simulated(run: RunConfig, cluster: ClusterConfig, layout: Layout) -> list[Applied]:
    """Every update that the servers of this run would apply, in order of time; an inner step takes each worker its
    `min_step_s`, and all begin once the last has its first weights."""
    paces = {w.name: w.min_step_s for region in cluster.regions for w in region.workers}
    steps = run.data.train_samples // run.samples_per_step
    world = World(world_of_cluster(cluster, paces), timing_task(run.outer, layout, steps, run.samples_per_step))
    applied: list[Applied] = []
    _note("global", world.top.server, world.clock, applied)
    for name, node in world.regions.items():
        _note(name, node.server, world.clock, applied)
    world.run()
    begin_s = min(worker.job_starts_s[0] for worker in world.workers.values())
    return [Applied(a.seconds - begin_s, a.site, a.member, a.sequence) for a in applied]


def real(folder: Path, event: str = "UpdateApplied") -> list[Applied]:
    """The same from the event logs of a run's servers (workers of one rank)."""
    found = []
    for path in sorted((folder / "servers").glob("*/events.jsonl")):
        for said in map(json.loads, path.read_text().splitlines()):
            if said["event"] == event:
                found.append(Applied(said["time_s"], path.parent.name, said["member"], said.get("sequence", 0)))
    return sorted(found, key=lambda a: a.seconds)


def least_gap_s(applied: list[Applied]) -> float:
    """The shortest time between two updates of different members at one server: how much a real run may be late
    before its order is another."""
    gaps = [
        later.seconds - sooner.seconds
        for site in {a.site for a in applied}
        for sooner, later in pairwise([a for a in applied if a.site == site])
        if sooner.member != later.member
    ]
    return min(gaps, default=float("inf"))


def _note(site: str, server: Server, clock: Clock, applied: list[Applied]) -> None:
    original: Callable[[UpdatePart], Any] = server.on_part

    def on_part(part: UpdatePart) -> Any:
        applied.append(Applied(clock.now, site, part.member, part.sequence))
        return original(part)

    server.on_part = on_part  # type: ignore[method-assign]
