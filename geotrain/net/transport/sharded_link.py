"""Links a member to a server whose shards are processes of their own: it pushes each chunk to the shard that has it,
beside the others, tells the coordinator what it pushed, and pulls an answer from coordinator and shards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from geotrain.config import ClusterConfig, shards_of
from geotrain.net.transport.certs import Role, Trust, trust_between
from geotrain.net.transport.deadlines import first_of
from geotrain.net.transport.grpc_client import AnswerPull, GrpcClient
from geotrain.outer.messages import Answer, Refused, UpdatePart
from geotrain.parameters.chunks import deal
from geotrain.parameters.parameter_map import ParameterMap

SHARD_S = 3600.0  # how long a shard is tried while its coordinator is there
AGAIN_S = 0.2
EMPTY_S = 3.0


@dataclass(frozen=True)
class ShardsAbove:
    """Lists the shards of the server above. owner: chunk → its shard."""

    addresses: tuple[str, ...]
    owner: tuple[int, ...]
    trust: Trust | None

    def of(self, shard: int, entries: Sequence[Any]) -> tuple[Any, ...]:
        """Select those of these deltas or weights that the shard has."""
        return tuple(each for each in entries if self.owner[each.chunk] == shard)


def shards_above(
    cluster: ClusterConfig, parameter_map: ParameterMap, role: Role, name: str, server: str
) -> ShardsAbove | None:
    """List what the member needs to reach the shards of that server; None: they are in the server's own process.
    Raises CertificateError."""
    addresses = shards_of(cluster, server)
    if not addresses:
        return None
    owner = {
        chunk.index: shard for shard, own in enumerate(deal(parameter_map.chunks, len(addresses))) for chunk in own
    }
    return ShardsAbove(
        tuple(map(str, addresses)),
        tuple(owner[chunk.index] for chunk in parameter_map.chunks),
        trust_between(cluster, role, name, "shard", server),
    )


class ShardedLink(GrpcClient):
    """Calls a coordinator and its shards as one server. trust: to the coordinator, as for `GrpcClient`."""

    def __init__(self, address: str, member: str, incarnation: str, trust: Trust | None, above: ShardsAbove) -> None:
        super().__init__(address, member, incarnation, trust)
        self.above = above
        self.shards = [GrpcClient(each, member, incarnation, above.trust) for each in above.addresses]

    def live_as(self, incarnation: str) -> None:
        for link in self.shards:
            link.incarnation = incarnation
        super().live_as(incarnation)

    async def close(self) -> None:
        for shard in self.shards:
            await shard.close()
        await super().close()

    async def push(self, part: UpdatePart) -> int:
        """Push to all shards at once, again and again, until the coordinator has taken the part or refuses it."""

        async def push_to(shard: GrpcClient, own: UpdatePart) -> None:
            await shard.persist(partial(shard.push, own), SHARD_S)
            await asyncio.Future()  # never done: the coordinator's word ends it

        shares = [(shard, self.above.of(i, part.deltas)) for i, shard in enumerate(self.shards)]
        pushes = [push_to(shard, replace(part, deltas=own)) for shard, own in shares if own]
        applied: int = await first_of(self.commit(part), *pushes)
        return applied

    async def pull(self, wanted: AnswerPull) -> Answer | None:
        header, made = await super().pull(replace(wanted, made=None)), wanted.made
        if header is None:
            return None
        concerned = [i for i in range(len(self.shards)) if self.above.of(i, header.weights)]
        mine = [{chunk for chunk, owner in enumerate(self.above.owner) if owner == i} for i in concerned]
        calls = [
            self._pull_from(i, replace(wanted, made=made and made.only(own), wait_s=AGAIN_S))
            for i, own in zip(concerned, mine, strict=True)
        ]
        found = whole(header, await asyncio.gather(*calls))
        if found is None:  # coordinator and shard spoke in different incarnations of the server
            await asyncio.sleep(AGAIN_S)
        return found

    async def _pull_from(self, i: int, wanted: AnswerPull) -> Answer:
        """Pull one shard's chunks of the answer; an empty answer, if it has had none for a while: it may have begun a
        new incarnation after the coordinator gave the header, and codes the answer, or knows the member, once more
        only when the coordinator is asked again."""
        shard, until_s = self.shards[i], time.monotonic() + EMPTY_S

        async def attempt() -> Answer | None:
            try:
                found = await shard.pull(wanted)
            except Refused as refused:
                if refused.retry_s is None or time.monotonic() < until_s:
                    raise
                found = None
            if found is None and time.monotonic() >= until_s:
                return Answer(wanted.fragment, wanted.sequence, ())
            return found

        return await shard.persist(attempt, SHARD_S)

    async def global_weights(self, part: int, number: int, limit_bytes: int) -> Answer:
        header = await super().global_weights(part, number, limit_bytes)
        if not header.weights:
            return header

        calls = [v.persist(partial(v.global_weights, part, number, limit_bytes), SHARD_S) for v in self.shards]
        found = await asyncio.gather(*calls)
        versions = {each.chunk: each.version for each in header.weights}
        same = [replace(a, weights=tuple(replace(w, version=versions[w.chunk]) for w in a.weights)) for a in found]
        return whole(header, same) or replace(header, weights=())


def whole(header: Answer, found: Sequence[Answer]) -> Answer | None:
    """Put the payloads that shards have given into the answer; None: they are not (all) of this answer."""
    weights = {
        each.chunk: each for answer in found for each in answer.weights if answer.incarnation == header.incarnation
    }
    if any(each.chunk not in weights or weights[each.chunk].version != each.version for each in header.weights):
        return None
    return replace(header, weights=tuple(weights[each.chunk] for each in header.weights))
