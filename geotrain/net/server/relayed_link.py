"""Links a region whose shards are processes of their own to the global server, which has as many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from geotrain.net.server.shard_sessions import ShardSessions
from geotrain.net.transport import rpc
from geotrain.net.transport.certs import Trust
from geotrain.net.transport.grpc_client import AnswerPull, GrpcClient
from geotrain.outer.messages import ChunkDelta, ChunkWeights, UpdatePart

FETCH_S = 20.0


class RelayedLink(GrpcClient):
    """Links coordinator to coordinator: payloads go from shard to shard, as this tells the region's shards."""

    def __init__(self, address: str, member: str, incarnation: str, trust: Trust | None, own: ShardSessions) -> None:
        super().__init__(address, member, incarnation, trust)
        self.own = own

    def live_as(self, incarnation: str) -> None:
        super().live_as(incarnation)
        self.own.holdings.drop_weights()

    async def push(self, part: UpdatePart) -> int:
        deltas = tuple(ChunkDelta(d.chunk, d.anchor_version, b"") for d in part.deltas)
        bring = rpc.Bring(replace(part, deltas=deltas))
        await self.own.server_thread.read(lambda: self.own.send_all(bring))
        return await self.commit(part)

    async def pull(self, wanted: AnswerPull) -> Any:
        """Have the shards pull the answer, which they make by themselves if they can; gives a `HeldAnswer`, as the
        region's coordinator takes it."""
        header = await super().pull(replace(wanted, made=None))
        if header is None:
            return None
        weights = tuple(ChunkWeights(each.chunk, each.version, b"") for each in header.weights)
        fetch = rpc.Fetch(self.incarnation, replace(header, weights=weights))
        await self.own.server_thread.read(lambda: self.own.send_all(fetch))
        return await self.own.answer(header, FETCH_S)
