"""The coordinator's end of the streams to its shards, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from grpc import aio

from geotrain.common.files import out_of_room
from geotrain.net.server.shard_sessions import ShardLost, ShardSessions, TimelineLost
from geotrain.net.storage.snapshots import StoreError
from geotrain.net.storage.timeline import Timeline
from geotrain.net.transport import rpc, wire
from geotrain.outer.messages import Refused
from geotrain.outer.shards.protocol import Copy
from tests.simulation.loop import VirtualLoop


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Make a test of a coroutine function. Its time is virtual: it passes only where all wait for it."""

    def run() -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(test())
        finally:
            for task in (left := asyncio.all_tasks(loop)):
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True)) if left else None

    return run


class FakeShard:
    """A stream whose shard says what it is told to; `holds_s`: how long each of the coordinator's frames takes to go
    out. timeline: of its state."""

    def __init__(self, index: int, holds_s: float = 0.0, timeline: str = "run-1") -> None:
        self.says: asyncio.Queue[Any] = asyncio.Queue()
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.holds_s, self.written = holds_s, 0
        self.say(rpc.ShardHello("eu", index, 2, 0, timeline))

    def say(self, message: Any) -> None:
        self.says.put_nowait(wire.pack(message))

    async def read(self) -> Any:
        return await self.says.get()

    async def write(self, frame: bytes) -> None:
        await asyncio.sleep(self.holds_s)
        self.written += 1
        for each in wire.unbundle(frame):
            self.heard.put_nowait(wire.unpack(each, rpc.Farewell, rpc.Belong, rpc.GoBack, rpc.Upload, Copy))

    async def leave(self, after: float = 0.0) -> None:
        assert isinstance(await self.heard.get(), rpc.Farewell)
        await asyncio.sleep(after)
        self.say(rpc.Farewell())


class Thread:
    async def read(self, look: Callable[[], Any]) -> Any:
        return look()


class Far:
    """A coordinator's commands: none was given."""

    shards, commands = 2, 0

    def since(self, commands: int) -> list[Any]:
        return []

    def begin_incarnation(self, incarnation: str) -> None: ...


async def noted(shard: int) -> None: ...


class FakeLineage:
    """Keeps a coordinator's timeline. checkpoint_ids: of which all have copies."""

    def __init__(self, timeline: Timeline, *checkpoint_ids: str) -> None:
        self.timeline, self.checkpoint_ids = timeline, checkpoint_ids

    def note(self, timeline: Timeline) -> None:
        self.timeline = timeline

    async def newest(self) -> str | None:
        return max(self.checkpoint_ids, default=None)


def sessions(lineage: FakeLineage | None = None) -> ShardSessions:
    lineage = lineage or FakeLineage(Timeline("run-1", begun=True))
    return ShardSessions(Thread(), Far(), "eu", "incarnation", lineage, noted)  # type: ignore[arg-type]


async def here(coordinator: ShardSessions, *shards: FakeShard) -> list[asyncio.Task[None]]:
    served = [asyncio.ensure_future(coordinator.serve(shard)) for shard in shards]
    await coordinator.wait_ready()
    return served


@on_a_loop
async def test_a_shard_that_leaves_quickly_keeps_the_farewell_from_none() -> None:
    coordinator, quick, slow = sessions(), FakeShard(0), FakeShard(1, holds_s=0.3)
    served = await here(coordinator, quick, slow)
    leaving = [asyncio.ensure_future(quick.leave()), asyncio.ensure_future(slow.leave(after=0.3))]
    assert await coordinator.farewell() == []
    await asyncio.gather(*served, *leaving)
    assert not coordinator.lost.done()


@on_a_loop
async def test_a_shard_that_dies_at_the_end_is_told_when_it_calls_again() -> None:
    coordinator, staying, dying = sessions(), FakeShard(0), FakeShard(1, holds_s=1000.0)
    served = await here(coordinator, staying, dying)
    ending = asyncio.ensure_future(coordinator.farewell())
    await staying.leave()
    await served[0]
    dying.says.put_nowait(aio.EOF)
    await served[1]
    again = FakeShard(1)
    served = [asyncio.ensure_future(coordinator.serve(again))]
    await again.leave()
    assert await ending == [] and not coordinator.lost.done()
    await served[0]


@on_a_loop
async def test_who_says_no_farewell_is_named_and_before_the_end_a_stream_that_breaks_is_a_lost_shard() -> None:
    coordinator, staying, silent = sessions(), FakeShard(0), FakeShard(1)
    served = await here(coordinator, staying, silent)
    leaving = asyncio.ensure_future(staying.leave())
    assert await coordinator.farewell(3.0) == [1]
    for task in (*served, leaving):
        task.cancel()
    coordinator, *shards = sessions(), FakeShard(0), FakeShard(1)
    served = await here(coordinator, *shards)
    shards[0].says.put_nowait(aio.EOF)
    await asyncio.gather(*served)
    try:
        await coordinator.until_lost()
        raise AssertionError("a lost shard ends the incarnation")
    except ShardLost as lost:
        assert "shard 0" in str(lost) or "shard 1" in str(lost)


@on_a_loop
async def test_orders_of_one_message_go_to_a_shard_together() -> None:
    coordinator, *shards = sessions(), FakeShard(0), FakeShard(1)
    served = await here(coordinator, *shards)
    commands = [Copy(number) for number in range(1, 20)]
    for command in commands:  # as on the server's thread, while it handles one message
        coordinator.send_all(command)
    for shard in shards:
        assert [await shard.heard.get() for _ in commands] == commands and shard.written == 1
    for task in served:
        task.cancel()


