"""A region's link to the global server has a lane for each worker: what one is asked wakes no other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from geotrain.net.server.region_client import RegionClient
from geotrain.net.transport import rpc
from geotrain.outer.messages import (
    Finished,
    Join,
    LeaseRequest,
    Refused,
    Release,
    Send,
    Standing,
    UpdatePart,
    Welcome,
)
from geotrain.outer.server.parts import ServerPart
from tests.support.outer_world import config, halves, make

WAIT_S = 10.0


async def _plain(attempt: Any, *_: Any) -> Any:
    return await attempt() if callable(attempt) else None


def test_a_request_waits_for_what_was_said_before_and_an_update_wakes_no_worker_s_lane():
    async def life() -> None:
        server, said, released = make(config("halos"), cut_a=halves).regions["eu"], list[str](), asyncio.Event()

        async def release(message: Release) -> None:
            await released.wait()
            said.append("release")

        async def lease(message: LeaseRequest) -> None:
            said.append(message.worker)

        calls = dict.fromkeys(("join", "take_back", "validated"))
        link: Any = SimpleNamespace(persist=_plain, release=release, lease=lease, **calls)
        client = RegionClient(SimpleNamespace(persist=_plain), server, link)  # type: ignore[arg-type]
        lanes = [asyncio.create_task(client._run_leases(lane)) for lane in client._said.values()]
        client.deliver(Send("global", Release((1,))))
        client.deliver(Send("global", LeaseRequest("a", 1)))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not said, "a lease that is on its way back would be given again"
        released.set()
        async with asyncio.timeout(WAIT_S):
            while said != ["release", "a"]:
                await asyncio.sleep(0.001)
        for lane in client._said.values():
            lane.stirred.clear()
        client.deliver(Send("global", UpdatePart("eu", "life-1", 0, 1, 0, ())))
        assert client._updates.stirred.is_set()
        assert not any(lane.stirred.is_set() for lane in client._said.values())
        for task in lanes:
            task.cancel()

    asyncio.run(life())


def test_the_job_to_which_a_worker_comes_first_is_not_asked_for_behind_one_that_waits():
    async def life() -> None:
        server, asked = make(config("halos"), cut_a=halves).regions["eu"], list[int]()

        async def lease(message: LeaseRequest) -> Finished | None:
            asked.append(message.job)
            await asyncio.sleep(0)
            return Finished("a", 1) if message.job == 1 else None

        async def again(attempt: Any, *_: Any) -> Any:
            while callable(attempt) and (reply := await attempt()) is None:
                await asyncio.sleep(0)
            return reply if callable(attempt) else None

        link: Any = SimpleNamespace(
            persist=again, lease=lease, **dict.fromkeys(("join", "release", "take_back", "validated"))
        )
        client = RegionClient(SimpleNamespace(persist=_plain), server, link)  # type: ignore[arg-type]
        lane = asyncio.create_task(client._run_leases(client._said["a"]))
        client.deliver(Send("global", LeaseRequest("a", 2)))
        async with asyncio.timeout(WAIT_S):
            while not asked:
                await asyncio.sleep(0)
            client.deliver(Send("global", LeaseRequest("a", 1)))
            while [message.job for message in client._said["a"]] != [2]:
                await asyncio.sleep(0)
        lane.cancel()

    asyncio.run(life())


def test_a_shard_joins_as_its_ledger_is_called_by_then():
    """Both ledgers were killed: the shard above waits for an incarnation that this one did not have at first."""
    region = make(config("halos"), cut_a=halves).regions["eu"]
    lives, said = iter(("life-1", "life-2")), list[str]()

    def join_message() -> Any:
        return SimpleNamespace(incarnation=next(lives))

    async def join(message: Join) -> Welcome:
        said.append(message.incarnation)
        if said != ["life-1", "life-2"]:
            raise Refused("this shard does not know yet that it joined", 0.0)
        return Welcome((), 1)

    async def persist(attempt: Any, *_: Any) -> Any:
        for _ in range(2):
            try:
                return await attempt()
            except Refused:
                continue

    async def life() -> None:
        link: Any = SimpleNamespace(incarnation="", live_as=lambda name: None, join=join)
        client = RegionClient(SimpleNamespace(read=_read, persist=_plain), region, link)  # type: ignore[arg-type]
        region.join_message = join_message
        assert await persist(client._join) == Welcome((), 1)

    asyncio.run(life())


async def _read(look: Any) -> Any:
    return look()


def test_a_shard_that_starts_over_is_another_to_its_workers_and_not_to_the_server_above():
    """A worker would end what it has of the old answer with the rest of the new one."""
    world = make(config("halos"), cut_a=halves)
    shard = world.build("eu", ServerPart((tuple(range(len(world.parameter_map.fragments))),), 0))
    shard.incarnation, said = "life-1", list[str]()
    shard.handle(Standing("ledger-1", "run", "", ()))

    async def read(call: Any) -> Any:
        return call()

    async def life() -> None:
        link: Any = SimpleNamespace(live_as=said.append)
        client = RegionClient(SimpleNamespace(persist=_plain, read=read), shard, link)  # type: ignore[arg-type]
        with pytest.raises(Exception) as ends:
            await client._start_over("it was wild", UpdatePart("eu", "ledger-1", 0, 1, 0, ()))
        assert type(ends.value).__name__ == "_SessionOver"

    asyncio.run(life())
    assert shard.incarnation != "life-1" and said == ["ledger-1"]


def test_a_region_that_counts_as_dead_joins_anew_where_it_has_something_to_send():
    async def life(waits: bool) -> str:
        server = make(config("halos"), cut_a=halves).regions["eu"]
        server.worker_data.trained = {1} if waits else set()

        async def read(call: Any) -> Any:
            return call()

        async def beat(*_: Any) -> Any:
            if beats.pop():
                return rpc.Ack(silent=True)
            raise Refused("enough")

        beats = [False, True]
        link: Any = SimpleNamespace(persist=_plain, beat=beat)
        client = RegionClient(SimpleNamespace(persist=_plain, read=read), server, link)  # type: ignore[arg-type]
        with patch.object(rpc, "REGION_BEAT_S", 0.0), pytest.raises(Exception) as ends:
            await client._run_beats()
        return type(ends.value).__name__

    assert [asyncio.run(life(waits)) for waits in (True, False)] == ["_SessionOver", "Refused"]
