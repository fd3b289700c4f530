"""The book's end of the streams to its vaults, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from grpc import aio

from geotrain.net import rpc, wire
from geotrain.net.vault_sessions import VaultLost, VaultSessions
from geotrain.vault import Copy


class FakeVault:
    """A stream whose vault says what it is told to; `holds_s`: how long each of the book's frames takes to go out."""

    def __init__(self, index: int, holds_s: float = 0.0) -> None:
        self.says: asyncio.Queue[Any] = asyncio.Queue()
        self.heard: asyncio.Queue[Any] = asyncio.Queue()
        self.holds_s, self.written = holds_s, 0
        self.say(rpc.VaultHello("eu", index, 2, 0))

    def say(self, message: Any) -> None:
        self.says.put_nowait(wire.pack(message))

    async def read(self) -> Any:
        return await self.says.get()

    async def write(self, frame: bytes) -> None:
        await asyncio.sleep(self.holds_s)
        self.written += 1
        for each in wire.unbundle(frame):
            self.heard.put_nowait(wire.unpack(each, rpc.Farewell, Copy))

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


def sessions() -> VaultSessions:
    return VaultSessions(Thread(), Far(), "eu", "life")  # type: ignore[arg-type]


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
