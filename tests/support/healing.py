"""A launched run whose worker stands on several hosts, which are this machine by several names behind a real sshd."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from geotrain.launch.check import free_ports
from geotrain.launch.guard import JOB
from tests.support.process_trees import commands, marked, new_mark, until
from tests.support.small_runs import BATCH, LOCAL_STEPS, MODEL, losses, prepare_text, status, write_files
from tests.support.sshd import sshd

BUSY_S = 300.0
ENOUGH = 1_000_000  # samples: no machine trains them before the run is stopped
HOSTS = ("127.0.0.1", "127.0.0.2")
ENV = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
EXPERTS = MODEL | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


class Launched:
    """A launch of a run whose worker stands on these hosts, two ranks on each."""

    def __init__(
        self, folder: Path, samples: int, outer: dict[str, Any], hosts: tuple[str, ...], **keys: Any
    ) -> None:
        self.folder = folder
        master, server = free_ports(2)
        worker = {
            "launcher": "ssh",
            "master_port": master,
            "hosts": [{"host": host, "slots": 2} for host in hosts],
            "env": ENV,
            "min_step_s": 0.2,
            "deepspeed": {"train_micro_batch_size_per_gpu": 1},
        }
        self.files = write_files(folder, "run", samples, {"eu": [2]}, outer, first=worker, **keys)
        cluster = json.loads(self.files[1].read_text())
        cluster["regions"][0]["server"] = {"host": "127.0.0.9", "port": server}
        cluster["restart"] = {"first_s": 0.05, "host_back_s": 1.0}
        self.files[1].write_text(json.dumps(cluster))

    def worker(self, **keys: Any) -> None:
        """Lay these keys over the worker in the cluster file."""
        cluster = json.loads(self.files[1].read_text())
        cluster["regions"][0]["workers"][0] |= keys
        self.files[1].write_text(json.dumps(cluster))

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        with (self.folder / "said").open("w") as said:
            command = [sys.executable, "-m", "geotrain", "launch", *map(str, self.files)]
            with subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, text=True) as self.launcher:
                try:
                    yield self.launcher
                finally:
                    self.launcher.terminate()

    def happens(self, what: Callable[[], bool]) -> None:
        assert until(lambda: what() or self.launcher.poll() is not None, BUSY_S), self.said
        assert self.launcher.poll() is None, self.said

    def trains_on(self) -> None:
        before = self.jobs()
        self.happens(lambda: self.jobs() > before + 3)

    def stops(self) -> None:
        geotrain("stop", str(self.folder / "run"), "--wait", f"{BUSY_S:g}")
        assert self.launcher.wait(BUSY_S) == 0, self.said

    def is_whole(self, mark: dict[str, str]) -> None:
        """What was leased was trained once, to a loss that is a number, and nothing is left."""
        top, found = status(self.files[0], "global"), losses(self.files[0])
        trained = top["train_samples"] if top["complete"] else len(found) * LOCAL_STEPS * BATCH
        assert top["committed_samples"] == trained and top["open_leases"] == 0
        assert all(math.isfinite(loss) for loss in found.values())
        assert {event["wrong_results"] for event in self.events("JobTrained", "eu-0")} == {0.0}
        assert sorted(job for _, job in found) == list(range(1, len(found) + 1))
        assert until(lambda: marked(mark) == [], BUSY_S), commands(mark)

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def jobs(self) -> int:
        with suppress(OSError):
            return len(losses(self.files[0]))
        return 0

    def lose(self, host: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Send all that the host has a signal, and let nobody reach it from now on."""
        with (self.folder / "lost").open("a") as lost:
            print(host, file=lost)
        for process in self.processes(f"eu-0@{host}"):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(how)

    def processes(self, job: str) -> list[psutil.Process]:
        name, every = str(self.folder / "run" / job), psutil.process_iter(["environ"])
        return [process for process in every if (process.info["environ"] or {}).get(JOB) == name]

    def events(self, kind: str, source: str = "launcher") -> list[dict[str, Any]]:
        lines = (self.folder / f"run/events/{source}.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def geotrain(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "geotrain", *words], text=True, capture_output=True, timeout=BUSY_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def hosts_by_ssh(folder: Path, port: int, own: Path | None = None) -> Iterator[dict[str, str]]:
    """Data in the folder, and hosts that are reached by ssh; gives the mark of all processes that are started. own:
    as for `sshd`."""
    mark = new_mark()
    prepare_text(folder)  # by processes that live on here
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    for place in (own, *(folder / "disks" / host for host in HOSTS)) if own else ():
        place.mkdir(parents=True)
    with sshd(folder, port, own), mock.patch.dict(os.environ, {**mark, "PATH": path}):
        yield mark
