"""Measure what watching a run costs it.

A worker (this process, the quickstart's model) trains jobs in two runs by turns, each with real servers: one run
with all monitoring on (events, status page asked every second as an open browser does, Prometheus metrics scraped,
TensorBoard of run and worker, samples), one with `monitor.enabled` = false. The other run's servers are stopped
meanwhile. The figure is the median, over pairs of jobs, of seconds without over seconds with.

    python -m benchmarks.monitoring [--pairs 24] [--record]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import command_line, report, units_by_ending
from benchmarks.overhead import RATIO, by_turns, figures, joined, only_rank, servers
from benchmarks.processes import wait_for
from geotrain.config import ClusterConfig, RunConfig
from geotrain.launch.check import free_ports
from geotrain.monitor.events import EventLog, JobTrained

READER = """
import itertools, json, sys, time, urllib.request
page, *metrics = sys.argv[1:]
known = {"number": 0, "epoch": ""}
for turn in itertools.count():
    url = f"{page}state.json?since={known['number']}&epoch={known['epoch']}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        known = json.load(answer)
    for url in metrics if turn % 5 == 0 else ():
        with urllib.request.urlopen(url, timeout=10) as answer:
            answer.read()
    time.sleep(1.0)
"""
started = partial(wait_for, within_s=300.0, failure=lambda: "the servers did not start")
LINGER_S = 0.3  # stopped servers are given this long to catch up before a job is timed


def main() -> None:
    parser = command_line(__doc__, quick={"pairs": 1, "local_steps": 1})
    parser.add_argument("--pairs", type=int, default=24, help="jobs timed with and without monitoring")
    parser.add_argument("--local-steps", type=int, default=8, help="H")
    args = parser.parse_args()
    result = {f"overhead_{name}": value for name, value in overhead(args.pairs, args.local_steps).items()}
    units = {**dict.fromkeys(("_with", "_without"), "tokens/s"), **RATIO, "_totals": "ratio"}
    report("monitoring", result, args, units_by_ending(units, "count"))


# ------------------------------------------------------------------------------------------------ overhead


class World:
    """One run with its servers, and this process as its worker."""

    def __init__(self, run: RunConfig, cluster: ClusterConfig, more: list[int]) -> None:
        self.run, self.cluster = run, cluster
        folder = run.run_folder / "servers"
        self.pids = [json.loads((folder / s / "listening.json").read_text())["pid"] for s in ("global", "eu")] + more

    def send(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Its processes run only meanwhile."""
        self.send(signal.SIGCONT)
        time.sleep(LINGER_S)
        try:
            yield
        finally:
            self.send(signal.SIGSTOP)


def overhead(pairs: int, local_steps: int) -> dict[str, float]:
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        metrics_port = free_ports(3)[0]
        watched = {"metrics_port": metrics_port, "tensorboard": "tensorboard", "sample_s": 5.0}
        on = stack.enter_context(servers(folders[0], local_steps, monitor=watched))
        off = stack.enter_context(servers(folders[1], local_steps, monitor={"enabled": False}))
        for run, _ in (on, off):
            for site in ("global", "eu"):
                started(lambda path=run.run_folder / "servers" / site / "listening.json": path.exists())
        reader = stack.enter_context(reading(on[1], metrics_port))
        worlds = {True: World(*on, [reader.pid]), False: World(*off, [])}
        stack.callback(lambda: [world.send(signal.SIGCONT) for world in worlds.values()])
        return _measure(worlds, pairs)


@contextmanager
def reading(cluster: ClusterConfig, metrics_port: int) -> Iterator[subprocess.Popen[bytes]]:
    """An open page and a Prometheus, as far as the servers notice."""
    from geotrain.net.transport.operator_client import ask_status

    status: dict[str, Any] = {}
    started(lambda: status.update(ask_status(str(cluster.global_server), 2.0) or {}) or status.get("page"))
    metrics = [f"http://127.0.0.1:{port}/metrics" for port in (metrics_port, metrics_port + 2)]
    process = subprocess.Popen([sys.executable, "-I", "-c", READER, status["page"], *metrics])
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def _measure(worlds: dict[bool, World], pairs: int) -> dict[str, float]:
    run = worlds[True].run
    boards = {"enabled": True, "output_path": str(run.run_folder / "tensorboard"), "job_name": "eu-0"}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as stack:
        engine, loader = stack.enter_context(only_rank(run, tensorboard=boards))
        events = stack.enter_context(EventLog(run.run_folder / "events" / "eu-0.jsonl", source="eu-0"))
        reports = {
            True: lambda numbers: events.write(JobTrained(worker="eu-0", **numbers)),
            False: lambda numbers: None,
        }
        trainers, leases = {}, {}
        for monitored, world in worlds.items():
            trainers[monitored], leases[monitored] = stack.enter_context(
                joined(world.run, world.cluster, engine, loader, reports[monitored])
            )
            world.send(signal.SIGSTOP)
        for monitored in by_turns(pairs):
            trainer, engine.monitor.enabled = trainers[monitored], monitored
            with worlds[monitored].turn():
                lease = next(leases[monitored])
                trainer.loop.laps.restart()
                begin = time.perf_counter()
                trainer.train_job(lease)
                seconds[monitored].append(time.perf_counter() - begin)
            print(
                f"{'with' if monitored else 'without'} monitoring: {seconds[monitored][-1]:.3f} s a job", flush=True
            )
        for world in worlds.values():
            world.send(signal.SIGCONT)
    totals = round(sum(seconds[False][1:]) / sum(seconds[True][1:]), 4)
    return {**figures(seconds, run, pairs, "ratio"), "ratio_of_totals": totals}


if __name__ == "__main__":
    main()
