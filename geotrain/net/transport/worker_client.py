"""Calls the server above for a rank of a worker. The methods are plain and blocking, or give futures; the sockets
live on a thread inside."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

from geotrain.common.names import OUTAGE_S
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.certs import Trust
from geotrain.net.transport.fragment_links import ShardsAbove, link_to
from geotrain.net.transport.grpc_client import GOODBYE_S, AnswerPull, ConnectionLost, GrpcClient, Unreachable
from geotrain.outer.messages import (
    Answer,
    Finished,
    Join,
    Lease,
    LeaseRequest,
    NotJoined,
    Refused,
    Release,
    UpdatePart,
    Validated,
    Welcome,
)
from geotrain.outer.travel import Travel
from geotrain.parameters.parameter_map import numel

log = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_S, CLOSE_S = 60.0, 10.0  # for the first connection; for the loop inside to end
LAST_WORDS_S = 10.0
MAX_WAITING_PARTS = 64  # so many updates may wait to be sent, or two of each fragment
NOT_YET = -1  # in place of the last update that a server has applied


@dataclass(eq=False)
class _Pushed:
    """Holds an update that was given to `push` and is not known to be part of the server's weights."""

    part: UpdatePart
    delivered: Future[None]
    needed_s: float = 0.0  # when its answer has to be here, by the loop's clock
    acknowledged: bool = False  # by the server's present incarnation, so that it need not be sent again

    def settle(self, error: Exception | None = None) -> None:
        """Note that it was delivered or, with an error, cannot be. Only the first call has an effect."""
        if not self.delivered.done():
            self.delivered.set_result(None) if error is None else self.delivered.set_exception(error)


