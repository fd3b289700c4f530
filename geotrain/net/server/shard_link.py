"""What a server's ledger and its shards say to each other: a shard brings facts, and asks how the run stands.

Both calls are the shard's. Facts are numbered, and said until the ledger has them on its disk, which takes each once.
How the run stands is said whole whenever it has changed, so a message that is lost is no loss. So neither restarts
with the other, and a shard's members need only wait where one of the two is away.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
from grpc import aio

from geotrain.common.names import GLOBAL
from geotrain.net.server.server_thread import ServerThread
from geotrain.net.storage.snapshots import StoreError
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.certs import Trust, expiry, open_channel
from geotrain.net.transport.deadlines import first_of
from geotrain.net.transport.grpc_client import CHANNEL_OPTIONS, REPLY_S
from geotrain.net.transport.tcp_counters import Traffic
from geotrain.outer.messages import Facts, Refused, Standing, WentBack
from geotrain.outer.server.waits import late_members

log = logging.getLogger(__name__)

FAREWELL_S = 60.0  # how long a server that has ended waits until its shards know
GOODBYE_S = 5.0  # how long a shard that ends tries to say so
SHARD_RETRY_S = 0.5  # when facts may be said again that came before a hello
AGAIN_S = (0.1, 1.0)  # pauses between two calls that fail, drawn at random
ASK_S = 2.0  # a shard asks again after so long
MISSED_S = 10.0  # one that has not asked for so long counts as away


class ShardTable:
    """The ledger's side: what it knows of its shards, for one incarnation of its process.

    left: shards that know, from a former incarnation, that the server has ended. note: writes down that one knows.
    """

    def __init__(
        self, server_thread: ServerThread, left: Collection[int], note: Callable[[int], Awaitable[None]]
    ) -> None:
        self.server_thread, self.server = server_thread, server_thread.server
        self.left, self._note = set(left), note
        server_thread.looks_again = True
        self.ending = False
        self._hellos: dict[int, tuple[float, rpc.ShardHello]] = {}  # shard → when it asked last, and what it said
        self._incarnations: dict[int, str] = {}  # shard → its present one
        self._beginning = [asyncio.Lock() for _ in self.server.as_ledger.taken]
        self._made: tuple[int, bool, bytes] = (-1, False, b"")  # the standing after so many looks, as it is sent

    @property
    def ready(self) -> bool:
        """Whether all shards are here now."""
        return all(map(self._is_up, range(len(self.server.as_ledger.taken))))

    def status(self) -> list[dict[str, Any]]:
        """Describe each shard, as plain data. behind: how many facts of it are not in the ledger."""
        found = []
        for shard, taken in enumerate(self.server.as_ledger.taken):
            _, said = self._hellos.get(shard, (0.0, None))
            numbers = {name: getattr(said, name, 0) for name in ("facts", "journal_bytes", "rss_bytes")}
            behind = max(0, numbers["facts"] - taken)
            found.append({"shard": shard, "up": self._is_up(shard), "behind": behind, **numbers})
        return found

    async def standing(self, hello: rpc.ShardHello) -> bytes:
        """Answer a shard that asks how the run stands, once that has changed. Raises Refused."""
        shard, server = hello.shard, self.server
        if not 0 <= shard < len(server.as_ledger.taken) or len(hello.versions) != len(server.part.dealt[shard]):
            raise Refused(
                f"shard {shard}: {server.name!r} has {len(server.as_ledger.taken)}; all need the same cluster file"
            )
        if hello.origin and server.origin and hello.origin != server.origin:
            raise Refused(f"shard {shard} of {server.name!r}: its state is of another run than its ledger's")
        # One at a time: a second hello of one process must not begin it again.
        async with self._beginning[shard]:
            if not hello.seen and hello.incarnation != self._incarnations.get(shard):
                await self._begin(hello)
            self._incarnations.setdefault(shard, hello.incarnation)  # this ledger is the one that is new
        self._hellos[shard] = time.monotonic(), hello
        if hello.ended and shard not in self.left:
            await self._note(shard)
            self.left.add(shard)
        if hello.wait_s:
            await self.server_thread.until(lambda: self._changed(hello.seen), min(hello.wait_s, rpc.MAX_WAIT_S))
        return await self.server_thread.read(self._packed)

    async def _begin(self, hello: rpc.ShardHello) -> None:
        """See whether a process of a shard, which has brought no fact yet, knows of as many as its former ones. Later
        hellos cannot say: they may be older than facts that came over another connection. Raises Refused."""
        shard, server = hello.shard, self.server
        if hello.facts < server.as_ledger.taken[shard]:
            if hello.new and server.name == GLOBAL:
                raise Refused(
                    f"shard {shard} of {server.name!r} has lost its disk, and there is no copy of it: bring back its "
                    "folder, or the copy that checkpoint.snapshots names (docs/servers.md)"
                )
            await self.server_thread.persist(WentBack(shard, hello.facts, hello.versions, hello.job))
        self._incarnations[shard] = hello.incarnation

    async def facts(self, said: Facts) -> int:
        """Take a shard's facts. Returns how many of them the ledger has. Raises Refused: as those of a process that
        is no more, which came late. Its disk may be lost, and with it what they are counted from."""
        if said.incarnation != self._incarnations.get(said.shard):
            raise Refused(f"shard {said.shard}: it has not said hello in this life, or lives no more", SHARD_RETRY_S)
        known: int = await self.server_thread.say(said)
        return known

    async def farewell(self, wait_s: float) -> list[int]:
        """Report to the shards that the server has ended in good order. Returns those that did not acknowledge it."""
        self.ending, until_s = True, time.monotonic() + wait_s
        self.server_thread.look_again()
        everyone = set(range(len(self.server.as_ledger.taken)))
        while self.left != everyone and time.monotonic() < until_s:
            await asyncio.sleep(0.05)
        return sorted(everyone - self.left)

    def with_links(self, own: Traffic) -> Traffic:
        """Add the bytes of the shards' links between regions, as far as they have said, to the ledger's own; peaks
        are the ledger's."""
        every = replace(own)
        for _, hello in self._hellos.values():
            sent, received, *_ = *hello.links, 0, 0
            every.join(Traffic(sent, received))
        return every

    def with_peers(self, own: dict[str, Traffic]) -> dict[str, Traffic]:
        """Add the shards' bytes with each member, as far as they have said, to the ledger's own."""
        every = {name: replace(traffic) for name, traffic in own.items()}
        for _, hello in self._hellos.values():
            for each in hello.peers:
                every.setdefault(each.member, Traffic()).join(Traffic(each.sent, each.received))
        return every

    def late(self) -> set[str]:
        """Members for whose deltas others wait in shards that are here."""
        return {name for shard, (_, hello) in self._hellos.items() if self._is_up(shard) for name in hello.late}

    def _is_up(self, shard: int) -> bool:
        return shard in self._hellos and time.monotonic() - self._hellos[shard][0] < MISSED_S

    def _packed(self) -> bytes:
        # Made once for all shards that ask after the same message.
        looks, ending, packed = self._made
        if (looks, ending) != (self.server_thread.looks, self.ending):
            packed = wire.pack(replace(self.server.stand(), ended=self.ending))
            self._made = self.server_thread.looks, self.ending, packed
        return packed

    def _changed(self, seen: int) -> bool | None:
        return wire.crc_of(self._packed()) != seen or None


