"""A server's state machine on a thread of its own: journal first, then the state, then the reply."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from geotrain.net.deadline import within
from geotrain.net.journal import Journal, JournalFull
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.messages import (
    Answer,
    Finished,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    Message,
    Offence,
    Over,
    Pardon,
    Refused,
    Release,
    Send,
    Silence,
    Steer,
    UpdatePart,
    Validated,
    Welcome,
)
from geotrain.outer.region_server import RegionServer

T = TypeVar("T")
AnyServer = GlobalServer | RegionServer

GROUP = 64  # messages that share one flush of the journal, at most
FULL_RETRY_S = 5.0


def take(server: AnyServer, message: Message) -> Any:
    """Give a message to the state machine and return its reply. Raises Refused.

    A region server's own Leave, coming back, means that the global server took it.
    """
    match message:
        case Join():
            return server.on_join(message)
        case UpdatePart():
            return server.on_part(message)
        case LeaseRequest():
            return server.on_lease_request(message)
        case Silence():
            return server.on_silence(message)
        case Validated():
            return server.on_validated(message)
        case Offence():
            return server.on_offence(message)
        case Pardon():
            return server.on_pardon(message)
    if isinstance(server, RegionServer):
        match message:
            case Welcome():
                return server.on_welcome(message)
            case Answer():
                return server.on_global_weights(message)
            case Lease() | Finished():
                return server.on_lease(message)
            case Leave() if message.member == server.name:
                return server.on_farewell()
            case Over():
                return server.on_over()
    if isinstance(server, GlobalServer):
        match message:
            case Release():
                return server.on_release(message)
            case Steer():
                return server.on_steer(message)
    if isinstance(message, Leave):
        return server.on_leave(message.member)
    raise Refused(f"a {type(message).__name__} means nothing to this server")


@dataclass
class _Work:
    """Either a message or a call. alone: shares no flush with what waits behind it."""

    message: Message | None
    call: Callable[[], Any]
    done: Future[Any]
    alone: bool = False


class Machine:
    """Serializes all calls on one thread, while the event loop stays free. A message is on disk before it is applied,
    and applied before it is answered; messages that wait together share a flush.

    deliver: called in the event loop with what a region server wants to send.
    watch: called on the machine's thread after each accepted message, with the message and the reply.
    `status` is what the server said of itself after the last message: reading it never waits for tensor work.
    `failure` is set when anything but Refused was raised: the state is then not to be trusted, and the server must
    end. Its journal holds what is needed to begin again.
    """

    def __init__(
        self,
        server: AnyServer,
        journal: Journal,
        deliver: Callable[[Send], None] = lambda send: None,
        watch: Callable[[Message, Any], None] = lambda message, reply: None,
    ) -> None:
        self.server, self.journal = server, journal
        self.deliver, self.watch = deliver, watch
        self.status: dict[str, Any] = server.status()
        self.flushes, self.flush_s = 0, 0.0  # of the journal, so far
        self.calls = 0  # messages so far
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self._changed = asyncio.Event()
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="state-machine", daemon=True)
        self._thread.start()

    async def say(self, message: Message) -> Any:
        """The state machine's reply. Raises Refused."""
        return await self._put(message, lambda: self._say(message))

    async def read(self, call: Callable[[], T]) -> T:
        """Run something that leaves the durable state as it is, between messages."""
        result: T = await self._put(None, call)
        return result

    async def alone(self, call: Callable[[], T]) -> T:
        """Like `read`, when the journal holds exactly what the state machine was told: for snapshots. Messages that
        share a flush are all written before the first of them is applied."""
        result: T = await self._put(None, call, alone=True)
        return result

    async def until(self, call: Callable[[], T | None], wait_s: float) -> T | None:
        """Like `read`, again after every message until there is a value; None after `wait_s`."""
        deadline = self._loop.time() + wait_s
        while True:
            changed = self._changed
            value = await self.read(call)
            left_s = deadline - self._loop.time()
            if value is not None or left_s <= 0:
                return value
            try:
                await within(left_s, changed.wait())
            except TimeoutError:
                return None

    @property
    def waiting(self) -> int:
        """Messages and calls that wait for the thread."""
        return self._queue.qsize()

    def close(self) -> None:
        """Ends after what was asked before."""
        self._queue.put(None)
        self._thread.join()

    # -- inside

    async def _put(self, message: Message | None, call: Callable[[], Any], alone: bool = False) -> Any:
        work = _Work(message, call, Future(), alone)
        self._queue.put(work)
        return await asyncio.wrap_future(work.done)

    def _run(self) -> None:
        held: _Work | None = None
        while (work := held or self._queue.get()) is not None:
            group, held, closing = [work], None, False
            while not (work.alone or held or closing or len(group) == GROUP or self._queue.empty()):
                more = self._queue.get()
                if more is None:
                    closing = True
                elif more.alone:
                    held = more
                else:
                    group.append(more)
            self._work_on([each for each in group if each.done.set_running_or_notify_cancel()])
            if closing:
                return

    def _work_on(self, group: list[_Work]) -> None:
        try:
            refused = self._record([work for work in group if work.message is not None])
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, error)
            for work in group:
                work.done.set_exception(error)
            return
        for work in group:
            try:
                if id(work) in refused:
                    raise refused[id(work)]
                work.done.set_result(work.call())
            except Exception as error:
                if not isinstance(error, Refused):
                    self._loop.call_soon_threadsafe(self._fail, error)
                work.done.set_exception(error)

    def _record(self, group: list[_Work]) -> dict[int, Refused]:
        """Make the messages durable. Returns those for which there is no room."""
        refused = {}
        for work in group:
            try:
                self.journal.append(work.message)
            except JournalFull as full:
                refused[id(work)] = Refused(f"the server's disk is full ({full.strerror})", FULL_RETRY_S)
        begin = time.perf_counter()
        self.journal.flush()
        if group:
            self.flushes, self.flush_s = self.flushes + 1, self.flush_s + time.perf_counter() - begin
            self.calls += len(group)
        return refused

    def _say(self, message: Message) -> Any:
        reply = take(self.server, message)
        self.watch(message, reply)
        sends = self.server.outgoing() if isinstance(self.server, RegionServer) else []
        self._loop.call_soon_threadsafe(self._after, sends, self.server.status())
        return reply

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def _after(self, sends: list[Send], status: dict[str, Any]) -> None:
        self.status = status
        for send in sends:
            self.deliver(send)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
