"""How a run's state is judged, and its logs are one stream."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from geotrain.commands.logs import stream
from geotrain.commands.operate import RunState, judge, launcher_runs
from geotrain.config import ConfigError
from geotrain.launch.launcher import locked

LIVE: dict[str, Any] = {"phase": "running"}
ENDED: dict[str, Any] = {"phase": "ended", "complete": True}


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