@on_a_loop
async def test_no_shard_gets_an_order_before_all_have_noted_the_past_that_they_belong_to() -> None:
    """Who comes without it after that has lost its disk. A coordinator killed before knows it all the same."""
    lineage = FakeLineage(Timeline())
    coordinator, quick, slow = sessions(lineage), FakeShard(0, timeline=""), FakeShard(1, timeline="")
    served = [asyncio.ensure_future(coordinator.serve(shard)) for shard in (quick, slow)]
    told = [await shard.heard.get() for shard in (quick, slow)]
    assert told[0] == told[1] and told[0].timeline
    quick.say(told[0])
    await asyncio.sleep(1000.0)  # all that follows from it has happened
    name = told[0].timeline
    assert not coordinator.ready and lineage.timeline == Timeline(name)
    back, known, untold = sessions(lineage), FakeShard(0, timeline=name), FakeShard(1, timeline="")
    served += [asyncio.ensure_future(back.serve(shard)) for shard in (known, untold)]
    assert [(await shard.heard.get()).timeline for shard in (known, untold)] == [name, name]
    assert not back.ready and not lineage.timeline.begun
    untold.say(told[1])
    await back.wait_ready()
    assert lineage.timeline == Timeline(name, begun=True)
    for task in served:
        task.cancel()


@on_a_loop
async def test_who_has_lost_its_disk_takes_all_back_and_is_refused_where_nothing_was_copied() -> None:
    coordinator = sessions(FakeLineage(Timeline("run-1", "1", begun=True)))
    with pytest.raises(Refused, match=r"shard 0 of 'eu': it has no state: .*docs/servers\.md") as refused:
        await coordinator.serve(FakeShard(0, timeline=""))
    assert refused.value.retry_s is None and not coordinator.lost.done()  # the other shards may stay
    for lineage in (FakeLineage(Timeline("run-1", "1", begun=True), "1", "2"), FakeLineage(Timeline())):
        coordinator, foreign = sessions(lineage), FakeShard(0, timeline="other-1")
        with pytest.raises(Refused, match="its state is of another run than its coordinator's") as refused:
            await coordinator.serve(foreign)
        assert refused.value.retry_s is None and not coordinator.lost.done() and foreign.heard.empty()

    for timeline in ("", "run-0"):
        coordinator = sessions(FakeLineage(Timeline("run-1", "1", begun=True), "1", "2"))
        await coordinator.serve(lost := FakeShard(0, timeline=timeline))
        with pytest.raises(TimelineLost, match="all go back to 2"):
            await coordinator.until_lost()
        assert lost.heard.empty()

    # The coordinator has gone back, and its shards follow: who has not taken the checkpoint yet is told,
    # and ends no incarnation.
    lineage = FakeLineage(Timeline("run-2", "2"), "1", "2")
    coordinator, late = sessions(lineage), FakeShard(0, timeline="run-1")
    await coordinator.serve(late)
    assert await late.heard.get() == rpc.GoBack("2", "run-2") and not coordinator.lost.done()
    served = await here(coordinator, FakeShard(0, timeline="run-2"), FakeShard(1, timeline="run-2"))
    assert lineage.timeline == Timeline("run-2", "2", begun=True)
    for task in served:
        task.cancel()

    # One has found its copy of that checkpoint damaged: the coordinator has to look for another.
    coordinator = sessions(FakeLineage(Timeline("run-2", "2"), "1"))
    await coordinator.serve(FakeShard(0, timeline="run-1"))
    with pytest.raises(TimelineLost, match="all go back to 1"):
        await coordinator.until_lost()


@on_a_loop
async def test_a_moment_is_copied_when_all_shards_have_said_so() -> None:
    coordinator, *shards = sessions(), FakeShard(0), FakeShard(1)
    served = await here(coordinator, *shards)
    for troubles in (("", "away"), ("", "")):
        copying = asyncio.ensure_future(coordinator.upload("7"))
        for shard, trouble in zip(shards, troubles, strict=True):
            assert await shard.heard.get() == rpc.Upload("7")
            assert not copying.done()
            shard.say(rpc.Uploaded("7", trouble))
        if any(troubles):
            with pytest.raises(StoreError, match="eu: shard 1: away"):
                await copying
    await copying
    copying = asyncio.ensure_future(coordinator.upload("8"))
    shards[0].says.put_nowait(aio.EOF)
    with pytest.raises(StoreError, match="8 is not copied: eu: the stream to shard 0 has ended"):
        await copying
    for task in served:
        task.cancel()


@on_a_loop
async def test_a_snapshot_that_a_shard_could_not_write_is_none_and_whether_there_was_room_is_known() -> None:
    coordinator, *shards = sessions(), FakeShard(0), FakeShard(1)
    served = await here(coordinator, *shards)
    for full in (True, False):
        shards[0].say(rpc.ShardState(0, 0, 0, 0, "7"))
        shards[1].say(rpc.Unsaved("7", "it has no snapshot", full))
        await asyncio.sleep(1.0)
        with pytest.raises(StoreError, match="eu: a shard has no snapshot: it has no snapshot") as unsaved:
            coordinator.saved("7")
        assert out_of_room(unsaved.value) == full and not coordinator.saved("8")
    for task in served:
        task.cancel()
