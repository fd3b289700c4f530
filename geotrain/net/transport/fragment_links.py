"""Links a member to a server whose fragments are in several processes: a table fragment → link."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from geotrain.config import ClusterConfig, shards_of
from geotrain.net.transport import rpc
from geotrain.net.transport.certs import Role, Trust, trust_between
from geotrain.net.transport.grpc_client import REPLY_S, AnswerPull, GrpcClient, Unreachable
from geotrain.outer.messages import Answer, Join, NotJoined, Refused, UpdatePart, Welcome
from geotrain.parameters.chunks import deal
from geotrain.parameters.parameter_map import ParameterMap

SHARD_S = 10.0  # where a join has not reached a shard, or its ledger's word has not, the ledger is asked anew
SHARD_RETRY_S = 0.5


@dataclass(frozen=True)
class ShardsAbove:
    """The shards of the server above. dealt: the fragments of each. chunks: chunk → its shard."""

    addresses: tuple[str, ...]
    dealt: tuple[tuple[int, ...], ...]
    chunks: tuple[int, ...]
    trust: Trust | None


def shards_above(
    cluster: ClusterConfig, parameter_map: ParameterMap, role: Role, name: str, server: str
) -> ShardsAbove | None:
    """List what the member needs to reach the shards of that server; None: the server is one process. Raises
    CertificateError."""
    if not (addresses := shards_of(cluster, server)):
        return None
    dealt = deal(parameter_map.fragments, len(addresses))
    of = {fragment: shard for shard, fragments in enumerate(dealt) for fragment in fragments}
    chunks = tuple(of[chunk.fragment] for chunk in parameter_map.chunks)
    return ShardsAbove(tuple(map(str, addresses)), dealt, chunks, trust_between(cluster, role, name, "shard", server))


class FragmentLinks(GrpcClient):
    """Calls a server's ledger, and for each fragment the shard that has it. trust: to the ledger, as for
    `GrpcClient`."""

    def __init__(self, address: str, member: str, incarnation: str, trust: Trust | None, above: ShardsAbove) -> None:
        super().__init__(address, member, incarnation, trust)
        self.above = above
        self.shards = [GrpcClient(each, member, incarnation, above.trust) for each in above.addresses]
        self.of = {fragment: self.shards[i] for i, fragments in enumerate(above.dealt) for fragment in fragments}

    def live_as(self, incarnation: str) -> None:
        for link in self.shards:
            link.incarnation = incarnation
        super().live_as(incarnation)

    async def close(self) -> None:
        for shard in self.shards:
            await shard.close()
        await super().close()

    async def join(self, join: Join) -> Welcome:
        """Join the ledger, then each shard with the slices of its chunks, then the ledger again, which knows by then
        what they took from the former incarnation. What shards say of their fragments is in the Welcome."""
        to_ledger = replace(join, applied=(0,) * len(join.applied))  # who knows of none by itself
        await super().join(to_ledger)
        each = await asyncio.gather(*(self._join_shard(i, join) for i in range(len(self.shards))))
        welcome = await super().join(to_ledger)
        of = {fragment: each[i] for i, fragments in enumerate(self.above.dealt) for fragment in fragments}
        every = range(len(of))
        versions = tuple(of[f].versions[f] for f in every) if all(welcome.versions for welcome in each) else ()
        incarnations = tuple(of[f].incarnations[f] for f in every)
        sequences = tuple(of[f].sequences[f] for f in every)
        return replace(welcome, sequences=sequences, versions=versions, incarnations=incarnations)

    async def _join_shard(self, i: int, join: Join) -> Welcome:
        own = [shard == i for shard in self.above.chunks]

        def only(slices: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(each if mine else () for each, mine in zip(slices, own, strict=True))

        applied = tuple(each if f in self.above.dealt[i] else -1 for f, each in enumerate(join.applied))
        said = replace(join, pushes=only(join.pushes), holds=only(join.holds), applied=applied)
        try:
            return await self.shards[i].persist(lambda: join_shard(self.shards[i], said), SHARD_S)
        except Unreachable as away:  # whoever joins knows how long to try
            raise Refused(str(away), SHARD_RETRY_S) from None

    async def beat(self, part: int, metrics: dict[str, float] | None = None, within_s: float = REPLY_S) -> rpc.Ack:
        """Say so to the ledger, and ask each shard whether it knows this rank: others may wait for it there. Raises
        NotJoined."""
        ack, *of_shards = await asyncio.gather(
            super().beat(part, metrics, within_s),
            *(shard.beat(part, within_s=rpc.BEAT_S) for shard in self.shards),
            return_exceptions=True,
        )
        for each in (ack, *(error for error in of_shards if isinstance(error, NotJoined))):
            if isinstance(each, BaseException):
                raise each
        return ack  # type: ignore[return-value]

    async def push(self, part: UpdatePart) -> int:
        return await self.of[part.fragment].push(part)

    async def pull(self, wanted: AnswerPull) -> Answer | None:
        return await self.of[wanted.fragment].pull(wanted)

    async def global_weights(self, part: int, number: int, limit_bytes: int) -> Answer:
        found = await asyncio.gather(*(shard.global_weights(part, number, limit_bytes) for shard in self.shards))
        weights = sorted((each for answer in found for each in answer.weights), key=lambda each: each.chunk)
        whole = len(weights) == len(self.above.chunks)
        return replace(found[0], weights=tuple(weights) if whole else ())


async def join_shard(link: GrpcClient, join: Join) -> Welcome:
    """Make an attempt to join a shard, to be repeated where that has not got word of the member from its ledger."""
    try:
        return await link.join(join)
    except NotJoined as refused:
        raise Refused(refused.reason, refused.retry_s) from None


def link_to(
    address: str, member: str, incarnation: str, trust: Trust | None, above: ShardsAbove | None
) -> GrpcClient:
    """Make the link of a member to a server."""
    if above is None:
        return GrpcClient(address, member, incarnation, trust)
    return FragmentLinks(address, member, incarnation, trust, above)
