"""The supervisor and the guard, with real process trees."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geotrain.launch import guard as guard_module
from geotrain.launch import supervisor as supervisor_module
from geotrain.launch.guard import EXIT_LEFT_BEHIND
from geotrain.launch.supervisor import LaunchError, ProcessSpec, RunOutcome, Supervisor, guarded
from tests.support.process_trees import STUBBORN, marked, new_mark, until

SUPERVISOR = """
import sys
from pathlib import Path
from geotrain.launch import supervisor as module
from geotrain.launch.supervisor import ProcessSpec, Supervisor, guarded
module.STOP_DEADLINE_S = 1000.0
with Supervisor(Path(sys.argv[1])) as supervisor:
    for name in ("a", "b"):
        supervisor.start(ProcessSpec(name, guarded(sys.argv[3:], grace_s=float(sys.argv[2]))))
    outcome = supervisor.wait()
print(outcome.reason)
sys.exit(outcome.code)
"""


def guard(*command: str, grace_s: float = 0.5, **popen: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(guarded(command, grace_s=grace_s), stdin=subprocess.PIPE, **popen)


def sh(script: str) -> tuple[str, ...]:
    return guarded(("bash", "-c", script))


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_guard_forwards_the_exit_code(script: str, code: int) -> None:
    assert guard("bash", "-c", script).wait(60) == code


def test_guard_names_a_program_that_is_not_there() -> None:
    process = guard("/no/such/program", stderr=subprocess.PIPE)
    assert process.wait(60) == 127
    assert b"/no/such/program: No such file" in process.stderr.read()


@pytest.mark.parametrize("how", ["end of input", "SIGTERM"])
def test_guard_ends_the_whole_tree(how: str) -> None:
    mark = new_mark()
    process = guard(*STUBBORN, env={**os.environ, **mark}, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    assert until(lambda: len(marked(mark)) >= 5)  # guard, bash, bash, sleep, setsid sleep
    if how == "SIGTERM":
        process.terminate()
    else:
        process.stdin.close()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert marked(mark) == []


def test_guard_gives_a_chance_to_end_well(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    script = f"trap 'sleep 0.3; touch {saved}; exit 0' TERM; echo ready; while true; do sleep 0.05; done"
    process = guard("bash", "-c", script, grace_s=10.0, stdout=subprocess.PIPE)
    process.stdout.readline()
    process.stdin.close()
    process.wait(60)
    assert saved.exists()


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("exit 0", EXIT_LEFT_BEHIND)])
def test_guard_clears_up_what_its_command_leaves(script: str, code: int) -> None:
    mark = new_mark()
    assert guard("bash", "-c", f"setsid sleep 300 & {script}", env={**os.environ, **mark}).wait(60) == code
    assert marked(mark) == []


def test_guard_lets_the_last_processes_end() -> None:
    assert guard("bash", "-c", "setsid sleep 0.2 & exit 0").wait(60) == 0


def test_an_exception_stops_everything(tmp_path: Path) -> None:
    mark = new_mark()
    with pytest.raises(KeyError), Supervisor(tmp_path) as supervisor:
        supervisor.start(ProcessSpec("a", sh("sleep 300"), env=mark))
        raise KeyError("x")
    assert marked(mark) == []


def test_ticks_come_at_their_pace(tmp_path: Path) -> None:
    ticks: list[float] = []

    def tick() -> None:
        ticks.append(time.monotonic())
        if len(ticks) == 3:
            (tmp_path / "enough").touch()

    with Supervisor(tmp_path) as supervisor:
        supervisor.start(ProcessSpec("a", sh(f"until [ -e {tmp_path}/enough ]; do sleep 0.05; done")))
        supervisor.wait(tick, every_s=0.2)
    assert all(later - before >= 0.2 for before, later in pairwise(ticks))


def test_a_supervisor_that_was_stopped_takes_nothing_for_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a debugger or with its machine: the server ends well meanwhile, late by the clock on the wall."""
    monkeypatch.setattr(supervisor_module, "LOOK_S", 0.05)
    monkeypatch.setattr(supervisor_module, "STOOD_STILL_S", 0.2)
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += supervisor._have_ended("worker")
        if ticks == 2:  # the server's time to end has begun
            (tmp_path / "end").touch()
            time.sleep(1.5)

    with Supervisor(tmp_path, drain_s=1.0) as supervisor:
        supervisor.start(
            ProcessSpec("global", sh(f"until [ -e {tmp_path}/end ]; do sleep 0.05; done"), role="server")
        )
        supervisor.start(ProcessSpec("a", sh("exit 0")))
        outcome = supervisor.wait(tick, every_s=0.1)
    assert outcome == RunOutcome(0)


def test_a_guard_that_was_stopped_leaves_its_command_the_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    times, alive, sent = iter([0.0, 0.1, 1000.0, 1000.1]), iter([[7], [7], [7], []]), list[int]()
    monkeypatch.setattr(guard_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(guard_module, "_pause", lambda _: b"")
    monkeypatch.setattr(guard_module.os, "kill", lambda pid, number: sent.append(number))
    assert guard_module._end(lambda: next(alive), 10.0, 0) and sent == [signal.SIGTERM]


def test_a_guard_says_so_where_a_process_outlives_even_sigkill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "KILL_DEADLINE_S", 0.1)
    monkeypatch.setattr(guard_module.os, "kill", lambda pid, number: None)
    silent, _kept = os.pipe()
    assert guard_module._end(lambda: [7], 0.0, silent) is False


def test_a_program_that_is_missing(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor, pytest.raises(LaunchError, match=r"'a' cannot be started: .*/no/such"):
        supervisor.start(ProcessSpec("a", ("/no/such",)))


def start_supervisor(
    tmp_path: Path, mark: dict[str, str], grace_s: float = 1.0, ignored: tuple[signal.Signals, ...] = ()
) -> subprocess.Popen[bytes]:
    def disposed() -> None:
        for number in guard_module.STOP_SIGNALS:  # whatever the tests were started by
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path), str(grace_s), *STUBBORN],
        env={**os.environ, **mark},
        stdout=subprocess.PIPE,
        preexec_fn=disposed,
    )
    assert until(lambda: all((tmp_path / f"{n}.log").exists() and (tmp_path / f"{n}.log").read_text() for n in "ab"))
    assert until(lambda: len(marked(mark)) >= 11)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(tmp_path: Path, number: signal.Signals) -> None:
    mark = new_mark()
    process = start_supervisor(tmp_path, mark, grace_s=1000.0)
    process.send_signal(number)
    assert until(lambda: all("asked" in (tmp_path / f"{n}.log").read_text() for n in "ab"))
    assert process.poll() is None
    process.send_signal(number)  # asked again: without grace
    assert process.wait(60) == 128 + number
    assert f"stopped by {number.name}" in process.stdout.read().decode()
    assert marked(mark) == []


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    """Under nohup the end of the terminal stops nothing: of two signals the lower number is read first."""
    process = start_supervisor(tmp_path, new_mark(), ignored=(signal.SIGHUP,))
    process.send_signal(signal.SIGHUP)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in process.stdout.read().decode()


def test_nothing_survives_the_supervisors_death(tmp_path: Path) -> None:
    mark = new_mark()
    process = start_supervisor(tmp_path, mark)
    process.kill()
    process.wait()
    assert until(lambda: marked(mark) == [])


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Supervisor(tmp_path):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
