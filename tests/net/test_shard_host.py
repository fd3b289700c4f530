"""A shard's process without sockets: how it executes its coordinator's commands."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from geotrain.monitor.events import EventLog
from geotrain.net.server.server_setup import ServerSetup
from geotrain.net.server.server_thread import ServerThread
from geotrain.net.server.shard_host import COMMANDS, ShardHost
from geotrain.net.storage import journal as journal_module
from geotrain.net.storage.journal import Journal
from geotrain.net.storage.recovery import Recovered
from geotrain.net.storage.snapshots import SnapshotStore
from geotrain.net.transport import rpc, wire
from geotrain.outer.messages import Refused, Send
from geotrain.outer.server.server import Handled
from geotrain.outer.server.shard_server import COORDINATOR
from geotrain.outer.shards.protocol import Copy, Froze
from tests.support.server_processes import Site


class FakeMachine:
    """Tells its coordinator of each command that it executes; `wrong` is one that it cannot execute."""

    index, number, commands = 0, 1, 0

    def __init__(self, wrong: int = 0) -> None:
        self.executed: list[int] = []
        self.wrong = wrong

    def take(self, command: Copy) -> Handled:
        if command.number == self.wrong:
            raise KeyError(command.number)
        self.executed.append(command.number)
        return Handled(None, (Send(COORDINATOR, Froze("w", 0, command.number, ())),))  # type: ignore[arg-type]

    def go_on(self) -> Handled:
        return Handled(None)

    def status(self) -> dict[str, Any]:
        return {}

    def end_incarnation(self) -> None: ...


class FakeCoordinator:
    """A stream that brings these commands, each list in a bundle, and then nothing. told: what the shard said of
    them. on_told: is called with each of them."""

    def __init__(self, *bundles: list[int], on_told: Callable[[Froze], None] = lambda told: None) -> None:
        self.bundles, self.told, self.on_told = list(bundles), asyncio.Queue[int](), on_told

    async def read(self) -> bytes:
        if not self.bundles:
            await asyncio.Event().wait()
        return wire.bundle(deque(wire.pack(Copy(number)) for number in self.bundles.pop(0)))

    async def write(self, frame: bytes) -> None:
        said = wire.unpack(frame, rpc.ShardHello, rpc.ShardState, Froze)
        if isinstance(said, Froze):
            self.on_told(said)
            self.told.put_nowait(said.commands)

    def cancel(self) -> None: ...


@dataclass
class Life:
    host: ShardHost
    machine: FakeMachine
    journal: Journal

    async def execute(self, coordinator: FakeCoordinator) -> None:
        """A session with this coordinator."""
        self.host.server_thread = ServerThread(self.machine, self.journal, self.host._deliver)  # type: ignore[arg-type]
        self.host.server_thread.failure.add_done_callback(lambda failed: failed.exception())
        try:
            await self.host._session(coordinator)
        finally:
            await self.host._end_session()
            self.host.server_thread.close()

    def on_disk(self, folder: Path) -> list[int]:
        self.journal.close()
        return [command.number for command in Journal(folder / "journal", COMMANDS, 0).replay(1)]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Life]]:
    lives: list[Life] = []
    site = Site(tmp_path, shards=1)

    def made(wrong: int = 0) -> Life:
        machine: Any = FakeMachine(wrong)
        journal = Journal(tmp_path / "journal", COMMANDS, 0)
        assert not list(journal.replay(1))
        setup = ServerSetup(site.run, site.cluster, "eu", tmp_path, shard=0)
        log = EventLog(tmp_path / "events.jsonl", enabled=False)
        host = ShardHost(setup, Recovered(machine, SnapshotStore(tmp_path / "s"), journal, [], 0), log, None)
        lives.append(Life(host, machine, journal))
        return lives[-1]

    yield made
    for incarnation in lives:
        incarnation.host.events.close()
        incarnation.journal.close()


def ended(incarnation: Life, coordinator: FakeCoordinator) -> list[int]:
    """The commands that the coordinator was told of; then the stream is cancelled."""

    async def main() -> list[int]:
        session = asyncio.ensure_future(incarnation.execute(coordinator))
        commands = [number for bundle in coordinator.bundles for number in bundle]
        told = [await coordinator.told.get() for _ in commands]
        session.cancel()
        await asyncio.gather(session, return_exceptions=True)
        return told

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_commands_that_are_there_share_a_flush_and_nothing_is_told_before(begin, tmp_path: Path, monkeypatch) -> None:
    incarnation, flushes, real = begin(), 0, os.fdatasync

    def fdatasync(descriptor: int) -> None:
        nonlocal flushes
        real(descriptor)
        flushes += 1

    monkeypatch.setattr(journal_module.os, "fdatasync", fdatasync)
    flushed = []
    coordinator = FakeCoordinator(
        list(range(1, 41)), on_told=lambda told: flushed.append(incarnation.journal._durable)
    )
    assert ended(incarnation, coordinator) == incarnation.machine.executed == list(range(1, 41))
    assert flushes == incarnation.host.server_thread.flushes == 1 and incarnation.host.server_thread.calls == 40
    assert set(flushed) == {40}
    assert incarnation.on_disk(tmp_path) == list(range(1, 41))


@pytest.mark.parametrize("room", [0, 1])
def test_where_one_does_not_fit_on_the_disk_none_is_left_out_and_the_session_ends(
    begin, tmp_path: Path, monkeypatch, room: int
) -> None:
    """Of those that came with it none was executed, told, or is found on the disk by the next incarnation. room: for
    how many of the first bundle's five."""
    incarnation, real = begin(), os.pwrite
    full = SimpleNamespace(after=None)

    def pwrite(descriptor: int, content: Any, position: int) -> int:
        if full.after is not None and position + len(content) > full.after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content, position)

    monkeypatch.setattr(journal_module.os, "pwrite", pwrite)

    async def main() -> None:
        incarnation.journal.append(Copy(1))
        record_bytes, full.after = incarnation.journal.segment_bytes, None
        incarnation.journal.flush()
        full.after = record_bytes + room * 80
        coordinator = FakeCoordinator([2, 3, 4, 5, 6], [7], [8])
        with pytest.raises(Refused, match="disk is full"):
            await incarnation.execute(coordinator)
        assert coordinator.told.empty()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert incarnation.machine.executed == []
    full.after = None
    assert incarnation.on_disk(tmp_path) == [1]


