"""A region's server and a global server as processes, with journal, disk and sockets, of a model of any size."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import resident_bytes, wait_for
from benchmarks.small_runs import deepspeed_block, llama
from geotrain.config import load_cluster, load_run
from geotrain.launch.check import free_ports
from geotrain.net.server.server_setup import LISTENING
from geotrain.net.transport.authority import make_certificates
from geotrain.net.transport.certs import OPERATOR, Role, trust_between

REGION, WORKERS, RANKS = "eu", ("w0", "w1"), 2
WIDTH = 1024
FRAGMENTS = 15  # of layers; the embedding is one more
# Deltas are bf16 inside the region, int4 beyond it; momenta and residuals are kept in bf16.
OUTER = {
    "rule": {"name": "region_momentum", "updates_per_send": 2}, "local_steps": 32, "up": {"name": "int4"},
    "down": {"name": "int4"}, "local": {"name": "bf16"}, "server_state": "bf16",
}  # fmt: skip
QUIET_S = 600.0
START_S = 600.0  # a server writes its first weights to the disk before it listens


def write_files(
    folder: Path, parameters: float, workers: dict[str, Sequence[str]] | None = None, name: str = "servers",
    shards: int = 0, pieces: int = 1, encrypted: bool = False,
) -> Path:  # fmt: skip
    """The run's and the cluster's files, with the settings of OUTER; returns the run's.

    workers: the names of each region's; None: REGION with WORKERS. shards: processes beside each server; 0: one
    in its own. pieces: of each fragment. encrypted: links
    have TLS, with certificates in `folder`."""
    of_regions = workers or {REGION: WORKERS}
    width = min(WIDTH, 64 * max(1, round((parameters / FRAGMENTS / 16) ** 0.5 / 64)))
    layer_numel = 16 * width**2  # attention's four matrices, and three of four times the width
    layers = max(FRAGMENTS, round(parameters / layer_numel / FRAGMENTS) * FRAGMENTS)
    fragments = {"layers_per_fragment": layers // FRAGMENTS, "pieces": pieces}
    run = {
        "name": name, "folder": str(folder / "run"),
        "model": {"config": llama(width, layers, 8, 4 * width, 4096, 128)},
        "data": {"train": str(folder / "none"), "sequence_length": 128, "train_samples": 1 << 30},
        "deepspeed": deepspeed_block(8, 2, 1e-3, bf16={"enabled": True}),
        "outer": OUTER | {"local_steps": 8, "fragments": fragments},
        "checkpoint": {"keep": 1, "every_minutes": 1e4},
        "monitor": {"sample_s": 2.0},
    }  # fmt: skip
    ports = free_ports((1 + len(of_regions)) * (1 + shards))
    listeners = [{"host": "127.0.0.1", "port": port} for port in ports]
    of_shards = [listeners[i : i + shards] for i in range(1 + len(of_regions), len(ports), shards or 1)]
    hosts = [{"host": "localhost", "slots": RANKS}]
    cluster = {
        "name": name, "global_server": listeners[0], "global_shards": of_shards[0] if shards else [],
        "regions": [
            {
                "name": region, "server": listeners[i], "shards": of_shards[i] if shards else [],
                "workers": [{"name": worker, "hosts": hosts} for worker in names],
            }
            for i, (region, names) in enumerate(of_regions.items(), 1)
        ],
    }  # fmt: skip
    if encrypted:
        cluster["security"] = {"folder": str(folder / "certs")}
    for file, content in (("run", run), ("cluster", cluster)):
        (folder / f"{file}.json").write_text(json.dumps(content))
    if encrypted:
        make_certificates(load_cluster(folder / "cluster.json"), folder / "certs")
    return folder / "run.json"


def start_worker(run_path: Path, name: str, address: str) -> Connection:
    """A process of `worker.main`, once it has its weights."""
    from benchmarks.servers import worker

    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=worker.main, args=(there, run_path, name, address), daemon=True).start()
    if not here.poll(QUIET_S) or here.recv() != "ready":
        raise RuntimeError(f"worker {name} has no weights after {QUIET_S:g} s")
    return here


def answered(pipe: Connection) -> tuple[float, float]:
    """Return what `Worker.timed` gives for the update that the worker's process was told of. Raises RuntimeError."""
    if not pipe.poll(QUIET_S):
        raise RuntimeError(f"an update is not answered after {QUIET_S:g} s")
    found: tuple[float, float] = pipe.recv()
    return found


def wait_until_quiet(region: ServerProcess) -> None:
    """Until nothing of the region, or its shard, is on its way up or down. Raises RuntimeError."""
    wait_for(lambda: not status(region)["in_flight"], QUIET_S, lambda: "the region's update is not answered")


class ServerProcess:
    """`geotrain serve` of one server, or of a shard. name: "global", the region's, or as `shard_name` gives it."""

    def __init__(self, run_path: Path, name: str) -> None:
        self.run_path, self.name = run_path, name
        self.folder = load_run(run_path).run_folder / "servers" / name
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, resume: bool = False) -> float:
        """Returns the seconds until it listens. Raises RuntimeError if it ends before, or does not within START_S."""
        begin = time.monotonic()
        server, _, shard = self.name.partition(".shard-")
        which = ["shard", server, shard] if shard else ["global"] if server == "global" else ["region", server]
        options = ["--run", str(self.run_path), *(["--resume"] if resume else [])]
        listening = self.folder / LISTENING
        listening.unlink(missing_ok=True)
        with (self.run_path.parent / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "geotrain", "serve", *which, *options], stdout=log, stderr=log,
                env={**os.environ, "DS_ACCELERATOR": "cpu"},
            )  # fmt: skip
        wait_for(
            listening.exists,
            START_S,
            lambda: f"{self.name} does not listen; its log ends:\n{Path(log.name).read_text()[-2000:]}",
            self.process,
        )
        return time.monotonic() - begin

    @property
    def address(self) -> str:
        return str(json.loads((self.folder / LISTENING).read_text())["address"])

    def cpu_s(self) -> float:
        """Processor time so far."""
        assert self.process is not None
        return sum(psutil.Process(self.process.pid).cpu_times()[:2])

    def resident_bytes(self, mapped: bool = False) -> int:
        """Memory of its own. mapped: also files that are mapped, and could be read again."""
        assert self.process is not None
        return resident_bytes(self.process.pid, ("RssAnon", "RssShmem", *(["RssFile"] if mapped else [])))

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def state_bytes(server: ServerProcess) -> int:
    """Bytes of the server's newest snapshot on the disk."""
    newest = max((server.folder / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime)
    return sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())


def status(server: ServerProcess) -> dict[str, Any]:
    from geotrain.net.transport.operator_client import ask_status

    role: Role = "global" if server.name == "global" else "region"
    cluster = load_cluster(server.run_path.parent / "cluster.json")
    trust = trust_between(cluster, "operator", OPERATOR, role, server.name)
    said = ask_status(server.address, 60.0, trust)
    if said is None:
        raise RuntimeError(f"the server {server.name} does not answer")
    return said
