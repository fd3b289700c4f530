"""Runs the coordinator's end of the streams to its shards: commands go out, what shards hold comes back.

A shard calls its coordinator, and the stream lasts as long as both live. A stream that breaks ends the server's
incarnation: the coordinator recovers from its disk, as after a death, which is quick, since it holds no vector; every
shard calls again, gets the commands that it lacks, and the members join again. So nothing has to be said twice within
an incarnation.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from grpc import aio

from geotrain.net.server.server_thread import ServerThread
from geotrain.net.storage.remote_snapshots import Copies, beside
from geotrain.net.storage.snapshots import StoreError
from geotrain.net.storage.timeline import Timeline, new_timeline, read_timeline, who_goes_back, write_timeline
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.deadlines import first_of, within
from geotrain.outer.messages import Answer, Refused, UpdatePart
from geotrain.outer.shards.protocol import Froze, HeldAnswer, HeldPart
from geotrain.outer.shards.remote import Holdings, RemoteShards

HELLO_S = 20.0
FAREWELL_S = 60.0  # how long a server waits at its end for its shards', and a shard until its own was heard
CALLS_AGAIN_S = 5.0  # a shard whose stream broke has called by then
RETRY_S = 0.5
STORE_RETRY_S = 5.0  # where the object storage does not answer
BELONG_S = 60.0  # how long a shard may take to note its timeline
T = TypeVar("T")


class ShardLost(ConnectionError):
    """Raised when the stream to a shard has ended: the server's incarnation ends, and another begins at once."""


class TimelineLost(ShardLost):
    """Raised when a shard lost its disk: all processes roll back to the newest checkpoint that all of them have."""


@dataclass
class Lineage:
    """Keeps the timeline of a process. folder: of its state. copies: of a coordinator's and its shards' snapshots;
    None: there are none."""

    folder: Path
    copies: Copies | None = None
    timeline: Timeline = field(init=False)

    def __post_init__(self) -> None:
        self.timeline = read_timeline(self.folder)

    def note(self, timeline: Timeline) -> None:
        """Move the state to that timeline. Raises OutputError."""
        write_timeline(self.folder, timeline)
        self.timeline = timeline

    async def newest(self) -> str | None:
        """Find the newest checkpoint id of which all have copies. Raises Refused, while the store does not answer."""
        if (copies := self.copies) is None:
            return None
        try:
            return max(await beside(copies.whole), default=None)
        except StoreError as error:
            raise Refused(str(error), STORE_RETRY_S) from error


