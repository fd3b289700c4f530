"""How a run's state is judged, and its logs are one stream."""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from geotrain.commands import operate
from geotrain.commands.logs import stream
from geotrain.commands.operate import LiveRun, RunState, RunStatus, judge, launcher_runs, picture
from geotrain.config import ConfigError
from geotrain.launch.forming import without_cordoned
from geotrain.launch.launcher import locked
from geotrain.launch.terminal import SEEN, RunDisplay, last_seen, new_console
from tests.support.command_line import say
from tests.support.net_worlds import BUSY_S, wait_for
from tests.support.server_processes import Site

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


def test_a_run_whose_servers_die_one_after_another(tmp_path: Path) -> None:
    """Processes. What is told of a server that does not answer is what its launcher saw last, and when that was."""
    site = Site(tmp_path, train_samples=48, updates_per_send=1)
    site.run = site.run.model_copy(update={"monitor": site.run.monitor.model_copy(update={"every_s": 0.2})})
    console = Console(file=(tmp_path / "display").open("w"))
    try:
        site.serve("global")
        region = site.serve("eu")
        run = LiveRun(tmp_path)
        worker = site.worker("a", "life-1")
        worker.join()
        worker.train(worker.lease())
        worker.lease()

        def told(*words: str) -> str:
            seen = run.wait(lambda seen: all(re.search(word, said(seen)) for word in words), BUSY_S)
            return said(seen)

        def said(seen: RunStatus) -> str:
            console = new_console()
            with console.capture() as shown:
                console.print(picture(run, seen))
            return shown.get()

        unseen = RunStatus(RunState.UNREACHABLE, "", {}, {}, {"gpu1": "a fan is loud"})
        assert "gpu1 is cordoned: a fan is loud" in said(unseen)
        told("running; 8.3% committed", "eu waits for b: its processes to join")
        assert say("expel", tmp_path, "b").text == "b: expelled; its leases go to others"
        told(r"eu waits for b: the end of its quarantine, or `geotrain unban` \(the operator expelled it\)")
        assert say("unban", tmp_path, "b").text == "b: unbanned"
        told("eu waits for b: its processes to join")
        with RunDisplay(site.run, site.cluster, console, tmp_path):
            wait_for(lambda: last_seen(tmp_path).get("global", {}).get("committed_samples"))
        region.send(signal.SIGKILL)
        told("running; eu cut off; 8.3% committed", "global waits for eu: the 1 lease that it holds")
        assert [(w["server"], w["what"], w["whom"]) for w in run.see().as_json()["waits"]] == [
            ("global", "lease", "eu")
        ]
        site.servers[0].send(signal.SIGKILL)
        last = told(r"unreachable; 8\.3% committed, \d+:\d\d ago; no server answers", "no answer")
        assert (
            "waits for" not in last
            and not run.see().as_json()["waits"]
            and run.see().as_json()["servers"]["global"]["as_of"] > 0
        )
        (tmp_path / SEEN).unlink()
        (tmp_path / "servers").symlink_to(tmp_path)  # then its own events tell, where they are here
        told(r"unreachable; 8\.3% committed, \d+:")
        site.serve("eu", resume=True)
        told(
            f"the global server at {site.address('global')} does not answer, but eu", "eu waits for global: the link"
        )
        worker.close()
    finally:
        site.kill()


def test_news_that_are_damaged_are_passed_over(tmp_path: Path) -> None:
    Site(tmp_path)
    files = [tmp_path / name for name in ("outcome.json", "seen.json", "servers/global/status.json")]
    (tmp_path / "servers/global").mkdir(parents=True)
    for content in (b"", b"[1]", b"\xff", b'{"global": 3}'):
        for file in files:
            file.write_bytes(content)
        assert LiveRun(tmp_path).see().state is RunState.UNREACHABLE, content


def test_a_host_that_its_worker_cannot_do_without_is_told(tmp_path: Path) -> None:
    Site(tmp_path)
    done = say("cordon", tmp_path, "localhost")
    assert done.returncode == 0 and "localhost is cordoned: by hand a, b goes on with it: only a" in done.text
    run = LiveRun(tmp_path)
    assert without_cordoned(run.config, run.cluster, tmp_path) == run.cluster


def test_a_snapshot_that_failed_is_reported_and_only_the_global_one_must_succeed(tmp_path: Path) -> None:
    site = Site(tmp_path, train_samples=48)
    try:
        for which in ("global", "eu"):
            site.serve(which)
            assert site.status(which)
        run = LiveRun(tmp_path)
        assert list(run.snapshot()) == ["global", "eu"]
        site.servers[1].kill()
        done = say("snapshot", tmp_path)
        assert "global/snapshots/" in done.text and f"the server at {site.address('eu')} does not answer" in done.text
        site.servers[0].kill()
        assert say("snapshot", tmp_path).returncode == 2
    finally:
        site.kill()


def test_a_drained_region_has_left_when_all_of_its_members_have(tmp_path: Path) -> None:
    Site(tmp_path)  # of a region with the workers a and b
    run = LiveRun(tmp_path)

    def has_left(members: dict[str, bool]) -> bool:
        told = {name: {"left": left} for name, left in members.items()}
        return run.has_left("eu", RunStatus(RunState.RUNNING, "", {"global": {"members": told}}))

    assert [has_left({"a": left, "b": True, "c": False}) for left in (False, True)] == [False, True]
    assert not has_left({})


def test_a_run_of_which_no_server_tells_is_not_over_while_its_launcher_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Site(tmp_path)
    run = LiveRun(tmp_path)
    with pytest.raises(TimeoutError, match="not within 0 s; now: unreachable"):
        run.wait_until_over(0.0)
    monkeypatch.setattr(operate, "COMMAND_S", -1.0)
    assert run.wait_until_over(0.0).state is RunState.UNREACHABLE  # its servers may have ended elsewhere
    with locked(tmp_path), pytest.raises(TimeoutError):
        monkeypatch.setattr(operate, "COMMAND_S", 1.0)
        run.wait_until_over(2.0)
    assert run.wait_until_over(0.0).state is RunState.FAILED


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
