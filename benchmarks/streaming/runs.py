"""The processes of `streaming.py`: emulated links, two deepspeed jobs that stay, and servers for each run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

import benchmarks.streaming.worker as streaming_worker
from benchmarks import ROOT
from benchmarks.processes import END_S, start_guarded, wait_for
from geotrain.config import ClusterConfig, LinkConfig, load_cluster
from geotrain.emulate import wan
from geotrain.launch.check import free_ports
from geotrain.launch.launcher import resolve
from geotrain.launch.launchers.base import SCRIPT, WorkerPlace
from geotrain.launch.launchers.registry import worker_commands

REGIONS = ("eu", "us")
GBPS, RTT_MS = 0.2, 100.0
START_S, RUN_S = 180.0, 300.0
PEAK_AFTER_S = 1.0  # a peak may reach so far back


@dataclass
class Seen:
    """One region's part of a run between the ends of its first and its last job."""

    ends_s: list[float] = field(default_factory=list)  # of its jobs
    jobs: list[dict[str, float]] = field(default_factory=list)  # what the trainer told of each
    links: list[dict[str, Any]] = field(default_factory=list)  # the region server's byte counts at those times
    began_s: float = 0.0  # Unix time of the first mark
    server_s: list[float] = field(default_factory=list)  # processor time of its server at the first and last mark
    peak_bytes_per_s: int = 0

    @property
    def seconds(self) -> float:
        return self.ends_s[-1] - self.ends_s[0]

    @property
    def tokens_per_s(self) -> float:
        return sum(job["tokens"] for job in self.jobs[1:]) / self.seconds

    def each(self, figure: Callable[[dict[str, float], float], float]) -> list[float]:
        """A figure of each job but the first: of what its trainer told, and the seconds that it took."""
        lengths_s = [end - begin for begin, end in pairwise(self.ends_s)]
        return [figure(job, seconds) for job, seconds in zip(self.jobs[1:], lengths_s, strict=True)]

    @property
    def processor_s(self) -> float:
        """Processor seconds of an inner step: the trainer's, and its share of its region's server's."""
        steps = sum(job["steps"] for job in self.jobs[1:])
        trainer_s = self.jobs[-1]["processor_s"] - self.jobs[0]["processor_s"]
        return (trainer_s + self.server_s[-1] - self.server_s[0]) / steps

    @property
    def link_bytes(self) -> int:
        first, last = self.links[0], self.links[-1]
        return sum(int(last[key]) - int(first[key]) for key in ("up_bytes", "down_bytes"))


