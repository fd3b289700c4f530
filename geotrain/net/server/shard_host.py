"""One shard as a process: its state machine behind a journal, its service for members, its stream to the coordinator.

On its disk are, as a server's: `snapshots/`, written when the coordinator says so, and `journal/`, with all that it
was told since. It comes back from these to what it had, and asks the coordinator for the orders after its last. A
member's payload is on disk before the coordinator hears of it. Where the coordinator says so, it goes back to an
older moment (`geotrain.net.storage.timeline`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import time
import typing
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
from grpc import StatusCode, aio

from geotrain.common.files import whole_file
from geotrain.common.names import GLOBAL
from geotrain.config import Address
from geotrain.monitor.events import EventLog, Recovery, SnapshotUploaded, SnapshotWritten, Trouble
from geotrain.net.server.connection_guard import ConnectionGuard, raise_file_limit
from geotrain.net.server.grpc_service import GrpcService
from geotrain.net.server.server_setup import LISTENING
from geotrain.net.server.server_thread import GROUP, ServerThread
from geotrain.net.server.shard_sessions import FAREWELL_S
from geotrain.net.storage.journal import Journal
from geotrain.net.storage.recovery import JOURNAL, begin_snapshot, finish_snapshot
from geotrain.net.storage.remote_snapshots import RemoteSnapshots, beside
from geotrain.net.storage.snapshots import SNAPSHOTS, SnapshotStore, StoreError
from geotrain.net.storage.timeline import Timeline, read_timeline, write_timeline
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.certs import Credentials, Trust, identity, open_channel
from geotrain.net.transport.grpc_client import CHANNEL_OPTIONS, GrpcClient
from geotrain.outer.messages import Answer, Join, Refused, Send, UpdatePart
from geotrain.outer.mirror_store import MirrorStore
from geotrain.outer.server.shard_server import ShardServer
from geotrain.outer.shards.protocol import Apply, Copy, Forget, Freeze, Merge, NewIncarnation, SendUp, StartOver

log = logging.getLogger(__name__)

COMMANDS = Apply, Freeze, Forget, SendUp, Merge, StartOver, Copy, NewIncarnation, Join
JOURNALED = (*COMMANDS, UpdatePart, Answer)
NO_COMMANDS = rpc.Belong | rpc.Bring | rpc.Fetch | rpc.Save | rpc.Upload | rpc.Farewell
TOLD = (*COMMANDS, *typing.get_args(NO_COMMANDS), rpc.GoBack)
AGAIN_S = 0.2
CALL_S = (0.2, 2.0)  # pauses between two calls of the coordinator, drawn at random
NEVER_SILENT_S = 1e9  # who is silent is for the coordinator to notice
ABOVE_S = 30 * 24 * 3600.0  # how long the shard above is tried
STATE_S = 1.0  # how often the coordinator is told how far the disk is


@dataclass(frozen=True)
class ShardSetup:
    """Where a shard stands. server: its server's name. coordinator: where that listens. above: where the shard of the
    same chunks at the global server does; None: for a shard of the global server. mirror: where copies of its
    snapshots go; None: nowhere."""

    server: str
    address: Address
    coordinator: Address
    above: Address | None
    folder: Path
    credentials: Credentials | None
    keep: int
    mirror: RemoteSnapshots | None = None

    def trust(self, role: Any, name: str) -> Trust | None:
        return Trust(self.credentials, identity(role, name)) if self.credentials else None


def recover_shard(
    machine: ShardServer, folder: Path, keep: int, mirror_store: MirrorStore | None = None
) -> tuple[SnapshotStore, Journal, int, int, list[str]]:
    """Bring the shard's state back from its folder; in an empty folder it stays as it is. Returns where it is kept,
    after how many orders its newest snapshot was taken (-1: there is none), how many messages were handled again, and
    sentences about what was found damaged. mirror_store: where its mirrors lie.

    Raises StoreError, JournalDamaged, ParameterMapError.
    """
    store = SnapshotStore(folder / SNAPSHOTS, keep, mirror_store)
    machine.shards.set_mirror_store(store.mirror_store)
    newest, faults = store.load_newest()
    if newest is None and faults:
        raise StoreError(
            "\n".join([*faults, f"{store.folder}: no snapshot is whole: docs/servers.md says what to do"])
        )
    if newest is not None:
        machine.load(newest.tensors, newest.meta["state"])
    journal = Journal(folder / JOURNAL, JOURNALED, limit_bytes=8 * machine.parameter_map.numel + 65536)
    replayed = 0
    for message in journal.replay(newest.meta["segment"] if newest else 1):
        replayed += 1
        with suppress(Refused):  # as it was then; what it says was said then
            machine.handle(message)
    machine.end_incarnation()
    saved = newest.meta["state"]["commands"] if newest else -1
    return store, journal, saved, replayed, faults + ([journal.cut] if journal.cut else [])


class ShardHost:
    """Runs a recovered shard in one event loop, until its coordinator says farewell or SIGTERM comes."""

    def __init__(
        self, machine: ShardServer, setup: ShardSetup, store: SnapshotStore, journal: Journal, events: EventLog,
        saved: int,
    ) -> None:  # fmt: skip
        self.machine, self.setup, self.store, self.journal, self.events = machine, setup, store, journal, events
        self.saved = saved  # after how many orders the newest snapshot was taken; -1: there is none
        self.writing: asyncio.Future[Any] | None = None  # a snapshot
        self.checkpoint_id = max(store.checkpoint_ids().items(), default=(0, ""))[1]  # of that snapshot
        self.timeline = read_timeline(setup.folder)
        self.goes_back: Timeline | None = None  # what it is to take in its next incarnation
        self.stop = asyncio.Event()
        self._dismissed = False  # its coordinator has said farewell
        self.disk = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._out: asyncio.Queue[Any] = asyncio.Queue()  # what the coordinator is to be told
        # What is brought up and fetched: which fragments → what was told, and the task.
        self._errands: dict[Any, tuple[Any, asyncio.Task[None]]] = {}
        self._above: GrpcClient | None = None

    async def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop.set)
        self.thread = ServerThread(self.machine, self.journal, self._deliver, self.events.write)  # type: ignore[arg-type]
        service = GrpcService(
            self.thread, self._refuse, silent_s=NEVER_SILENT_S, credentials=self.setup.credentials, payloads_only=True
        )
        guard: ConnectionGuard | None = None
        listening = self.setup.folder / LISTENING
        try:
            if self.saved < 0:  # before anybody can be answered, there must be one
                await self._save("")
                assert self.writing is not None
                await self.writing
            port = await service.start(self.setup.address)
            with whole_file(listening) as file:
                json.dump({"address": f"{self.setup.address.host}:{port}", "pid": os.getpid()}, file)
            guard = ConnectionGuard(port, service.peers, raise_file_limit(), lambda what: self._tell(what))
            guard.start()
            tasks: list[asyncio.Future[Any]] = [
                self.thread.failure,
                asyncio.ensure_future(self.stop.wait()),
                asyncio.ensure_future(self._sessions()),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                task.result()
        finally:
            listening.unlink(missing_ok=True)
            await service.stop(0)
            self.thread.close()
            self.disk.shutdown()
            self.journal.close()
            if guard is not None:
                guard.stop()

    def _deliver(self, send: Send) -> None:
        self._out.put_nowait(send.message)

    def _tell(self, what: str) -> None:
        log.error("%s", what)
        self.events.write(Trouble(what))

    async def _refuse(self) -> str:
        raise Refused("snapshots are ordered from the server: its shards write theirs with it")

    # -- the stream to the coordinator

    async def _sessions(self) -> None:
        setup, trouble = self.setup, ""
        role: Any = "global" if setup.server == GLOBAL else "region"
        while not self.stop.is_set():
            channel = open_channel(aio, str(setup.coordinator), setup.trust(role, setup.server), CHANNEL_OPTIONS)
            call = channel.stream_stream(f"/{rpc.SERVICE}/shard")()
            try:
                await self._session(call)
            except aio.AioRpcError as error:
                refused = rpc.refusal_of(error)
                if refused is not None and refused.retry_s is None:
                    raise StoreError(refused.reason) from None
                if trouble != (trouble := str(refused or error.code().name.lower())):
                    log.warning(
                        "%s: its coordinator at %s: %s; it is called again", setup.server, setup.coordinator, trouble
                    )
            except (wire.DamagedError, asyncio.InvalidStateError):
                pass  # the stream ended
            except Refused as refused:
                self._tell(refused.reason)
            finally:
                await self._end_session()
                ended_well = call.done() and await call.code() is StatusCode.OK
                await channel.close()
            # A stream that breaks has perhaps not carried this shard's farewell, for which its coordinator waits as
            # long as this shard calls it then: FAREWELL_S.
            if (self._dismissed and ended_well) or self.goes_back is not None:
                self.stop.set()
                return
            await asyncio.sleep(random.uniform(*CALL_S))

    async def _session(self, call: Any) -> None:
        self._out = asyncio.Queue()
        machine = self.machine
        hello = rpc.ShardHello(self.setup.server, machine.index, machine.number, machine.commands, self.timeline.name)
        await call.write(wire.pack(hello))
        told: asyncio.Queue[Any] = asyncio.Queue(GROUP)
        parts = self._speak(call), self._tell_state(), self._listen(call, told), self._execute(told)
        tasks = [asyncio.ensure_future(each) for each in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _speak(self, call: Any) -> None:
        while True:
            await call.write(wire.pack(await self._out.get()))

    async def _tell_state(self) -> None:
        before: rpc.ShardState | None = None
        process, rss_bytes = psutil.Process(), 0
        while True:
            with suppress(OSError, psutil.Error):  # where no file descriptor is free
                rss_bytes = process.memory_info().rss
            said = self.machine.commands, self.saved, self.journal.segment_bytes, rss_bytes, self.checkpoint_id
            state = rpc.ShardState(*said)
            if state != before:
                self._out.put_nowait(state)
                before = state
            await asyncio.sleep(STATE_S)

    async def _listen(self, call: Any, told: asyncio.Queue[Any]) -> None:
        while True:
            for frame in wire.unbundle(await rpc.next_frame(call.read())):
                said = wire.unpack(frame, *TOLD)
                if isinstance(said, rpc.GoBack):
                    if self.timeline.name == said.timeline:
                        raise StoreError(f"{said.checkpoint_id}, as it was copied, does not fit its coordinator's")
                    self.goes_back = Timeline(said.timeline, said.checkpoint_id, begun=True)
                    return
                await told.put(said)

    async def _execute(self, told: asyncio.Queue[Any]) -> None:
        """One thing after the other. Orders that wait together share a flush. None may be left out: where the disk is
        full for one of them this raises Refused, and the coordinator begins a new incarnation."""
        while True:
            waiting = [await told.get()]
            while not told.empty():
                waiting.append(told.get_nowait())
            for are_orders, several in groupby(waiting, key=lambda each: isinstance(each, COMMANDS)):
                if are_orders:
                    await self.thread.say_all(*several)
                else:
                    for each in several:
                        await self._do(each)

    async def _do(self, told: NO_COMMANDS) -> None:
        """What is no order, after those before it."""
        match told:
            case rpc.Bring(update):
                self._go(("up", *(d.chunk for d in update.deltas)), update, self._bring)
            case rpc.Fetch():
                self._go(("down", *told.fragments), told, self._fetch)
            case rpc.Belong(timeline):
                self.timeline = Timeline(timeline, begun=True)
                write_timeline(self.setup.folder, self.timeline)
                self._out.put_nowait(told)
            case rpc.Upload():
                self._go("copy", told, self._upload)
            case rpc.Save(checkpoint_id):
                try:
                    await self._save(checkpoint_id)
                except StoreError as error:  # the older ones are whole
                    self._tell(str(error))
            case rpc.Farewell():
                self._dismissed = True
                asyncio.get_running_loop().call_later(FAREWELL_S, self.stop.set)
                self._out.put_nowait(told)  # the coordinator ends the stream when it has written that down

    async def _end_session(self) -> None:
        await self.thread.read(self.machine.end_incarnation)
        tasks = [task for _, task in self._errands.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._errands.clear()
        if self._above is not None:
            await self._above.close()
            self._above = None

    # -- what goes up, and comes down, beside the coordinator

    def _go(self, what: Any, told: Any, errand: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Whoever is told the same again goes on: a long transfer would never end."""
        before, older = self._errands.get(what, (None, None))
        if older is not None and not older.done() and before == told:
            return
        if older is not None:
            older.cancel()
        self._errands[what] = told, asyncio.ensure_future(errand(told))

    def _link(self, incarnation: str) -> GrpcClient:
        """To the shard above, in the region's present incarnation."""
        setup = self.setup
        assert setup.above is not None
        if self._above is None:
            self._above = GrpcClient(str(setup.above), setup.server, incarnation, setup.trust("shard", GLOBAL))
        self._above.incarnation = incarnation
        return self._above

    async def _bring(self, update: UpdatePart) -> None:
        own = await self.thread.read(lambda: self.machine.going_up(update))
        if own.deltas:
            link = self._link(update.incarnation)
            try:
                await link.persist(partial(link.push, own), ABOVE_S)
            except Refused as refused:  # the coordinator above is asked too, and what it says counts
                self._tell(f"{self.setup.server}: the shard above refuses an update's chunks: {refused.reason}")

    async def _fetch(self, fetch: rpc.Fetch) -> None:
        wanted = {w.chunk: w.version for w in fetch.answer.weights if w.chunk in self.machine.chunks}
        if not wanted:
            return
        link, limit_bytes = self._link(fetch.incarnation), 8 * self.machine.parameter_map.numel + 65536
        call = partial(link.pull, 0, fetch.answer.sequence, fetch.fragments, limit_bytes)
        while True:
            answer = await link.persist(call, ABOVE_S)
            given = {w.chunk: w.version for w in answer.weights}
            if answer.incarnation == fetch.answer.incarnation and given == wanted:
                break
            await asyncio.sleep(AGAIN_S)  # coordinator and shard above spoke in different lives
        while True:
            try:
                await self.thread.say(answer)
                return
            except Refused as refused:  # while the disk is full
                await asyncio.sleep(refused.retry_s or AGAIN_S)

    # -- snapshots

    async def _upload(self, told: rpc.Upload) -> None:
        mirror, began_s, trouble = self.setup.mirror, time.monotonic(), ""
        try:
            number = next(
                (
                    n
                    for n, checkpoint_id in self.store.checkpoint_ids().items()
                    if checkpoint_id == told.checkpoint_id
                ),
                None,
            )
            if mirror is None or number is None:
                raise StoreError(f"{self.store.folder}: has no snapshot {told.checkpoint_id} to copy")
            with self.store.kept(number) as folder:
                size = await beside(lambda: mirror.upload(folder, told.checkpoint_id))
            self.events.write(SnapshotUploaded(number, size, time.monotonic() - began_s))
        except StoreError as error:  # the coordinator tries again
            trouble = str(error)[: wire.MAX_TEXT]
            self._tell(trouble)
        self._out.put_nowait(rpc.Uploaded(told.checkpoint_id, trouble))

    async def _save(self, checkpoint_id: str) -> None:
        """Write a snapshot beside further orders, which wait while the last one is still written. Raises
        StoreError."""
        if self.writing is not None:
            await asyncio.wait([self.writing])
        began_s, machine = time.monotonic(), self.machine
        commands, (frozen, meta) = await self.thread.alone(
            lambda: (machine.commands, begin_snapshot(machine, self.store, self.journal, False, checkpoint_id))
        )
        self.writing = asyncio.get_running_loop().run_in_executor(
            self.disk, finish_snapshot, self.store, self.journal, frozen, meta
        )

        def done(written: Any) -> None:
            if (error := written.exception()) is not None:
                self._tell(str(error))
                return
            self.saved, self.checkpoint_id = commands, checkpoint_id
            self.events.write(SnapshotWritten(written.result(), time.monotonic() - began_s))

        self.writing.add_done_callback(done)


def run_shard(
    machine: ShardServer, setup: ShardSetup, events: EventLog, mirror_store: MirrorStore
) -> Timeline | None:
    """The shard's incarnation. mirror_store: where its mirrors lie. Returns the past whose moment it is to take, if
    it ended for that."""
    store, journal, saved, replayed, faults = recover_shard(machine, setup.folder, setup.keep, mirror_store)
    for fault in faults:
        log.error("%s", fault)
        events.write(Trouble(fault))
    events.write(Recovery(replayed))
    host = ShardHost(machine, setup, store, journal, events, saved)
    asyncio.run(host.run())
    return host.goes_back
