"""Transfers whose headers come from a coordinator, and their payloads from shards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from geotrain.net.server.shard_host import ShardHost
from geotrain.net.transport import sharded_link
from geotrain.net.transport.grpc_client import AnswerPull, GrpcClient
from geotrain.net.transport.sharded_link import ShardedLink, ShardsAbove
from geotrain.outer.messages import Answer, ChunkWeights
from tests.support.net_worlds import BUSY_S


def test_the_book_is_asked_again_where_a_shard_has_forgotten_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It died after the coordinator gave the header, and codes the answer again only when the new incarnation's
    coordinator is asked."""
    monkeypatch.setattr(sharded_link, "EMPTY_S", 0.0)
    asked = []

    async def pull(self: GrpcClient, *_: Any) -> Answer | None:
        if isinstance(self, ShardedLink):
            asked.append("coordinator")
            return Answer(0, 3, (ChunkWeights(0, 5, b""),), f"incarnation {len(asked)}")
        await asyncio.sleep(0.05)  # a transfer may take longer than a shard without an answer is waited for
        return Answer(0, 3, (ChunkWeights(0, 5, b"x"),), "incarnation 2") if len(asked) == 2 else None

    monkeypatch.setattr(GrpcClient, "pull", pull)

    async def main() -> Answer:
        link = ShardedLink("127.0.0.1:1", "a", "1", None, ShardsAbove(("127.0.0.1:2",), (0,), None))
        try:
            return await link.persist(lambda: link.pull(AnswerPull(0, 0, 3, 100)), BUSY_S)
        finally:
            await link.close()

    assert asyncio.run(main()) == Answer(0, 3, (ChunkWeights(0, 5, b"x"),), "incarnation 2")
    assert asked == ["coordinator", "coordinator"]


def test_a_transfer_goes_on_where_a_shard_is_told_the_same_again() -> None:
    """A coordinator that asks above once more says it once more; a long transfer would never end."""
    began = []

    async def errand(told: str) -> None:
        began.append(told)
        await asyncio.Event().wait()

    async def main() -> None:
        host = object.__new__(ShardHost)
        host._errands = {}
        for told in ("an answer", "an answer", "another"):
            host._go("down", told, errand)
            await asyncio.sleep(0)
        ((_, last),) = host._errands.values()
        assert not last.done()
        last.cancel()

    asyncio.run(main())
    assert began == ["an answer", "another"]
