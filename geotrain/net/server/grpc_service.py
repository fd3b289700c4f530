"""Serves a server's members, operator and shards over gRPC. `geotrain.net.transport.rpc` lists the calls.

Nothing about training is decided here. It is checked who makes a call, the call becomes a message, and the reply of
`Server.handle` goes back. This module adds what only a network needs: streams of data frames, waiting, deadlines,
certificates and limits.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import grpc
from grpc import aio

from geotrain.config import Address
from geotrain.net.server.answer_timer import AnswerTimer
from geotrain.net.server.failure_detector import NOBODY, WORKER_SILENT_S, FailureDetector
from geotrain.net.server.first_weights import FirstDigests
from geotrain.net.server.listener import ENROLL, Handler, open_server, proven
from geotrain.net.server.peers import is_this_machine, plain_peer
from geotrain.net.server.profile_requests import ProfileRequests
from geotrain.net.server.rate_limits import RateLimits
from geotrain.net.server.resumable_uploads import ResumableUploads
from geotrain.net.server.server_thread import ServerThread
from geotrain.net.server.shard_link import ShardTable
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.certs import OPERATOR, Credentials, Role, identity
from geotrain.net.transport.deadlines import FrameDeadline, within
from geotrain.outer.messages import (
    Answer,
    AnswerWanted,
    BadDelta,
    DataGone,
    Facts,
    Finished,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    LiftQuarantine,
    NotJoined,
    OperatorCommand,
    Refused,
    Send,
    Trained,
    UpdatePart,
    UpdateRejected,
)
from geotrain.outer.metrics import credible
from geotrain.outer.server.waits import WaitTable, waits

MAX_LATE_FRAMES = 1024  # so many frames of an update are read after the reply to it, and dropped
DAMAGED_RETRY_S = 0.5  # when a sender whose frame was damaged may try again
SHARDS_RETRY_S = 0.5  # when a member may join, once its shards are there
BUSY_RETRY_S = 0.1  # the shortest pause for a sender with too many calls
FIRSTS_AT_ONCE = 4  # first weights that are sent at a time: whoever has them trains, while others get theirs
HEADER_S = 20.0  # a stream that was opened must begin within this time
NOT_FINITE = "it says that its delta is not finite"
REPLACED = "another stream of this rank took its place"
# The calls that a shard takes.
OF_SHARDS = "join", "push", "pull", "trained", "weights", "beat", "status", "control"


class GrpcService:
    """Runs from `start` to `stop`. All methods belong to the event loop in which it was started.

    snapshot: writes a snapshot and returns where it is. extra_status: gives more entries for a status, whole or not.
    silent_s: a member that was silent for so long is taken for dead.
    credentials: None means plaintext, where everyone is believed to be who they say.
    shards: where the server has some, of which this process keeps the ledger.
    enroll: takes new members' enrollments (`geotrain.net.transport.enrollment`).
    """

    def __init__(
        self,
        server_thread: ServerThread,
        snapshot: Callable[[], Awaitable[str]],
        extra_status: Callable[[bool], dict[str, Any]] = lambda whole: {},
        *,
        silent_s: float = WORKER_SILENT_S,
        credentials: Credentials | None = None,
        shards: ShardTable | None = None,
        enroll: Handler | None = None,
    ) -> None:
        self.server_thread, self._snapshot, self._extra_status = server_thread, snapshot, extra_status
        self.server, self.credentials, self.shards = server_thread.server, credentials, shards
        self._enroll = enroll
        self.failure_detector = FailureDetector(server_thread, silent_s, lambda: shards is None or shards.ready)
        self.answer_timer = AnswerTimer(server_thread)
        self._waits = WaitTable()
        self.peers: dict[str, str] = {}  # "host:port" of a connection → the member that speaks over it
        self.beats: dict[str, dict[str, float]] = {}  # member → the metrics of its last heartbeat
        self._profiles = ProfileRequests(self.server.members if self.server.member_role == "worker" else {})
        # of any update
        most_bytes = sum(self.server.core.up.encoded_bytes(p.numel) for p in self.server.parameter_map.chunks)
        self._update_bytes = most_bytes + 4096
        self.uploads = ResumableUploads(most_bytes)
        self.rates = RateLimits()
        self._deadlines: defaultdict[str, FrameDeadline] = defaultdict(FrameDeadline)  # by member, for both ways
        # worker → the lease that came down for it last; kept, because each of its ranks asks for it.
        self._granted: dict[str, Lease | Finished] = {}
        self._leaving: dict[str, tuple[str, set[int]]] = {}  # member → incarnation, ranks that have said goodbye
        self._receiving: dict[tuple[str, int], asyncio.Task[Any]] = {}  # rank → the task that receives its update
        self._firsts, self._first_digests = asyncio.Semaphore(FIRSTS_AT_ONCE), FirstDigests()
        self._grpc: aio.Server | None = None

    async def start(self, address: Address) -> int:
        """Listen; returns the port. Raises ListenError."""
        # A call's name, as `geotrain.net.transport.rpc` lists it, is that of its method here.
        calls = (
            self._join, self._lease, self._release, self._takeback, self._trained, self._validated,
            self._leave, self._beat, self._status, self._control, self._pull, self._weights, self._push,
            self._standing, self._facts,
        )  # fmt: skip
        handlers = {call.__name__[1:]: self._handled(call) for call in calls}
        # Leases, goodbyes and shards' own calls are the ledger's.
        handlers = {name: call for name, call in handlers.items() if self.server.ledger or name in OF_SHARDS}
        if self._enroll is not None:
            handlers[ENROLL] = self._enroll
        self._grpc, port = await open_server(address, self.credentials, handlers)
        self.answer_timer.start()
        if self.server.ledger:
            self.failure_detector.start()
        return port

    async def stop(self, grace_s: float | None) -> None:
        """Take no new calls, and end those that are open after `grace_s`."""
        self.failure_detector.stop()
        self.answer_timer.stop()
        if self._grpc is not None:
            await self._grpc.stop(grace_s)

    def deliver(self, send: Send) -> None:
        """Keep what the server sends to a worker until the worker's ranks ask for it: servers never call members."""
        if isinstance(send.message, Lease | Finished):
            self._granted[send.to] = send.message

    def status(self, whole: bool = True) -> dict[str, Any]:
        """Say how the server goes, for people: its state, its members, and what it waits for; whole: also bytes."""
        said = {**self.server_thread.status, "silent_limit_s": self.failure_detector.silent_s}
        said |= {**self._extra_status(whole), **self.answer_timer.status()}
        if self.shards is not None:
            said |= {"awaited": sorted(self.shards.late() & said["members"].keys()), "due_s": None}
        if self.server.ledger:
            said["members"] = self.failure_detector.judge(said)
            said["waits"] = self._waits.as_json(waits(said), time.time())
        return said

    # -- the calls

    async def _join(self, request: bytes, context: Any) -> bytes:
        join = wire.unpack(request, Join)
        self._check_speaker(context, self.server.member_role, join.member)
        if join.member in self.server.members:
            # The join itself may wait for shards, or for the thread.
            again = self._has_joined(join.member, join.incarnation, join.part)
            self.failure_detector.note_alive(join.member, join.part if again else NOBODY)
        if self.shards is not None and not self.shards.ready:
            raise Refused(f"{self.server.name}: not all shards of this server are here", SHARDS_RETRY_S)
        welcome = await self.server_thread.say(join)
        self.failure_detector.note_alive(join.member, join.part)
        self._granted.pop(join.member, None)  # a lease of its earlier incarnation may be void by now
        return wire.pack(welcome)

    async def _push(self, _: Any, context: Any) -> None:
        reply: rpc.Ack | rpc.Refusal
        try:
            reply = await self._take_update(context)
        except Refused as refused:
            reply = rpc.Refusal.of(refused)
        except wire.DamagedError as error:
            reply = rpc.Refusal(str(error), DAMAGED_RETRY_S, False)
        except wire.WireError as error:
            reply = rpc.Refusal(str(error), None, False)
        deadline = FrameDeadline()
        await deadline.frame(context.write(wire.pack(reply)))
        # The reply may leave while data frames are still on their way. They are read and dropped, since gRPC loses a
        # reply when its call ends before the other side has finished speaking.
        for _ in range(MAX_LATE_FRAMES):
            if await deadline.frame(context.read()) is aio.EOF:
                break

    async def _take_update(self, context: Any) -> rpc.Ack:
        """Receive an update. All that its header says is checked once, before memory is allocated for the payload."""
        reader = await self._opening(context, rpc.Resume)
        resumed = isinstance(reader.header, rpc.Resume)
        if resumed:
            await self._resume(context, reader.header)
            reader = await self._opening(context)
        part: UpdatePart = reader.header
        self._check_speaker(context, self.server.member_role, part.member)
        # Not wanted is, for example, an update that was applied before: its acknowledgement was lost.
        wanted = await self._judged(part, self.server_thread.read(lambda: self.server.intake.admit(part)))
        if wanted:
            # Behind the check: a stream that nobody wants ends none that is under way.
            await self._only_one(part.member, part.part)
            kept = self.uploads.take((part.member, part.part), reader)
            reader = kept if resumed else reader
            await self._take_data_frames(context, part, reader)
            await self._judged(part, self.server_thread.say(reader.message))
        return rpc.Ack(self.server.members[part.member].fragments[part.fragment].sequence)

    async def _standing(self, request: bytes, context: Any) -> bytes:
        return await self._with_shards(context).standing(wire.unpack(request, rpc.ShardHello))

    async def _facts(self, request: bytes, context: Any) -> bytes:
        return wire.pack(rpc.Ack(await self._with_shards(context).facts(wire.unpack(request, Facts))))

    def _with_shards(self, context: Any) -> ShardTable:
        self._check_speaker(context, "shard", self.server.name)
        if self.shards is None:
            raise Refused("this server is one process: it and its shards need the same cluster file")
        return self.shards

    async def _opening(self, context: Any, *other_kinds: type) -> wire.FrameReader:
        """Read the first frame of a message from the stream; returns the reader that was fed it."""
        frame = await rpc.next_frame(within(HEADER_S, context.read()))
        reader = wire.FrameReader(UpdatePart, *other_kinds, limit_bytes=self._update_bytes)
        reader.feed(frame)
        return reader

    async def _resume(self, context: Any, resume: rpc.Resume) -> None:
        """Answer the rank how many data frames of its update have arrived.

        An older stream of the rank is ended first, because its connection may have broken without this end noticing.
        """
        await self._check_incarnation(context, resume.member, resume.incarnation, resume.part)
        await self._only_one(resume.member, resume.part)
        have = rpc.Have(self.uploads.data_frames((resume.member, resume.part), resume.header))
        await self._deadlines[resume.member].frame(context.write(wire.pack(have)))

    async def _take_data_frames(self, context: Any, part: UpdatePart, reader: wire.FrameReader) -> None:
        rank, deadline = (part.member, part.part), self._deadlines[part.member]
        keep = True  # however the stream breaks, even after a damaged frame, the data frames before are good
        try:
            while not reader.complete:
                reader.feed(await rpc.next_frame(deadline.frame(context.read())))
                self.failure_detector.note_alive(*rank)
        except wire.WireError as error:
            keep = isinstance(error, wire.DamagedError)
            raise
        finally:
            if keep and not reader.complete:
                self.uploads.keep(rank, reader)
                asyncio.get_running_loop().call_later(self.uploads.keep_s, self.uploads.trim)

    async def _pull(self, request: bytes, context: Any) -> None:
        pull = wire.unpack(request, rpc.Pull)
        self._check_speaker(context, self.server.member_role, pull.member)
        asked = pull.member, pull.incarnation, pull.part, pull.fragment, pull.sequence
        wanted = AnswerWanted(pull.member, pull.incarnation, pull.fragment, pull.sequence)

        def looked_for() -> Answer | AnswerWanted | None:
            return wanted if self.server.lacks_answer(*asked) else self.server.answer(*asked)

        wait_s = min(pull.wait_s, rpc.MAX_WAIT_S)
        until_s = asyncio.get_running_loop().time() + wait_s
        while (answer := await self.server_thread.until(looked_for, wait_s)) is wanted:
            await self.server_thread.say(wanted)
        answer = self.answer_timer.held(pull.member, answer) if isinstance(answer, Answer) else answer
        message: Any = rpc.NotYet() if answer is None else answer
        if isinstance(answer, Answer) and pull.digest and not pull.sequence:
            message = await self._first_digests.reply(pull.member, answer, pull.digest, until_s)
        header = next(wire.frames(message))
        # Data frames that the receiver has already are left out only if they are of this very answer.
        first = pull.data_frames if wire.crc_of(header) == pull.header else 0
        async with AsyncExitStack() as turn:
            if message is answer and not pull.sequence and not first:  # who was cut off goes on at once
                try:
                    left_s = until_s - asyncio.get_running_loop().time()
                    await within(left_s, turn.enter_async_context(self._firsts))
                except TimeoutError:
                    message = rpc.NotYet()
            for frame in wire.frames(message, first):
                await self._deadlines[pull.member].frame(context.write(frame))

    async def _lease(self, request: bytes, context: Any) -> bytes:
        ask = wire.unpack(request, rpc.AskLease)
        await self._check_incarnation(context, ask.member, ask.incarnation)
        worker, job = ask.request.worker, ask.request.job
        if worker not in self.server.workers_of(ask.member):
            raise Refused(f"{ask.member} cannot ask for the data of {worker!r}")

        def settled() -> Lease | Finished | Literal["ask again"] | None:
            granted = self._granted.get(worker)
            if granted is not None and granted.job == job:
                return granted
            return "ask again" if self.server.lease_is_due(worker) else None

        def asked() -> LeaseRequest:
            # At each attempt: lengths are steered by when a request was made here (`LeaseTable`, together).
            return replace(ask.request, at_s=time.time())

        lease = await self._judged(ask, self.server_thread.say(asked()))
        # A region server may have to ask the global server first, and a global server may be paused.
        if lease is None:
            lease = await self.server_thread.until(settled, min(ask.wait_s, rpc.MAX_WAIT_S))
        if lease == "ask again":
            lease = await self._judged(ask, self.server_thread.say(asked()))
        return wire.pack(lease or rpc.NotYet())

    async def _release(self, request: bytes, context: Any) -> bytes:
        release = wire.unpack(request, rpc.ReleaseLeases)
        await self._check_incarnation(context, release.member, release.incarnation)
        held = await self.server_thread.read(lambda: self.server.membership.leases.holds(release.member))
        # Others may have gone to another worker meanwhile, because this one was silent for too long.
        mine = {n: held[n] for n in release.release.leases if n in held}
        if not release.release.failed or self.server.member_role == "region":
            await self.server_thread.say(replace(release.release, leases=tuple(mine)))
        elif mine:  # each of the worker's ranks may say so; it is refused once
            job = max(lease.job for lease in mine.values())
            await self.server_thread.say(UpdateRejected(release.member, release.incarnation, NOT_FINITE, job=job))
        return wire.pack(rpc.Ack())

    async def _takeback(self, request: bytes, context: Any) -> bytes:
        ask = wire.unpack(request, rpc.AskBack)
        await self._check_incarnation(context, ask.member, ask.incarnation)
        if ask.asked.worker not in self.server.workers_of(ask.member):
            raise Refused(f"{ask.member} cannot ask for the data of {ask.asked.worker!r}")
        return wire.pack(await self.server_thread.say(ask.asked))

    async def _trained(self, request: bytes, context: Any) -> bytes:
        said = wire.unpack(request, rpc.SayTrained)
        await self._check_incarnation(context, said.member, said.incarnation)
        await self.server_thread.say(Trained(said.member, said.fragment, said.leases))
        return wire.pack(rpc.Ack())

    async def _weights(self, request: bytes, context: Any) -> None:
        pull = wire.unpack(request, rpc.PullGlobal)
        self._check_speaker(context, self.server.member_role, pull.member)
        answer = await self.server_thread.read(
            lambda: self.server.weights_to_validate(pull.member, pull.incarnation, pull.part, pull.number)
        )
        for frame in wire.frames(answer):
            await self._deadlines[pull.member].frame(context.write(frame))

    async def _validated(self, request: bytes, context: Any) -> bytes:
        said = wire.unpack(request, rpc.SayValidated)
        await self._check_incarnation(context, said.member, said.incarnation)
        if said.result.worker not in self.server.workers_of(said.member):
            raise Refused(f"{said.member} cannot speak for {said.result.worker!r}")
        await self._judged(said, self.server_thread.say(said.result))
        return wire.pack(rpc.Ack())

    async def _leave(self, request: bytes, context: Any) -> bytes:
        leave = wire.unpack(request, rpc.SayLeave)
        member = await self._check_incarnation(context, leave.member, leave.incarnation, leave.part)
        if missing := [f for f, sequence in enumerate(leave.sequences) if member.fragments[f].sequence < sequence]:
            raise Refused(f"{leave.member}: its last updates of fragments {missing} are not here whole", retry_s=0.2)
        incarnation, ranks = self._leaving.get(leave.member, ("", set()))
        ranks = ranks if incarnation == leave.incarnation else set()
        ranks.add(leave.part)
        self._leaving[leave.member] = leave.incarnation, ranks
        # With its last rank: others of it may have something to send until then.
        if not member.left and ranks >= set(range(member.parts)):
            await self.server_thread.say(Leave(leave.member))
        if not await self.server_thread.until(lambda: member.left or None, rpc.MAX_WAIT_S):
            raise Refused(f"{leave.member}: its other ranks have not left yet", retry_s=0.2)
        return wire.pack(rpc.Ack())

    async def _beat(self, request: bytes, context: Any) -> bytes:
        beat = wire.unpack(request, rpc.Beat)
        self._check_speaker(context, self.server.member_role, beat.member)
        # Not asked on the server's thread, which may be busy for longer than a member may be silent: with a snapshot,
        # or with other members' updates. Only single attributes are read here, and none is changed.
        if self._has_joined(beat.member, beat.incarnation, beat.part):  # be its other ranks here or not
            self.failure_detector.note_alive(beat.member, beat.part)
        member = self.server.membership.current(beat.member, beat.incarnation, beat.part)
        if beat.metrics:
            said = {name[:40]: value for name, value in islice(beat.metrics.items(), rpc.MAX_METRICS)}
            self.beats[beat.member] = credible(said)  # bounded, because another machine sent them
        recalled, profile = self.server.recalls(beat.member), self._profiles.take(beat.member, beat.part)
        return wire.pack(rpc.Ack(0, self.server.over, recalled, profile, member.silent))

    async def _status(self, request: bytes, context: Any) -> bytes:
        return json.dumps(self.status()).encode()

    async def _control(self, request: bytes, context: Any) -> bytes:
        """Carry out the operator's command. Raises Refused."""
        self._check_speaker(context, "operator", OPERATOR)
        if self.credentials is None and not is_this_machine(plain_peer(context.peer())):
            raise Refused("without TLS, a run is steered from the server's own machine only; see `geotrain certs`")
        control = wire.unpack(request, rpc.Control)
        what, name = control.what, control.name
        if what == "snapshot":
            try:
                text = await self._snapshot()
            except OSError as error:
                raise Refused(str(error)) from None
        elif what == "unban":
            await self.server_thread.say(LiftQuarantine(name))
            text = f"{name}: unbanned"
        elif what == "profile":
            text = self._profiles.ask(name, control.steps)
        else:
            text = await self.server_thread.say(OperatorCommand(what, name))
        return wire.pack(rpc.ControlReply(text))

    # -- inside

    def _check_speaker(self, context: Any, role: Role, name: str) -> None:
        """Raise Refused if the certificate at the other end is not that of `role` and `name`."""
        if self.credentials is not None:
            names = proven(self.credentials, context)
            # A region's shards bring and fetch its payloads.
            speakers = [identity(each, name) for each in ((role, "shard") if role == "region" else (role,))]
            if not set(speakers) & set(names):
                raise Refused(f"the certificate of {', '.join(names)} does not speak for {role} {name!r}")
        if role == self.server.member_role and name in self.server.members:
            self.peers[plain_peer(context.peer())] = name  # at each call, since it may come over a new connection

    def _has_joined(self, name: str, incarnation: str, part: int) -> bool:
        member = self.server.members.get(name)
        return member is not None and member.incarnation == incarnation and part in member.joined

    async def _check_incarnation(self, context: Any, member: str, incarnation: str, part: int | None = None) -> Any:
        """Give the member, if it speaks for itself and this is its present incarnation. Raises Refused, NotJoined."""
        self._check_speaker(context, self.server.member_role, member)
        return await self.server_thread.read(lambda: self.server.membership.current(member, incarnation, part))

    async def _judged(self, said: UpdatePart | rpc.FromMember, call: Awaitable[Any]) -> Any:
        """Await a call about what a member said. A refusal is final once the strike for it is written down."""
        try:
            return await call
        except Refused as refused:
            judged = refused.retry_s is None and not isinstance(refused, DataGone)
            if judged and said.member in self.server.members:
                rejected = UpdateRejected(said.member, said.incarnation, refused.reason)
                if isinstance(said, UpdatePart):
                    job = said.job if isinstance(refused, BadDelta) else 0
                    rejected = replace(rejected, fragment=said.fragment, sequence=said.sequence, job=job)
                await self.server_thread.say(rejected)
            raise

    async def _only_one(self, member: str, part: int) -> None:
        """End the task that receives an earlier update of this rank, which sends one at a time: so it has given the
        earlier one up. Afterwards what came of that is kept."""
        task = asyncio.current_task()
        assert task is not None
        older, self._receiving[member, part] = self._receiving.get((member, part)), task
        if older is not None and older is not task:
            older.cancel(REPLACED)
            await asyncio.wait([older], timeout=HEADER_S)

    def _handled(self, handler: Handler) -> Handler:
        """Wrap a handler: limit its calls, and turn its exceptions into gRPC status codes."""

        async def handle(request: Any, context: Any) -> Any:
            try:
                wait_s = self.rates.wait_s(context.peer())
                if wait_s is not None:
                    raise Refused("too many calls over this connection", retry_s=max(wait_s, BUSY_RETRY_S))
                return await handler(request, context)
            except Refused as refused:
                refusal = wire.pack(rpc.Refusal.of(refused))
                context.set_trailing_metadata(((rpc.REFUSAL_KEY, refusal),))
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
            except asyncio.CancelledError as cancelled:
                # It may be the newer of the two, read first; gRPC would say nothing of a handler that was cancelled.
                if cancelled.args != (REPLACED,):
                    raise
                await context.abort(grpc.StatusCode.ABORTED, REPLACED)

        return handle