class Site:
    """Links that are up, and a worker in each region waiting for orders."""

    def __init__(
        self, clusters: tuple[ClusterConfig, ...], links: wan.Wan, workers: dict[str, Connection], stack: ExitStack
    ) -> None:
        self.clusters, self.links, self.workers, self.stack = clusters, links, workers, stack
        self.runs: dict[Path, list[subprocess.Popen[bytes]]] = {}

    def prepare(self, folder: Path, run: dict[str, Any]) -> None:
        """Start a run's servers, in a folder of its own. They stand still until it is trained."""
        cluster = self.clusters[len(self.runs) % 2]  # the last run's servers may still hold the other one's ports
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({**run, "folder": str(folder)}))
        (folder / "cluster.json").write_text(cluster.model_dump_json(by_alias=True))
        self.runs[folder] = [self._serve(folder, "global")]
        self.runs[folder] += [self._serve(folder, "region", region) for region in REGIONS]
        for name in ("global", *REGIONS):
            os.kill(_listening(folder, name), signal.SIGSTOP)

    def train(self, folder: Path) -> dict[str, Seen]:
        """A prepared run, to its end. Its servers then linger."""
        for name in ("global", *REGIONS):
            os.kill(_listening(folder, name), signal.SIGCONT)
        for control in self.workers.values():
            control.send(("run", str(folder)))
        return self._watch(folder)

    def end(self, folder: Path, seen: dict[str, Seen]) -> None:
        """Wait for the run's servers to end, and add to what was seen what they have written."""
        for server in self.runs[folder]:
            if server.wait(END_S):
                raise SystemExit(f"a server failed; see {folder}/*.log")
        for region, part in seen.items():
            part.peak_bytes_per_s = _peak(folder / "servers" / region / "events.jsonl", part)

    def alone(self, seconds: float) -> dict[str, dict[str, float]]:
        """Let both workers train without communication, and return `Trained.alone` of each."""
        for control in self.workers.values():
            control.send(("alone", seconds))
        return {region: _receive(control, "alone", RUN_S)[1] for region, control in self.workers.items()}

    def _watch(self, folder: Path) -> dict[str, Seen]:
        seen = {region: Seen() for region in REGIONS}
        working = {control: region for region, control in self.workers.items()}
        while working:
            for control in _ready(working):
                region = working[control]
                message, part = control.recv(), seen[region]
                if message[0] == "done":
                    del working[control]
                    continue
                part.began_s = part.began_s or time.time()
                _, end_s, job, links = message
                part.ends_s.append(end_s)
                part.jobs.append(job)
                part.links.append(links)
                part.server_s.append(sum(psutil.Process(_listening(folder, region)).cpu_times()[:2]))
        return seen

    def _serve(self, folder: Path, *what: str) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-m", "geotrain", "serve", *what, "--run", str(folder / "run.json"))
        netns = self.links.namespaces.get(what[-1])
        return start_guarded(self.stack, folder / f"{what[-1]}.log", command, netns)


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    """Raises SystemExit where links cannot be emulated."""
    if why_not := wan.cannot_emulate():
        raise SystemExit(f"streaming.py needs emulated links: {why_not}")
    links = {region: LinkConfig(regions=(region, "global"), gbps=GBPS, rtt_ms=RTT_MS) for region in REGIONS}
    hosts = [{"host": "localhost", "slots": 1}]
    regions = [{"name": region, "workers": [{"name": f"{region}-0", "hosts": hosts}]} for region in REGIONS]
    (folder / "cluster.json").write_text(json.dumps({"name": "streaming", "regions": regions}))
    with ExitStack() as stack:
        up = stack.enter_context(wan.emulated(links))
        start_guarded(stack, folder / "wan.log", up.pump_command, keeps=up.pump_fds)
        clusters = tuple(resolve(load_cluster(folder / "cluster.json"), up) for _ in range(2))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / streaming_worker.SOCKET))
        listener.listen()
        listener.settimeout(START_S)
        for region, port in zip(REGIONS, free_ports(len(REGIONS)), strict=True):
            made = worker_commands(WorkerPlace(folder, port), region, clusters[0].worker(region, None))
            for name, text in made.files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text)
            (job,) = made.commands
            own = str(Path(streaming_worker.__file__).resolve())
            command = [own if part == str(SCRIPT) else part for part in job.command]
            start_guarded(
                stack,
                folder / f"{job.name}.log",
                command,
                up.namespaces[region],
                env=job.env | {"PYTHONPATH": str(ROOT)},
            )
        workers: dict[str, Connection] = {}
        for _ in REGIONS:
            control = stack.enter_context(Connection(listener.accept()[0].detach()))
            workers[control.recv()] = control
        yield Site(clusters, up, workers, stack)
        for control in workers.values():
            control.send(())


def _listening(folder: Path, server: str) -> int:
    """Wait until a server listens, and return its process id."""
    said = folder / "servers" / server / "listening.json"
    wait_for(said.exists, START_S, lambda: f"the server {server!r} does not listen; see {folder}/{server}.log")
    return int(json.loads(said.read_text())["pid"])


def _ready(controls: Any) -> list[Connection]:
    found = wait(list(controls), RUN_S)
    if not found:
        raise SystemExit("the workers have said nothing for too long; see their logs")
    return found  # type: ignore[return-value]


def _receive(control: Connection, kind: str, within_s: float) -> Any:
    if not control.poll(within_s):
        raise SystemExit(f"a worker has not answered {kind!r} within {within_s:g} s; see its log")
    return control.recv()


def _peak(events: Path, part: Seen) -> int:
    """The most bytes within one second, in one direction, from the end of the first job on. A server tells of its
    link every few seconds: where none of these spans lies whole after that, those that end after it count, with what
    came before."""
    said = [json.loads(line) for line in events.read_text().splitlines()]
    traffic = [event for event in said if event["event"] == "LinkTraffic"]
    begin_s = part.began_s + PEAK_AFTER_S
    counted = [e for e in traffic if e["time_s"] - e["seconds"] >= begin_s]
    counted = counted or [e for e in traffic if e["time_s"] >= part.began_s]
    return max((max(e["peak_up_bytes_per_s"], e["peak_down_bytes_per_s"]) for e in counted), default=0)
