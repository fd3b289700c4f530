"""Calls the server above on behalf of a member, in spite of lost connections and restarts."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc import aio

from geotrain.common.backoff import RetryBackoff
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.certs import Trust, expiry, open_channel
from geotrain.net.transport.deadlines import FrameDeadline, within
from geotrain.net.transport.made_weights import MadeWeights
from geotrain.outer.messages import (
    Answer,
    Finished,
    Join,
    Lease,
    LeaseRequest,
    NotJoined,
    Refused,
    Release,
    TakeBack,
    TakenBack,
    Trained,
    UpdatePart,
    Validated,
    Welcome,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

# A call without a connection costs nothing but the call, and whoever waits for longer trains nothing meanwhile.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 1.0
REPLY_S = 30.0  # for a small call, in addition to the time for which the server may hold it
GOODBYE_S = 120.0  # how long a member tries to say goodbye: its server may have taken that, and ended
REPORT_S = 30.0  # trouble that lasts so long is reported, and again whenever that time has doubled
ANSWER_S = 600.0  # from an update's last frame to its acknowledgement; keepalive notices a dead server much earlier
MAX_HALF_ANSWERS = 4  # so many answers that broke off are kept, to go on with
CHANNEL_OPTIONS = (
    *rpc.OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # channels of one process to one address do not share a connection
)
# Status codes of calls that would fail in the same way again.
HOPELESS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)

# What is raised when an attempt fails on its way. gRPC raises InvalidStateError when a call ends during a write.
LOST = (aio.AioRpcError, TimeoutError, asyncio.InvalidStateError, wire.DamagedError)


class Unreachable(ConnectionError):
    """Raised when the server did not answer in time. Says where it should be and what to check."""


class ConnectionLost(ConnectionError):
    """Raised when one attempt of a call failed on its way; another may succeed."""


@dataclass(frozen=True)
class AnswerPull:
    """The answer that a rank pulls.

    sequence: of its update of the fragment; 0: of the join. limit_bytes: of the answer, at most. made: as the member
    has made it by itself: if the server has the same, it is not sent. wait_s: how long the server may wait until
    there is one.
    """

    part: int
    fragment: int
    sequence: int
    limit_bytes: int
    made: MadeWeights | None = None
    wait_s: float = rpc.MAX_WAIT_S


class GrpcClient:
    """Calls one server on behalf of one incarnation of one member. Belongs to one event loop. trust: None means
    plaintext.

    Each call makes a single attempt, and raises ConnectionLost, Refused or wire.WireError. `persist` repeats it; a
    transfer that was broken off then goes on from its last data frame.
    """

    def __init__(self, address: str, member: str, incarnation: str, trust: Trust | None = None) -> None:
        self.address, self.member, self.incarnation = address, member, incarnation
        self.retries = 0  # how many attempts failed on their way and were repeated
        self._up, self._down = FrameDeadline(), FrameDeadline()
        # Of updates whose stream broke: part → checksum of the update's header.
        self._broken: dict[int, int] = {}
        # Of answers whose stream broke: (part, fragment, sequence) → what arrived of it.
        self._arriving: dict[tuple[int, int, int], wire.FrameReader] = {}
        self._trust, self._channel = trust, open_channel(aio, address, trust, CHANNEL_OPTIONS)

    def live_as(self, incarnation: str) -> None:
        """Call as a new incarnation of the member from here on."""
        self.incarnation = incarnation

    async def close(self) -> None:
        await self._channel.close()

    # -- single attempts

    async def join(self, join: Join) -> Welcome:
        return await self._unary("join", join, Welcome)

    async def push(self, part: UpdatePart) -> int:
        """Send a rank's part of an update; returns the last update of the member's fragment that the server has
        applied."""
        call = self._channel.stream_stream(f"/{rpc.SERVICE}/push")()
        header = wire.crc_of(next(wire.frames(part)))
        again = self._broken.get(part.part) == header
        self._broken[part.part] = header  # taken away below when the update has arrived
        replied = asyncio.Event()
        tasks: list[asyncio.Task[Any]] = []
        try:
            first = await self._resume(call, part, header) if again else 0
            tasks = [
                asyncio.create_task(self._write(call, wire.frames(part, first), replied)),
                asyncio.create_task(call.read()),
            ]
            # The server may reply before it has the whole update, as when it has the update already or refuses it.
            writing, reading = tasks
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                writing.result()  # raises if writing failed
            frame = await rpc.next_frame(within(ANSWER_S, reading))
            reply: rpc.Ack | rpc.Refusal = wire.unpack(frame, rpc.Ack, rpc.Refusal)
            replied.set()
            await asyncio.wait({writing})
        except LOST as error:
            raise self._reason(error) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()
        if isinstance(reply, rpc.Refusal):
            raise reply.error()
        del self._broken[part.part]
        return reply.applied

    async def _resume(self, call: Any, part: UpdatePart, header: int) -> int:
        """Ask how many data frames of this update the server has already."""
        resume = rpc.Resume(self.member, self.incarnation, part.part, header)
        await self._up.frame(call.write(wire.pack(resume)))
        frame = await rpc.next_frame(within(REPLY_S, call.read()))
        reply: rpc.Have | rpc.Refusal = wire.unpack(frame, rpc.Have, rpc.Refusal)
        if isinstance(reply, rpc.Refusal):
            raise reply.error()
        return reply.data_frames

    async def _write(self, call: Any, frames: Iterator[bytes], replied: asyncio.Event) -> None:
        """Send the frames, but stop when the other side has replied."""
        for frame in frames:
            if replied.is_set():
                break
            await self._up.frame(call.write(frame))
        await call.done_writing()

    async def pull(self, wanted: AnswerPull) -> Answer | None:
        """Pull an answer; None: there is none yet."""
        key, made = (wanted.part, wanted.fragment, wanted.sequence), wanted.made
        reader = self._arriving.pop(key, None)
        known = (wire.crc_of(reader.opening), reader.data_frames) if reader else (0, 0)
        digest = made.digest if made and not reader else ""
        request = rpc.Pull(self.member, self.incarnation, *key, wanted.wait_s, *known, digest)
        call = self._channel.unary_stream(f"/{rpc.SERVICE}/pull")(wire.pack(request))
        try:
            frame = await rpc.next_frame(within(wanted.wait_s + REPLY_S, call.read()))
            # The header comes first in any case. If it is that of the answer that broke off, the answer goes on where
            # it did; if not, as after a server was restored, another answer begins.
            if reader is None or frame != reader.opening:
                reader = wire.FrameReader(Answer, rpc.NotYet, rpc.Same, limit_bytes=wanted.limit_bytes)
                reader.feed(frame)
            while not reader.complete:
                reader.feed(await rpc.next_frame(self._down.frame(call.read())))
            match reader.message:
                case rpc.NotYet():
                    return None
                case rpc.Same(incarnation) if made is not None:
                    size = sum(len(each.payload) for each in made.weights)
                    log.info("%s: first weights: made here, %d bytes not sent", self.member, size)
                    return Answer(wanted.fragment, wanted.sequence, made.weights, incarnation)
            return reader.message
        except LOST as error:
            if reader is not None:
                self._arriving[key] = reader
                if len(self._arriving) > MAX_HALF_ANSWERS:
                    del self._arriving[next(iter(self._arriving))]  # the oldest
            raise self._reason(error) from None
        finally:
            call.cancel()

    async def global_weights(self, part: int, number: int, limit_bytes: int) -> Answer:
        """Pull the global weights that validation `number` is to evaluate; empty: the server has none."""
        request = rpc.PullGlobal(self.member, self.incarnation, part, number)
        call = self._channel.unary_stream(f"/{rpc.SERVICE}/weights")(wire.pack(request))
        reader = wire.FrameReader(Answer, limit_bytes=limit_bytes)
        try:
            while not reader.complete:
                reader.feed(await rpc.next_frame(self._down.frame(call.read())))
            return reader.message
        except LOST as error:
            raise self._reason(error) from None
        finally:
            call.cancel()

    async def lease(self, request: LeaseRequest, wait_s: float = rpc.MAX_WAIT_S) -> Lease | Finished | None:
        ask = rpc.AskLease(self.member, self.incarnation, request, wait_s)
        reply = await self._unary("lease", ask, Lease, Finished, rpc.NotYet, within_s=wait_s + REPLY_S)
        return None if isinstance(reply, rpc.NotYet) else reply

    async def release(self, release: Release) -> rpc.Ack:
        return await self._unary("release", rpc.ReleaseLeases(self.member, self.incarnation, release), rpc.Ack)

    async def take_back(self, asked: TakeBack) -> TakenBack:
        return await self._unary("takeback", rpc.AskBack(self.member, self.incarnation, asked), TakenBack)

    async def trained(self, said: Trained) -> rpc.Ack:
        words = rpc.SayTrained(self.member, self.incarnation, said.fragment, said.leases)
        return await self._unary("trained", words, rpc.Ack)

    async def validated(self, result: Validated) -> rpc.Ack:
        return await self._unary("validated", rpc.SayValidated(self.member, self.incarnation, result), rpc.Ack)

    async def leave(self, part: int, sequences: tuple[int, ...]) -> rpc.Ack:
        """Say goodbye for one rank. sequences: by fragment, of the last update that it has sent."""
        leave = rpc.SayLeave(self.member, self.incarnation, part, sequences)
        return await self._unary("leave", leave, rpc.Ack, within_s=rpc.MAX_WAIT_S + REPLY_S)

    async def beat(self, part: int, metrics: dict[str, float] | None = None, within_s: float = REPLY_S) -> rpc.Ack:
        """Send a heartbeat. metrics: numbers to be shown to people."""
        said = rpc.Beat(self.member, self.incarnation, part, metrics or {})
        return await self._unary("beat", said, rpc.Ack, within_s=within_s)

    # -- again and again

    async def persist(
        self,
        attempt: Callable[[], Awaitable[T | None]],
        deadline_s: float,
        rejoin: Callable[[], Awaitable[None]] | None = None,
        patient: bool = False,
    ) -> T:
        """Repeat an attempt until it gives a value, and return it.

        An attempt that was lost is repeated after growing pauses, one that was refused after the time that the
        refusal says, and one that gave None ("not yet") at once.
        rejoin: called when the server does not know this incarnation of the member; without it, NotJoined is raised.
        patient: "not yet" counts as a sign of life, from which the deadline is counted anew.

        Raises Refused if the refusal is final, wire.WireError, and Unreachable when `deadline_s` is over.
        """
        loop = asyncio.get_running_loop()
        since = loop.time()  # of the trouble, if there is any
        deadline, report_s = since + deadline_s, REPORT_S
        backoff, trouble = RetryBackoff(FIRST_PAUSE_S, LAST_PAUSE_S), "it has not answered yet"
        must_join, joined = False, False
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    if must_join and rejoin is not None:
                        await rejoin()
                        must_join, joined = False, True
                    value = await attempt()
                    if value is not None:
                        return value
                    backoff.reset()
                    trouble, since, report_s = "it had no answer yet", loop.time(), REPORT_S
                    deadline = loop.time() + deadline_s if patient else deadline
                    continue
            except (ConnectionLost, wire.DamagedError) as lost:
                self.retries += 1
                trouble, wait_s = str(lost), backoff.pause_s()
            except NotJoined as refused:
                if rejoin is None:
                    raise
                # A server that was restarted knows the updates of its members, but not who had joined: the usual
                # case, so the first time it is joined at once. If it says so once more, other ranks are missing.
                trouble, wait_s = refused.reason, refused.retry_s or FIRST_PAUSE_S if must_join or joined else 0.0
                must_join = True
            except Refused as refused:
                if refused.retry_s is None:
                    raise
                trouble, wait_s = refused.reason, refused.retry_s * random.uniform(0.75, 1.25)
            except TimeoutError:
                wait_s = FIRST_PAUSE_S
            if loop.time() > deadline + REPLY_S:  # this process was stopped meanwhile: it could not call
                deadline = loop.time() + deadline_s
            elif loop.time() + wait_s >= deadline:
                raise self.unreachable(deadline_s, trouble)
            if loop.time() - since >= report_s:
                report_s *= 2
                what = "%s: for %.0f s, the server at %s has not answered a call: %s; it is repeated"
                log.warning(what, self.member, loop.time() - since, self.address, trouble)
            await asyncio.sleep(wait_s)

    def unreachable(self, after_s: float, trouble: str) -> Unreachable:
        return Unreachable(
            f"{self.member}: the server at {self.address} gave no answer within {after_s:g} s ({trouble}); "
            f"check that it runs, that this is its address in the cluster file, and that no firewall is between"
        )

    # -- inside

    async def _unary(self, method: str, message: Any, *kinds: type, within_s: float = REPLY_S) -> Any:
        return await self._call(method, wire.pack(message), *kinds, within_s=within_s)

    async def _call(self, method: str, request: bytes, *kinds: type, within_s: float) -> Any:
        try:
            call = self._channel.unary_unary(f"/{rpc.SERVICE}/{method}")
            return wire.unpack(await call(request, timeout=within_s), *kinds)
        except aio.AioRpcError as error:
            raise self._reason(error) from None

    def _reason(self, error: Exception) -> Exception:
        """Choose what a failed attempt raises: the server's refusal, a WireError if repeating the attempt is
        hopeless, or ConnectionLost."""
        if isinstance(error, wire.DamagedError):
            return error
        if isinstance(error, asyncio.InvalidStateError):
            return ConnectionLost("the connection was lost while sending")
        if not isinstance(error, aio.AioRpcError):
            return ConnectionLost("the stream stood still for too long")
        refused = rpc.refusal_of(error)
        if refused is not None:
            return refused
        if error.code() in HOPELESS:
            return wire.WireError(f"{self.address}: {error.details()}")
        return ConnectionLost(f"{error.code().name.lower()}: {error.details()}{expiry(error, self._trust)}")
