"""The book's end of the streams to its vaults: orders go out, what vaults hold comes back.

A vault calls its book, and the stream lasts as long as both live. A stream that breaks ends the server's life: the
book recovers from its disk, as after a death, which is quick, since it holds no vector; every vault calls again, gets
the orders that it lacks, and the members join again. So nothing has to be said twice within a life.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from grpc import aio

from geotrain.net.server.server_thread import ServerThread
from geotrain.net.storage.past import Past, read_past, who_goes_back, write_past
from geotrain.net.storage.snapshot_mirror import Copies, beside
from geotrain.net.storage.snapshots import StoreError
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.deadlines import within
from geotrain.outer.messages import Answer, Refused, UpdatePart
from geotrain.outer.shards.shards import FarVaults, Froze, HeldAnswer, HeldPart, Holdings

HELLO_S = 20.0
FAREWELL_S = 60.0  # how long a server waits at its end for its vaults', and a vault until its own was heard
CALLS_AGAIN_S = 5.0  # a vault whose stream broke has called by then
RETRY_S = 0.5
STORE_RETRY_S = 5.0  # where the object storage does not answer
BELONG_S = 60.0  # how long a vault may take to note its past
T = TypeVar("T")


class VaultLost(ConnectionError):
    """The stream to a vault has ended: the server's life ends, and another begins at once."""


class PastLost(VaultLost):
    """So has one whose vault lost its disk: before the next life all go back to a moment of which all have copies."""


@dataclass
class Lineage:
    """The book's past. folder: of its state. copies: of its and its vaults' snapshots; None: there are none."""

    folder: Path
    copies: Copies | None
    past: Past = field(init=False)

    def __post_init__(self) -> None:
        self.past = read_past(self.folder)

    def note(self, past: Past) -> None:
        """Raises OutputError."""
        write_past(self.folder, past)
        self.past = past

    async def newest(self) -> str | None:
        """The newest moment of which all have copies. Raises Refused, while that cannot be told."""
        if (copies := self.copies) is None:
            return None
        try:
            return max(await beside(copies.whole), default=None)
        except StoreError as error:
            raise Refused(str(error), STORE_RETRY_S) from error


