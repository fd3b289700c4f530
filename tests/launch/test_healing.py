"""A worker whose host is lost is formed anew of the others, and of all again when the host is back: behind a real
sshd, whose hosts are this machine by several names."""

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

import psutil
import pytest

from geotrain.launch.check import free_ports
from geotrain.launch.guard import JOB
from tests.support.process_trees import commands, marked, new_mark, until
from tests.support.small_runs import BATCH, losses, prepare_text, status, write_files
from tests.support.sshd import sshd

BUSY_S = 300.0
HOSTS = ("127.0.0.1", "127.0.0.2")


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
            "env": {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            "min_step_s": 0.2,
            "deepspeed": {"train_micro_batch_size_per_gpu": 1},
        }
        self.files = write_files(folder, "run", samples, {"eu": [2]}, outer, first=worker, **keys)
        cluster = json.loads(self.files[1].read_text())
        cluster["regions"][0]["server"] = {"host": "127.0.0.9", "port": server}
        cluster["restart"] = {"first_s": 0.05, "host_back_s": 1.0}
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

    def is_whole(self, mark: dict[str, str]) -> None:
        """All data was trained once, to a loss that is a number, and nothing is left."""
        top = status(self.files[0], "global")
        assert top["complete"] and top["committed_samples"] == top["train_samples"]
        found = losses(self.files[0])
        assert all(math.isfinite(loss) for loss in found.values())
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

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "run/events/launcher.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture
def ssh(tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    mark = new_mark()
    prepare_text(tmp_path)  # by processes that live on here
    with sshd(tmp_path, free_port):
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        for name, value in mark.items():
            monkeypatch.setenv(name, value)
        yield mark


@pytest.mark.long("launch")
@pytest.mark.slow
@pytest.mark.root
def test_a_lost_host_leaves_its_worker_and_comes_back(tmp_path: Path, ssh: dict[str, str]) -> None:
    run = Launched(tmp_path, 400 * BATCH, {"rule": {"name": "halos"}}, HOSTS, checkpoint={"every_jobs": 1})
    with run.running() as launcher:
        run.happens(lambda: run.jobs() > 2)
        run.lose(HOSTS[1])
        run.happens(lambda: len(run.events("WorkerFormed")) == 1)
        (formed,) = run.events("WorkerFormed")
        assert formed["hosts"] == [HOSTS[0]] and formed["why"] == f"without {HOSTS[1]}: exit code 255"
        run.trains_on()
        (tmp_path / "lost").unlink()
        run.happens(lambda: len(run.events("WorkerFormed")) == 2)
        assert run.events("WorkerFormed")[1]["hosts"] == list(HOSTS)
        run.trains_on()
        assert launcher.wait(BUSY_S) == 0, run.said
    run.is_whole(ssh)
    assert "without its saved state" not in run.said


@pytest.mark.long("launch")
@pytest.mark.slow
@pytest.mark.root
def test_hosts_are_cordoned_and_freeze_while_the_global_server_is_away(tmp_path: Path, ssh: dict[str, str]) -> None:
    """Under ACCO. The checkpoint is of two hosts, then of one, then of two again."""
    acco: dict[str, Any] = {"checkpoint": {"every_jobs": 1}, "acco": {}, "monitor": {"hang_s": 20.0}}
    run = Launched(tmp_path, 600 * BATCH, {"rule": {"name": "halos"}}, HOSTS, **acco)
    with run.running() as launcher:
        run.happens(lambda: run.jobs() > 2)
        geotrain("cordon", str(tmp_path / "run"), HOSTS[0], "--why", "a fan is loud")
        run.happens(lambda: len(run.events("WorkerFormed")) == 1)
        run.trains_on()
        said = geotrain("status", str(tmp_path / "run"), "--once")
        assert f"eu-0 is formed of {HOSTS[1]}" in said and f"{HOSTS[0]} is cordoned: a fan is loud" in said
        geotrain("uncordon", str(tmp_path / "run"), HOSTS[0])
        run.happens(lambda: len(run.events("WorkerFormed")) == 2)
        run.trains_on()
        assert not run.events("ProcessDied"), run.said  # no step was lost
        *_, server = run.processes("global")  # behind its guard
        server.suspend()
        run.lose(HOSTS[1], signal.SIGSTOP)
        run.happens(lambda: len(run.events("WorkerFormed")) == 3)
        assert run.events("WorkerFormed")[2]["hosts"] == [HOSTS[0]]
        server.resume()
        run.trains_on()
        assert launcher.wait(BUSY_S) == 0, run.said
    for process in run.processes(f"eu-0@{HOSTS[1]}"):
        process.kill()
    run.is_whole(ssh)


def geotrain(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "geotrain", *words], text=True, capture_output=True, timeout=BUSY_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
