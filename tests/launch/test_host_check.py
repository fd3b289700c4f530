"""Hosts are looked at before a launch, as the launch reaches them; what is wrong there refuses it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from geotrain.config import ClusterConfig, RunConfig, load_cluster, load_run
from geotrain.launch import host_check, host_facts
from geotrain.launch.host_check import HERE, check_hosts, hosts_of, inquiries, parse_answers
from geotrain.launch.host_facts import GpuFacts, read_gpus, read_host
from geotrain.launch.host_rules import EXCLUSIVE
from geotrain.launch.site_processes import fixed_master_port
from tests.support.command_line import say
from tests.support.nvml import Nvml
from tests.support.programs import SSH, stand_in
from tests.support.small_runs import prepare_text, write_files


@pytest.fixture
def taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port that somebody listens on; and in the path an ssh to this machine."""
    stand_in(monkeypatch, tmp_path / "bin/ssh", SSH)
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        yield listening.getsockname()[1]


def files(folder: Path, port: int, launcher: str, *hosts: str) -> tuple[Path, Path]:
    """A run whose worker eu-0 has these hosts and meets at this port; us-0 is local."""
    worker = {"launcher": launcher, "master_port": port, "hosts": [{"host": host, "slots": 1} for host in hosts]}
    return write_files(folder, "run", 64, {"eu": [1], "us": [1]}, {"rule": {"name": "halos"}}, first=worker)


def read(made: tuple[Path, Path]) -> tuple[RunConfig, ClusterConfig]:
    return load_run(made[0]), load_cluster(made[1])


def test_each_host_is_asked_by_its_launcher(tmp_path: Path) -> None:
    run, cluster = read(files(tmp_path, 29400, "ssh", "h1", "h2"))
    hosts = hosts_of(run, cluster, ("global", "eu", "us"))
    assert {key: [(n.worker, n.ranks, n.ports) for n in needs] for key, needs in hosts.items()} == {
        ("ssh", "h1"): [("eu-0", 1, (29400,))],  # where its ranks meet
        ("ssh", "h2"): [("eu-0", 1, ())],
        ("local", HERE): [("us-0", 1, ())],  # it gets a free port when it starts
    }
    assert hosts_of(run, cluster, ("global", "us")).keys() == {("local", HERE)}
    assert len({fixed_master_port(cluster.workers[1][1], n) for n in range(9)}) == 9, "they may share a host"
    first, second = inquiries(cluster, hosts, tmp_path)
    assert first.command[:2] == ("ssh", "-T") and first.command[-2] == "h1"
    assert first.command[-1].endswith(f"-m geotrain.launch.host_facts {tmp_path} h1 29400")
    assert second.hosts == ("h2",) and second.command[-1].endswith(f"{tmp_path} h1")


@pytest.mark.parametrize(("launcher", "program"), [("pdsh", "pdsh"), ("slurm", "srun")])
def test_a_multi_node_launcher_asks_a_workers_hosts_at_once(tmp_path: Path, launcher: str, program: str) -> None:
    run, cluster = read(files(tmp_path, 29400, launcher, "h1", "h2"))
    (asked,) = inquiries(cluster, hosts_of(run, cluster, ("eu",)), tmp_path)
    assert asked.hosts == ("h1", "h2") and asked.command[0] == program
    assert "h1,h2" in " ".join(asked.command) and asked.command[-1].endswith("29400")
    facts = [replace(read_host(tmp_path, []), name=host) for host in ("h1", "h2")]
    prefix = "{}: " if launcher == "pdsh" else ""
    said = "\n".join(["a banner", *(prefix.format(f.name) + f.to_line() for f in facts)])
    assert parse_answers(asked, said) == {"h1": facts[0], "h2": facts[1]}


@pytest.mark.parametrize(("launcher", "asks"), [("ssh", ["us"]), ("pdsh", ["eu"])])
def test_a_host_in_another_region_is_asked_by_who_starts_ranks_there(
    tmp_path: Path, launcher: str, asks: list[str]
) -> None:
    made = files(tmp_path, 29400, launcher, "h1", "h2")
    raw = json.loads(made[1].read_text())
    raw["regions"][0]["workers"][0]["hosts"][1]["region"] = "us"
    made[1].write_text(json.dumps(raw))
    run, cluster = read(made)
    assert [site for site in ("eu", "us") if (launcher, "h2") in hosts_of(run, cluster, (site,))] == asks


def test_mpis_are_not_asked(tmp_path: Path) -> None:
    run, cluster = read(files(tmp_path, 29400, "openmpi", "h1", "h2"))
    assert inquiries(cluster, hosts_of(run, cluster, ("eu",)), tmp_path) == []


