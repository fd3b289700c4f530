"""A worker's rank speaking to the server above it. Plain and blocking; the sockets live on a thread inside."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from geotrain.net import calls, wire
from geotrain.net.certs import Trust
from geotrain.net.link import Link, Lost
from geotrain.outer.layout import numel
from geotrain.outer.messages import (
    Answer,
    Finished,
    Join,
    Lease,
    LeaseRequest,
    NotJoined,
    Refused,
    UpdatePart,
    Validated,
    Welcome,
)

T = TypeVar("T")

MAX_WAITING_PARTS = 64


class ServerForgot(RuntimeError):
    """The server's state is older than what it acknowledged. This worker has to be started again."""


@dataclass
class _Pushed:
    part: UpdatePart
    delivered: Future[None]
    acknowledged: bool = False  # by the server's present life


class MemberClient:
    """One rank's connection, for one life of its member.

    Updates are delivered in order, and kept until they are part of the server's weights, so that a server restarted
    meanwhile gets them again. After "join first" the client joins by itself, in the same life, and goes on.

    trust: None means plaintext. connect_s: how long `join` tries. deadline_s: how long the others try, each.
    """

    def __init__(
        self, address: str, *, connect_s: float = 60.0, deadline_s: float = 3600.0, trust: Trust | None = None
    ) -> None:
        self.address, self.connect_s, self.deadline_s, self.trust = address, connect_s, deadline_s, trust
        self.on_acknowledged: Callable[[int], None] = lambda sequence: (
            None
        )  # on the thread inside: an update is applied
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"outer-link-{address}", daemon=True)
        self._thread.start()
        self._link: Link | None = None
        self._join: Join | None = None
        self._limit_bytes = 0
        self._parts: deque[_Pushed] = deque()  # not known to be applied
        self._applied = 0
        self._sequence = 0  # of the last update given to push
        self._work = asyncio.Event()
        self._rejoining = asyncio.Lock()
        self._lives = 0  # joins so far
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def join(self, join: Join) -> Welcome:
        """Introduce this rank. Raises Refused, and Unreachable after `connect_s`."""
        return self._wait(self._first_join(join), self.connect_s + 5)

    def push(self, part: UpdatePart) -> Future[None]:
        """Deliver this rank's part of an update, after those pushed before. Done: the server has it.

        The future raises Refused (for good), Unreachable, ServerForgot.
        """
        if len(self._parts) >= MAX_WAITING_PARTS:
            raise RuntimeError(f"{len(self._parts)} updates wait to be sent already; pull their answers first")
        pushed = _Pushed(part, Future())
        self._loop.call_soon_threadsafe(self._enqueue, pushed)
        return pushed.delivered

    def pull(self, sequence: int, fragments: tuple[int, ...]) -> Future[Answer]:
        """The answer to update `sequence` (0: to the join), which spoke of these fragments."""
        return self._start(self._pull(sequence, fragments))

    def lease(self, request: LeaseRequest) -> Future[Lease | Finished]:
        """Waits for as long as the run is paused."""
        link = self._live()
        return self._start(
            link.persist(lambda: link.lease(request), self.deadline_s, rejoin=self._rejoin, patient=True)
        )

    def global_weights(self, number: int) -> Future[Answer]:
        """What this rank holds of the global weights that validation `number` speaks of; empty: they are not here."""
        link, join = self._live(), self._join
        assert join is not None
        limit_bytes, part = self._limit_bytes, join.part
        return self._start(
            link.persist(lambda: link.global_weights(part, number, limit_bytes), self.deadline_s, rejoin=self._rejoin)
        )

    def validated(self, result: Validated) -> None:
        """Tell the server, in the background. What cannot be delivered is lost: the next one comes."""
        link = self._live()

        async def tell() -> bool:
            await link.validated(result)
            return True

        self._start(link.persist(tell, self.deadline_s, rejoin=self._rejoin))

    def status(self) -> dict[str, Any]:
        """The server's status; works without joining. Raises Unreachable after `connect_s`."""

        async def ask() -> dict[str, Any]:
            link = Link(self.address, "a visitor", "", self.trust)
            try:
                return await link.persist(link.status, self.connect_s)
            finally:
                await link.close()

        return self._wait(ask(), self.connect_s + 5)

    @property
    def retries(self) -> int:
        """Attempts that failed on their way and were repeated."""
        return self._link.retries if self._link else 0

    def leave(self) -> None:
        """Say goodbye, once every update of this rank has been delivered; returns when all ranks of the member have
        said it. Raises as `push`."""
        self._wait(self._leave(), 2 * self.deadline_s + 5)

    def close(self) -> None:
        """Give up everything that is under way. Idempotent."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # -- between the threads

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run on the thread inside; remembered, so that `close` can cancel it."""

        async def tracked() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                return await work
            finally:
                self._tasks.discard(task)

        return asyncio.run_coroutine_threadsafe(tracked(), self._loop)

    def _wait(self, work: Coroutine[Any, Any, T], within_s: float) -> T:
        return self._start(work).result(within_s)

    async def _shut(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_parts(ConnectionError(f"the link to {self.address} was closed"))
        if self._link is not None:
            await self._link.close()

    # -- on the thread inside

    def _live(self) -> Link:
        if self._link is None:
            raise RuntimeError("join first")
        return self._link

    async def _first_join(self, join: Join) -> Welcome:
        if self._join is not None:
            raise RuntimeError(f"{join.member} has joined already; a new life needs a client of its own")
        link = Link(self.address, join.member, join.incarnation, self.trust)
        try:
            welcome = await link.persist(lambda: link.join(join), self.connect_s)
        except BaseException:
            await link.close()
            raise
        self._join, self._link = join, link
        self._limit_bytes = 8 * sum(numel(slices) for slices in join.holds) + 65536
        self._applied = self._sequence = welcome.sequence - 1
        self._lives += 1
        self._start(self._push_all())
        self._start(self._beat())
        return welcome

    async def _rejoin(self) -> None:
        """Join again, once for all calls that met a restarted server; then all that is not applied goes out again."""
        lives = self._lives
        async with self._rejoining:
            if lives != self._lives:
                return
            link, join = self._live(), self._join
            assert join is not None
            welcome = await link.join(join)
            if welcome.sequence <= self._applied:
                raise ServerForgot(
                    f"{self.address} expects update {welcome.sequence} of {join.member}, but had acknowledged "
                    f"{self._applied}: it was restored from an older state; start this worker again"
                )
            self._lives += 1
            self._note_applied(welcome.sequence - 1)
            for pushed in self._parts:
                pushed.acknowledged = False
            self._work.set()

    def _enqueue(self, pushed: _Pushed) -> None:
        self._sequence = pushed.part.sequence
        self._parts.append(pushed)
        self._work.set()

    async def _push_all(self) -> None:
        """Send what was not acknowledged, in order, for as long as this client lives."""
        while True:
            await self._work.wait()
            self._work.clear()
            while pushed := next((p for p in self._parts if not p.acknowledged), None):
                await self._push(pushed)

    async def _beat(self) -> None:
        """Say that this rank lives. What fails is tried again with the next beat, or noticed by a call that waits."""
        link, join = self._live(), self._join
        assert join is not None
        while True:
            await asyncio.sleep(calls.BEAT_S)
            try:
                await link.beat(join.part)
            except NotJoined:
                with suppress(Exception):
                    await self._rejoin()
            except (Lost, Refused, wire.WireError):
                pass

    async def _push(self, pushed: _Pushed) -> None:
        link = self._live()
        try:
            applied = await link.persist(lambda: link.push(pushed.part), self.deadline_s, rejoin=self._rejoin)
        except Exception as error:
            self._parts.remove(pushed)
            if not pushed.delivered.done():
                pushed.delivered.set_exception(error)
            return
        pushed.acknowledged = True
        if applied >= pushed.part.sequence:
            self.on_acknowledged(pushed.part.sequence)
        if not pushed.delivered.done():
            pushed.delivered.set_result(None)
        self._note_applied(applied)

    async def _pull(self, sequence: int, fragments: tuple[int, ...]) -> Answer:
        link, join = self._live(), self._join
        assert join is not None
        answer = await link.persist(
            lambda: link.pull(join.part, sequence, fragments, self._limit_bytes), self.deadline_s, rejoin=self._rejoin
        )
        self._note_applied(sequence)
        return answer

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(self.deadline_s):
                while any(not p.acknowledged for p in self._parts):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise self._live().unreachable(self.deadline_s, "updates wait to be sent") from None
        await self._live().persist(self._say_leave, self.deadline_s, rejoin=self._rejoin)

    async def _say_leave(self) -> bool:
        assert self._join is not None
        await self._live().leave(self._join.part, self._sequence)
        return True

    def _note_applied(self, sequence: int) -> None:
        self._applied = max(self._applied, sequence)
        while self._parts and self._parts[0].part.sequence <= self._applied:
            pushed = self._parts.popleft()
            if not pushed.delivered.done():
                pushed.delivered.set_result(None)

    def _fail_parts(self, error: Exception) -> None:
        for pushed in self._parts:
            if not pushed.delivered.done():
                pushed.delivered.set_exception(error)
        self._parts.clear()
