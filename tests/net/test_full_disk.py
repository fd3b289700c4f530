"""A disk that is really full: servers refuse and wait, say so, and go on when there is room."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from geotrain.monitor.events import EventLog, Follower, Trouble
from geotrain.net.transport import rpc
from geotrain.net.transport.operator_client import command
from geotrain.outer.messages import Lease, Refused
from tests.support.disks import BALLAST, fill, small_disk
from tests.support.net_worlds import BUSY_S, FakeWorker, side_by_side, wait_for
from tests.support.server_processes import Server, Site

pytestmark = pytest.mark.root


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with small_disk(tmp_path / "global", "12m"), small_disk(tmp_path / "eu", "12m"):
        made = Site(tmp_path)
        yield made
        for server in made.servers:
            server.process.kill()
            server.process.join()


def waits(server: Server) -> bool:
    return server.said.exists() and "the server waits until there is room" in server.said.read_text()


def train_when(filled: threading.Event, worker: FakeWorker, train: Callable[[Lease], None], lease: Lease) -> None:
    """The first lease at once, the others when the disks are full."""
    assert not worker.trained or filled.wait(BUSY_S)
    train(lease)


@pytest.mark.long("geotrain/net")
@pytest.mark.slow
def test_servers_wait_for_room_and_the_run_ends_well(site: Site) -> None:
    """Both disks are filled while a run goes on, both servers are killed and come back to full disks."""
    servers = {which: site.serve(which) for which in ("global", "eu")}
    workers = [site.worker("a"), site.worker("b")]
    filled = threading.Event()
    for worker in workers:  # else one of them may train everything before the other is there, or the disks are full
        worker.train = partial(train_when, filled, worker, worker.train)  # type: ignore[method-assign]
    with side_by_side(workers):
        wait_for(lambda: all(worker.trained for worker in workers))
        for which in servers:
            fill(site.folder / which)
        filled.set()
        for which in servers:
            with pytest.raises(Refused, match=r"needs .* MB, but only .* free|No space left"):
                command(site.address(which), rpc.Control("snapshot"), BUSY_S)
            assert servers[which].process.is_alive()
        for which in servers:
            servers[which].send(signal.SIGKILL)
            servers[which].ended()
            servers[which] = site.serve(which, resume=True)
        for server in servers.values():
            wait_for(lambda s=server: waits(s))
            assert server.process.is_alive()
        for which in servers:
            (site.folder / which / BALLAST).unlink()
    for server in servers.values():
        server.process.join(BUSY_S)
        assert server.process.exitcode == 0
    assert sorted(lease.start for worker in workers for lease in worker.trained) == list(range(0, 48, 4))


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