class WorkerClient:
    """Connects one rank, for one incarnation of its member.

    Updates are delivered in order. They are kept until they are part of the server's weights, so that a server that
    is restarted meanwhile can get them again. If the server does not know the member, as after a restart, the client
    joins again by itself, in the same incarnation, and goes on.

    trust: None means plaintext. connect_s: how long `join` tries. deadline_s: how long each other call tries.
    shards: the server's, where they are processes of their own.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_s: float = CONNECT_S,
        deadline_s: float = OUTAGE_S,
        trust: Trust | None = None,
        shards: ShardsAbove | None = None,
    ) -> None:
        self.address, self.connect_s, self.deadline_s, self.trust = address, connect_s, deadline_s, trust
        self.shards = shards
        # Called, on the thread inside, with the fragment and sequence of each update that begins to be sent, and of
        # each that the server has applied.
        self.on_sent: Callable[[int, int], None] = lambda fragment, sequence: None
        self.on_acknowledged: Callable[[int, int], None] = lambda fragment, sequence: None
        self.on_profile: Callable[[int], None] = lambda steps: None  # called with inner steps that are to be recorded
        self.mirrors: Callable[[], tuple[int, ...]] = tuple  # fingerprints for a join in the same incarnation
        self._loop = asyncio.new_event_loop()
        self._travel = Travel(self._loop.time)
        self._thread = threading.Thread(target=self._run, name=f"outer-link-{address}", daemon=True)
        self._thread.start()
        self._link: GrpcClient | None = None
        self._join: Join | None = None
        self._part = self._limit_bytes = 0
        self._parts: deque[_Pushed] = deque()  # those not known to be applied
        self._applied: list[int] = []  # by fragment, of the last update that the server has applied
        self._sequences: list[int] = []  # by fragment, of the last update given to `push`
        self._work = asyncio.Event()
        self._rejoining = asyncio.Lock()
        self._joins = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def join(self, join: Join) -> Welcome:
        """Introduce this rank. Raises Refused, and Unreachable after `connect_s`."""
        return self._start(self._first_join(join)).result(self.connect_s + 5)

    def push(self, part: UpdatePart) -> Future[None]:
        """Deliver this rank's part of an update, after those pushed before. The future is done when the server has
        it.

        The future raises Refused if that is final, and Unreachable.
        """
        if len(self._parts) >= max(MAX_WAITING_PARTS, 2 * len(self._sequences)):
            raise RuntimeError(f"{len(self._parts)} updates wait to be sent already; pull their answers first")
        pushed = _Pushed(part, Future())
        self._loop.call_soon_threadsafe(self._enqueue, pushed)
        return pushed.delivered

    def pull(self, fragment: int, sequence: int) -> Future[Answer]:
        """Pull the answer to update `sequence` of the fragment (0: to the join)."""
        return self._start(self._pull(fragment, sequence))

    def lease(self, request: LeaseRequest) -> Future[Lease | Finished]:
        """Ask for a lease. The future waits for as long as the run is paused."""
        return self._start(self._persist(lambda link: link.lease(request), patient=True))

    def global_weights(self, number: int) -> Future[Answer]:
        """Pull this rank's part of the global weights that validation `number` is to evaluate; empty: the server has
        none."""
        limit_bytes, part = self._limit_bytes, self._part
        return self._start(self._persist(lambda link: link.global_weights(part, number, limit_bytes)))

    def validated(self, result: Validated) -> None:
        """Send the server a validation's result, in the background. If it cannot be delivered it is lost, which does
        no harm: there will be others."""
        self._start(self._persist(lambda link: link.validated(result)))

    def report_nonfinite_delta(self, lease: int) -> None:
        """Report that this lease's training gave a delta that is not finite; returns when the server knows, or soon:
        this worker is about to end."""
        with suppress(Exception):
            released = self._start(self._persist(lambda link: link.release(Release((lease,), failed=True))))
            released.result(LAST_WORDS_S)

    @property
    def retries(self) -> int:
        """Number of attempts that failed on their way and were repeated."""
        return self._link.retries if self._link else 0

    def leave(self) -> None:
        """Say goodbye once every update of this rank has been delivered. Returns when all ranks of the member have
        said it. Raises what the futures of `push` raise."""
        self._start(self._leave()).result(2 * self.deadline_s + 5)

    def close(self) -> None:
        """Give up everything that is under way. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    # -- between the threads

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the thread inside. It is remembered, so that `close` can cancel it."""

        async def tracked() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                return await work
            finally:
                self._tasks.discard(task)

        return asyncio.run_coroutine_threadsafe(tracked(), self._loop)

    async def _shut(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pushed in self._parts:
            pushed.settle(ConnectionError(f"the link to {self.address} was closed"))
        self._parts.clear()
        if self._link is not None:
            await self._link.close()

    # -- on the thread inside

    def _persist(
        self, attempt: Callable[[GrpcClient], Awaitable[T | None]], patient: bool = False, within_s: float = inf
    ) -> Coroutine[Any, Any, T]:
        """Repeat a call until it gives a value, and join again where the server asks for it."""
        if (link := self._link) is None:
            raise RuntimeError("join first")
        return link.persist(
            lambda: attempt(link), min(self.deadline_s, within_s), rejoin=self._rejoin, patient=patient
        )

    async def _first_join(self, join: Join) -> Welcome:
        if self._join is not None:
            raise RuntimeError(f"{join.member} has joined already; a new incarnation needs a client of its own")
        link = link_to(self.address, join.member, join.incarnation, self.trust, self.shards)
        try:
            welcome = await link.persist(lambda: link.join(join), self.connect_s)
        except BaseException:
            await link.close()
            raise
        self._join, self._link, self._part = join, link, join.part
        self._limit_bytes = 8 * sum(numel(slices) for slices in join.holds) + 65536
        self._applied = [sequence - 1 for sequence in welcome.sequences]
        self._sequences = list(self._applied)
        self._joins += 1
        self._start(self._push_all())
        self._start(self._beat())
        return welcome

    async def _rejoin(self) -> None:
        """Join again, and let every update that is not applied be sent again.

        A server's restart fails all calls that are under way at once; only the first of them joins.
        """
        joins = self._joins
        async with self._rejoining:
            if joins != self._joins:
                return
            link, join = self._link, self._join
            assert link is not None and join is not None
            welcome = await link.join(replace(join, mirrors=self.mirrors(), applied=tuple(self._applied)))
            for fragment, wanted in enumerate(welcome.sequences):
                self._note_applied(fragment, wanted - 1)
            self._joins += 1
            for pushed in self._parts:
                pushed.acknowledged = False
            self._work.set()

    def _enqueue(self, pushed: _Pushed) -> None:
        self._sequences[pushed.part.fragment] = pushed.part.sequence
        pushed.needed_s = self._loop.time() + pushed.part.need_s
        self._parts.append(pushed)
        self._work.set()

    async def _push_all(self) -> None:
        """Send updates that were not acknowledged, in order, for as long as this client lives."""
        while True:
            await self._work.wait()
            self._work.clear()
            while pushed := self._next():
                await self._push(pushed)

    def _next(self) -> _Pushed | None:
        """Find the first update that the server's present incarnation has not acknowledged."""
        return next((p for p in self._parts if not p.acknowledged), None)

    async def _beat(self) -> None:
        """Send heartbeats. One that fails needs no care: the next comes soon, and calls that wait notice lost
        links."""
        assert self._link is not None
        while True:
            await asyncio.sleep(rpc.BEAT_S)
            try:
                if steps := (await self._link.beat(self._part)).profile:
                    self.on_profile(steps)
            except NotJoined:
                with suppress(Exception):
                    await self._rejoin()
            except (ConnectionLost, Refused, wire.WireError):
                pass

    async def _push(self, pushed: _Pushed) -> None:
        part = self._travel.leaves(pushed.part, pushed.needed_s - self._loop.time())

        async def attempt(link: GrpcClient) -> int | None:
            # Joining again may have brought up an earlier one, whose other parts had not come: it is wanted first.
            if self._next() not in (None, pushed):
                return NOT_YET
            joins = self._joins
            applied = await link.push(part)
            # If this client has joined again meanwhile, an earlier incarnation of the server has acknowledged. Unless
            # all parts had come, that incarnation has taken the part with it.
            return applied if joins == self._joins else None

        update = pushed.part.fragment, pushed.part.sequence
        self.on_sent(*update)
        try:
            applied = await self._persist(attempt)
        except Exception as error:
            self._parts.remove(pushed)
            pushed.settle(error)
            return
        if applied == NOT_YET:
            return
        pushed.acknowledged = True
        if applied >= pushed.part.sequence:
            self.on_acknowledged(*update)
        pushed.settle()
        self._note_applied(pushed.part.fragment, applied)

    async def _pull(self, fragment: int, sequence: int) -> Answer:
        wanted = AnswerPull(self._part, fragment, sequence, self._limit_bytes)
        answer = await self._persist(lambda link: link.pull(wanted))
        self._travel.came(answer)
        self._note_applied(fragment, sequence)
        return answer

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(self.deadline_s):
                while any(not p.acknowledged for p in self._parts):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            assert self._link is not None
            raise self._link.unreachable(self.deadline_s, "updates wait to be sent") from None

        async def say(link: GrpcClient) -> rpc.Ack | None:
            try:
                return await link.leave(self._part, tuple(self._sequences))
            except Refused as refused:  # for a time, while other ranks' updates are on their way: the server lives
                if isinstance(refused, NotJoined) or refused.retry_s is None:
                    raise
                await asyncio.sleep(refused.retry_s)
                return None

        try:
            await self._persist(say, patient=True, within_s=GOODBYE_S)
        except Unreachable as error:  # all that it has sent is durable there, and perhaps its goodbye came
            log.warning("nobody has answered the goodbye: %s", error)

    def _note_applied(self, fragment: int, sequence: int) -> None:
        self._applied[fragment] = applied = max(self._applied[fragment], sequence)
        for pushed in [p for p in self._parts if p.part.fragment == fragment and p.part.sequence <= applied]:
            self._parts.remove(pushed)
            pushed.settle()
