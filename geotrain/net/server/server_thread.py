"""Runs a state machine on a thread of its own. A message goes to the journal first, then to the machine's `handle`,
and only then do its reply, its sends and its events leave. So nothing is said to anyone before it is durable. What
the message makes due for others is done when the reply has left."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from geotrain.common.files import out_of_room
from geotrain.monitor.events import Trouble
from geotrain.net.storage.journal import Journal, JournalFull
from geotrain.net.transport.deadlines import within
from geotrain.outer.events import Event
from geotrain.outer.messages import Refused, Send, UpdatePart
from geotrain.outer.server.server import Handled, Server

log = logging.getLogger(__name__)
T = TypeVar("T")
GROUP = 64  # at most so many messages share one flush of the journal
FULL_RETRY_S = 5.0
STATUS_SHARE, STATUS_WAIT_S = 0.02, 0.02  # see `ServerThread`; how long a reader of the status waits for rest


@dataclass
class _Work:
    """Holds messages to be handled, or a call between messages.

    messages: what the journal gets, all or nothing; none for a call. call: what is then run. alone: it shares no
    flush with others.
    """

    messages: tuple[Any, ...]
    call: Callable[[], Any]
    done: Future[Any]
    alone: bool = False


@dataclass(frozen=True)
class _Watch:
    """Holds a call that is repeated after each message, until it gives a value."""

    call: Callable[[], Any]
    done: Future[Any]


class ServerThread:
    """Makes all calls to one server on one thread, because a state machine has no locks, and because its tensor work
    would block the event loop. Messages that wait together share a flush of the journal, the slow part of durability.

    deliver: called in the event loop with each thing that the server wants to send.
    write_event: called on the server's thread with each event, after each accepted message.

    `status` is the server's status after the last message; reading it waits for tensor work for STATUS_WAIT_S at
    most. It grows with the members, and the time of an update must not: while the thread is at work it may be that
    after an earlier message, so that making it takes STATUS_SHARE of the time at most. `full` says why
    messages are refused for want of room on the disk; None while there is room. `failure` gets the exception if
    handling a message raised anything but Refused. The state is not to be trusted then, and the process must end;
    the journal holds what is needed to begin again.
    """

    def __init__(
        self,
        server: Server,
        journal: Journal,
        deliver: Callable[[Send], None] = lambda send: None,
        write_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.server, self.journal = server, journal
        self.deliver, self.write_event = deliver, write_event
        self._status: dict[str, Any] = server.status()
        self._status_due_s = 0.0  # when it may be made again at work; time.perf_counter()
        self._changed = False  # whether the server may have changed since
        self._working = threading.Lock()  # held while the server may change
        self.flushes, self.flush_s = 0, 0.0  # of the journal: how many so far, and their time
        self.calls = 0  # how many messages so far
        self.looks = 0  # how often something may have changed for those who wait
        self.looks_again = False  # whether they are to be seen to also after what a message has made due
        self.full: str | None = None
        self._full_s = 0.0  # when a message was last refused for want of room; time.monotonic()
        self._loop = asyncio.get_running_loop()
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self._watches: list[_Watch] = []  # the thread's own
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._thread = threading.Thread(target=self._run, name="state-machine", daemon=True)
        self._thread.start()

    async def say(self, message: Any) -> Any:
        """Make the message durable and handle it; returns the state machine's reply. Raises Refused."""
        [reply] = await self.say_all(message)
        return reply

    async def persist(self, message: Any) -> Any:
        """Say the message again and again while it is refused for a time, as while the disk is full. Raises Refused:
        for good."""
        while True:
            try:
                return await self.say(message)
            except Refused as refused:
                if refused.retry_s is None:
                    raise
                await asyncio.sleep(refused.retry_s)

    async def say_all(self, *messages: Any) -> list[Any]:
        """Make messages durable with one flush, all or none, and handle them one after another; returns the replies.
        None may be left out, so what handling one raises ends the process. Raises Refused: none was taken."""
        replies: list[Any] = await self._put(messages, lambda: self._say(messages))
        return replies

    async def read(self, call: Callable[[], T]) -> T:
        """Run, between two messages, something that does not change the durable state."""
        result: T = await self._put((), call)
        return result

    async def alone(self, call: Callable[[], T]) -> T:
        """Run something between two messages when every message in the journal was handled, as snapshots need it.

        Messages that share a flush are all written before the first of them is applied. Between two of them the
        journal is ahead of the state.
        """
        result: T = await self._put((), call, alone=True)
        return result

    async def until(self, call: Callable[[], T | None], wait_s: float) -> T | None:
        """Run `call` between two messages, and again after every message and every delivery, until it gives a value;
        None after `wait_s`."""
        deadline, watch = self._loop.time() + wait_s, _Watch(call, Future())

        def look() -> T | None:
            if (value := call()) is None:
                self._watches.append(watch)
            return value

        try:
            value = await self.read(look)
            left_s = deadline - self._loop.time()
            if value is None and left_s > 0:
                value = await within(left_s, asyncio.wrap_future(watch.done))
            return value
        except TimeoutError:
            return None
        finally:
            watch.done.cancel()

    @property
    def status(self) -> dict[str, Any]:
        if self._changed and self._working.acquire(timeout=STATUS_WAIT_S):
            try:
                self._make_status()
            finally:
                self._working.release()
        return self._status

    @property
    def waiting(self) -> int:
        """Number of messages and calls that wait for the thread."""
        return self._queue.qsize()

    def look_again(self) -> None:
        """See to those who wait (`until`), as what they wait for has changed outside of the server."""
        self._queue.put(_Work((), self._look, Future()))

    def close(self) -> None:
        """End the thread after everything that was asked of it before."""
        self._queue.put(None)
        self._thread.join()
        self._flusher.shutdown()

    # -- inside

    async def _put(self, messages: tuple[Any, ...], call: Callable[[], Any], alone: bool = False) -> Any:
        work = _Work(messages, call, Future(), alone)
        self._queue.put(work)
        return await asyncio.wrap_future(work.done)

    def _run(self) -> None:
        held: _Work | None = None  # taken from the queue, but must be alone: it is the next group
        while (work := held or self._queue.get()) is not None:
            # What came while the last group was at work. Nothing waits for a fuller one.
            group, held, closing = [work], None, False
            while not (work.alone or held or closing or len(group) == GROUP or self._queue.empty()):
                more = self._queue.get()
                if more is None:
                    closing = True
                elif more.alone:
                    held = more
                else:
                    group.append(more)
            # Work whose caller was cancelled while it waited is left out.
            with self._working:
                self._work_on([each for each in group if each.done.set_running_or_notify_cancel()])
            if closing:
                return

    def _work_on(self, group: list[_Work]) -> None:
        try:
            refused = self._record([work for work in group if work.messages])
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, error)
            for work in group:
                work.done.set_exception(error)
            return
        for work in group:
            if id(work) in refused:
                work.done.set_exception(refused[id(work)])
                continue
            try:
                work.done.set_result(work.call())
            except Exception as error:
                # What is refused has not changed the state, nor has a call between messages that found no room, as
                # for a snapshot. Of several messages those after it would be left out.
                harmless = isinstance(error, Refused) or (not work.messages and out_of_room(error))
                if not harmless or len(work.messages) > 1:
                    self._loop.call_soon_threadsafe(self._fail, error)
                work.done.set_exception(error)
            else:
                if work.messages:
                    self._follow()

    def _follow(self) -> None:
        """See to those who wait for what a message has changed, then do what it has made due."""
        # First those who wait: a worker's answer leaves before the region's own update is made.
        self._look()
        self._changed = True
        try:
            self._go_on()
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, error)
        if self.looks_again:
            self._look()

    def _make_status(self) -> None:
        began_s, self._changed = time.perf_counter(), False
        self._status = self.server.status()
        now_s = time.perf_counter()
        self._status_due_s = now_s + (now_s - began_s) / STATUS_SHARE

    def _look(self) -> None:
        """Give those who wait what they wait for, if it is there now."""
        self.looks, still = self.looks + 1, []
        for watch in self._watches:
            if watch.done.cancelled():
                continue
            try:
                value, error = watch.call(), None
            except Exception as raised:
                value, error = None, raised
            if value is None and error is None:
                still.append(watch)
            elif watch.done.set_running_or_notify_cancel():
                watch.done.set_result(value) if error is None else watch.done.set_exception(error)
        self._watches = still

    def _record(self, group: list[_Work]) -> dict[int, Refused]:
        """Make the messages durable. Returns a refusal, by id of the work, for each that cannot be written down."""
        refused, parts = {}, list[UpdatePart]()
        for work in group:
            try:
                self.journal.append(*work.messages)
            except JournalFull as full:
                self._note_room(full)
                refused[id(work)] = Refused(f"the server's disk is full ({full.strerror})", FULL_RETRY_S)
            except (ValueError, TypeError, OverflowError) as error:  # WireError is one: of a header too long
                refused[id(work)] = Refused(f"this message cannot be written to the journal: {error}")
            else:
                self._note_room(None)
                parts += [message for message in work.messages if isinstance(message, UpdatePart)]
        if parts:
            # Their payloads are decoded while the disk writes. That changes no state, and nothing leaves.
            flushed = self._flusher.submit(self._flush)
            try:
                for part in parts:
                    self.server.store.decode_ahead(part)
            finally:
                flushed.result()
        elif group:
            self._flush()
        self.calls += sum(len(work.messages) for work in group)
        return refused

    def _flush(self) -> None:
        begin = time.perf_counter()
        self.journal.flush()
        self.flushes, self.flush_s = self.flushes + 1, self.flush_s + time.perf_counter() - begin

    @property
    def refuses(self) -> bool:
        """Whether there is no room on the disk. It is not known while nothing is written; but whoever was refused
        comes again within FULL_RETRY_S."""
        return self.full is not None and time.monotonic() - self._full_s < 4 * FULL_RETRY_S

    def _note_room(self, full: JournalFull | None) -> None:
        """Report the beginning and the end of a time in which messages did not fit on the disk.

        Small messages may still fit while others do not. So the time has ended when none was refused for a while.
        """
        now_s, before = time.monotonic(), self.full
        if full is not None:
            self._full_s = now_s
            self.full = f"{full.strerror}; messages are refused until there is room"
        elif before is not None and now_s - self._full_s > 2 * FULL_RETRY_S:
            self.full = None
        if (before is None) != (self.full is None):
            said = self.full or "there is room on the disk again; messages are taken"
            log.error("%s", said)
            self.write_event(Trouble(said))

    def _say(self, messages: tuple[Any, ...]) -> list[Any]:
        replies = list[Any]()
        self._changed = True
        for message in messages:
            # What one message makes due is done before the next, as a replay does it (`Server.take`).
            if replies:
                self._go_on()
            replies.append(self._hand_out(self.server.take(message)))
        if time.perf_counter() >= self._status_due_s:
            self._make_status()
        return replies

    def _go_on(self) -> None:
        self._hand_out(self.server.go_on())

    def _hand_out(self, handled: Handled) -> Any:
        for event in handled.events:
            self.write_event(event)
        if handled.sends:
            self._loop.call_soon_threadsafe(self._deliver_all, handled.sends)
        return handled.reply

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def _deliver_all(self, sends: tuple[Send, ...]) -> None:
        for send in sends:
            self.deliver(send)
        self.look_again()  # what was delivered may be waited for