def test_what_is_wrong_is_told_of_each_host(tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run, cluster = read(files(tmp_path, taken, "ssh", "h1", "gone"))
    found = check_hosts(run, cluster, ("global", "eu", "us"))
    assert [(each.host, each.what) for each in found] == [
        ("gone", "cannot be looked at by ssh: ssh: connect to host gone port 22: No route to host"),
        ("h1", f"port {taken} is taken"),
    ]
    assert all(each.refuses for each in found)
    assert found[0].remedy == "`ssh gone true` must work here, without a password"
    run, cluster = read(files(tmp_path, taken, "ssh", "bare"))
    (bare,) = check_hosts(run, cluster, ("eu",))
    assert bare.what == "cannot be looked at by ssh: python: No module named 'geotrain'"
    assert "same paths as here" in bare.remedy
    assert check_hosts(run, cluster, ("global", "us")) == check_hosts(run, cluster, ("eu",), ask=False) == []
    monkeypatch.setattr(host_check, "ASK_S", 0.5)
    run, cluster = read(files(tmp_path, taken, "ssh", "silent"))
    (late,) = check_hosts(run, cluster, ("eu",))
    assert late.what == "cannot be looked at by ssh: no answer within 0.5 s"


def test_who_answered_is_known_where_another_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "said").write_text(f"h1: {read_host(tmp_path, []).to_line()}\n")
    stand_in(monkeypatch, tmp_path / "bin/pdsh", f"#!/bin/sh\ncat {tmp_path}/said\nexec sleep 300\n")
    monkeypatch.setattr(host_check, "ASK_S", 5.0)
    found = check_hosts(*read(files(tmp_path, 29400, "pdsh", "h1", "h2")), ("eu",))
    assert [each.host for each in found if "no answer within 5 s" in each.what] == ["h2"]


def test_a_launch_is_refused_before_anything_begins(tmp_path: Path, taken: int) -> None:
    prepare_text(tmp_path)
    made = files(tmp_path, taken, "ssh", "h1")
    for words in (("launch",), ("dry-run", "--ask-hosts")):
        done = say(words[0], *made, *words[1:])
        assert done.returncode == 2 and f"refused h1 port {taken} is taken end what listens there" in done.text
    assert not (tmp_path / "run/servers").exists() and not (tmp_path / "run/hosts").exists()


def test_gpus_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(tmp_path, monkeypatch)
    nvml.say({"1.used": 5 << 30, "1.mode": 3, "1.processes": 1, "1.ecc": 2})
    kind = "NVIDIA H100 80GB HBM3", "580.95.05", 85520809984
    first = GpuFacts(0, "GPU-0", *kind, 4 << 20, "Default", (), (9, 0), 0)
    second = GpuFacts(1, "GPU-1", *kind, 5 << 30, EXCLUSIVE, ("python3 (process 4242)",), (9, 0), 2)
    assert read_gpus() == ((first, second), "")
    nvml.say({"0.lost": 1, "nvmlDeviceGetMemoryInfo_v2.error": 3})
    assert read_gpus() == ((replace(second, memory_bytes=None, used_bytes=None),), "GPU 0: GPU is lost")


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ({"system.devices": 0}, ""),
        ({"nvmlInitWithFlags.error": 18}, "RM has detected an NVML/RM version mismatch."),
        ({"nvmlInitWithFlags.error": 9}, "Driver Not Loaded"),
        ({"nvmlDeviceGetUUID.hang": 1}, "no answer within 0.5 s"),
    ],
)
def test_a_driver_that_gives_no_gpus(
    tmp_path: Path, answers: dict[str, int], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml(tmp_path, monkeypatch)
    nvml.say(answers)
    monkeypatch.setattr(host_facts, "NVML_S", 0.5 if "0.5 s" in error else 60.0)
    assert read_gpus() == ((), error)
    nvml.go_on()


def test_no_driver_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml(tmp_path, monkeypatch)
    (tmp_path / "libnvidia-ml.so.1").unlink()
    assert read_gpus() == ((), "")


def test_this_machine_is_read(tmp_path: Path, taken: int) -> None:
    facts = read_host(tmp_path / "not/there/yet", [taken, 0])
    assert facts.taken_ports == (taken,) and facts.free_bytes > 0 and facts.shm_bytes is not None
    assert facts.torch is not None and facts.headers and facts.compiler
    assert (facts.usable, facts.gpus, facts.unusable) == (0, (), "")
