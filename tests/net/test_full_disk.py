"""A disk that is really full: servers refuse and wait, say so, and go on when there is room."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from geotrain.monitor.events import EventLog, Follower, Trouble
from tests.support.disks import BALLAST, fill, small_disk
from tests.support.net_worlds import wait_for
from tests.support.server_processes import Server, Site

pytestmark = pytest.mark.root


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with small_disk(tmp_path / "global", "12m"), small_disk(tmp_path / "eu", "12m"):
        made = Site(tmp_path)
        yield made
        made.kill()


def waits(server: Server) -> bool:
    return server.said.exists() and "the server waits until there is room" in server.said.read_text()


def test_a_server_is_stopped_on_a_full_disk_and_loses_nothing(site: Site) -> None:
    top = site.serve("global")
    wait_for(lambda: (site.folder / "global" / "listening.json").exists())
    fill(site.folder / "global")
    top.send(signal.SIGTERM)
    assert top.ended() == (0, "")
    (site.folder / "global" / BALLAST).unlink()
    again = site.serve("global", resume=True)
    assert site.status("global")["phase"]
    again.send(signal.SIGTERM)
    assert again.ended() == (0, "")


def test_a_new_run_begins_when_there_is_room(site: Site) -> None:
    fill(site.folder / "global")
    top = site.serve("global")
    wait_for(lambda: waits(top))
    (site.folder / "global" / BALLAST).unlink()
    assert site.status("global")["full"] is None
    top.send(signal.SIGTERM)
    assert top.ended()[0] == 0


def test_events_are_dropped_and_counted_also_in_the_middle_of_a_rotation(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        path = disk / "events.jsonl"
        with EventLog(path, max_bytes=8000, older=2) as log:
            for i in range(30):
                log.write(Trouble(f"before {i}"))
            fill(disk)
            for i in range(1000):  # far more than what is left of the last block
                log.write(Trouble(f"full {i}"))
            dropped = log.dropped
            assert dropped > 800
            (disk / BALLAST).unlink()
            for i in range(1000):
                log.write(Trouble(f"after {i}"))
            assert log.dropped == 0
        follower = Follower(path)
        lines = [record.event.what for record in follower.read() if isinstance(record.event, Trouble)]
        follower.close()
        assert lines[-1] == "after 999"
        names = sorted(p.name for p in disk.iterdir())
        assert names == ["events.jsonl", "events.jsonl.1", "events.jsonl.2"]


def test_missing_events_are_told(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        with EventLog(disk / "events.jsonl") as log:
            fill(disk)
            for i in range(1000):
                log.write(Trouble(f"full {i}"))
            dropped = log.dropped
            (disk / BALLAST).unlink()
            log.write(Trouble("after"))
        follower = Follower(disk / "events.jsonl")
        *written, missing, after = [r.event.what for r in follower.read() if isinstance(r.event, Trouble)]
        follower.close()
        assert written == [f"full {i}" for i in range(1000 - dropped)]
        assert missing.endswith(f": {dropped} events could not be written and are missing here")
        assert after == "after"
