"""The launcher: where it says the page is, what it writes down, its metrics."""

from __future__ import annotations

import io
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, RunConfig, parse
from geotrain.launch.launcher import event_log
from geotrain.launch.supervisor import ProcessSpec, Supervisor
from geotrain.launch.terminal import RunDisplay, page_line
from geotrain.monitor.events import Follower, ProcessEnded, ProcessStarted
from geotrain.monitor.monitor import LAUNCHER, Monitor, metrics_port
from geotrain.outer.events import UpdateApplied
from tests.support.process_trees import until


def a_run(folder: Path, **monitor: Any) -> RunConfig:
    raw = {
        "name": "r", "folder": str(folder), "model": {"config": {"model_type": "llama"}}, "monitor": monitor,
        "data": {"train": "x", "sequence_length": 4, "train_samples": 10},
        "deepspeed": {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1},
    }  # fmt: skip
    return parse(RunConfig, raw, "run")


def a_cluster(**keys: Any) -> ClusterConfig:
    def region(name: str) -> dict[str, Any]:
        return {"name": name, "workers": [{"name": f"{name}-0", "hosts": [{"host": "h", "slots": 1}]}]}

    return parse(ClusterConfig, {"name": "c", "regions": [region("eu"), region("us")], **keys}, "cluster")


def test_curves_that_go_nowhere_keep_neither_the_start_nor_metrics_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, over = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: asked.set() or over.wait(60)))
    monkeypatch.setattr("geotrain.monitor.monitor.STOP_S", 0.2)
    run = a_run(tmp_path, metrics_port=0, wandb={"project": "p"})
    with event_log(run, tmp_path) as events, Monitor(run, a_cluster(), GLOBAL, events) as monitor:
        events.write(UpdateApplied("eu", 0, 1, 1, [1], 0, 8, 9, 2.5, {}, None, 4))
        url = str(monitor.metrics_url)
        assert until(lambda: 'updates_total{member="eu"' in urllib.request.urlopen(url).read().decode())
        assert asked.wait(60) and not over.is_set()
    assert not over.is_set()
    over.set()


def test_processes_become_events_and_metrics(tmp_path: Path) -> None:
    run = a_run(tmp_path, metrics_port=0)
    with event_log(run, tmp_path) as events, Monitor(run, a_cluster(), LAUNCHER, events) as monitor:
        with Supervisor(tmp_path / "logs", on_event=events.write) as supervisor:
            supervisor.start(ProcessSpec("good", (sys.executable, "-c", "pass"), role="worker"))
            supervisor.start(
                ProcessSpec("bad", (sys.executable, "-c", "import time; time.sleep(1); raise SystemExit(3)"))
            )
            assert supervisor.wait().code == 3
        assert monitor.metrics_url and monitor.page_url is None
        wanted = 'geotrain_process_exits_total{code="3",process="bad",run="r",site="launcher"} 1.0'

        def metrics() -> str:
            assert monitor.metrics_url
            with urllib.request.urlopen(monitor.metrics_url, timeout=60) as answer:
                return str(answer.read().decode())

        assert until(lambda: wanted in metrics()), metrics()
        assert 'geotrain_process_up{process="good",run="r",site="launcher"} 0.0' in metrics()
    told = [record.event for record in Follower(tmp_path / "events" / "launcher.jsonl").read()]
    assert [e for e in told if isinstance(e, ProcessStarted)] == [
        ProcessStarted("good", "worker"),
        ProcessStarted("bad", "worker"),
    ]
    assert sorted((e.process, e.code) for e in told if isinstance(e, ProcessEnded)) == [("bad", 3), ("good", 0)]


def test_nothing_is_served_or_written_when_it_is_switched_off(tmp_path: Path) -> None:
    run = a_run(tmp_path, enabled=False, metrics_port=0)
    with event_log(run, tmp_path) as events, Monitor(run, a_cluster(), LAUNCHER, events) as monitor:
        events.write(ProcessStarted("x", "worker"))
        assert monitor.metrics_url is None
    assert (tmp_path / "events" / "launcher.jsonl").read_text() == ""


def test_each_process_has_a_port_of_its_own(tmp_path: Path) -> None:
    sites = ("global", "launcher", "eu", "us")
    ports = [metrics_port(a_run(tmp_path, metrics_port=9400), a_cluster(), site) for site in sites]
    assert ports == [9400, 9401, 9402, 9403]
    assert {metrics_port(a_run(tmp_path, metrics_port=0), a_cluster(), site) for site in sites} == {0}
    assert metrics_port(a_run(tmp_path), a_cluster(), "eu") is None


def test_where_the_page_is() -> None:
    assert page_line(a_cluster(), "http://127.0.0.1:80/") == "status page: http://127.0.0.1:80/"
    far = a_cluster(global_ssh="top.example", global_server={"host": "10.0.0.1", "port": 5})
    assert "ssh -N -L 8600:127.0.0.1:8600 top.example" in page_line(far, "http://127.0.0.1:8600/")
    assert "ssh -N -L 8600:[::1]:8600 top.example" in page_line(far, "http://[::1]:8600/")
    assert page_line(far, "http://10.0.0.1:8600/") == "status page: http://10.0.0.1:8600/"


def test_the_launcher_says_it_once(tmp_path: Path) -> None:
    said = io.StringIO()
    display = RunDisplay(a_run(tmp_path), a_cluster(), Console(file=said, width=200), tmp_path)
    for url in (None, "http://127.0.0.1:80/", "http://127.0.0.1:80/", "http://127.0.0.1:81/"):
        display.latest = {"global": {"page": url}}
        display.show()
    assert said.getvalue().splitlines() == [f"status page: http://127.0.0.1:{port}/" for port in (80, 81)]


def test_on_a_terminal_it_draws_what_status_draws(tmp_path: Path) -> None:
    said = io.StringIO()
    top = {"phase": "running", "page": "http://127.0.0.1:80/", "train_samples": 4, "committed_samples": 1}
    terminal = Console(file=said, width=120, force_terminal=True, color_system=None)
    with RunDisplay(a_run(tmp_path), a_cluster(), terminal, tmp_path) as display:
        display.latest = {"global": top}
        display.show()
    assert "r: running; 25.0% committed" in said.getvalue()
    assert "region  state  loss" in said.getvalue() and "status page: http://127.0.0.1:80/" in said.getvalue()
