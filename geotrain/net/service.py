"""A server's sockets: a gRPC service around one state machine. The calls are listed in `geotrain.net.calls`."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import isfinite
from typing import Any
from urllib.parse import unquote

import grpc
from grpc import aio

from geotrain.config import Address
from geotrain.net import calls, wire
from geotrain.net.certs import OPERATOR, Credentials, Role, identity
from geotrain.net.deadline import Pace, within
from geotrain.net.inbox import Inbox
from geotrain.net.machine import Machine
from geotrain.net.pulse import WORKER_SILENT_S, Pulse
from geotrain.net.rates import Rates
from geotrain.net.tally import Tally
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.messages import (
    Finished,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    NotJoined,
    Offence,
    Pardon,
    Refused,
    Release,
    Send,
    Steer,
    UpdatePart,
)

log = logging.getLogger(__name__)

MAX_CALLS = 8192  # at the same time
MAX_LATE_FRAMES = 1024  # of an update, read after the reply to it
DAMAGED_RETRY_S = 0.5
BUSY_RETRY_S = 0.1
HEADER_S = 20.0  # a stream that was opened must begin within this time
Handler = Callable[[Any, Any], Awaitable[Any]]


class ListenError(OSError):
    """The server cannot listen on its address. Says why and what to do."""


class Service:
    """Runs until `stop`. All methods belong to the event loop that it was started in.

    snapshot: writes one, and says where. extra_status: more for the status, from whoever runs the service.
    member_role: of those who may join. silent_s: after so long without a sign, a member is taken for dead.
    credentials: None means plaintext, where everyone is who he says.
    """

    def __init__(
        self,
        machine: Machine,
        snapshot: Callable[[], Awaitable[str]],
        extra_status: Callable[[], dict[str, Any]] = dict,
        *,
        member_role: Role = "worker",
        silent_s: float = WORKER_SILENT_S,
        credentials: Credentials | None = None,
    ) -> None:
        self.machine, self._snapshot, self._extra_status = machine, snapshot, extra_status
        self.member_role, self.credentials = member_role, credentials
        self.pulse = Pulse(machine, silent_s)
        self.peers: dict[str, str] = {}  # "host:port" of a connection → the member that speaks over it
        self.tallies: dict[str, Tally] = {}  # member → its bytes by fragment
        self.beats: dict[str, dict[str, float]] = {}  # member → what its last heartbeat said
        self.inbox = Inbox(machine.server.up.encoded_bytes(machine.server.layout.numel))
        self.rates = Rates()
        self._paces: dict[str, Pace] = {}  # member → how fast frames go, both ways
        self._granted: dict[str, Lease | Finished] = {}  # worker → what came down last, for each of its ranks
        self._leaving: dict[str, tuple[str, set[int]]] = {}  # member → incarnation, ranks that have said goodbye
        self._receiving: dict[tuple[str, int], asyncio.Task[Any]] = {}
        self._grpc: aio.Server | None = None

    async def start(self, address: Address) -> int:
        """Listen; returns the port. Raises ListenError."""
        self._grpc = aio.server(options=(*calls.OPTIONS, ("grpc.so_reuseport", 0)), maximum_concurrent_rpcs=MAX_CALLS)
        unary, streamed = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods = {
            "join": unary(self._handled(self._join)),
            "push": grpc.stream_stream_rpc_method_handler(self._handled(self._push)),
            "pull": streamed(self._handled(self._pull)),
            "lease": unary(self._handled(self._lease)),
            "weights": streamed(self._handled(self._weights)),
            "validated": unary(self._handled(self._validated)),
            "release": unary(self._handled(self._release)),
            "leave": unary(self._handled(self._leave)),
            "beat": unary(self._handled(self._beat)),
            "status": unary(self._handled(self._status)),
            "control": unary(self._handled(self._on_control)),
        }
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(calls.SERVICE, methods),))
        _check_free(address)
        try:
            if self.credentials is None:
                port = self._grpc.add_insecure_port(str(address))
            else:
                port = self._grpc.add_secure_port(str(address), self.credentials.server())
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {address}: {error}") from None
        await self._grpc.start()
        self.pulse.start()
        return int(port)

    async def stop(self, grace_s: float | None) -> None:
        """Take no new calls; give those that are open `grace_s` to end."""
        self.pulse.stop()
        if self._grpc is not None:
            await self._grpc.stop(grace_s)

    def deliver(self, send: Send) -> None:
        """Something that the state machine says to a worker."""
        if isinstance(send.message, Lease | Finished):
            self._granted[send.to] = send.message

    def status(self) -> dict[str, Any]:
        silent = sorted(self.pulse.silent)
        return {**self.machine.status, "silent": silent, **self._extra_status()}

    # -- the calls

    async def _join(self, request: bytes, context: Any) -> bytes:
        join = wire.unpack(request, Join)
        self._speaks(context, self.member_role, join.member)
        welcome = await self.machine.say(join)
        self.pulse.heard(join.member, join.part)
        self._granted.pop(join.member, None)  # what its earlier life was told may be wrong by now
        return wire.pack(welcome)

    async def _push(self, _: Any, context: Any) -> None:
        """The reply may come while chunks are still on their way; those are read and dropped, since gRPC loses a
        reply when its call ends before the other side has finished speaking."""
        reply: calls.Ack | calls.Refusal
        try:
            reply = await self._take_update(context)
        except Refused as refused:
            reply = calls.Refusal.of(refused)
        except wire.DamagedError as error:
            reply = calls.Refusal(str(error), DAMAGED_RETRY_S, False)
        except wire.WireError as error:
            reply = calls.Refusal(str(error), None, False)
        pace = Pace()
        await pace.frame(context.write(wire.pack(reply)))
        for _ in range(MAX_LATE_FRAMES):
            if await pace.frame(context.read()) is aio.EOF:
                break

    async def _take_update(self, context: Any) -> calls.Ack:
        """Everything that can be known from the header is checked before the payload is taken."""
        server = self.machine.server
        frame = await _next_frame(within(HEADER_S, context.read()))
        opening = wire.Reader(UpdatePart, calls.Resume, limit_bytes=self._update_bytes)
        opening.feed(frame)
        again = isinstance(opening.header, calls.Resume)
        if again:
            await self._resume(context, opening.header)
            frame = await _next_frame(within(HEADER_S, context.read()))
            opening = wire.Reader(UpdatePart, limit_bytes=self._update_bytes)
            opening.feed(frame)
        part: UpdatePart = opening.header
        self._speaks(context, self.member_role, part.member)
        wanted = await self._judged(part, self.machine.read(lambda: server.wants(part)))
        if wanted:
            self._only_one(part.member, part.part)
            reader = self.inbox.begin((part.member, part.part), frame, opening, again)
            await self._take_chunks(context, part, reader)
            await self._judged(part, self.machine.say(reader.message))
        return calls.Ack(server.members[part.member].sequence)

    async def _resume(self, context: Any, resume: calls.Resume) -> None:
        """Tell how much of its update is here. A stream of it that seems to live still is ended first."""
        member = await self._check_life(context, resume.member, resume.incarnation)
        if resume.part not in member.joined:
            raise Refused(f"{resume.member}: part {resume.part} has not joined")
        self._only_one(resume.member, resume.part)
        have = calls.Have(self.inbox.chunks((resume.member, resume.part), resume.header))
        await self._pace(resume.member).frame(context.write(wire.pack(have)))

    async def _take_chunks(self, context: Any, part: UpdatePart, reader: wire.Reader) -> None:
        rank, pace = (part.member, part.part), self._pace(part.member)
        try:
            count = self._tally(part.member).receiving(part, reader.chunks)
            while not reader.complete:
                frame = await _next_frame(pace.frame(context.read()))
                reader.feed(frame)
                count(frame)
                self.pulse.heard(*rank)
        except wire.DamagedError:
            raise
        except wire.WireError:
            self.inbox.drop(rank, reader)
            raise
        finally:
            if reader.complete:
                self.inbox.drop(rank, reader)
            else:
                self.inbox.broke(rank, reader)
                asyncio.get_running_loop().call_later(self.inbox.keep_s, self.inbox.trim)

    async def _pull(self, request: bytes, context: Any) -> None:
        pull = wire.unpack(request, calls.Pull)
        self._speaks(context, self.member_role, pull.member)
        answer = await self.machine.until(
            lambda: self.machine.server.answer(
                pull.member, pull.incarnation, pull.part, pull.sequence, pull.fragments
            ),
            min(pull.wait_s, calls.MAX_WAIT_S),
        )
        message = calls.NotYet() if answer is None else answer
        header = next(wire.frames(message))
        pace = self._pace(pull.member)
        first = pull.chunks if wire.crc_of(header) == pull.header else 0
        for frame in self._tally(pull.member).sending(message, first):
            await pace.frame(context.write(frame))

    async def _lease(self, request: bytes, context: Any) -> bytes:
        ask = wire.unpack(request, calls.AskLease)
        await self._check_life(context, ask.member, ask.incarnation)
        if ask.request.worker not in self._workers_of(ask.member):
            raise Refused(f"{ask.member} cannot ask for the data of {ask.request.worker!r}")
        job = ask.request.job
        lease = await self.machine.say(ask.request)
        wait_s = min(ask.wait_s, calls.MAX_WAIT_S)
        if lease is None and isinstance(self.machine.server, GlobalServer):
            lease = await self._when_resumed(self.machine.server, ask.request, wait_s)
        elif lease is None:  # a region server has to ask for it first
            lease = await self.machine.until(lambda: self._granted_for(ask.request.worker, job), wait_s)
        return wire.pack(lease or calls.NotYet())

    async def _release(self, request: bytes, context: Any) -> bytes:
        release = wire.unpack(request, calls.ReleaseLeases)
        member = await self._check_life(context, release.member, release.incarnation)
        server = self.machine.server
        if isinstance(server, GlobalServer):
            held = await self.machine.read(lambda: server.holds(release.member))
            leases = tuple(n for n in release.release.leases if n in held)
            await self.machine.say(Release(leases))
        return wire.pack(calls.Ack(member.sequence))

    async def _weights(self, request: bytes, context: Any) -> None:
        pull = wire.unpack(request, calls.PullGlobal)
        self._speaks(context, self.member_role, pull.member)
        server = self.machine.server
        answer = await self.machine.read(
            lambda: server.weights_to_validate(pull.member, pull.incarnation, pull.part, pull.number)
        )
        pace = self._pace(pull.member)
        for frame in wire.frames(answer):
            await pace.frame(context.write(frame))

    async def _validated(self, request: bytes, context: Any) -> bytes:
        said = wire.unpack(request, calls.SayValidated)
        member = await self._check_life(context, said.member, said.incarnation)
        if said.result.worker not in self._workers_of(said.member):
            raise Refused(f"{said.member} cannot speak for {said.result.worker!r}")
        await self.machine.say(said.result)
        return wire.pack(calls.Ack(member.sequence))

    async def _leave(self, request: bytes, context: Any) -> bytes:
        leave = wire.unpack(request, calls.SayLeave)
        member = await self._check_life(context, leave.member, leave.incarnation)
        if leave.part not in member.joined:
            raise Refused(f"{leave.member}: part {leave.part} has not joined")
        if member.sequence < leave.sequence:
            raise Refused(f"{leave.member}: update {leave.sequence} is not here whole yet", retry_s=0.2)
        life, ranks = self._leaving.get(leave.member, ("", set()))
        ranks = ranks if life == leave.incarnation else set()
        ranks.add(leave.part)
        self._leaving[leave.member] = leave.incarnation, ranks
        if not member.left and ranks >= set(range(member.parts)):
            await self.machine.say(Leave(leave.member))
        if not await self.machine.until(lambda: member.left or None, calls.MAX_WAIT_S):
            raise Refused(f"{leave.member}: its other ranks have not left yet", retry_s=0.2)
        return wire.pack(calls.Ack(member.sequence))

    async def _beat(self, request: bytes, context: Any) -> bytes:
        beat = wire.unpack(request, calls.Beat)
        member = await self._check_life(context, beat.member, beat.incarnation)
        self.pulse.heard(beat.member, beat.part)
        if beat.metrics:
            self.beats[beat.member] = _finite(beat.metrics)
        server = self.machine.server
        over = isinstance(server, GlobalServer) and server.over
        return wire.pack(calls.Ack(member.sequence, over))

    async def _status(self, request: bytes, context: Any) -> bytes:
        return json.dumps(self.status()).encode()

    async def _on_control(self, request: bytes, context: Any) -> bytes:
        self._speaks(context, "operator", OPERATOR)
        if self.credentials is None and not is_this_machine(_plain_peer(context.peer())):
            raise Refused("without TLS, a run is steered from the server's own machine only; see `geotrain certs`")
        control = wire.unpack(request, calls.Control)
        return wire.pack(calls.Told(await self._do(control.what[:40], control.name[:40])))

    # -- inside

    async def _do(self, what: str, name: str) -> str:
        """The operator's word; what to answer. Raises Refused."""
        server = self.machine.server
        if what == "snapshot":
            try:
                return await self._snapshot()
            except OSError as error:
                raise Refused(str(error)) from None
        if what == "pardon":
            await self.machine.say(Pardon(name))
            return f"{name}: pardoned"
        if not isinstance(server, GlobalServer):
            raise Refused(f"a region's server can be told to snapshot and to pardon, not to {what!r}")
        await self.machine.say(Steer(what, name))
        return server.phase

    async def _when_resumed(
        self, server: GlobalServer, request: LeaseRequest, wait_s: float
    ) -> Lease | Finished | None:
        def goes_on() -> bool | None:
            return not server.paused or server.leaves(request.worker) or None

        if await self.machine.until(goes_on, wait_s) is None:
            return None
        lease: Lease | Finished | None = await self.machine.say(request)
        return lease

    def _tally(self, member: str) -> Tally:
        return self.tallies.setdefault(member, Tally())

    def _granted_for(self, worker: str, job: int) -> Lease | Finished | None:
        granted = self._granted.get(worker)
        return granted if granted and granted.job == job else None

    def _speaks(self, context: Any, role: Role, name: str) -> None:
        """Raises Refused when the certificate on the other end is not this one's."""
        if self.credentials is not None:
            names = [name.decode() for name in context.auth_context().get("x509_subject_alternative_name", [])]
            if identity(role, name) not in names:
                raise Refused(f"the certificate of {', '.join(names)} does not speak for {role} {name!r}")
        if role == self.member_role and name in self.machine.server.members:
            self.peers[_plain_peer(context.peer())] = name  # also after a loss, when it comes over a new connection

    def _workers_of(self, member: str) -> tuple[str, ...]:
        server = self.machine.server
        return server.workers_of[member] if isinstance(server, GlobalServer) else (member,)

    async def _check_life(self, context: Any, member: str, incarnation: str) -> Any:
        self._speaks(context, self.member_role, member)
        return await self.machine.read(lambda: self.machine.server.current(member, incarnation))

    async def _judged(self, part: UpdatePart, call: Awaitable[Any]) -> Any:
        """A refusal for good is held against its sender."""
        try:
            return await call
        except Refused as refused:
            if refused.retry_s is None and part.member in self.machine.server.members:
                with suppress(Refused):  # a full disk
                    await self.machine.say(Offence(part.member, part.incarnation, refused.reason))
            raise

    @property
    def _update_bytes(self) -> int:
        """No update has more payload."""
        server = self.machine.server
        return server.up.encoded_bytes(server.layout.numel) + 4096

    def _pace(self, member: str) -> Pace:
        return self._paces.setdefault(member, Pace())

    def _only_one(self, member: str, part: int) -> None:
        """A rank sends one update at a time: whatever it began before is abandoned, and its memory freed."""
        task = asyncio.current_task()
        assert task is not None
        older, self._receiving[member, part] = self._receiving.get((member, part)), task
        if older is not None and older is not task and not older.done():
            older.cancel()

    def _handled(self, handler: Handler) -> Handler:
        async def handle(request: Any, context: Any) -> Any:
            try:
                wait_s = self.rates.wait_s(context.peer())
                if wait_s is not None:
                    raise Refused("too many calls over this connection", retry_s=max(wait_s, BUSY_RETRY_S))
                return await handler(request, context)
            except Refused as refused:
                refusal = wire.pack(calls.Refusal.of(refused))
                context.set_trailing_metadata(((calls.REFUSAL_KEY, refusal),))
                code = grpc.StatusCode.FAILED_PRECONDITION
                if refused.retry_s is not None and not isinstance(refused, NotJoined):
                    code = grpc.StatusCode.RESOURCE_EXHAUSTED
                await context.abort(code, refused.reason)
            except wire.DamagedError as error:
                await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            except wire.WireError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except TimeoutError:
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the stream stood still for too long")

        return handle


