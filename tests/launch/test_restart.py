"""Processes that die are started again: the pauses as numbers, and a supervisor with real processes."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from geotrain.common.files import OutputError
from geotrain.config import EXIT_FOR_GOOD, RestartConfig, load_cluster, load_run
from geotrain.launch.backoff import RestartBackoff
from geotrain.launch.launcher import resolve
from geotrain.launch.machine import HostMachine
from geotrain.launch.site_processes import LaunchRequest, local_processes
from geotrain.launch.supervisor import ProcessSpec, Supervisor, guarded
from geotrain.monitor.events import ProcessDied, Trouble
from geotrain.outer.events import Event
from tests.support.process_trees import only_deaths
from tests.support.small_runs import write_files


def test_pauses_double_and_begin_anew_after_it_has_run_for_long() -> None:
    backoff = RestartBackoff(RestartConfig(limit=100, first_s=1.0, longest_s=5.0))
    assert [backoff.pause_s(1, t, lived_s=0.1) for t in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert [backoff.pause_s(1, 10.0, lived_s=6.0), backoff.pause_s(1, 11.0, lived_s=0.1)] == [0.0, 1.0]
    assert backoff.restarts == 7


def test_restarts_are_bounded_within_the_window() -> None:
    backoff = RestartBackoff(RestartConfig(limit=2, window_s=100.0, first_s=1.0, longest_s=1.0))
    assert [backoff.pause_s(137, t, lived_s=9.0) for t in (0.0, 50.0, 60.0)] == [0.0, 0.0, None]
    assert backoff.pause_s(137, 101.0, lived_s=9.0) == 0.0
    assert backoff.pause_s(EXIT_FOR_GOOD, 300.0, lived_s=9.0) is None


def test_a_full_disk_costs_no_restart_and_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where a process cannot be started for want of room, nor where nothing can be told."""
    monkeypatch.setattr("geotrain.launch.supervisor.FULL_RETRY_S", 0.05)
    told: list[Event] = []
    attempts = 0

    def tell(event: Event) -> None:
        told.append(event)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def respawn() -> list[ProcessSpec]:
        nonlocal attempts
        attempts += 1
        if attempts < 5:
            raise OutputError("hosts/a: cannot be written") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return [ProcessSpec("a", guarded(("true",)))]

    with Supervisor(tmp_path, restart=RestartConfig(limit=1, first_s=0.05), on_event=tell) as running:
        running.start(ProcessSpec("a", guarded(("bash", "-c", "exit 1"), grace_s=1.0), respawn=respawn))
        outcome = running.wait(tick=lambda: tell(Trouble("tick")), every_s=0.01)
    assert (outcome.code, attempts) == (0, 5)
    said = [event.what for event in told if isinstance(event, Trouble) and event.what != "tick"]
    assert said == ["hosts/a: cannot be written; it is started when there is room"]


def test_what_cannot_be_started_again_counts_as_a_death(tmp_path: Path) -> None:
    tries: list[str] = []

    def again() -> list[ProcessSpec]:
        tries.append("try")
        if len(tries) == 1:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return [ProcessSpec("a", guarded(("true",)), respawn=again)]

    deaths: list[ProcessDied] = []
    restart = RestartConfig(first_s=0.05)
    with Supervisor(tmp_path, restart=restart, on_event=only_deaths(deaths)) as running:
        running.start(ProcessSpec("a", guarded(("false",)), respawn=again))
        assert running.wait().code == 0
    assert (len(tries), [d.pause_s for d in deaths]) == (2, [0.05, 0.1])


def test_a_server_is_told_the_launch_and_so_is_what_replaces_it(tmp_path: Path) -> None:
    """A shard is told nothing: its coordinator lets it go."""
    run, cluster = write_files(tmp_path, "run", 32, {"eu": [1]}, {}, shards=1)
    request = LaunchRequest(load_run(run), resolve(load_cluster(cluster)), ("global", "eu"), False, "incarnation")
    for launch_id, told in (("", "incarnation"), ("job-7", "job-7")):
        for process in local_processes(replace(request, launch_id=launch_id), tmp_path, HostMachine(2)):
            for spec in (process, *(process.respawn() if process.respawn else ())):
                words = list(spec.command)
                said = words[words.index("--launch-id") + 1] if "--launch-id" in words else None
                assert said == (told if spec.role == "server" else None)
                assert ("--resume" in words) == (spec is not process)
