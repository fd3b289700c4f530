"""The book's end of the streams to its vaults, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from grpc import aio

from geotrain.net.server.vault_sessions import PastLost, VaultLost, VaultSessions
from geotrain.net.storage.past import Past
from geotrain.net.storage.snapshots import StoreError
from geotrain.net.transport import rpc, wire
from geotrain.outer.messages import Refused
from geotrain.outer.shards.shard import Copy


class FakeVault:
    """A stream whose vault says what it is told to; `holds_s`: how long each of the book's frames takes to go out.
    past: of its state."""

    def __init__(self, index: int, holds_s: float = 0.0, past: str = "before") -> None:
        self.says: asyncio.Queue[Any] = asyncio.Queue()
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.holds_s, self.written = holds_s, 0
        self.say(rpc.VaultHello("eu", index, 2, 0, past))

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
    """A book's orders: none was given."""

    vaults, orders = 2, 0

    def since(self, orders: int) -> list[Any]:
        return []

    def begin_life(self, life: str) -> None: ...


async def noted(vault: int) -> None: ...


class FakeLineage:
    """Where a book keeps its past. moments: of which all have copies."""

    def __init__(self, past: Past, *moments: str) -> None:
        self.past, self.moments = past, moments

    def note(self, past: Past) -> None:
        self.past = past

    async def newest(self) -> str | None:
        return max(self.moments, default=None)


def sessions(lineage: FakeLineage | None = None) -> VaultSessions:
    lineage = lineage or FakeLineage(Past("before", begun=True))
    return VaultSessions(Thread(), Far(), "eu", "life", lineage, noted)  # type: ignore[arg-type]


async def here(book: VaultSessions, *vaults: FakeVault) -> list[asyncio.Task[None]]:
    served = [asyncio.ensure_future(book.serve(vault)) for vault in vaults]
    await book.wait_ready()
    return served


def test_a_vault_that_leaves_quickly_keeps_the_farewell_from_none() -> None:
    async def main() -> None:
        book, quick, slow = sessions(), FakeVault(0), FakeVault(1, holds_s=0.3)
        served = await here(book, quick, slow)
        leaving = [asyncio.ensure_future(quick.leave()), asyncio.ensure_future(slow.leave(after=0.3))]
        assert await book.farewell() == []
        await asyncio.gather(*served, *leaving)
        assert not book.lost.done()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_vault_that_dies_at_the_end_is_told_when_it_calls_again() -> None:
    async def main() -> None:
        book, staying, dying = sessions(), FakeVault(0), FakeVault(1, holds_s=1000.0)
        served = await here(book, staying, dying)
        ending = asyncio.ensure_future(book.farewell())
        await staying.leave()
        await served[0]
        dying.says.put_nowait(aio.EOF)
        await served[1]
        again = FakeVault(1)
        served = [asyncio.ensure_future(book.serve(again))]
        await again.leave()
        assert await ending == [] and not book.lost.done()
        await served[0]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_who_says_no_farewell_is_named_and_before_the_end_a_stream_that_breaks_is_a_lost_vault() -> None:
    async def main() -> None:
        book, staying, silent = sessions(), FakeVault(0), FakeVault(1)
        served = await here(book, staying, silent)
        leaving = asyncio.ensure_future(staying.leave())
        assert await book.farewell(0.5) == [1]
        for task in (*served, leaving):
            task.cancel()
        book, *vaults = sessions(), FakeVault(0), FakeVault(1)
        served = await here(book, *vaults)
        vaults[0].says.put_nowait(aio.EOF)
        await asyncio.gather(*served)
        try:
            await book.until_lost()
            raise AssertionError("a lost vault ends the life")
        except VaultLost as lost:
            assert "vault 0" in str(lost) or "vault 1" in str(lost)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_orders_of_one_message_go_to_a_vault_together() -> None:
    async def main() -> None:
        book, *vaults = sessions(), FakeVault(0), FakeVault(1)
        served = await here(book, *vaults)
        orders = [Copy(number) for number in range(1, 20)]
        for order in orders:  # as on the server's thread, while it handles one message
            book.tell_all(order)
        for vault in vaults:
            assert [await vault.heard.get() for _ in orders] == orders and vault.written == 1
        for task in served:
            task.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_no_vault_gets_an_order_before_all_have_noted_the_past_that_they_belong_to() -> None:
    """Who then comes without it has lost its disk, also if its book was killed in between."""

    async def main() -> None:
        lineage = FakeLineage(Past())
        book, quick, slow = sessions(lineage), FakeVault(0, past=""), FakeVault(1, past="")
        served = [asyncio.ensure_future(book.serve(vault)) for vault in (quick, slow)]
        told = [await vault.heard.get() for vault in (quick, slow)]
        assert told[0] == told[1] and told[0].past
        quick.say(told[0])
        await asyncio.sleep(0.1)
        assert not book.ready and lineage.past == Past()
        slow.say(told[1])
        await book.wait_ready()
        assert lineage.past == Past(told[0].past, begun=True)
        for task in served:
            task.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_who_has_lost_its_disk_takes_all_back_and_is_refused_where_nothing_was_copied() -> None:
    async def main() -> None:
        book = sessions(FakeLineage(Past("before", "1", begun=True)))
        with pytest.raises(Refused, match=r"vault 0 of 'eu': it has no state: .*docs/servers\.md") as refused:
            await book.serve(FakeVault(0, past=""))
        assert refused.value.retry_s is None and not book.lost.done()  # the other vaults may stay

        for past in ("", "another"):
            book = sessions(FakeLineage(Past("before", "1", begun=True), "1", "2"))
            await book.serve(lost := FakeVault(0, past=past))
            with pytest.raises(PastLost, match="all go back to 2"):
                await book.until_lost()
            assert lost.heard.empty()

        # The book has gone back, and its vaults follow: who has not taken the moment yet is told, and ends no life.
        lineage = FakeLineage(Past("after", "2"), "1", "2")
        book, late = sessions(lineage), FakeVault(0, past="before")
        await book.serve(late)
        assert await late.heard.get() == rpc.GoBack("2", "after") and not book.lost.done()
        served = await here(book, FakeVault(0, past="after"), FakeVault(1, past="after"))
        assert lineage.past == Past("after", "2", begun=True)
        for task in served:
            task.cancel()

        # One has found its copy of that moment damaged: the book has to look for another.
        book = sessions(FakeLineage(Past("after", "2"), "1"))
        await book.serve(FakeVault(0, past="before"))
        with pytest.raises(PastLost, match="all go back to 1"):
            await book.until_lost()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_moment_is_copied_when_all_vaults_have_said_so() -> None:
    async def main() -> None:
        book, *vaults = sessions(), FakeVault(0), FakeVault(1)
        served = await here(book, *vaults)
        for troubles in (("", "away"), ("", "")):
            copying = asyncio.ensure_future(book.upload("7"))
            for vault, trouble in zip(vaults, troubles, strict=True):
                assert await vault.heard.get() == rpc.Upload("7")
                assert not copying.done()
                vault.say(rpc.Uploaded("7", trouble))
            if any(troubles):
                with pytest.raises(StoreError, match="eu: vault 1: away"):
                    await copying
        await copying
        copying = asyncio.ensure_future(book.upload("8"))
        vaults[0].says.put_nowait(aio.EOF)
        with pytest.raises(StoreError, match="8 is not copied: eu: the stream to vault 0 has ended"):
            await copying
        for task in served:
            task.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))
