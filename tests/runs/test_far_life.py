"""A run whose region stands behind a real sshd, and whose worker's two hosts do behind that: its connection,
its launcher and then all of it are lost, and it is resumed; what was said and left, each part for itself."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from geotrain.config import load_cluster, load_run
from geotrain.data.dataset import read_manifest
from geotrain.launch.check import free_ports
from geotrain.launch.host_check import Finding, check_hosts
from tests.support.command_line import Done, say
from tests.support.process_trees import commands, marked, new_mark, until
from tests.support.small_runs import BATCH, LOCAL_STEPS, prepare_text, status, write_files
from tests.support.sshd import fall_silent, sshd

COVERS = pytest.mark.long("geotrain/commands", "geotrain/net/transport", "launch")
pytestmark = [COVERS, pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]
BUSY_S = 500.0
ENOUGH = 1_000_000  # samples: no machine trains them
HOSTS = ("127.0.0.1", "second.example.org")  # this machine by two names; the second is known to ssh only


@dataclass
class FarLife:
    """said: what each launcher said; refused: what was tried beside or after them; region: the region's processes at
    each stage; jobs: trained until then; ranks: what they are given."""

    files: tuple[Path, Path]
    folder: Path
    taken: list[Finding] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # hosts that ssh was called for, until the worker trained
    said: list[str] = field(default_factory=list)
    refused: dict[str, Done] = field(default_factory=dict)
    region: list[set[int]] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    ranks: list[dict[str, str]] = field(default_factory=list)  # environments of the ranks

    def log(self, name: str) -> str:
        path = self.folder / "logs" / name
        return path.read_text() if path.exists() else ""

    def trained(self) -> int:
        events = self.folder / "events/eu-0.jsonl"
        return events.read_text().count("JobTrained") if events.exists() else 0


def write(folder: Path, samples: int, pace_s: float, ports: list[int]) -> tuple[Path, Path]:
    outer = {"rule": {"name": "halos"}, "lease_reserve": 0}
    files = write_files(folder, "far", samples, {"eu": [2]}, outer, min_step_s=pace_s)
    cluster = json.loads(files[1].read_text())
    cluster["restart"] = {"limit": 0, "first_s": 0.05}  # whatever dies fails the run
    cluster["regions"][0] |= {"ssh": "eu.example.org", "server": {"host": "127.0.0.2", "port": ports[0]}}
    cluster["regions"][0]["workers"][0] |= {
        "launcher": "ssh",
        "master_port": ports[1],
        "hosts": [{"host": host, "slots": 1} for host in HOSTS],
        "env": {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NOTE": "two words"},
    }
    files[1].write_text(json.dumps(cluster))
    return files


def played(folder: Path, patch: pytest.MonkeyPatch) -> FarLife:
    prepare_text(folder)
    ports, mark = free_ports(3), new_mark()
    files = write(folder, ENOUGH, 0.3, ports)
    life = FarLife(files, load_run(files[0]).run_folder.absolute())
    for name, value in mark.items():
        patch.setenv(name, value)

    def launch(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "geotrain", "launch", *map(str, files), *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def keepers() -> list[psutil.Process]:
        return [process for process, words in commands(mark) if "--keep" in words]

    def ranks() -> list[psutil.Process]:
        return [p for p, words in commands(mark) if any(word.startswith("--local_rank") for word in words)]

    def look() -> None:
        """Count what the region has trained, and note its processes: its keeper, what that started, and the ranks."""
        life.jobs.append(life.trained())
        started = {p.pid for keeper in keepers() for p in (keeper, *keeper.children(recursive=True))}
        life.region.append(started | {rank.pid for rank in ranks()})

    def reached(launcher: subprocess.Popen[str], attached: int, jobs: int) -> None:
        """Wait until the region was attached to so often, and has trained so many jobs."""
        log = "eu.ssh.log"
        done = until(
            lambda: (
                (life.log(log).count("attached to process") >= attached and life.trained() >= jobs)
                or launcher.poll() is not None
            ),
            BUSY_S,
        )
        assert done and launcher.poll() is None, launcher.communicate()[0]

    with sshd(folder, ports[2]) as server:
        patch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        with socket.socket() as somebody:
            somebody.bind(("", ports[1]))
            life.taken = check_hosts(load_run(files[0]), load_cluster(files[1]), ("global", "eu"))
        (folder / "asked").unlink()
        launcher = launch()
        try:
            reached(launcher, 1, 1)
            life.asked = (folder / "asked").read_text().split()
            life.refused["beside it"] = say("launch", *files)
            life.ranks = [rank.environ() for rank in ranks()]
            look()
            fall_silent(server, "launch-site")
            reached(launcher, 2, 2)
            launcher.kill()  # the region goes on
            life.said.append(launcher.communicate()[0])
            look()
            launcher = launch("--resume")
            reached(launcher, 3, life.trained() + 2)
            look()
            launcher.kill()
            life.said.append(launcher.communicate()[0])
            for keeper in keepers():  # and the region does not
                keeper.kill()
            assert until(lambda: marked(mark) == [], BUSY_S)
            life.refused["without --resume"] = say("launch", *files)
            write(folder, 2 * (life.trained() + 20) * LOCAL_STEPS * BATCH, 0.0, ports)
            launcher = launch("--resume")
            life.said.append(launcher.communicate(timeout=BUSY_S)[0])
            assert launcher.returncode == 0, life.said[-1]
            look()
            assert until(lambda: marked(mark) == [], BUSY_S)
        finally:
            launcher.kill()
            launcher.wait()
    return life


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> FarLife:
    with pytest.MonkeyPatch.context() as patch:
        return played(tmp_path_factory.mktemp("far"), patch)


def test_hosts_are_asked_before_they_are_used(life: FarLife) -> None:
    assert [(found.host, found.what.partition(" ")[0]) for found in life.taken] == [(HOSTS[0], "port")]  # of rank 0
    assert life.taken[0].what.endswith(" is taken")
    assert life.asked[0] == "eu.example.org" and set(life.asked) == {"eu.example.org", *HOSTS}


def test_a_rank_is_started_on_each_host(life: FarLife) -> None:
    told = {(rank["RANK"], rank["WORLD_SIZE"], rank["NOTE"]) for rank in life.ranks}
    assert told == {("0", "2", "two words"), ("1", "2", "two words")}


def test_the_region_lives_on_without_connection_and_launcher(life: FarLife) -> None:
    trains, cut, again, _ = life.region
    assert len(trains) >= 7  # keeper, server and its guard, an ssh and a rank a host
    assert trains == cut == again
    assert life.jobs == sorted(life.jobs) and life.jobs[1] < life.jobs[2]
    assert "eu.ssh: no connection" in life.said[0] and "what runs there goes on" in life.said[0]
    assert life.log("eu.launcher.log").count("given up") == 0


def test_what_is_refused_meanwhile(life: FarLife) -> None:
    for when, words in (
        ("beside it", "this run is running already"),
        ("without --resume", "holds a run already: continue it with --resume"),
    ):
        assert life.refused[when].returncode == 2 and words in life.refused[when].stderr, when


def test_a_region_that_died_with_its_launcher_is_resumed(life: FarLife) -> None:
    assert "committed 100%" in life.said[-1] and life.jobs[3] > life.jobs[2]
    top = status(life.files[0], "global")
    assert top["complete"] and top["committed_samples"] == top["train_samples"]
    events = [json.loads(line) for line in (life.folder / "events/launcher-eu.jsonl").read_text().splitlines()]
    assert [e["process"] for e in events if e["event"] == "ProcessStarted"] == ["eu", "eu-0.0", "eu-0.1"] * 2
    assert {path.name for path in (life.folder / "logs").iterdir()} == {
        "global.log", "eu.ssh.log", "eu.launcher.log", "eu.log", "eu-0.0.log", "eu-0.1.log"
    }  # fmt: skip


def test_the_launchers_machine_decides_which_data_is_the_runs(life: FarLife) -> None:
    mine = read_manifest(life.files[0].parent / "data/train").sha256
    assert load_run(life.folder / "run.json").data.sha256 == mine
