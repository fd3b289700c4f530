"""Compare a real run of processes over emulated links with its simulation: is the order of updates the same?

Three workers in two regions, whose paces (`min_step_s`) and links set the order of all updates. They wait until the
last has joined, and begin together.

    python -m benchmarks.agreement [--record]

Needs root, for the network namespaces. The last line printed is one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import command_line, report, units_by_ending
from benchmarks.processes import wait_for
from benchmarks.small_runs import cluster_file, run_file, write_files
from geotrain.commands.operate import LiveRun
from geotrain.config import load_cluster, load_run
from geotrain.emulate import wan
from geotrain.outer.messages import Message, UpdatePart
from geotrain.outer.server.server import Handled, Server
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.simulate.clock import Clock
from geotrain.simulate.spec import world_of_cluster
from geotrain.simulate.world import VirtualWorld, timing_task

PACE_S = {"eu": {"eu-0": 0.7, "eu-1": 1.7}, "us": {"us-0": 1.3}}  # least seconds of an inner step
LINKS = {"eu": (0.01, 100.0), "us": (0.01, 300.0)}  # Gbit/s, round trip in ms
STEPS, BATCH, LOCAL_STEPS = 20, 4, 2  # STEPS: of all workers
START_S = 300.0  # until all have joined, on a busy machine
END_S = 120.0  # for a run of about eleven seconds
STOP_S = 30.0  # for an orderly end, before the run is killed


@dataclass(frozen=True)
class Applied:
    """seconds: Unix time of a real run; virtual ones since training began in a simulated run. site: the server."""

    seconds: float
    site: str
    member: str
    sequence: int


def main() -> int:
    args = command_line(__doc__, quick={}).parse_args()
    why_not = wan.cannot_emulate()
    if why_not:
        print(f"agreement: {why_not}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="geotrain-agreement-") as folder:
        files = make_world(Path(folder))
        result = compared(simulated(files), launched(files))
    report("agreement", result, args, units_by_ending({"_s": "s"}), timed=False)
    return 0


def make_world(folder: Path) -> tuple[Path, Path]:
    """Data, run file and cluster file."""
    run = run_file(folder, "agreement", BATCH * STEPS, (BATCH, BATCH), (4, STEPS))
    run["outer"] = {
        "rule": {"name": "halos", "updates_per_send": 2}, "local_steps": LOCAL_STEPS, "scale_local_steps": False,
        "up": {"name": "int4"}, "down": {"name": "int4"},
    }  # fmt: skip
    workers = {region: {name: (1, pace_s) for name, pace_s in paces.items()} for region, paces in PACE_S.items()}
    return write_files(folder, run, cluster_file("agreement", workers, LINKS))


def simulated(files: tuple[Path, Path]) -> list[Applied]:
    """Simulate every update that the servers of this run would apply, in order of time.

    Inner steps take as long as each worker's `min_step_s` says. Time counts from the first worker's first job.
    """
    run, cluster = load_run(files[0]), load_cluster(files[1])
    paces = {w.name: w.min_step_s for region in cluster.regions for w in region.workers}
    steps = run.data.train_samples // run.samples_per_step
    world = VirtualWorld(
        world_of_cluster(cluster, paces), timing_task(run.outer, parameter_map_of(run), steps, run.samples_per_step)
    )
    applied: list[Applied] = []
    _note("global", world.top.server, world.clock, applied)
    for name, node in world.regions.items():
        _note(name, node.server, world.clock, applied)
    world.run()
    begin_s = min(worker.job_starts_s[0] for worker in world.workers.values())
    return [Applied(a.seconds - begin_s, a.site, a.member, a.sequence) for a in applied]


def real(folder: Path, event: str = "UpdateApplied") -> list[Applied]:
    """Read every update that the servers of a real run applied, from their event logs. Workers must have one rank
    each."""
    found = []
    for path in sorted((folder / "servers").glob("*/events.jsonl")):
        for said in map(json.loads, path.read_text().splitlines()):
            if said["event"] == event:
                found.append(Applied(said["time_s"], path.parent.name, said["member"], said.get("sequence", 0)))
    return sorted(found, key=lambda a: a.seconds)


def least_gap_s(applied: list[Applied]) -> float:
    """The shortest time between two updates of different members at one server. A real run that is late by less than
    this still has the same order."""
    gaps = [
        later.seconds - sooner.seconds
        for site in {a.site for a in applied}
        for sooner, later in pairwise([a for a in applied if a.site == site])
        if sooner.member != later.member
    ]
    return min(gaps, default=float("inf"))


def _note(site: str, server: Server, clock: Clock, applied: list[Applied]) -> None:
    original = server.handle

    def handle(message: Message) -> Handled:
        if isinstance(message, UpdatePart):
            applied.append(Applied(clock.now, site, message.member, message.sequence))
        return original(message)

    server.handle = handle  # type: ignore[method-assign]


def launched(files: tuple[Path, Path], env: dict[str, str] | None = None) -> list[Applied]:
    """Launch the run and return what it applied, its seconds counted from when all may begin. Raises RuntimeError."""
    folder = load_run(files[0]).run_folder
    log = folder.with_suffix(".log")
    with log.open("w") as file:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "geotrain", "launch", *map(str, files)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def wait(what: str, condition: Callable[[], bool], within_s: float) -> None:
        wait_for(condition, within_s, lambda: f"the run was not {what}: {log.read_text()[-3000:]}", launcher)

    everybody = {worker for paces in PACE_S.values() for worker in paces}
    try:
        wait("up", lambda: (folder / "servers/global/listening.json").exists(), START_S)
        live = LiveRun(folder)
        live.steer("pause")
        wait("joined by all", lambda: everybody <= {a.member for a in real(folder, "Joined")}, START_S)
        if real(folder):
            raise RuntimeError("the run began before it was told to")
        begin_s = time.time()
        live.steer("resume")
        wait("over", lambda: launcher.poll() is not None, END_S)
        if launcher.returncode:
            raise RuntimeError(f"the run failed: {log.read_text()[-3000:]}")
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(STOP_S)
        launcher.kill()
        launcher.wait()
    return [Applied(a.seconds - begin_s, a.site, a.member, a.sequence) for a in real(folder)]


def order(applied: list[Applied], site: str) -> list[tuple[str, int]]:
    """(member, its update's number), as that server applied them."""
    return [(a.member, a.sequence) for a in applied if a.site == site]


def compared(simulation: list[Applied], reality: list[Applied]) -> dict[str, Any]:
    """wall_over_simulated: until the last update of the run."""
    real_s, simulated_s = max(a.seconds for a in reality), max(a.seconds for a in simulation)
    return {
        "same_order": all(order(simulation, site) == order(reality, site) for site in ("global", *PACE_S)),
        "updates": len(reality),
        "least_gap_s": least_gap_s(simulation),
        "simulated_s": simulated_s,
        "real_s": real_s,
        "wall_over_simulated": real_s / simulated_s,
    }


if __name__ == "__main__":
    sys.exit(main())