async def _next_frame(arriving: Awaitable[Any]) -> bytes:
    frame = await arriving
    if frame is aio.EOF:
        raise wire.DamagedError("the stream ended before its message did")
    return bytes(frame)


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    """What another machine says, within bounds."""
    told = [(name[:40], float(value)) for name, value in metrics.items() if isfinite(value)]
    return dict(told[: calls.MAX_METRICS])


def _plain_peer(peer: str) -> str:
    """gRPC's "ipv4:1.2.3.4:5" or "ipv6:%5B::1%5D:5" as the meter writes it."""
    plain = unquote(peer.partition(":")[2]).replace("[", "").replace("]", "")
    return plain.removeprefix("::ffff:")


EMULATED = ipaddress.ip_network("198.18.0.0/15")  # never routed: the links that this machine emulates for itself


def is_this_machine(peer: str) -> bool:
    """Whether a peer, "host:port", has one of this machine's own addresses."""
    host = ipaddress.ip_address(peer.rpartition(":")[0])
    if host.is_loopback or host in EMULATED:
        return True
    with socket.socket(socket.AF_INET6 if host.version == 6 else socket.AF_INET) as probe, suppress(OSError):
        probe.bind((str(host), 0))
        return True
    return False


def _check_free(address: Address) -> None:
    """gRPC does not say why it cannot bind: try by hand first. Raises ListenError."""
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: recently closed is free
            probe.bind((address.host, address.port))
            probe.listen()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ListenError(
            f"cannot listen on {address}: {reason}; stop what uses the port, or choose another in the cluster file"
        ) from None