class ShardSessions:
    """Holds the streams to all shards, for one incarnation of the server process.

    Belongs to its event loop; any thread may call `saved`. far: the shards of the server on that thread. incarnation:
    its name. note: writes down that a shard has said farewell. left_before: those that have, in a former incarnation
    of the server.
    """

    def __init__(
        self, server_thread: ServerThread, far: RemoteShards, server: str, incarnation: str, lineage: Lineage,
        note: Callable[[int], Awaitable[None]], left_before: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.server_thread, self.far, self.server, self.incarnation = server_thread, far, server, incarnation
        self.lineage = lineage
        self.holdings = Holdings()
        self.states: dict[int, rpc.ShardState] = {}
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()  # gets a ShardLost
        self._ready = asyncio.Event()
        self._heard = asyncio.Event()  # set when a shard has said something, and then replaced by a new one
        self._here: set[int] = set()
        self._ending = False
        self._note, self._left_before = note, frozenset(left_before)
        self._left: set[int] = set()  # shards that have said farewell
        self._timelines: dict[int, str] = {}  # shard → the timeline that it has on its disk
        self._uploads: dict[int, rpc.Uploaded] = {}  # shard → what it answered to the last Upload
        self._unsaved: rpc.Unsaved | None = None  # the last snapshot that a shard could not write
        # Only the server's thread changes it: a command must not fall between what is caught up and what is new.
        self._queues: list[asyncio.Queue[bytes]] = []
        self._begun = False
        far.emit = self.send_all

    @property
    def ready(self) -> bool:
        """Whether all shards are there."""
        return self._ready.is_set()

    async def wait_ready(self) -> None:
        """Wait until all shards are there. Raises ShardLost."""
        await self._unless_lost(self._ready.wait())

    async def _unless_lost(self, what: Awaitable[T]) -> T:
        """Await `what`, or raise ShardLost when a shard is lost first."""
        result: T = await first_of(self.until_lost(), what)
        return result

    async def until_lost(self) -> None:
        """Wait until a shard is lost, and raise ShardLost then."""
        await asyncio.shield(self.lost)

    def saved(self, checkpoint_id: str) -> bool:
        """Whether every shard's newest snapshot has this checkpoint id. Raises StoreError where one has none."""
        if (no := self._unsaved) is not None and no.checkpoint_id == checkpoint_id:
            cause = OSError(ENOSPC, no.trouble) if no.full else None
            raise StoreError(f"{self.server}: a shard has no snapshot: {no.trouble}") from cause
        states = list(self.states.values())
        return len(states) == self.far.shards and all(state.checkpoint_id == checkpoint_id for state in states)

    @property
    def journal_bytes(self) -> int:
        return max((state.journal_bytes for state in list(self.states.values())), default=0)

    def status(self) -> list[dict[str, Any]]:
        """Describe each shard, as plain data. commands: how many it has on its disk; behind: how many it has not, of
        those given. What is not known is 0."""
        unknown, given = rpc.ShardState(0, 0, 0, 0, ""), self.far.commands
        found = []
        for shard in range(self.far.shards):
            state = self.states.get(shard, unknown)
            behind = max(0, given - state.commands) if shard in self.states else 0
            known = {key: value for key, value in asdict(state).items() if key != "checkpoint_id"}
            found.append({"shard": shard, "up": shard in self._here, "behind": behind, **known})
        return found

    def send_all(self, message: Any) -> None:
        """Send all shards a message behind all commands given so far; on the server's thread, or between its
        messages."""
        frame = wire.pack(message)
        for queue in self._queues:
            self._loop.call_soon_threadsafe(queue.put_nowait, frame)

    async def farewell(self, wait_s: float = FAREWELL_S) -> list[int]:
        """Tell the shards that the server has ended in good order, also one that dies meanwhile and calls again.
        Returns those that have not answered within `wait_s`: they will not find their coordinator any more."""
        self._ending = True  # from here on a stream's end is none of the server's incarnation
        await self.server_thread.read(lambda: self.send_all(rpc.Farewell()))
        everyone = set(range(self.far.shards))
        # One that has said it in a former incarnation calls only if that ended before the stream did.
        first_s = min(wait_s, CALLS_AGAIN_S)
        await self._until(lambda: self._left == everyone or None, first_s)
        await self._until(lambda: self._left | self._left_before == everyone or None, wait_s - first_s)
        return sorted(everyone - self._left - self._left_before)

    async def upload(self, checkpoint_id: str) -> None:
        """Have all shards copy their snapshots of this checkpoint id, and wait until all have answered, be it that
        one cannot: the next attempt is for all again. Raises StoreError."""

        async def until_answered() -> None:
            while len(self._uploads) < self.far.shards:
                await self._heard.wait()

        self._uploads.clear()
        try:
            await self.wait_ready()
            await self.server_thread.read(lambda: self.send_all(rpc.Upload(checkpoint_id)))
            await self._unless_lost(until_answered())
        except ShardLost as lost:
            raise StoreError(f"{checkpoint_id} is not copied: {lost}") from None
        troubles = [f"shard {v}: {each.trouble}" for v, each in sorted(self._uploads.items()) if each.trouble]
        if troubles:
            raise StoreError(f"{self.server}: {'; '.join(troubles)}")

    # -- what shards hold

    async def part(self, part: UpdatePart, wait_s: float) -> HeldPart | None:
        """Collect what shards say of a part of an update, once they hold all of it; None after `wait_s`."""
        return await self._until(lambda: self.holdings.part(part), wait_s)

    async def answer(self, wanted: Answer, wait_s: float) -> HeldAnswer | None:
        return await self._until(lambda: self.holdings.answer(wanted), wait_s)

    async def _until(self, look: Callable[[], T | None], wait_s: float) -> T | None:
        deadline_s = time.monotonic() + wait_s
        while (found := look()) is None and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                await within(left_s, self._heard.wait())
            except TimeoutError:
                return None
        return found

    # -- one stream

    async def serve(self, context: Any) -> None:
        """Speak with a shard until the stream ends. Raises Refused when it may not be here."""
        hello: rpc.ShardHello = wire.unpack(await rpc.next_frame(within(HELLO_S, context.read())), rpc.ShardHello)
        if (hello.server, hello.shards) != (self.server, self.far.shards) or not 0 <= hello.shard < hello.shards:
            raise Refused(
                f"shard {hello.shard} of {hello.shards} of {hello.server!r}; "
                f"this is the coordinator of {self.server!r}, which has {self.far.shards}"
                ": both need the same cluster file"
            )
        origin = Timeline(hello.timeline).origin
        if origin and origin != self.lineage.timeline.origin:
            raise Refused(
                f"shard {hello.shard} of {self.server!r}: its state is of another run than its coordinator's. "
                "Nothing was changed: give each process the folder of its own run; where the coordinator's disk was "
                "lost, docs/servers.md says what to do"
            )
        if hello.shard in self._here or (self.lost.done() and not self._ending):
            raise Refused(f"shard {hello.shard} of {self.server!r} is here already", RETRY_S)
        self._here.add(hello.shard)
        try:
            # Its bound: an update is handled only once every shard holds its part, so a slow one holds up all
            # commands.
            queue: asyncio.Queue[bytes] = asyncio.Queue()
            unfit = await self.server_thread.read(lambda: self._catch_up(queue, hello))
            if unfit is None:
                await self._converse(context, hello, queue)
            else:
                await self._send_back(context, hello, unfit)
        finally:
            self._here.discard(hello.shard)

    async def _converse(self, context: Any, hello: rpc.ShardHello, queue: asyncio.Queue[bytes]) -> None:
        try:
            self._timelines[hello.shard] = hello.timeline
            ways = [asyncio.ensure_future(way) for way in (self._write(context, queue), self._read(context, hello))]
            await self._begin()
            others = [] if self._ending else [self.until_lost()]
            with suppress(Exception):  # however the stream ends, the shard calls again
                await first_of(*ways, *others)
        finally:
            if not self._ending:
                self._lose(ShardLost(f"{self.server}: the stream to shard {hello.shard} has ended"))

    def _lose(self, lost: ShardLost) -> None:
        if not self.lost.done():
            self.lost.set_exception(lost)
            self.lost.exception()  # it may be that nobody waits for it any more

    async def _send_back(self, context: Any, hello: rpc.ShardHello, unfit: str) -> None:
        """Decide about a shard whose state does not fit its coordinator's: one of them has lost its disk, or was on
        another timeline."""
        newest = await self.lineage.newest()
        if self.lost.done() or self._ending:
            raise Refused(f"the server {self.server!r} ends this incarnation", RETRY_S)
        match who_goes_back(self.lineage.timeline, newest):
            case "shard":
                assert newest is not None
                await context.write(wire.bundle(deque([wire.pack(rpc.GoBack(newest, self.lineage.timeline.name))])))
            case "all":
                self._lose(TimelineLost(f"{self.server}: shard {hello.shard}: {unfit}: all go back to {newest}"))
            case "nobody":
                raise Refused(
                    f"shard {hello.shard} of {self.server!r}: {unfit}: the disk of one of them was lost, or brought "
                    "back from another time; docs/servers.md says what to do"
                )

    def _catch_up(self, queue: asyncio.Queue[bytes], hello: rpc.ShardHello) -> str | None:
        """Give the shard the commands that it lacks, and all that follow. Returns why its state does not fit the
        coordinator's, if so; then it is given nothing."""
        timeline = self.lineage.timeline
        untold = not hello.timeline and not timeline.begun and not timeline.checkpoint_id  # `_begin` tells it
        if timeline.name and hello.timeline != timeline.name and not untold:
            return (
                "its state is of another timeline of the server than its coordinator's"
                if hello.timeline
                else "it has no state"
            )
        try:
            missing = self.far.since(hello.commands)
        except ValueError as error:
            return str(error)
        for command in missing:
            self._loop.call_soon_threadsafe(queue.put_nowait, wire.pack(command))
        self._queues.append(queue)
        if self._ending:
            self._loop.call_soon_threadsafe(queue.put_nowait, wire.pack(rpc.Farewell()))
        return None

    async def _begin(self) -> None:
        """Begin the incarnation, when the last shard has come. All of them have the server's timeline on their disks
        before any gets a command: who comes without has lost its disk."""
        if len(self._queues) < self.far.shards or self._begun or self._ending:
            return
        self._begun = True
        if not self.lineage.timeline.name:
            self.lineage.note(new_timeline())  # before any shard has it: one that has another is of another run
        timeline = self.lineage.timeline
        if set(self._timelines.values()) != {timeline.name}:
            await self.server_thread.read(lambda: self.send_all(rpc.Belong(timeline.name)))
        if await self._until(lambda: set(self._timelines.values()) == {timeline.name} or None, BELONG_S) is None:
            self._lose(ShardLost(f"{self.server}: not all shards have noted which timeline they belong to"))
            return
        if not timeline.begun:
            self.lineage.note(replace(timeline, begun=True))
        await self.server_thread.read(lambda: self.far.begin_incarnation(self.incarnation))
        self._ready.set()

    async def _write(self, context: Any, queue: asyncio.Queue[bytes]) -> None:
        """Write what waits together: so a shard can put the commands of an update on its disk with one flush."""
        while True:
            waiting = deque([await queue.get()])
            while not queue.empty():
                waiting.append(queue.get_nowait())
            while waiting:
                await context.write(wire.bundle(waiting))

    async def _read(self, context: Any, hello: rpc.ShardHello) -> None:
        kinds = HeldPart, HeldAnswer, Froze, rpc.ShardState, rpc.Belong, rpc.Uploaded, rpc.Unsaved, rpc.Farewell
        while (frame := await context.read()) is not aio.EOF:
            said = wire.unpack(bytes(frame), *kinds)
            if isinstance(said, Froze):
                await self.server_thread.say(said)
            elif isinstance(said, rpc.Farewell):
                await self._note(hello.shard)  # before the stream ends, which lets it go
                self._left.add(hello.shard)
            elif isinstance(said, rpc.Belong):
                self._timelines[hello.shard] = said.timeline
            elif isinstance(said, rpc.Uploaded):
                self._uploads[hello.shard] = said
            elif isinstance(said, rpc.Unsaved):
                self._unsaved = said
            elif isinstance(said, rpc.ShardState):
                self.states[hello.shard] = said
                if len(self.states) == self.far.shards:
                    least = min(state.commands for state in self.states.values())
                    await self.server_thread.read(partial(self.far.drop, least))
            else:
                self.holdings.take(said)
            heard, self._heard = self._heard, asyncio.Event()
            heard.set()
            if hello.shard in self._left:
                return
