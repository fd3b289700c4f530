"""The client's side of one link: a member speaking to the server above it, through losses and restarts."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc import aio

from geotrain.net import calls, wire
from geotrain.net.certs import Trust
from geotrain.net.deadline import Pace, within
from geotrain.net.tally import Tally
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

T = TypeVar("T")

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 5.0
REPLY_S = 30.0  # for a small call, beyond the time it may be held
ANSWER_S = 600.0  # from the last frame of an update to its acknowledgement; keepalive notices a dead server before
MAX_HALF_ANSWERS = 4
CHANNEL_OPTIONS = (
    *calls.OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),
)
HOPELESS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)


class Unreachable(ConnectionError):
    """The server did not answer in time. Says where it should be and what to check."""


class Lost(ConnectionError):
    """One attempt failed on its way."""


@dataclass
class _Arriving:
    """An answer that has come in part. header: its frame."""

    header: bytes
    reader: wire.Reader


class Link:
    """Calls to one server, as one life of one member. Belongs to one event loop. trust: None means plaintext.

    Single calls are attempted once: Lost, Refused, wire.WireError. `persist` repeats them; a transfer that broke goes
    on from its last chunk.
    """

    def __init__(self, address: str, member: str, incarnation: str, trust: Trust | None = None) -> None:
        self.address, self.member, self.incarnation = address, member, incarnation
        self.tally = Tally()
        self.retries = 0  # attempts that failed on their way and were repeated
        self._up, self._down = Pace(), Pace()
        self._broken: dict[int, int] = {}  # part → checksum of the header of its update that was broken off
        self._arriving: dict[tuple[int, int, tuple[int, ...]], _Arriving] = {}  # answers that were broken off
        if trust is None:
            self._channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", trust.server))
            self._channel = aio.secure_channel(address, trust.credentials.channel(), options=options)

    async def close(self) -> None:
        await self._channel.close()

    # -- single attempts

    async def join(self, join: Join) -> Welcome:
        return await self._unary("join", wire.pack(join), Welcome)

    async def push(self, part: UpdatePart) -> int:
        """Returns the last update of this member that the server has applied."""
        call = self._channel.stream_stream(f"/{calls.SERVICE}/push")()
        header = wire.crc_of(next(wire.frames(part)))
        again = self._broken.get(part.part) == header
        self._broken[part.part] = header
        replied = asyncio.Event()
        tasks: list[asyncio.Task[Any]] = []
        try:
            first = await self._resume(call, part, header) if again else 0
            tasks = [
                asyncio.create_task(self._write(call, self.tally.sending(part, first), replied)),
                asyncio.create_task(call.read()),
            ]
            writing, reading = tasks
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                writing.result()
            frame = await within(ANSWER_S, reading)
            if frame is aio.EOF:
                raise Lost("the connection ended before the acknowledgement")
            reply: calls.Ack | calls.Refusal = wire.unpack(frame, calls.Ack, calls.Refusal)
            replied.set()
            await asyncio.wait({writing})
        except (aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as error:
            raise self._reason(error) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()
        if isinstance(reply, calls.Refusal):
            raise reply.error()
        del self._broken[part.part]
        return reply.applied

    async def _resume(self, call: Any, part: UpdatePart, header: int) -> int:
        """How many chunks of this update the server has already."""
        resume = calls.Resume(self.member, self.incarnation, part.part, header)
        await self._up.frame(call.write(wire.pack(resume)))
        frame = await within(REPLY_S, call.read())
        if frame is aio.EOF:
            raise Lost("the connection ended early")
        reply: calls.Have | calls.Refusal = wire.unpack(frame, calls.Have, calls.Refusal)
        if isinstance(reply, calls.Refusal):
            raise reply.error()
        return reply.chunks

    async def _write(self, call: Any, frames: Iterator[bytes], replied: asyncio.Event) -> None:
        """Send the frames, until the other side has replied."""
        for frame in frames:
            if replied.is_set():
                break
            await self._up.frame(call.write(frame))
        await call.done_writing()

    async def pull(
        self, part: int, sequence: int, fragments: tuple[int, ...], limit_bytes: int, wait_s: float = calls.MAX_WAIT_S
    ) -> Answer | None:
        """The answer to update `sequence`; None when there is none yet after `wait_s`."""
        key = part, sequence, fragments
        half = self._arriving.pop(key, None)
        known = (wire.crc_of(half.header), half.reader.chunks) if half else (0, 0)
        request = calls.Pull(self.member, self.incarnation, part, sequence, fragments, wait_s, *known)
        call = self._channel.unary_stream(f"/{calls.SERVICE}/pull")(wire.pack(request))
        try:
            frame = await within(wait_s + REPLY_S, call.read())
            if half is None or frame != half.header:
                if frame is aio.EOF:
                    raise Lost("the answer ended early")
                half = _Arriving(frame, wire.Reader(Answer, calls.NotYet, limit_bytes=limit_bytes))
                half.reader.feed(frame)
            reader = half.reader
            count = self.tally.receiving(reader.header, reader.chunks)
            while not reader.complete:
                frame = await self._down.frame(call.read())
                if frame is aio.EOF:
                    raise Lost("the answer ended early")
                reader.feed(frame)
                count(frame)
            return None if isinstance(reader.message, calls.NotYet) else reader.message
        except (aio.AioRpcError, TimeoutError) as error:
            self._keep(key, half)
            raise self._reason(error) from None
        except (Lost, wire.DamagedError):
            self._keep(key, half)
            raise
        finally:
            call.cancel()

    def _keep(self, key: tuple[int, int, tuple[int, ...]], half: _Arriving | None) -> None:
        """What came of an answer, for the next attempt."""
        if half is not None:
            self._arriving[key] = half
            if len(self._arriving) > MAX_HALF_ANSWERS:
                del self._arriving[next(iter(self._arriving))]

    async def global_weights(self, part: int, number: int, limit_bytes: int) -> Answer:
        """What validation `number` speaks of."""
        request = calls.PullGlobal(self.member, self.incarnation, part, number)
        call = self._channel.unary_stream(f"/{calls.SERVICE}/weights")(wire.pack(request))
        reader = wire.Reader(Answer, limit_bytes=limit_bytes)
        try:
            while not reader.complete:
                frame = await self._down.frame(call.read())
                if frame is aio.EOF:
                    raise Lost("the weights ended early")
                reader.feed(frame)
            answer: Answer = reader.message
            return answer
        except (aio.AioRpcError, TimeoutError) as error:
            raise self._reason(error) from None
        finally:
            call.cancel()

    async def lease(self, request: LeaseRequest, wait_s: float = calls.MAX_WAIT_S) -> Lease | Finished | None:
        ask = calls.AskLease(self.member, self.incarnation, request, wait_s)
        reply = await self._unary("lease", wire.pack(ask), Lease, Finished, calls.NotYet, within_s=wait_s + REPLY_S)
        return None if isinstance(reply, calls.NotYet) else reply

    async def release(self, release: Release) -> None:
        await self._unary(
            "release", wire.pack(calls.ReleaseLeases(self.member, self.incarnation, release)), calls.Ack
        )

    async def validated(self, result: Validated) -> None:
        await self._unary(
            "validated", wire.pack(calls.SayValidated(self.member, self.incarnation, result)), calls.Ack
        )

    async def leave(self, part: int, sequence: int) -> None:
        """sequence: of the last update sent."""
        leave = calls.SayLeave(self.member, self.incarnation, part, sequence)
        await self._unary("leave", wire.pack(leave), calls.Ack, within_s=calls.MAX_WAIT_S + REPLY_S)

    async def beat(self, part: int, metrics: dict[str, float] | None = None) -> bool:
        """Whether all data of the run is trained for good. metrics: numbers for people."""
        beat = calls.Beat(self.member, self.incarnation, part, metrics or {})
        ack = await self._unary("beat", wire.pack(beat), calls.Ack)
        return bool(ack.over)

    async def status(self) -> dict[str, Any]:
        return json.loads(await self._raw_unary("status", b"", REPLY_S))

    async def control(self, what: str, name: str = "") -> str:
        """What the server says to the operator."""
        told = await self._unary("control", wire.pack(calls.Control(what, name)), calls.Told, within_s=ANSWER_S)
        return str(told.text)

    # -- again and again

    async def persist(
        self,
        attempt: Callable[[], Awaitable[T | None]],
        deadline_s: float,
        rejoin: Callable[[], Awaitable[None]] | None = None,
        patient: bool = False,
    ) -> T:
        """Repeat an attempt until it gives a value: after losses with growing pauses, after a refusal that says when
        to try again, after "not yet" at once. rejoin: called when the server does not know this life; without it,
        NotJoined is raised. patient: "not yet" is a sign of life, from which the deadline counts anew.

        Raises Refused (for good), wire.WireError, Unreachable when `deadline_s` is over.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_s
        pause_s, trouble = FIRST_BACKOFF_S, "it has not answered yet"
        must_join = False
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    if must_join and rejoin is not None:
                        await rejoin()
                        must_join = False
                    value = await attempt()
                    if value is not None:
                        return value
                    pause_s, trouble = FIRST_BACKOFF_S, "it had no answer yet"
                    deadline = loop.time() + deadline_s if patient else deadline
                    continue
            except (Lost, wire.DamagedError) as lost:
                self.retries += 1
                trouble, wait_s = str(lost), pause_s * random.uniform(0.5, 1.0)
                pause_s = min(2 * pause_s, LAST_BACKOFF_S)
            except NotJoined as refused:
                if rejoin is None:
                    raise
                # The first time at once: a server that was restarted knows the updates, not the lives.
                trouble, wait_s = refused.reason, 0.0 if not must_join else refused.retry_s or FIRST_BACKOFF_S
                must_join = True
            except Refused as refused:
                if refused.retry_s is None:
                    raise
                trouble, wait_s = refused.reason, refused.retry_s * random.uniform(0.75, 1.25)
            except TimeoutError:
                raise self.unreachable(deadline_s, trouble) from None
            if loop.time() + wait_s >= deadline:
                raise self.unreachable(deadline_s, trouble)
            await asyncio.sleep(wait_s)

    def unreachable(self, after_s: float, trouble: str) -> Unreachable:
        return Unreachable(
            f"{self.member}: the server at {self.address} gave no answer within {after_s:g} s ({trouble}); "
            f"check that it runs, that this is its address in the cluster file, and that no firewall is between"
        )

    # -- inside

    async def _unary(self, method: str, request: bytes, *kinds: type, within_s: float = REPLY_S) -> Any:
        return wire.unpack(await self._raw_unary(method, request, within_s), *kinds)

    async def _raw_unary(self, method: str, request: bytes, within_s: float) -> bytes:
        try:
            return await self._channel.unary_unary(f"/{calls.SERVICE}/{method}")(request, timeout=within_s)
        except aio.AioRpcError as error:
            raise self._reason(error) from None

    def _reason(self, error: Exception) -> Exception:
        if isinstance(error, asyncio.InvalidStateError):
            return Lost("the connection was lost while sending")
        if not isinstance(error, aio.AioRpcError):
            return Lost("the stream stood still for too long")
        refused = calls.refusal_of(error)
        if refused is not None:
            return refused
        if error.code() in HOPELESS:
            return wire.WireError(f"{self.address}: {error.details()}")
        return Lost(f"{error.code().name.lower()}: {error.details()}")