def test_after_a_command_that_cannot_be_executed_no_other_is(begin) -> None:
    incarnation = begin(wrong=3)

    async def main() -> None:
        with pytest.raises(KeyError):
            await incarnation.execute(FakeCoordinator([1, 2, 3, 4], [5]))
        assert incarnation.host.server_thread.failure.done()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert incarnation.machine.executed == [1, 2]


def test_what_is_to_go_up_is_read_before_the_next_command_is_executed(begin, monkeypatch) -> None:
    """That one may have the region start over: then the payloads are gone."""
    incarnation, brought = begin(), asyncio.Queue[list[int]]()
    host, machine = incarnation.host, incarnation.machine
    monkeypatch.setattr(machine, "going_up", lambda update: [*machine.executed], raising=False)
    monkeypatch.setattr(host, "_bring", brought.put)

    async def main() -> list[int]:
        host.server_thread = ServerThread(machine, incarnation.journal, host._deliver)
        received = asyncio.Queue[Any]()
        for message in (Copy(1), rpc.Bring(SimpleNamespace(deltas=())), Copy(2)):
            received.put_nowait(message)
        executing = asyncio.ensure_future(host._execute(received))
        while machine.executed != [1, 2]:
            await asyncio.sleep(0)
        executing.cancel()
        host.server_thread.close()
        return await brought.get()

    assert asyncio.run(asyncio.wait_for(main(), 60)) == [1]
