"""The operator's commands on a live run of real processes; and how a run's state is judged."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from geotrain.commands.logs import stream
from geotrain.commands.operate import LiveRun, RunState, judge, launcher_runs
from geotrain.config import ConfigError
from geotrain.launch.launcher import locked
from tests.support.command_line import Run
from tests.support.process_trees import marked, new_mark, until
from tests.support.small_runs import prepare_text, write_files

START_S = 500.0
ENOUGH = 1_000_000  # samples: no machine trains them during the test
PACE_S = 0.05  # a step: workers that wait leave the processor to those who look at them
LIVE: dict[str, Any] = {"phase": "running"}
ENDED: dict[str, Any] = {"phase": "ended", "complete": True}


def updates(folder: Path, site: str) -> int:
    return sum(m["updates"] for m in LiveRun(folder).see().statuses.get(site, {}).get("members", {}).values())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_watched_paused_drained_and_stopped_then_resumed(tmp_path: Path, geotrain: Run) -> None:
    prepare_text(tmp_path)
    halos = {"rule": {"name": "halos", "updates_per_send": 2}}
    files = write_files(tmp_path, "run", ENOUGH, {"eu": [1], "us": [1]}, halos, min_step_s=PACE_S)
    folder, mark = tmp_path / "run", new_mark()
    env = {**os.environ, **mark, "OMP_NUM_THREADS": "1"}

    def launch(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "geotrain", "launch", *map(str, files), *more]
        return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    launcher = launch()
    try:
        assert until(lambda: launcher.poll() is not None or (folder / "servers/us/listening.json").exists(), START_S)
        assert until(lambda: launcher.poll() is not None or all(updates(folder, s) for s in ("eu", "us")), START_S)
        assert launcher.poll() is None, launcher.communicate()[0]
        once = geotrain("status", folder, "--once")
        assert once.returncode == RunState.RUNNING and "small: running; " in once.stdout and "tokens/s" in once.stdout

        for member in ("eu-0", "us"):
            unbanned = geotrain("unban", folder, member)
            assert unbanned.stdout == f"{member}: unbanned\n", unbanned.stderr
        nobody = geotrain("unban", folder, "x")
        assert (
            nobody.returncode == 2 and "'x' is no worker or region of this run; there are eu, eu-0" in nobody.stderr
        )

        assert geotrain("pause", folder).stdout == "paused\n"
        quiet: list[int] = []

        def at_rest() -> bool:
            nonlocal quiet
            quiet = [updates(folder, site) for site in ("eu", "us")]
            time.sleep(1.0)
            return [updates(folder, site) for site in ("eu", "us")] == quiet

        # Regions hear of it by their next heartbeats; their workers then finish the job in hand and the next.
        assert until(at_rest, START_S)
        assert LiveRun(folder).see().headline.startswith("paused; ")
        assert "paused; " in geotrain("status", folder, "--once").stdout
        assert geotrain("resume", folder).stdout == "running\n"
        assert until(lambda: updates(folder, "eu") > quiet[0], START_S)

        written = geotrain("snapshot", folder)
        assert written.returncode == 0, written.stdout + written.stderr
        places = dict(line.split(": ", 1) for line in written.stdout.splitlines())
        assert set(places) == {"global", "eu", "us"}
        for place in places.values():
            assert (Path(place.partition(":")[2]) / "meta.json").exists()

        drained = geotrain("drain", folder, "us", "--wait", "200")
        assert drained.returncode == 0 and "draining us" in drained.stdout, drained.stderr
        before = updates(folder, "eu")
        assert until(lambda: updates(folder, "eu") > before, START_S)
        assert until(lambda: not (folder / "servers/us/listening.json").exists(), START_S)  # its server has ended
        assert launcher.poll() is None

        stopped = geotrain("stop", folder, "--wait", "200")
        assert stopped.returncode == 0 and "stopped; " in stopped.stdout, stopped.stderr
        said = launcher.communicate(timeout=START_S)[0]
        assert launcher.returncode == 0, said
        assert "% of the data is trained, and kept; the run goes on with: geotrain launch " in said
        assert ": loss " in (folder / "logs/eu-0.log").read_text()
        assert marked(mark) == []
        last = LiveRun(folder).see()
        carried = last.statuses["eu"]["links"]["up_bytes"]
        nothing = geotrain("stop", folder)
        assert nothing.returncode == 2, nothing.stderr
        assert "the run is not on, nothing was done: stopped; " in nothing.stderr and "--resume" in nothing.stderr
        committed = last.statuses["global"]["committed_samples"]
        assert last.state is RunState.STOPPED and 0 < committed < ENOUGH
        assert last.statuses["global"]["open_leases"] == 0

        write_files(tmp_path, "run", committed + 160, {"eu": [1], "us": [1]}, halos)
        resumed = launch("--resume")
        said = resumed.communicate(timeout=START_S)[0]
        assert resumed.returncode == 0, said
        status = geotrain("status", folder, "--json")
        last = json.loads(status.stdout)
        top = last["servers"]["global"]
        assert (status.returncode, last["state"]) == (RunState.FINISHED, "finished")
        assert top["committed_samples"] == top["train_samples"] == committed + 160
        assert last["servers"]["eu"]["links"]["up_bytes"] > carried  # counted from the run's beginning
        again = geotrain("launch", *files).stderr
        assert "holds a run that is finished: all its data is trained" in again
        assert "raise data.train_samples and launch with --resume" in again
        again = geotrain("launch", *files, "--resume").stdout
        assert "small: is finished" in again and "processes started" not in again
    finally:
        launcher.kill()
        launcher.communicate()
    steered = [
        event["what"]
        for line in (folder / "servers/global/events.jsonl").read_text().splitlines()
        if (event := json.loads(line))["event"] == "Steered"
    ]
    assert steered == ["pause", "resume", "drain", "stop"]
    paused = geotrain("pause", folder)
    assert paused.returncode == 2 and "nothing was done: finished; 100.0% committed" in paused.stderr
    assert "no run is here" in geotrain("status", tmp_path / "none").stderr


@pytest.mark.parametrize(
    ("live", "words", "outcome", "launcher", "state"),
    [
        (LIVE, None, None, True, RunState.RUNNING),
        (LIVE, ENDED, {"code": 1, "reason": "of an earlier start"}, None, RunState.RUNNING),
        (ENDED, None, None, True, RunState.FINISHED),  # it lingers
        (None, ENDED, {"code": 0, "reason": ""}, False, RunState.FINISHED),
        (None, ENDED, {"code": 1, "reason": "process 'eu-0' failed"}, False, RunState.FAILED),
        (None, {**ENDED, "complete": False}, {"code": 0, "reason": ""}, False, RunState.STOPPED),
        (None, None, {"code": 0, "reason": ""}, False, RunState.FINISHED),  # the global server was far away
        (None, {"phase": "running"}, None, False, RunState.FAILED),  # the machine was switched off
        (None, None, None, True, RunState.UNREACHABLE),
        (None, None, None, None, RunState.UNREACHABLE),
    ],
)
def test_the_state_of_a_run(live: Any, words: Any, outcome: Any, launcher: bool | None, state: RunState) -> None:
    found, reason = judge(live, words, outcome, launcher)
    assert found is state
    assert bool(reason) == (state in (RunState.FAILED, RunState.UNREACHABLE))


def test_a_launcher_is_known_by_its_lock(tmp_path: Path) -> None:
    assert launcher_runs(tmp_path) is None
    with locked(tmp_path):
        assert launcher_runs(tmp_path) is True
    assert launcher_runs(tmp_path) is False


def test_logs_are_one_stream(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    eu, us = tmp_path / "logs/eu.log", tmp_path / "logs/us.log"
    eu.write_text("one\ntwo\nthree\n")
    us.write_text("")
    turns = iter(["late\nha", "lf\nrest"])

    def goes_on() -> bool:
        with us.open("a") as file:
            file.write(text := next(turns, ""))
        return bool(text)

    assert list(stream(tmp_path, (), 2, goes_on)) == [
        "eu: two", "eu: three", "us: late", "us: half", "us: rest"
    ]  # fmt: skip
    assert list(stream(tmp_path, ("eu",), 1, lambda: False)) == ["three"]
    with pytest.raises(ConfigError, match="no log of 'mars'; there are: eu, us"):
        list(stream(tmp_path, ("mars",), 1, lambda: False))
    with contextlib.suppress(StopIteration), pytest.raises(ConfigError, match="no log files here"):
        next(stream(tmp_path / "logs", (), 1, lambda: False))
