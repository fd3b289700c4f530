"""What a ledger makes of its shards' hellos, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest

from geotrain.common.names import GLOBAL
from geotrain.net.server.shard_link import ShardLink, ShardTable
from geotrain.net.transport import rpc
from geotrain.net.transport.fragment_links import FragmentLinks, ShardsAbove
from geotrain.net.transport.grpc_client import GrpcClient
from geotrain.net.transport.tcp_counters import Traffic
from geotrain.outer.messages import (
    Answer,
    ChunkWeights,
    Fact,
    Facts,
    LeaseRequest,
    MemberSilent,
    MemberStanding,
    NotJoined,
    Refused,
    Standing,
    WentBack,
)
from geotrain.outer.server.parts import ServerPart
from tests.support.outer_world import config, make


class AtOnce:
    """A server's thread that does everything in place."""

    looks = 0

    def __init__(self, server: Any) -> None:
        self.server = server

    async def persist(self, message: Any) -> Any:
        return self.server.handle(message).reply

    say = persist

    async def read(self, call: Callable[[], Any]) -> Any:
        return call()

    async def until(self, call: Callable[[], Any], wait_s: float) -> Any:
        while (value := call()) is None:
            await asyncio.sleep(0)
        return value


def test_only_a_process_that_begins_can_have_gone_back() -> None:
    """A hello, or the first one said again, may arrive after facts that are newer than it."""
    world = make(config())
    count = len(world.parameter_map.fragments)
    ledger = world.build(GLOBAL, ServerPart((tuple(range(count)),)))
    table = ShardTable(AtOnce(ledger), (), lambda shard: asyncio.sleep(0))  # type: ignore[arg-type]
    first = rpc.ShardHello(0, 0, (0,) * count, 0, "", False, 0, 0.0, False, 0, 0, "life-1")

    async def hellos() -> None:
        versions, former = ((1,) * count, (0,) * count), Fact("contained", "eu")
        said = Facts(0, 0, (former,), *versions, incarnation="life-1")
        with pytest.raises(Refused, match="has not said hello"):
            await table.facts(said)
        await table.standing(replace(first, links=(5, 7), peers=(rpc.MemberBytes("eu", 5, 7),)))
        own = Traffic(1, 1)
        for _ in range(2):
            assert table.with_links(own).counts[:2] == table.with_peers({"eu": own})["eu"].counts[:2] == [6, 8]
        assert await table.facts(said) == 1
        await table.standing(replace(first, seen=7))
        await table.standing(first)
        assert ledger.as_ledger.taken == [1]
        await table.standing(replace(first, incarnation="life-2"))
        with pytest.raises(Refused, match="lives no more"):  # as it lay in a socket while its process died
            await table.facts(said)
        assert ledger.as_ledger.taken == [0]

    asyncio.run(hellos())


def test_a_shard_says_how_it_stands_to_each_incarnation_of_its_ledger() -> None:
    """Also where nothing is new: what the ledger was told may be newer than the state that it came back from."""
    world = make(config())
    count = len(world.parameter_map.fragments)
    shard = world.build(GLOBAL, ServerPart((tuple(range(count)),), 0))

    async def told() -> None:
        thread: Any = AtOnce(shard)
        link = ShardLink(thread, 0, "127.0.0.1:2", None, lambda: (0,) * count, False, Traffic(), dict)
        with patch.object(link, "_call", AsyncMock(return_value=(b"", rpc.Ack(0)))) as call:
            bring = asyncio.create_task(link._bring())
            for times, ledger in ((1, "life-1"), (1, "life-1"), (2, "life-2")):
                shard.handle(Standing(ledger, "run", "", (), number=1))
                for _ in range(9):
                    await asyncio.sleep(0)
                assert call.await_count == times
            bring.cancel()

    asyncio.run(told())


def test_facts_with_versions_of_other_fragments_change_nothing() -> None:
    world = make(config())
    count = len(world.parameter_map.fragments)
    ledger = world.build(GLOBAL, ServerPart((tuple(range(count)),)))
    right, short = (0,) * count, (1,) * (count - 1)
    before = ledger.state()[1]
    for said in (Facts(0, 0, (), short, right), Facts(0, 0, (), right, short), WentBack(0, 0, short)):
        with pytest.raises(Refused, match="the same cluster file"):
            ledger.handle(said)
    assert ledger.state()[1] == before


