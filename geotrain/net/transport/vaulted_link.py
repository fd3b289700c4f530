"""A member's link to a server whose vaults are processes of their own: it pushes each piece to the vault that has it,
beside the others, tells the book what it pushed, and pulls an answer from book and vaults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from geotrain.config import ClusterConfig, vaults_of
from geotrain.net.transport import rpc
from geotrain.net.transport.certs import Role, Trust, trust_between
from geotrain.net.transport.grpc_client import GrpcClient
from geotrain.outer.messages import Answer, UpdatePart
from geotrain.parameters.layout import Layout
from geotrain.parameters.pieces import deal

VAULT_S = 3600.0  # how long a vault is tried while its book is there
AGAIN_S = 0.2
EMPTY_S = 3.0


@dataclass(frozen=True)
class VaultsAbove:
    """The vaults of the server above. owner: piece → its vault. fragments: piece → its fragment."""

    addresses: tuple[str, ...]
    owner: tuple[int, ...]
    fragments: tuple[int, ...]
    trust: Trust | None

    def of(self, vault: int, entries: Sequence[Any]) -> tuple[Any, ...]:
        """Those of these deltas or weights that the vault has."""
        return tuple(each for each in entries if self.owner[each.piece] == vault)


def vaults_above(cluster: ClusterConfig, layout: Layout, role: Role, name: str, server: str) -> VaultsAbove | None:
    """What the member needs to reach the vaults of that server; None: they are in the server's own process. Raises
    CertificateError."""
    addresses = vaults_of(cluster, server)
    if not addresses:
        return None
    owner = {piece.index: vault for vault, own in enumerate(deal(layout.pieces, len(addresses))) for piece in own}
    return VaultsAbove(
        tuple(map(str, addresses)),
        tuple(owner[piece.index] for piece in layout.pieces),
        tuple(piece.fragment for piece in layout.pieces),
        trust_between(cluster, role, name, "vault", server),
    )


class VaultedLink(GrpcClient):
    """trust: to the book, as for `GrpcClient`."""

    def __init__(self, address: str, member: str, incarnation: str, trust: Trust | None, above: VaultsAbove) -> None:
        super().__init__(address, member, incarnation, trust)
        self.above = above
        self.vaults = [GrpcClient(each, member, incarnation, above.trust) for each in above.addresses]

    def live_as(self, incarnation: str) -> None:
        for link in self.vaults:
            link.incarnation = incarnation
        super().live_as(incarnation)

    async def close(self) -> None:
        for vault in self.vaults:
            await vault.close()
        await super().close()

    async def push(self, part: UpdatePart) -> int:
        """Ends when the book has taken the part, or refuses it; until then vaults are tried again and again."""
        pushes = [
            asyncio.ensure_future(vault.persist(partial(vault.push, replace(part, deltas=own)), VAULT_S))
            for i, vault in enumerate(self.vaults)
            if (own := self.above.of(i, part.deltas))
        ]
        taken = asyncio.ensure_future(self._taken(part))
        try:
            waiting = {taken, *pushes}
            while not taken.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for push in done - {taken}:
                    push.result()
            return taken.result()
        finally:
            for task in (taken, *pushes):
                task.cancel()
            await asyncio.gather(taken, *pushes, return_exceptions=True)

    async def _taken(self, part: UpdatePart) -> int:
        while (applied := await self.commit(part)) is None:
            pass
        return applied

    async def pull(
        self, part: int, sequence: int, fragments: tuple[int, ...], limit_bytes: int, wait_s: float = rpc.MAX_WAIT_S
    ) -> Answer | None:
        header = await super().pull(part, sequence, fragments, limit_bytes, wait_s)
        if header is None:
            return None
        wanted = [i for i in range(len(self.vaults)) if self.above.of(i, header.weights)]
        calls = [self._pull_from(i, part, sequence, fragments, limit_bytes) for i in wanted]
        found = whole(header, await asyncio.gather(*calls))
        if found is None:  # book and vault spoke in different lives of the server
            await asyncio.sleep(AGAIN_S)
        return found

    async def _pull_from(
        self, i: int, part: int, sequence: int, fragments: tuple[int, ...], limit_bytes: int
    ) -> Answer:
        """An empty one, if the vault has had none for a while: it may have begun a new life after the book gave the
        header, and codes the answer once more only when the book is asked again."""
        vault, until_s = self.vaults[i], time.monotonic() + EMPTY_S

        async def attempt() -> Answer | None:
            found = await vault.pull(part, sequence, fragments, limit_bytes, AGAIN_S)
            return Answer(sequence, ()) if found is None and time.monotonic() >= until_s else found

        return await vault.persist(attempt, VAULT_S)

    async def global_weights(self, part: int, number: int, limit_bytes: int) -> Answer:
        header = await super().global_weights(part, number, limit_bytes)
        if not header.weights:
            return header

        def calls() -> list[Any]:
            return [v.persist(partial(v.global_weights, part, number, limit_bytes), VAULT_S) for v in self.vaults]

        found = await asyncio.gather(*calls())
        versions = {each.piece: each.version for each in header.weights}
        told = [replace(a, weights=tuple(replace(w, version=versions[w.piece]) for w in a.weights)) for a in found]
        return whole(header, told) or replace(header, weights=())


def whole(header: Answer, found: Sequence[Answer]) -> Answer | None:
    """The answer with the payloads that vaults have given; None: they are not (all) of this answer."""
    weights = {each.piece: each for answer in found for each in answer.weights if answer.life == header.life}
    if any(each.piece not in weights or weights[each.piece].version != each.version for each in header.weights):
        return None
    return replace(header, weights=tuple(weights[each.piece] for each in header.weights))
