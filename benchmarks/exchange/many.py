"""Measure how an exchange grows with workers and regions: real processes on this machine, then the simulator."""

from __future__ import annotations

from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median

from benchmarks import ROOT
from benchmarks.servers.world import ServerProcess, answered, start_worker, write_files
from benchmarks.studies.claims.methods import OURS
from benchmarks.studies.environments import one_block, synthetic_world
from geotrain.config import OverlapConfig, load_run
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.world import VirtualWorld, timing_task

SIMULATED_NUMEL, STEP_S, LOCAL_STEPS, JOBS = 10**9, 1.0, 32, 400
GBPS, RTT_S = 1.0, 0.1  # of each region to the global server


def real(folder: Path, numel: int, regions: int, workers: int, rounds: int) -> dict[str, float]:
    """Let all workers update every fragment at the same time. exchange: ns a parameter from the first byte to the
    answer's last, mean of the workers, median of the rounds; server: processor time of all servers, of one worker's
    update."""
    folder.mkdir(parents=True)
    names = {f"r{r}": [f"r{r}w{i}" for i in range(workers)] for r in range(regions)}
    run_path = write_files(folder, numel, names)
    parameter_map = parameter_map_of(load_run(run_path))
    with ExitStack() as open_:
        servers = [ServerProcess(run_path, name) for name in ("global", *names)]
        for server in servers:
            open_.callback(server.kill)
            server.start()
        pipes = [
            start_worker(run_path, name, server.address)
            for server, of_region in zip(servers[1:], names.values(), strict=True)
            for name in of_region
        ]
        took: list[float] = []
        before_s = 0.0
        for number in range(rounds + 1):
            if number == 1:  # the first warms up
                before_s, took = sum(server.cpu_s() for server in servers), []
            took.append(sum(_updated(pipes, fragment) for fragment in range(len(parameter_map.fragments))))
        spent_s = sum(server.cpu_s() for server in servers) - before_s
        for pipe in pipes:
            pipe.send(None)
    updates = rounds * len(pipes)
    return {
        "exchange": 1e9 * median(took) / parameter_map.numel,
        "server": 1e9 * spent_s / updates / parameter_map.numel,
    }


def _updated(pipes: list[Connection], fragment: int) -> float:
    """Seconds of one fragment's update, of all workers at once, on average."""
    for pipe in pipes:
        pipe.send(fragment)
    return mean(answered(pipe)[1] for pipe in pipes)


def simulated(regions: int, workers: int, overlap: bool) -> float:
    """The share of time in which training stands still, of a billion parameters: links and waiting, no processors."""
    outer = load_run(ROOT / f"configs/runs/baselines/{OURS}.json").outer
    outer = outer.model_copy(update={"local_steps": LOCAL_STEPS, "scale_local_steps": False})
    if overlap:
        outer = outer.model_copy(update={"overlap": OverlapConfig(steps=LOCAL_STEPS // 4, adopt="rebase")})
    spec = synthetic_world(regions, workers, STEP_S, LinkSpec(GBPS, RTT_S / 2), spread=1.3)
    steps = JOBS * LOCAL_STEPS * regions * workers
    return 1 - float(
        VirtualWorld(spec, timing_task(outer, one_block(SIMULATED_NUMEL), steps, 1)).run()["utilization"]
    )
