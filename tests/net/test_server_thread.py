"""The state machine's thread: what shares a flush, and what may not."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from geotrain.net.server.server_thread import ServerThread
from geotrain.net.storage.journal import Journal
from geotrain.net.storage.recovery import begin_snapshot, finish_snapshot, recover
from geotrain.outer.messages import Lease, LeaseRequest, Leave, Send, UpdatePart
from geotrain.outer.server.server import Handled
from tests.support.net_worlds import outer, wait_for, whole

DEADLINE_S = 120.0


def test_messages_that_wait_behind_a_snapshot_are_in_the_journal_after_it(make, tmp_path):
    """A group of messages is written before the first of them is applied: a snapshot taken in between would cut off
    journal records that it does not hold."""
    top = make(outer(), {"eu": {"a": whole}}).top
    store, journal = top.recovered.store, top.recovered.journal
    wait_for(lambda: top.server_thread.status["members"]["eu"]["joined"])  # a join takes a member's leases back

    async def together() -> tuple[Any, Lease]:
        gate = threading.Event()
        waiting: list[asyncio.Task[Any]] = []
        for work in (
            top.server_thread.read(gate.wait),
            top.server_thread.say(LeaseRequest("a", 1)),
            top.server_thread.alone(lambda: begin_snapshot(top.server, store, journal, ended=False)),
            top.server_thread.say(LeaseRequest("a", 2)),
        ):
            waiting.append(asyncio.create_task(work))
            await asyncio.sleep(0.01)
        gate.set()
        _, _, copy, lease = await asyncio.gather(*waiting)
        return copy, lease

    copy, lease = top.loop.do(together())
    finish_snapshot(store, journal, *copy)
    shutil.copytree(top.folder, tmp_path / "copy")
    again: Any = recover(top.build, top.begin, tmp_path / "copy", keep=2)
    assert sorted(again.server.lease_table.open) == [1, lease.lease] == [1, 2]
    again.journal.close()


def test_who_waits_is_looked_after_behind_each_message_of_a_group(make):
    """How the run stands is kept as it was at a look: the last message of a group may have changed it."""
    top = make(outer(), {"eu": {"a": whole}}).top
    wait_for(lambda: top.server_thread.status["members"]["eu"]["joined"])
    looks = top.server_thread.looks
    top.loop.do(top.server_thread.say_all(LeaseRequest("a", 1), LeaseRequest("a", 2)))
    wait_for(lambda: top.server_thread.looks >= looks + 2)


def test_a_message_is_on_the_disk_before_it_is_answered(make, monkeypatch):
    top = make(outer(), {"eu": {"a": whole}}).top
    wait_for(lambda: top.server_thread.status["members"]["eu"]["joined"])
    order: list[str] = []
    fdatasync, take, append = os.fdatasync, top.server.take, top.server_thread.journal.append

    def written(*messages: Any) -> None:
        append(*messages)
        order.extend(f"{type(message).__name__} written" for message in messages)

    def synced(file: int) -> None:
        fdatasync(file)
        order.append("on disk")

    def taken(message: Any) -> Handled:
        order.append(type(message).__name__)
        return take(message)

    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(top.server, "take", taken)
    monkeypatch.setattr(top.server_thread.journal, "append", written)
    assert top.loop.do(top.server_thread.say(LeaseRequest("a", 1))).job == 1
    # others may have come with it, which share its flush
    assert "on disk" in order[order.index("LeaseRequest written") : order.index("LeaseRequest")]


def test_payloads_are_decoded_while_the_disk_writes_and_taken_after(make, monkeypatch):
    cluster = make(outer(), {"eu": {"a": whole}})
    region, worker = cluster.regions["eu"], cluster.joined("a")
    lease = worker.lease()
    assert lease is not None
    fdatasync, take, decode = os.fdatasync, region.server.take, region.server.core.up.decode_measured
    decoded, order, journal = threading.Event(), list[str](), region.recovered.journal
    append = journal.append

    def written(*messages: Any) -> None:
        append(*messages)
        order.extend("written" for message in messages if isinstance(message, UpdatePart))

    def synced(file: int) -> None:
        of_part = file == journal._file.fileno() and "written" in order
        assert not of_part or decoded.wait(DEADLINE_S)
        fdatasync(file)
        order.extend(["on disk"] * of_part)

    def taken(message: Any) -> Handled:
        if isinstance(message, UpdatePart):
            order.append("taken")
        return take(message)

    def measured(*of: Any) -> float:
        order.append("decoded")
        decoded.set()
        return decode(*of)

    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(region.server, "take", taken)
    monkeypatch.setattr(region.server.core.up, "decode_measured", measured)
    monkeypatch.setattr(journal, "append", written)
    worker.exchange(worker.parts(lease, 0))
    at = order.index("taken")
    assert order[:at].count("decoded") == 1 == order.count("decoded") and "on disk" in order[:at]


class Slow:
    """A server of nothing, whose work for others goes on until the test says so."""

    def __init__(self) -> None:
        self.taken, self.may_go_on, self.gone_on = 0, threading.Event(), 0

    def take(self, message: Any) -> Handled:
        self.taken += 1
        return Handled(self.taken, (Send("eu", message),))

    def go_on(self) -> Handled:
        self.gone_on += self.may_go_on.wait(DEADLINE_S)
        return Handled(None)

    def status(self) -> dict[str, Any]:
        return {"taken": self.taken}


def run_slow(folder: Path, delivered: list[Send], steps: Callable[[ServerThread, Slow], Any]) -> None:
    async def run() -> None:
        server, journal = Slow(), Journal(folder / "journal", (Leave,), 0)
        assert not list(journal.replay(1))
        thread = ServerThread(server, journal, delivered.append)  # type: ignore[arg-type]
        try:
            await steps(thread, server)
        finally:
            server.may_go_on.set()
            await asyncio.to_thread(thread.close)
            journal.close()

    asyncio.run(run())


def test_neither_the_sender_nor_who_waits_for_it_waits_for_the_work_for_others(tmp_path):
    async def steps(thread: ServerThread, server: Slow) -> None:
        waiting = asyncio.create_task(thread.until(lambda: server.taken or None, DEADLINE_S))
        await thread.read(lambda: None)  # it waits by now
        assert await thread.say(Leave("eu")) == 1
        assert await waiting == 1
        assert thread.status == {"taken": 1}
        assert server.gone_on == 0
        second = asyncio.create_task(thread.say(Leave("eu")))
        await asyncio.sleep(0)
        server.may_go_on.set()
        assert await second == 2
        assert server.gone_on >= 1  # before the next message was taken

    run_slow(tmp_path, [], steps)


def test_a_status_that_takes_long_is_not_made_for_every_message(tmp_path, monkeypatch):
    """It grows with the members. Who asks for it when the thread rests gets that after the last message."""
    made: list[int] = []

    def status(server: Slow) -> dict[str, Any]:
        made.append(server.taken)
        time.sleep(0.2)
        return {"taken": server.taken}

    async def steps(thread: ServerThread, server: Slow) -> None:
        server.may_go_on.set()
        for _ in range(20):
            await thread.say(Leave("eu"))
        assert len(made) <= 5
        while thread.status != {"taken": 20}:
            await asyncio.sleep(0.01)
        before = len(made)
        assert thread.status == {"taken": 20} and len(made) == before

    monkeypatch.setattr(Slow, "status", status)
    run_slow(tmp_path, [], steps)


def test_who_waits_for_what_is_delivered_is_told(tmp_path):
    delivered: list[Send] = []

    async def steps(thread: ServerThread, server: Slow) -> None:
        server.may_go_on.set()
        waiting = asyncio.create_task(thread.until(lambda: delivered or None, DEADLINE_S))
        await thread.read(lambda: None)
        await thread.say(Leave("eu"))
        assert await waiting == [Send("eu", Leave("eu"))]
        assert await thread.until(lambda: None, 0.01) is None

    run_slow(tmp_path, delivered, steps)