def test_who_is_quarantined_has_no_share_on_shards_either() -> None:
    world = make(config())
    dealt = (tuple(range(len(world.parameter_map.fragments))),)
    shard = world.build(GLOBAL, ServerPart(dealt, 0))
    for barred, shares in (("", {"eu", "us"}), ("it was wild", {"us"}), ("", {"eu", "us"})):
        members = (
            MemberStanding("eu", "life-1", "present", barred, quarantined=bool(barred)),
            MemberStanding("us", "life-1", "present"),
        )
        shard.handle(Standing("life-1", "run", "", members))
        assert shard.membership.sharing == shares


def test_what_its_ledger_has_said_of_members_is_known_again_after_a_restart() -> None:
    world = make(config())
    part = ServerPart((tuple(range(len(world.parameter_map.fragments))),), 0)
    shard, again = world.build("eu", part), world.build("eu", part)
    shard.handle(Standing("life-1", "run", "", (MemberStanding("a", "life-1", "present", ends=True),)))
    again.load(*shard.state())
    assert again.ends("a") and not again.ends("b")


def test_leases_of_who_is_gone_go_once_its_shards_have_said_what_they_took() -> None:
    """So do those of a member that begins anew, which is let in no further before."""
    world = make(config(local_steps=2))
    dealt = (tuple(range(len(world.parameter_map.fragments))),)
    ledger = world.build(GLOBAL, ServerPart(dealt))
    versions = (0,) * len(dealt[0])
    join = world.regions["eu"].join_message()
    ledger.handle(join)
    with pytest.raises(Refused, match="not known yet"):
        ledger.handle(join)
    seen = ledger.stand().number
    ledger.handle(Facts(0, 0, (), versions, versions, seen=seen))
    ledger.handle(join)
    lease = ledger.handle(LeaseRequest("a", 1)).reply
    ledger.handle(MemberSilent("eu", join.incarnation))
    assert ledger.stand().number == seen + 1 and lease.lease in ledger.lease_table.open
    ledger.handle(Facts(0, 0, (), versions, versions, seen=seen))
    assert lease.lease in ledger.lease_table.open, "the shard may have taken more since"
    ledger.handle(Facts(0, 0, (), versions, versions, seen=seen + 1))
    assert lease.lease in ledger.lease_table.returned


def test_weights_to_evaluate_are_those_of_all_shards_or_none() -> None:
    async def pulls() -> None:
        above = ShardsAbove(("127.0.0.1:2", "127.0.0.1:3"), ((0,), (1,)), (0, 1), None)
        links = FragmentLinks("127.0.0.1:1", "a", "life-1", None, above)
        one, other = (Answer(0, 0, (ChunkWeights(chunk, 1, b""),), "life-1") for chunk in (1, 0))
        for second, chunks in ((other, [0, 1]), (replace(other, weights=()), [])):
            with patch.object(GrpcClient, "global_weights", AsyncMock(side_effect=[one, second])):
                assert [each.chunk for each in (await links.global_weights(0, 1, 9)).weights] == chunks
        await links.close()

    asyncio.run(pulls())


def test_a_rank_asks_each_shard_whether_it_is_known_there() -> None:
    """It may have nothing to say to that one, for which others wait."""

    async def beats() -> None:
        links = FragmentLinks("127.0.0.1:1", "a", "life-1", None, ShardsAbove(("127.0.0.1:2",), ((0,),), (0,), None))
        for error in (NotJoined("a: join first", 0.5), Refused("busy", 0.5)):
            with patch.object(GrpcClient, "beat", AsyncMock(side_effect=[rpc.Ack(1), error])):
                if isinstance(error, NotJoined):
                    with pytest.raises(NotJoined):
                        await links.beat(0)
                else:
                    assert (await links.beat(0)).applied == 1
        await links.close()

    asyncio.run(beats())