class VaultSessions:
    """Of one life of the book's process. Belongs to its event loop; `saved` may be asked by any thread.

    far: the vaults of the server on that thread. life: its name. note: writes down that a vault has said farewell.
    left_before: those that have, in a former life of the server.
    """

    def __init__(
        self, server_thread: ServerThread, far: FarVaults, server: str, life: str, lineage: Lineage,
        note: Callable[[int], Awaitable[None]], left_before: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.server_thread, self.far, self.server, self.life = server_thread, far, server, life
        self.lineage = lineage
        self.holdings = Holdings()
        self.states: dict[int, rpc.VaultState] = {}
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()  # gets a VaultLost
        self._ready = asyncio.Event()
        self._told = asyncio.Event()  # set when a vault has told something, and then replaced by a new one
        self._here: set[int] = set()
        self._ending = False
        self._note, self._left_before = note, frozenset(left_before)
        self._left: set[int] = set()  # vaults that have said farewell
        self._pasts: dict[int, str] = {}  # vault → the past that it has on its disk
        self._uploads: dict[int, rpc.Uploaded] = {}  # vault → what it answered to the last Upload
        # Only the server's thread changes it: an order must not fall between what is caught up and what is new.
        self._queues: list[asyncio.Queue[bytes]] = []
        self._begun = False
        far.emit = self.tell_all

    @property
    def ready(self) -> bool:
        """Whether all vaults are there."""
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        """Raises VaultLost."""
        await self._unless_lost(self._ready.wait())

    async def _unless_lost(self, what: Awaitable[T]) -> T:
        """Raises VaultLost."""
        wanted, lost = asyncio.ensure_future(what), asyncio.ensure_future(self.until_lost())
        try:
            await asyncio.wait([wanted, lost], return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                lost.result()
            return wanted.result()
        finally:
            wanted.cancel()
            lost.cancel()

    async def until_lost(self) -> None:
        """Raises VaultLost when a vault is."""
        await asyncio.shield(self.lost)

    def saved(self, moment: str) -> bool:
        """Whether it is the moment of every vault's newest snapshot."""
        states = list(self.states.values())
        return len(states) == self.far.vaults and all(state.moment == moment for state in states)

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
            known = {key: value for key, value in asdict(state).items() if key != "moment"}
            found.append({"vault": vault, "up": vault in self._here, "behind": behind, **known})
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
        # One that has said it in a former life calls only if that ended before the stream did.
        first_s = min(wait_s, CALLS_AGAIN_S)
        await self._until(lambda: self._left == everyone or None, first_s)
        await self._until(lambda: self._left | self._left_before == everyone or None, wait_s - first_s)
        return sorted(everyone - self._left - self._left_before)

    async def upload(self, moment: str) -> None:
        """Have all vaults copy their snapshots of this moment, and wait until all have answered, be it that one
        cannot: the next attempt is for all again. Raises StoreError."""

        async def until_answered() -> None:
            while len(self._uploads) < self.far.vaults:
                await self._told.wait()

        self._uploads.clear()
        try:
            await self.wait_ready()
            await self.server_thread.read(lambda: self.tell_all(rpc.Upload(moment)))
            await self._unless_lost(until_answered())
        except VaultLost as lost:
            raise StoreError(f"{moment} is not copied: {lost}") from None
        troubles = [f"vault {v}: {each.trouble}" for v, each in sorted(self._uploads.items()) if each.trouble]
        if troubles:
            raise StoreError(f"{self.server}: {'; '.join(troubles)}")

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
        try:
            # Its bound: an update is handled only once every vault holds its part, so a slow one holds up all orders.
            queue: asyncio.Queue[bytes] = asyncio.Queue()
            unfit = await self.server_thread.read(lambda: self._catch_up(queue, hello))
            if unfit is None:
                await self._converse(context, hello, queue)
            else:
                await self._send_back(context, hello, unfit)
        finally:
            self._here.discard(hello.vault)

    async def _converse(self, context: Any, hello: rpc.VaultHello, queue: asyncio.Queue[bytes]) -> None:
        try:
            self._pasts[hello.vault] = hello.past
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
            if not self._ending:
                self._lose(VaultLost(f"{self.server}: the stream to vault {hello.vault} has ended"))

    def _lose(self, lost: VaultLost) -> None:
        if not self.lost.done():
            self.lost.set_exception(lost)
            self.lost.exception()  # it may be that nobody waits for it any more

    async def _send_back(self, context: Any, hello: rpc.VaultHello, unfit: str) -> None:
        """The vault's state is not that of its book: one of them has lost its disk, or had another past."""
        newest = await self.lineage.newest()
        if self.lost.done() or self._ending:
            raise Refused(f"the server {self.server!r} ends this life", RETRY_S)
        match who_goes_back(self.lineage.past, newest):
            case "vault":
                assert newest is not None
                await context.write(wire.bundle(deque([wire.pack(rpc.GoBack(newest, self.lineage.past.name))])))
            case "all":
                self._lose(PastLost(f"{self.server}: vault {hello.vault}: {unfit}: all go back to {newest}"))
            case "nobody":
                raise Refused(
                    f"vault {hello.vault} of {self.server!r}: {unfit}: the disk of one of them was lost, or brought "
                    "back from another time; docs/servers.md says what to do"
                )

    def _catch_up(self, queue: asyncio.Queue[bytes], hello: rpc.VaultHello) -> str | None:
        """Give the vault the orders that it lacks, and all that follow. Returns why its state does not fit the
        book's, if so; then it is given nothing."""
        past = self.lineage.past.name
        if past and hello.past != past:
            return "its state is of another past of the server than its book's" if hello.past else "it has no state"
        try:
            missing = self.far.since(hello.orders)
        except ValueError as error:
            return str(error)
        for order in missing:
            self._loop.call_soon_threadsafe(queue.put_nowait, wire.pack(order))
        self._queues.append(queue)
        if self._ending:
            self._loop.call_soon_threadsafe(queue.put_nowait, wire.pack(rpc.Farewell()))
        return None

    async def _begin(self) -> None:
        """Begin the life, when the last vault has come. All of them have the server's past on their disks before any
        gets an order: who comes without has lost its disk."""
        if len(self._queues) < self.far.vaults or self._begun or self._ending:
            return
        self._begun = True
        past = self.lineage.past
        if not past.name:
            past = replace(past, name=uuid.uuid4().hex)
            await self.server_thread.read(lambda: self.tell_all(rpc.Belong(past.name)))
        if await self._until(lambda: set(self._pasts.values()) == {past.name} or None, BELONG_S) is None:
            self._lose(VaultLost(f"{self.server}: not all vaults have noted which past they belong to"))
            return
        if not past.begun:
            self.lineage.note(replace(past, begun=True))
        await self.server_thread.read(lambda: self.far.begin_life(self.life))
        self._ready.set()

    async def _write(self, context: Any, queue: asyncio.Queue[bytes]) -> None:
        """What waits goes together: so a vault can put the orders of an update on its disk with one flush."""
        while True:
            waiting = deque([await queue.get()])
            while not queue.empty():
                waiting.append(queue.get_nowait())
            while waiting:
                await context.write(wire.bundle(waiting))

    async def _read(self, context: Any, hello: rpc.VaultHello) -> None:
        kinds = HeldPart, HeldAnswer, Froze, rpc.VaultState, rpc.Belong, rpc.Uploaded, rpc.Farewell
        while (frame := await context.read()) is not aio.EOF:
            said = wire.unpack(bytes(frame), *kinds)
            if isinstance(said, Froze):
                await self.server_thread.say(said)
            elif isinstance(said, rpc.Farewell):
                await self._note(hello.vault)  # before the stream ends, which lets it go
                self._left.add(hello.vault)
            elif isinstance(said, rpc.Belong):
                self._pasts[hello.vault] = said.past
            elif isinstance(said, rpc.Uploaded):
                self._uploads[hello.vault] = said
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
