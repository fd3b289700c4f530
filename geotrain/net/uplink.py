"""A region server's side towards the global server: what it wants to send, delivered in order, in the background.

Two lanes, so that a lease never waits behind gigabytes: updates and the goodbye on one, leases on the other.
Answers are pulled beside them, a lane for each fragment. A lost link is retried for as long as the region
lives: its workers go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from geotrain.net import calls
from geotrain.net.certs import Trust
from geotrain.net.link import Link
from geotrain.net.machine import Machine
from geotrain.outer.messages import (
    Answer,
    Finished,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    Message,
    NotJoined,
    Over,
    Refused,
    Release,
    Send,
    UpdatePart,
    Validated,
)
from geotrain.outer.region_server import RegionServer

log = logging.getLogger(__name__)
T = TypeVar("T")

FOREVER_S = 30 * 24 * 3600.0  # how long a region waits for a global server that it has known


class Uplink:
    """connect_s: how long the first connection may take.

    on_lost: told how many acknowledged updates a restored global server does not know. on_acknowledged: told of each
    update that the global server has taken.
    metrics: numbers for people that go up with each heartbeat.
    """

    def __init__(
        self,
        machine: Machine,
        address: str,
        *,
        connect_s: float = 60.0,
        trust: Trust | None = None,
        on_lost: Callable[[int], None] = lambda updates: None,
        on_acknowledged: Callable[[int], None] = lambda sequence: None,
        metrics: Callable[[], dict[str, float]] = dict,
    ) -> None:
        assert isinstance(machine.server, RegionServer)
        self.machine, self.server = machine, machine.server
        self.connect_s, self.on_lost, self.on_acknowledged = connect_s, on_lost, on_acknowledged
        self.metrics = metrics
        self.link = Link(address, self.server.name, self.server.incarnation, trust)
        self.connected = False
        self._updates: deque[UpdatePart | Leave] = deque()
        self._leases: deque[Join | LeaseRequest | Release | Validated] = deque()  # Join: the data is known now
        self._work = asyncio.Event()
        self._limit_bytes = 8 * self.server.layout.numel + 65536

    def deliver(self, send: Send) -> None:
        """Something that the region server says to the global server. In the event loop."""
        message = send.message
        if isinstance(message, UpdatePart | Leave):
            self._updates.append(message)
        elif not isinstance(message, LeaseRequest) or self._is_new(message):
            self._leases.append(message)  # type: ignore[arg-type]
        self._work.set()

    async def run(self) -> None:
        """Until the global server took our Leave. Raises Refused (for good), Unreachable at the first connection.
        Leaves the link open: its bytes can be counted until `close`."""
        try:
            within_s = self.connect_s
            while not self.server.done:
                await self._session(within_s)  # ends when the global server was restarted, too
                self.connected, within_s = False, FOREVER_S
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def close(self) -> None:
        await self.link.close()

    async def _session(self, within_s: float) -> None:
        join = await self.machine.read(self.server.join_message)
        welcome = await self.link.persist(lambda: self.link.join(join), within_s)
        lost = await self._tell(welcome)
        if lost:
            log.error("the global server was restored from an older state: %d acknowledged updates are lost", lost)
            self.on_lost(lost)
        if not self.server.fragments:
            fragments = tuple(range(len(self.server.layout.fragments)))
            await self._tell(await self._pull(0, fragments))
        again = [send.message for send in await self.machine.read(self.server.resend)]
        self._updates = deque(again)  # type: ignore[arg-type]
        if self.server.gone:
            self._updates.append(Leave(self.server.name))
        self.connected = True
        try:
            async with asyncio.TaskGroup() as lanes:
                pushed: list[asyncio.Queue[UpdatePart]] = [asyncio.Queue() for _ in self.server.layout.fragments]
                for queue in pushed:
                    lanes.create_task(self._run_answers(queue))
                lanes.create_task(self._run_updates(pushed))
                lanes.create_task(self._run_leases())
                lanes.create_task(self._run_beats())
        except* (NotJoined, _Done):
            pass

    async def _run_updates(self, pushed: list[asyncio.Queue[UpdatePart]]) -> None:
        """Ends with the goodbye. pushed: for each fragment, where its updates are told of once they are delivered."""
        last = 0
        while True:
            message = await self._next(self._updates)
            if isinstance(message, Leave):
                await self._persist(_certain(self.link.leave, 0, self.server.sequence))
                await self._tell(message)
                raise _Done
            if message.sequence > last:  # what was sent again at the beginning may be said a second time
                last = message.sequence
                await self._persist(partial(self.link.push, message))
                self.on_acknowledged(message.sequence)
                pushed[message.deltas[0].fragment].put_nowait(message)
            self._updates.popleft()

    async def _run_leases(self) -> None:
        while True:
            message = await self._next(self._leases)
            if isinstance(message, Join):
                await self._persist(partial(self.link.join, message))
                self._leases.popleft()
                continue
            try:
                if isinstance(message, Release):
                    await self._persist(_certain(self.link.release, message))
                elif isinstance(message, Validated):
                    await self._persist(_certain(self.link.validated, message))
                else:
                    lease: Lease | Finished = await self._persist(partial(self.link.lease, message))
                    await self._tell(lease)
            except NotJoined:
                raise
            except Refused as refused:
                log.error("the global server refuses %s: %s", message, refused.reason)
            self._leases.popleft()

    def _is_new(self, request: LeaseRequest) -> bool:
        waiting = [(m.worker, m.job) for m in self._leases if isinstance(m, LeaseRequest)]
        return (request.worker, request.job) not in waiting

    async def _run_beats(self) -> None:
        while True:
            await asyncio.sleep(calls.REGION_BEAT_S)
            if await self._persist(partial(self.link.beat, 0, self.metrics())) and not self.server.over:
                await self._tell(Over())

    async def _run_answers(self, pushed: asyncio.Queue[UpdatePart]) -> None:
        while True:
            update = await pushed.get()
            fragments = tuple(delta.fragment for delta in update.deltas)
            await self._tell(await self._pull(update.sequence, fragments))

    async def _pull(self, sequence: int, fragments: tuple[int, ...]) -> Answer:
        return await self._persist(lambda: self.link.pull(0, sequence, fragments, self._limit_bytes))

    async def _tell(self, message: Message) -> Any:
        """Tell the region server; as often as it asks to (its disk may be full)."""
        while True:
            try:
                return await self.machine.say(message)
            except Refused as refused:
                if refused.retry_s is None:
                    raise
                await asyncio.sleep(refused.retry_s)

    async def _next(self, lane: deque[Any]) -> Any:
        """The head of the lane, left there until it was delivered."""
        while not lane:
            await self._work.wait()
            self._work.clear()
        return lane[0]

    async def _persist(self, attempt: Callable[[], Awaitable[T | None]]) -> T:
        return await self.link.persist(attempt, FOREVER_S)


def _certain(call: Callable[..., Awaitable[None]], *arguments: Any) -> Callable[[], Awaitable[bool]]:
    """An attempt that gives True when the call, which gives nothing, was done."""

    async def attempt() -> bool:
        await call(*arguments)
        return True

    return attempt


class _Done(Exception):
    """Ends the session's lanes."""
