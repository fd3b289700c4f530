"""Runs a shard of a server as a process: it serves payloads to members and executes its coordinator's commands.

Its journal holds all commands and payloads since its last snapshot, which it takes when its coordinator says so. It
recovers from these and asks the coordinator for the commands after its last. A member's payload is on disk before the
coordinator hears of it. Where the coordinator says so, the shard goes back to an older checkpoint
(`geotrain.net.storage.timeline`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import typing
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any

import psutil
from grpc import StatusCode, aio

from geotrain.common.files import out_of_room
from geotrain.common.names import GLOBAL
from geotrain.monitor.events import EventLog, SnapshotUploaded
from geotrain.net.server.first_weights import first_answers
from geotrain.net.server.grpc_service import GrpcService
from geotrain.net.server.process_host import ProcessHost
from geotrain.net.server.server_setup import ServerSetup
from geotrain.net.server.server_thread import GROUP
from geotrain.net.server.shard_sessions import FAREWELL_S
from geotrain.net.storage.recovery import Recovered
from geotrain.net.storage.remote_snapshots import RemoteSnapshots, beside
from geotrain.net.storage.snapshots import StoreError
from geotrain.net.storage.timeline import Timeline
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.certs import expiry, open_channel
from geotrain.net.transport.deadlines import first_of
from geotrain.net.transport.grpc_client import CHANNEL_OPTIONS, AnswerPull, GrpcClient
from geotrain.outer.messages import Answer, Join, MadeWeights, Refused, Send, UpdatePart
from geotrain.outer.server.shard_server import ShardServer
from geotrain.outer.shards.protocol import Apply, Copy, Forget, Freeze, Merge, NewIncarnation, SendUp, StartOver

log = logging.getLogger(__name__)

COMMANDS = Apply, Freeze, Forget, SendUp, Merge, StartOver, Copy, NewIncarnation, Join
JOURNALED = (*COMMANDS, UpdatePart, Answer)
REQUESTS = rpc.Belong | rpc.Bring | rpc.Fetch | rpc.Save | rpc.Upload | rpc.Farewell  # no commands: not journaled
RECEIVED = (*COMMANDS, *typing.get_args(REQUESTS), rpc.GoBack)
AGAIN_S = 0.2
CALL_S = (0.2, 2.0)  # pauses between two calls of the coordinator, drawn at random
NEVER_SILENT_S = 1e9  # who is silent is for the coordinator to notice
ABOVE_S = 30 * 24 * 3600.0  # how long the shard above is tried
STATE_S = 1.0  # how often the coordinator is told how far the disk is


class ShardHost(ProcessHost[ShardServer]):
    """Runs a recovered shard in one event loop, until its coordinator says farewell or SIGTERM comes.

    mirror: where copies of its snapshots go; None: nowhere.
    """

    def __init__(
        self,
        setup: ServerSetup,
        recovered: Recovered[ShardServer],
        events: EventLog,
        mirror: RemoteSnapshots | None,
    ) -> None:
        super().__init__(setup, recovered, events)
        self.mirror = mirror
        newest = recovered.snapshot
        self.saved = newest["state"]["commands"] if newest else -1  # after how many commands the newest snapshot is
        self.checkpoint_id: str = newest["checkpoint_id"] if newest else ""  # of that snapshot
        self.goes_back: Timeline | None = None  # what it takes before its next incarnation
        self._dismissed = False  # its coordinator has said farewell
        self._out: asyncio.Queue[Any] = asyncio.Queue()  # what the coordinator is to be told
        # What is pushed up and pulled down: which fragments → the coordinator's message, and the task.
        self._errands: dict[Any, tuple[Any, asyncio.Task[None]]] = {}
        self._above: GrpcClient | None = None
        self._firsts: dict[int, MadeWeights] | None = None  # first weights that were made here and not asked for yet

    def _make_service(self) -> GrpcService:
        return GrpcService(
            self.server_thread,
            self._snapshot,
            silent_s=NEVER_SILENT_S,
            credentials=self.credentials,
            payloads_only=True,
        )

    def _works(self) -> list[Coroutine[Any, Any, None]]:
        return [self._sessions()]

    def _deliver(self, send: Send) -> None:
        self._out.put_nowait(send.message)

    # -- the stream to the coordinator

    async def _sessions(self) -> None:
        server, address, trouble = self.setup.server, str(self.setup.server_address), ""
        trust = self.trust(self.setup.server_role, server)
        while True:
            channel = open_channel(aio, address, trust, CHANNEL_OPTIONS)
            call = channel.stream_stream(f"/{rpc.SERVICE}/shard")()
            try:
                await self._session(call)
            except aio.AioRpcError as error:
                refused = rpc.refusal_of(error)
                if refused is not None and refused.retry_s is None:
                    raise StoreError(refused.reason) from None
                if trouble != (trouble := str(refused or error.code().name.lower() + expiry(error, trust))):
                    log.warning("%s: its coordinator at %s: %s; it is called again", server, address, trouble)
            except (wire.DamagedError, asyncio.InvalidStateError):
                pass  # the stream ended
            except Refused as refused:
                self.report(refused.reason)
            finally:
                await self._end_session()
                ended_well = call.done() and await call.code() is StatusCode.OK
                await channel.close()
            # A stream that breaks has perhaps not carried this shard's farewell, for which its coordinator waits as
            # long as this shard calls it then: FAREWELL_S.
            if (self._dismissed and ended_well) or self.goes_back is not None:
                return
            await asyncio.sleep(random.uniform(*CALL_S))

    async def _session(self, call: Any) -> None:
        self._out = asyncio.Queue()
        machine = self.server
        hello = rpc.ShardHello(
            self.setup.server, machine.index, machine.number, machine.commands, self.lineage.timeline.name
        )
        await call.write(wire.pack(hello))
        received: asyncio.Queue[Any] = asyncio.Queue(GROUP)
        try:
            await first_of(self._write(call), self._say_state(), self._read(call, received), self._execute(received))
        finally:
            call.cancel()

    async def _write(self, call: Any) -> None:
        while True:
            await call.write(wire.pack(await self._out.get()))

    async def _say_state(self) -> None:
        """Tell the coordinator how far this shard's disk is, whenever that has changed."""
        before: rpc.ShardState | None = None
        process, rss_bytes = psutil.Process(), 0
        while True:
            with suppress(OSError, psutil.Error):  # where no file descriptor is free
                rss_bytes = process.memory_info().rss
            said = self.server.commands, self.saved, self.journal.segment_bytes, rss_bytes, self.checkpoint_id
            state = rpc.ShardState(*said)
            if state != before:
                self._out.put_nowait(state)
                before = state
            await asyncio.sleep(STATE_S)

    async def _read(self, call: Any, received: asyncio.Queue[Any]) -> None:
        while True:
            for frame in wire.unbundle(await rpc.next_frame(call.read())):
                message = wire.unpack(frame, *RECEIVED)
                if isinstance(message, rpc.GoBack):
                    if self.lineage.timeline.name == message.timeline:
                        raise StoreError(f"{message.checkpoint_id}, as it was copied, does not fit its coordinator's")
                    self.goes_back = Timeline(message.timeline, message.checkpoint_id, begun=True)
                    return
                await received.put(message)

    async def _execute(self, received: asyncio.Queue[Any]) -> None:
        """Execute one message after the other. Commands that wait together share a flush. None may be left out: where
        the disk is full for one of them this raises Refused, and the coordinator begins a new incarnation."""
        while True:
            waiting = [await received.get()]
            while not received.empty():
                waiting.append(received.get_nowait())
            for are_commands, several in groupby(waiting, key=lambda each: isinstance(each, COMMANDS)):
                if are_commands:
                    await self.server_thread.say_all(*several)
                else:
                    for each in several:
                        await self._do(each)

    async def _do(self, request: REQUESTS) -> None:
        """Carry out what is no command, after the commands before it."""
        match request:
            case rpc.Bring(update):
                # Read before the next command, which may have the region start over: then its payloads are gone.
                own = await self.server_thread.read(lambda: self.server.going_up(update))
                self._go(("up", *(d.chunk for d in update.deltas)), update, lambda _: self._bring(own))
            case rpc.Fetch():
                self._go(("down", request.answer.fragment), request, self._fetch)
            case rpc.Belong(timeline):
                self.lineage.note(Timeline(timeline, begun=True))
                self._out.put_nowait(request)
            case rpc.Upload():
                self._go("copy", request, self._upload)
            case rpc.Save(checkpoint_id):
                try:
                    await self._save(checkpoint_id)
                except StoreError as error:
                    self._note_unsaved(checkpoint_id, error)
            case rpc.Farewell():
                self._dismissed = True
                asyncio.get_running_loop().call_later(FAREWELL_S, self.stop.set)
                self._out.put_nowait(request)  # the coordinator ends the stream when it has written that down

    async def _end_session(self) -> None:
        await self.server_thread.read(self.server.end_incarnation)
        tasks = [task for _, task in self._errands.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._errands.clear()
        if self._above is not None:
            await self._above.close()
            self._above = None

    # -- what goes up, and comes down, beside the coordinator

    def _go(self, what: Any, request: Any, errand: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Begin a transfer. One that is asked for again, unchanged, goes on: a long one would never end otherwise."""
        before, older = self._errands.get(what, (None, None))
        if older is not None and not older.done() and before == request:
            return
        if older is not None:
            older.cancel()
        self._errands[what] = request, asyncio.ensure_future(errand(request))

    def _link(self, incarnation: str) -> GrpcClient:
        """Give the link to the shard of the same chunks above, in the region's present incarnation."""
        if self._above is None:
            address = str(self.setup.cluster.global_shards[self.server.index])
            self._above = GrpcClient(address, self.setup.server, incarnation, self.trust("shard", GLOBAL))
        self._above.incarnation = incarnation
        return self._above

    async def _bring(self, own: UpdatePart) -> None:
        if own.deltas:
            link = self._link(own.incarnation)
            try:
                await link.persist(partial(link.push, own), ABOVE_S)
            except Refused as refused:  # the coordinator above is asked too, and what it says counts
                self.report(f"{self.setup.server}: the shard above refuses an update's chunks: {refused.reason}")

    async def _fetch(self, fetch: rpc.Fetch) -> None:
        wanted = {w.chunk: w.version for w in fetch.answer.weights if w.chunk in self.server.chunks}
        if not wanted:
            return
        link, limit_bytes = self._link(fetch.incarnation), 8 * self.server.parameter_map.numel + 65536
        fragment, sequence = fetch.answer.fragment, fetch.answer.sequence
        if not sequence and not any(wanted.values()) and self._firsts is None:
            about = self.setup.run, self.server.parameter_map, self.server.shard.chunks
            self._firsts = await beside(partial(first_answers, *about))
        made = None if sequence else (self._firsts or {}).pop(fragment, None)
        call = partial(link.pull, AnswerPull(0, fragment, sequence, limit_bytes, made))
        while True:
            answer = await link.persist(call, ABOVE_S)
            given = {w.chunk: w.version for w in answer.weights}
            if answer.incarnation == fetch.answer.incarnation and given == wanted:
                break
            await asyncio.sleep(AGAIN_S)  # coordinator and shard above spoke in different incarnations
        await self.server_thread.persist(answer)

    # -- snapshots

    async def _upload(self, request: rpc.Upload) -> None:
        began_s, trouble, ids = time.monotonic(), "", self.store.checkpoint_ids().items()
        try:
            number = next((number for number, each in ids if each == request.checkpoint_id), None)
            if (mirror := self.mirror) is None or number is None:
                raise StoreError(f"{self.store.folder}: has no snapshot {request.checkpoint_id} to copy")
            with self.store.kept(number) as folder:
                size = await beside(lambda: mirror.upload(folder, request.checkpoint_id))
            self.events.write(SnapshotUploaded(number, size, time.monotonic() - began_s))
        except StoreError as error:  # the coordinator tries again
            trouble = str(error)[: wire.MAX_TEXT]
            self.report(trouble)
        self._out.put_nowait(rpc.Uploaded(request.checkpoint_id, trouble))

    async def _save(self, checkpoint_id: str, ended: bool = False) -> asyncio.Future[int]:
        commands = self.server.commands  # none is executed meanwhile: the session takes one message after the other
        writing = await super()._save(checkpoint_id, ended)

        def done(_: Any) -> None:
            if (error := writing.exception()) is not None:
                self._note_unsaved(checkpoint_id, error)
            else:
                self.saved, self.checkpoint_id = commands, checkpoint_id

        writing.add_done_callback(done)
        return writing

    def _note_unsaved(self, checkpoint_id: str, error: BaseException) -> None:
        """Tell people and the coordinator that a snapshot was not written; the older ones are whole."""
        self.report(str(error))
        self._out.put_nowait(rpc.Unsaved(checkpoint_id, str(error)[: wire.MAX_TEXT], out_of_room(error)))
