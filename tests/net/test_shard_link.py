"""What a ledger makes of its shards' hellos, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.net.server.shard_link import ShardTable
from geotrain.net.transport import rpc
from geotrain.outer.messages import Fact, Facts, MemberStanding, Standing
from geotrain.outer.server.parts import ServerPart
from tests.support.outer_world import config, make


class AtOnce:
    """A server's thread that does everything in place."""

    looks = 0

    def __init__(self, server: Any) -> None:
        self.server = server

    async def persist(self, message: Any) -> None:
        self.server.handle(message)

    async def read(self, call: Callable[[], Any]) -> Any:
        return call()


def test_only_a_process_that_begins_can_have_gone_back() -> None:
    """A hello, or the first one said again, may arrive after facts that are newer than it."""
    world = make(config())
    count = len(world.parameter_map.fragments)
    ledger = world.build(GLOBAL, ServerPart((tuple(range(count)),)))
    table = ShardTable(AtOnce(ledger), (), lambda shard: asyncio.sleep(0))  # type: ignore[arg-type]
    first = rpc.ShardHello(0, 0, (0,) * count, 0, "", False, 0, 0.0, False, 0, 0, "life-1")

    async def hellos() -> None:
        await table.standing(first)
        ledger.handle(Facts(0, 0, (Fact("contained", "eu"),), (1,) * count, (0,) * count))
        await table.standing(replace(first, seen=7))
        await table.standing(first)
        assert ledger.taken == [1]
        await table.standing(replace(first, incarnation="life-2"))
        assert ledger.taken == [0]

    asyncio.run(hellos())


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
        assert shard.sharing == shares
