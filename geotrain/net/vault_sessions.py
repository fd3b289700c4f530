"""The book's end of the streams to its vaults: orders go out, what vaults hold comes back.

A vault calls its book, and the stream lasts as long as both live. A stream that breaks ends the server's life: the
book recovers from its disk, as after a death, which is quick, since it holds no vector; every vault calls again, gets
the orders that it lacks, and the members join again. So nothing has to be said twice within a life.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from grpc import aio

from geotrain.net import rpc, wire
from geotrain.net.deadlines import within
from geotrain.net.server_thread import ServerThread
from geotrain.outer.messages import Answer, Refused, UpdatePart
from geotrain.vaults import FarVaults, Froze, HeldAnswer, HeldPart, Holdings

HELLO_S = 20.0
FAREWELL_S = 60.0  # how long a server waits at its end for its vaults'
RETRY_S = 0.5
T = TypeVar("T")


class VaultLost(ConnectionError):
    """The stream to a vault has ended: the server's life ends, and another begins at once."""


class VaultSessions:
    """Of one life of the book's process. Belongs to its event loop; `saved` may be asked by any thread.

    far: the vaults of the server on that thread. life: its name.
    """

    def __init__(self, server_thread: ServerThread, far: FarVaults, server: str, life: str) -> None:
        self.server_thread, self.far, self.server, self.life = server_thread, far, server, life
        self.holdings = Holdings()
        self.states: dict[int, rpc.VaultState] = {}
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()  # gets a VaultLost
        self._ready = asyncio.Event()
        self._told = asyncio.Event()  # set when a vault has told something, and then replaced by a new one
        self._here: set[int] = set()
        self._ending = False
        self._left: set[int] = set()  # vaults that have said farewell
        # Only the server's thread touches these: an order must not fall between what is caught up and what is new.
        self._queues: list[asyncio.Queue[bytes]] = []
        self._begun = False
        far.emit = self.tell_all

    @property
    def ready(self) -> bool:
        """Whether all vaults are there."""
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        """Raises VaultLost."""
        tasks = [asyncio.ensure_future(each) for each in (self._ready.wait(), self.until_lost())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()

    async def until_lost(self) -> None:
        """Raises VaultLost when a vault is."""
        await asyncio.shield(self.lost)

    def saved(self, orders: int) -> bool:
        """Whether every vault has a snapshot of its state after so many orders, or more."""
        states = list(self.states.values())
        return len(states) == self.far.vaults and all(state.saved >= orders for state in states)

    @property
    def journal_bytes(self) -> int:
        return max((state.journal_bytes for state in list(self.states.values())), default=0)

    def status(self) -> list[dict[str, Any]]:
        """Of each vault, as plain data. orders: how many it has on its disk; behind: how many it has not, of those
        given. What is not known is 0."""
        unknown, given = rpc.VaultState(0, 0, 0, 0), self.far.orders
        found = []
        for vault in range(self.far.vaults):
            state = self.states.get(vault, unknown)
            behind = max(0, given - state.orders) if vault in self.states else 0
            found.append({"vault": vault, "up": vault in self._here, "behind": behind, **asdict(state)})
        return found

    def tell_all(self, message: Any) -> None:
        """Behind all orders given so far. Call it on the server's thread, or between its messages."""
        frame = wire.pack(message)
        for queue in self._queues:
            self._loop.call_soon_threadsafe(queue.put_nowait, frame)

    async def farewell(self, wait_s: float = FAREWELL_S) -> list[int]:
        """Tell the vaults that the server has ended in good order, also one that dies meanwhile and calls again.
        Returns those that have not answered within `wait_s`: they will not find their book any more."""
        self._ending = True  # from here on a stream's end is none of the server's life
        await self.server_thread.read(lambda: self.tell_all(rpc.Farewell()))
        everyone = set(range(self.far.vaults))
        await self._until(lambda: self._left == everyone or None, wait_s)
        return sorted(everyone - self._left)

    # -- what vaults hold

    async def part(self, part: UpdatePart, wait_s: float) -> HeldPart | None:
        """What the book is to be told of a part of an update, once vaults hold all of it; None after `wait_s`."""
        return await self._until(lambda: self.holdings.part(part), wait_s)

    async def answer(self, wanted: Answer, wait_s: float) -> HeldAnswer | None:
        return await self._until(lambda: self.holdings.answer(wanted), wait_s)

    async def _until(self, look: Callable[[], T | None], wait_s: float) -> T | None:
        deadline_s = time.monotonic() + wait_s
        while (found := look()) is None and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                await within(left_s, self._told.wait())
            except TimeoutError:
                return None
        return found

    # -- one stream

    async def serve(self, context: Any) -> None:
        """Speak with a vault until the stream ends. Raises Refused when it may not be here."""
        hello: rpc.VaultHello = wire.unpack(await rpc.next_frame(within(HELLO_S, context.read())), rpc.VaultHello)
        if (hello.server, hello.vaults) != (self.server, self.far.vaults) or not 0 <= hello.vault < hello.vaults:
            raise Refused(
                f"vault {hello.vault} of {hello.vaults} of {hello.server!r}; this is the book of {self.server!r}, "
                f"which has {self.far.vaults}: both need the same cluster file"
            )
        if hello.vault in self._here or (self.lost.done() and not self._ending):
            raise Refused(f"vault {hello.vault} of {self.server!r} is here already", RETRY_S)
        self._here.add(hello.vault)
        # Its bound: an update is handled only once every vault holds its part, so a slow one holds up all orders.
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        try:
            await self.server_thread.read(lambda: self._catch_up(queue, hello))
            tasks: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(each) for each in (self._write(context, queue), self._read(context, hello))
            ]
            others = [] if self._ending else [self.lost]
            await self._begin()
            await asyncio.wait([*tasks, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._here.discard(hello.vault)
            if not (self._ending or self.lost.done()):
                self.lost.set_exception(VaultLost(f"{self.server}: the stream to vault {hello.vault} has ended"))
                self.lost.exception()  # it may be that nobody waits for it any more

    def _catch_up(self, queue: asyncio.Queue[bytes], hello: rpc.VaultHello) -> None:
        try:
            missing = self.far.since(hello.orders)
        except ValueError as error:
            raise Refused(
                f"vault {hello.vault} of {self.server!r}: {error}: the disk of one of them was lost, or brought back "
                "from another time; docs/servers.md says what to do"
            ) from None
        for order in missing:
            self._loop.call_soon_threadsafe(queue.put_nowait, wire.pack(order))
        self._queues.append(queue)
        if self._ending:
            self._loop.call_soon_threadsafe(queue.put_nowait, wire.pack(rpc.Farewell()))

    async def _begin(self) -> None:
        """Begin the life, when the last vault has come."""

        def begin() -> None:
            if len(self._queues) == self.far.vaults and not self._begun and not self._ending:
                self._begun = True
                self.far.begin_life(self.life)
                self._loop.call_soon_threadsafe(self._ready.set)

        await self.server_thread.read(begin)

    async def _write(self, context: Any, queue: asyncio.Queue[bytes]) -> None:
        """What waits goes together: so a vault can put the orders of an update on its disk with one flush."""
        while True:
            waiting = deque([await queue.get()])
            while not queue.empty():
                waiting.append(queue.get_nowait())
            while waiting:
                await context.write(wire.bundle(waiting))

    async def _read(self, context: Any, hello: rpc.VaultHello) -> None:
        kinds = HeldPart, HeldAnswer, Froze, rpc.VaultState, rpc.Farewell
        while (frame := await context.read()) is not aio.EOF:
            said = wire.unpack(bytes(frame), *kinds)
            if isinstance(said, Froze):
                await self.server_thread.say(said)
            elif isinstance(said, rpc.Farewell):
                self._left.add(hello.vault)
            elif isinstance(said, rpc.VaultState):
                self.states[hello.vault] = said
                if len(self.states) == self.far.vaults:
                    least = min(state.orders for state in self.states.values())
                    await self.server_thread.read(partial(self.far.drop, least))
            else:
                self.holdings.take(said)
            told, self._told = self._told, asyncio.Event()
            told.set()
            if hello.vault in self._left:
                return
