"""Delivers to the global server, in the background and in order, what a region server sends.

There are two lanes, so that a lease never waits behind gigabytes: updates and the goodbye go on one, leases on the
other. Answers are pulled beside them, on a lane for each fragment. When the link is lost, the client tries again for
as long as the region lives, since its workers train on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

from geotrain.net.server.server_thread import ServerThread
from geotrain.net.storage.remote_snapshots import beside
from geotrain.net.transport import rpc
from geotrain.net.transport.fragment_links import join_shard
from geotrain.net.transport.grpc_client import GOODBYE_S, AnswerPull, GrpcClient, Unreachable
from geotrain.net.transport.made_weights import MadeWeights
from geotrain.outer.messages import (
    Answer,
    AnswerWanted,
    Join,
    LeaseRequest,
    Leave,
    NotJoined,
    Recall,
    Refused,
    Release,
    RunComplete,
    Send,
    TakeBack,
    Trained,
    UpdatePart,
    UpdateRejected,
    Validated,
    Welcome,
)
from geotrain.outer.server.answer_times import AnswerTimes
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.travel import Travel

log = logging.getLogger(__name__)
T = TypeVar("T")

_LATER = object()  # there is no reply yet to a request, and its worker comes to another job before
CONNECT_S = 60.0  # how long the first connection may take
FOREVER_S = 30 * 24 * 3600.0  # how long a region waits for a global server that it has known


class RegionClient:
    """Runs beside a region server's thread and hands it what the global server says.

    server: the region server on that thread.
    on_lost: called with the number of acknowledged updates that a restored global server does not know.
    on_acknowledged: called with the fragment and sequence of each update that the global server has taken.
    on_joined: called when the global server has taken the region.
    metrics: gives the numbers that go up with each heartbeat, to be shown to people. times: of
    the updates of its workers; None: none of them waits.
    link: to the global server, or to the part of it that has this server's fragments. first: makes the weights that
    answer the join before the global server has applied an update, by fragment; empty: it cannot.
    """

    def __init__(
        self,
        server_thread: ServerThread,
        server: RegionServer,
        link: GrpcClient,
        *,
        on_lost: Callable[[int], None] = lambda updates: None,
        on_acknowledged: Callable[[int, int], None] = lambda fragment, sequence: None,
        on_joined: Callable[[], None] = lambda: None,
        metrics: Callable[[], dict[str, float]] = dict,
        first: Callable[[], dict[int, MadeWeights]] = dict,
        times: AnswerTimes | None = None,
    ) -> None:
        self.server_thread, self.server = server_thread, server
        self.on_lost, self.on_acknowledged, self.on_joined = on_lost, on_acknowledged, on_joined
        self.metrics, self.first, self.times = metrics, first, times
        self.travel = Travel(asyncio.get_running_loop().time)
        if times is not None:
            times.above = self.travel
        self.link = link
        self.connected = False
        self._updates: _Lane[UpdatePart | Trained | AnswerWanted | Leave] = _Lane()
        # "" → what is said to have been done, in order; worker → its requests, which may wait for long.
        self._said: dict[str, _Lane[Join | LeaseRequest | Release | TakeBack | Validated]] = {
            name: _Lane() for name in ("", *server.members)
        }
        self._limit_bytes = 8 * self.server.parameter_map.numel + 65536

    def deliver(self, send: Send) -> None:
        """Take something that the region server sends to the global server. Call it in the event loop."""
        message = send.message
        if isinstance(message, UpdatePart | Trained | AnswerWanted | Leave):
            self._updates.put(message)
        else:
            lane = self._said[message.worker if isinstance(message, LeaseRequest) else ""]
            known = [waiting.job for waiting in lane if isinstance(waiting, LeaseRequest)]
            if not isinstance(message, LeaseRequest) or message.job not in known:
                lane.put(message)  # type: ignore[arg-type]
            if isinstance(message, LeaseRequest):  # the worker comes to the first of them next
                waiting = sorted(lane, key=lambda request: request.job)  # type: ignore[union-attr]
                lane.clear()
                lane.extend(waiting)

    async def run(self) -> None:
        """Run until the global server has taken the region's Leave.

        Raises Refused if it is final, and Unreachable if the first connection fails. The link stays open until
        `close`, so that its bytes can be counted.
        """
        within_s = CONNECT_S
        await self.server_thread.until(
            lambda: self.server.as_shard.open or None, float("inf")
        )  # its ledger has spoken
        while not self.server.finished:
            try:
                await self._session(within_s)  # also ends when the global server was restarted
            except (Unreachable, ExceptionGroup) as error:
                first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                if not (self.server.gone and isinstance(first, Unreachable)):
                    raise first from None
                # Nothing of it is on its way. Should the global server live after all, it counts it as dead in time.
                log.warning(
                    "%s: its goodbye is not acknowledged; the global server is gone: %s", self.server.name, first
                )
                await self.server_thread.persist(Leave(self.server.name))
            self.connected, within_s = False, GOODBYE_S if self.server.gone else FOREVER_S

    async def close(self) -> None:
        await self.link.close()

    async def _session(self, within_s: float) -> None:
        """Serve one incarnation of the global server: join it, send again what it may not have, then run the
        lanes until one of them learns that the server does not know this region any more."""
        welcome = await self.link.persist(self._join, within_s)
        lost = await self.server_thread.persist(welcome)
        self.on_joined()
        if lost:
            log.error("the global server was restored from an older state: %d acknowledged updates are lost", lost)
            self.on_lost(lost)
        if missing := [number for number in self.server.numbers if number not in self.server.fragments]:
            # a new region: it begins with the global weights
            made = {} if any(welcome.versions) else await beside(self.first)
            try:
                for fragment in missing:
                    await self.server_thread.persist(await self._pull(fragment, 0, made.pop(fragment, None)))
            except NotJoined:  # the global server was restarted meanwhile
                return
        # Asked only now, because the welcome may have given new numbers to the updates that are in flight.
        # What is delivered meanwhile stays: made after the reading, it is not among what was read.
        self._updates.clear()
        again = [send.message for send in await self.server_thread.read(self.server.resend)]
        self._updates.extendleft(reversed(again))  # type: ignore[arg-type]
        if self.server.gone:
            self._updates.append(Leave(self.server.name))
        self.connected = True
        log.info("%s: joined the global server at %s", self.server.name, self.link.address)
        try:
            async with asyncio.TaskGroup() as lanes:
                pushed: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in self.server.parameter_map.fragments]
                for fragment, queue in enumerate(pushed):
                    lanes.create_task(self._run_answers(fragment, queue))
                lanes.create_task(self._run_updates(pushed))
                for lane in self._said.values() if self.server.ledger else ():
                    lanes.create_task(self._run_leases(lane))
                if self.server.ledger:
                    lanes.create_task(self._run_beats())
        except* (NotJoined, _SessionOver):
            pass

    async def _join(self) -> Welcome:
        """Make an attempt to join. A shard says it anew each time: its ledger may have another incarnation since."""
        join = await self.server_thread.read(self.server.join_message)
        if self.link.incarnation != join.incarnation:
            self.link.live_as(join.incarnation)
        return await (self.link.join(join) if self.server.ledger else join_shard(self.link, join))

    async def _run_updates(self, pushed: list[asyncio.Queue[int]]) -> None:
        """Deliver updates, and end with the goodbye. pushed: a queue for each fragment, which gets the sequence of
        each delivered update, and not its payloads, which would stay in memory until the fragment's next one."""
        last = [0] * len(pushed)
        while True:
            message = await self._updates.first()
            if isinstance(message, Leave):
                await self.link.persist(partial(self.link.leave, 0, tuple(self.server.uplink.sequences)), GOODBYE_S)
                await self.server_thread.persist(message)
                raise _SessionOver
            if isinstance(message, Trained):
                await self._persist(partial(self.link.trained, message))
                await self.server_thread.persist(message)
            elif isinstance(message, AnswerWanted):
                final = self.server.worker_data.final
                if final is not None and message.fragment not in final:  # else they have come since it was said
                    self.link.live_as(self.server.speaks_as)  # with nothing of what came at the join
                    await self.server_thread.persist(await self._pull(message.fragment, 0))
            # An update that was queued again when the session began may also have come through `deliver` meanwhile.
            elif message.sequence > last[message.fragment]:
                last[message.fragment] = message.sequence
                message = await self._with_need(message)
                try:
                    await self._persist(partial(self.link.push, message))
                except Refused as refused:
                    if isinstance(refused, NotJoined):
                        raise
                    await self._start_over(refused.reason, message)
                self.on_acknowledged(message.fragment, message.sequence)
                pushed[message.fragment].put_nowait(message.sequence)
            self._updates.popleft()
            del message  # and with it the payloads, before the next is waited for

    async def _start_over(self, reason: str, update: UpdatePart) -> NoReturn:
        """Begin again from the global weights, since an update was refused for good. The region does so as a new
        incarnation: the global server must not count on what it sent to the old one, nor workers go on with answers
        of the old one that came in part."""
        log.error("the global server refuses an update for good, so this region starts over: %s", reason)
        about = self.server.name, self.server.speaks_as, reason, update.fragment, update.sequence
        await self.server_thread.persist(UpdateRejected(*about))

        def new_incarnation() -> str:
            self.server.incarnation = uuid.uuid4().hex
            return self.server.speaks_as

        self.link.live_as(await self.server_thread.read(new_incarnation))
        raise _SessionOver

    async def _run_leases(self, lane: _Lane[Join | LeaseRequest | Release | TakeBack | Validated]) -> None:
        link, first = self.link, self._said[""]
        calls: dict[type, Callable[[Any], Awaitable[Any]]] = {
            Join: link.join, LeaseRequest: link.lease, Release: link.release, TakeBack: link.take_back,
            Validated: link.validated,
        }  # fmt: skip
        while True:
            message = await lane.first()
            # A lease that is on its way back would be given again; and a join may name the data.
            while lane is not first and first:
                await lane.changed()

            async def attempt(said: Any = message) -> Any:
                reply = await calls[type(said)](said)
                return _LATER if reply is None and lane[0] is not said else reply

            try:
                reply = await self._persist(attempt)
                if reply is _LATER:
                    continue
                if isinstance(message, LeaseRequest | TakeBack) and await self.server_thread.persist(reply):
                    continue
            except Refused as refused:
                if isinstance(refused, NotJoined) or isinstance(message, Join):
                    raise
                log.error("the global server refuses %s: %s", message, refused.reason)
            # Perhaps not the first any more: `deliver` sorts requests by job.
            lane.remove(message)
            for each in self._said.values() if lane is first else ():
                each.stirred.set()

    async def _run_beats(self) -> None:
        leases = self.server.worker_data.leases
        while True:
            await asyncio.sleep(rpc.REGION_BEAT_S)
            ack = await self._persist(partial(self.link.beat, 0, self.metrics()))
            if ack.over and not self.server.over:
                await self.server_thread.persist(RunComplete())
            if ack.silent and await self.server_thread.read(self.server.needs_to_join):  # its shards cannot say so
                raise _SessionOver
            if ack.recalled and await self.server_thread.read(lambda: any(map(leases.spare, leases.held))):
                await self.server_thread.persist(Recall())

    async def _run_answers(self, fragment: int, pushed: asyncio.Queue[int]) -> None:
        while True:
            answer = await self._pull(fragment, await pushed.get())
            await self.server_thread.persist(answer)
            self.travel.came(answer)  # merged, which takes time, too

    async def _with_need(self, update: UpdatePart) -> UpdatePart:
        """Return an update that leaves now, with the seconds until its answer is needed: by the first of the workers
        whose deltas are in it."""
        if self.times is None or not self.server.answers.waits:
            return update
        times, fragment = self.times, update.fragment
        left_s = await self.server_thread.read(lambda: times.left_s(self.server.going_up(fragment), fragment))
        return self.travel.leaves(update, left_s)

    async def _pull(self, fragment: int, sequence: int, made: MadeWeights | None = None) -> Answer:
        wanted = AnswerPull(0, fragment, sequence, self._limit_bytes, made)
        return await self._persist(partial(self.link.pull, wanted))

    async def _persist(self, attempt: Callable[[], Awaitable[T | None]]) -> T:
        return await self.link.persist(attempt, FOREVER_S)


class _Lane(deque[T]):
    """Holds messages to be sent in order, and wakes the one task that sends them: there is a lane for each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.stirred = asyncio.Event()

    def put(self, message: T) -> None:
        self.append(message)
        self.stirred.set()

    async def changed(self) -> None:
        await self.stirred.wait()
        self.stirred.clear()

    async def first(self) -> T:
        """Wait for the first message. It stays there until it was delivered, in case this session ends before."""
        while not self:
            await self.changed()
        return self[0]


class _SessionOver(Exception):
    """Raised to end the session's lanes: the goodbye was delivered, or the region joins anew, as it has forgotten its
    weights and fetches the global ones, or counts as dead."""