class ShardLink:
    """A shard's side. safe: gives `Facts.safe`. new: whether the shard began without any state. links: counts bytes
    between regions, peers: those with each member."""

    def __init__(
        self, server_thread: ServerThread, shard: int, address: str, trust: Trust | None,
        safe: Callable[[], tuple[int, ...]], new: bool, links: Traffic, peers: Callable[[], dict[str, Traffic]],
    ) -> None:  # fmt: skip
        self.server_thread, self.server, self.shard = server_thread, server_thread.server, shard
        self.address, self.trust, self.safe, self.new = address, trust, safe, new
        self.links, self.peers = links, peers
        self.process = self.server.incarnation  # its first: a region that starts over has another one from there on
        self._channel = open_channel(aio, address, trust, CHANNEL_OPTIONS)
        self._seen = 0
        self._said: tuple[Any, ...] = ()
        self._trouble = ""

    async def run(self) -> None:
        """Run until the ledger says that the server has ended. Raises StoreError where it refuses for good."""
        try:
            await first_of(self._stand(), self._bring())
        finally:
            await self._channel.close()

    async def _stand(self) -> None:
        while True:
            hello = await self._hello(ASK_S)
            if (reply := await self._call("standing", hello, Standing)) is None:
                continue
            frame, standing = reply
            if self._seen != wire.crc_of(frame):
                # In the journal before it is confirmed by the next hello: a shard that dies between asks again.
                await self.server_thread.persist(standing)
                self._seen = wire.crc_of(frame)
            if standing.ended:
                return

    async def _hello(self, wait_s: float, ended: bool = False) -> rpc.ShardHello:
        peers = tuple(rpc.MemberBytes(n, t.sent_bytes, t.received_bytes) for n, t in self.peers().items())
        late = tuple(late_members(self.server_thread.status))  # not on that thread, which it waits for
        return await self.server_thread.read(lambda: replace(self._stands(wait_s, ended), peers=peers, late=late))

    def _stands(self, wait_s: float, ended: bool) -> rpc.ShardHello:
        server = self.server
        said = server.facts(())
        of_all = [m.fragments for m in server.members.values()]
        rounds = [each[f].came if f in each else 0 for each in of_all for f in server.numbers]  # makes no entry
        return rpc.ShardHello(
            said.shard, server.as_shard.count, said.versions, min(rounds, default=0), server.origin,
            self.new and not server.as_shard.open, self._seen, wait_s if self._seen else 0.0, ended,
            self.server_thread.journal.segment_bytes, psutil.Process().memory_info().rss, self.process,
            tuple(self.links.counts),
        )  # fmt: skip

    async def _bring(self) -> None:
        def news() -> tuple[Facts, tuple[Any, ...]] | None:
            facts, standing = self.server.facts(self.safe()), self.server.as_shard.standing
            # To another incarnation of the ledger, too: its state may be older than what was said before.
            told = facts.safe, facts.quiet, facts.seen, standing and standing.incarnation
            return (facts, told) if facts.facts or told != self._said else None

        await self.server_thread.until(lambda: self.server.as_shard.open or None, float("inf"))
        while True:
            found = await self.server_thread.until(news, float("inf"))
            assert found is not None
            facts, told = found
            self._said = ()  # its ledger may have taken what is said now, though the reply is lost
            if (reply := await self._call("facts", replace(facts, incarnation=self.process), rpc.Ack)) is not None:
                self._said = told
                await self.server_thread.read(partial(self.server.as_shard.known, reply[1].applied))

    async def farewell(self) -> None:
        """Acknowledge the end to the ledger: this shard ends."""
        self._channel = open_channel(aio, self.address, self.trust, CHANNEL_OPTIONS)
        try:
            async with asyncio.timeout(GOODBYE_S):
                hello = await self._hello(0.0, ended=True)
                while await self._call("standing", hello, Standing) is None:
                    pass
        except TimeoutError:
            pass
        finally:
            await self._channel.close()

    async def _call(self, method: str, message: Any, kind: type) -> tuple[bytes, Any] | None:
        """Make one attempt of a call; None: it failed, and a pause has passed."""
        try:
            call = self._channel.unary_unary(f"/{rpc.SERVICE}/{method}")
            frame = bytes(await call(wire.pack(message), timeout=rpc.MAX_WAIT_S + REPLY_S))
            reply = wire.unpack(frame, kind)
        except aio.AioRpcError as error:
            refused = rpc.refusal_of(error)
            if refused is not None and refused.retry_s is None:
                raise StoreError(refused.reason) from None
            trouble = str(refused or error.code().name.lower() + expiry(error, self.trust))
        except wire.WireError as error:
            trouble = str(error)
        else:
            self._trouble = ""
            return frame, reply
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("%s: its ledger at %s: %s; it is called again", self.server.name, self.address, trouble)
        await asyncio.sleep(random.uniform(*AGAIN_S))
        return None
