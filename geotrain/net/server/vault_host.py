"""One vault as a process: its state machine behind a journal, its service for members, its stream to the book.

On its disk are, as a server's: `snapshots/`, written when the book says so, and `journal/`, with all that it was told
since. It comes back from these to what it had, and asks the book for the orders after its last. A member's payload is
on disk before the book hears of it. Where the book says so, it goes back to an older moment
(`geotrain.net.storage.past`).
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
from geotrain.config import Address
from geotrain.monitor.events import EventLog, Recovery, SnapshotUploaded, SnapshotWritten, Trouble
from geotrain.net.server.connection_guard import ConnectionGuard, raise_file_limit
from geotrain.net.server.grpc_service import GrpcService
from geotrain.net.server.server_setup import LISTENING
from geotrain.net.server.server_thread import GROUP, ServerThread
from geotrain.net.server.vault_sessions import FAREWELL_S
from geotrain.net.storage.journal import Journal
from geotrain.net.storage.past import Past, read_past, write_past
from geotrain.net.storage.recovery import JOURNAL, begin_snapshot, finish_snapshot
from geotrain.net.storage.snapshot_mirror import SnapshotMirror, beside
from geotrain.net.storage.snapshots import SNAPSHOTS, SnapshotStore, StoreError
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.certs import Credentials, Trust, identity, open_channel
from geotrain.net.transport.grpc_client import CHANNEL_OPTIONS, GrpcClient
from geotrain.outer.messages import GLOBAL, Answer, Join, Refused, Send, UpdatePart
from geotrain.outer.mirror_store import Shelf
from geotrain.outer.server.shard_server import VaultMachine
from geotrain.outer.shards.shard import Apply, Copy, Forget, Freeze, Merge, SendUp, StartOver
from geotrain.outer.shards.shards import NewLife

log = logging.getLogger(__name__)

ORDERS = Apply, Freeze, Forget, SendUp, Merge, StartOver, Copy, NewLife, Join
JOURNALED = (*ORDERS, UpdatePart, Answer)
NO_ORDERS = rpc.Belong | rpc.Bring | rpc.Fetch | rpc.Save | rpc.Upload | rpc.Farewell
TOLD = (*ORDERS, *typing.get_args(NO_ORDERS), rpc.GoBack)
AGAIN_S = 0.2
CALL_S = (0.2, 2.0)  # pauses between two calls of the book, drawn at random
NEVER_SILENT_S = 1e9  # who is silent is for the book to notice
ABOVE_S = 30 * 24 * 3600.0  # how long the vault above is tried
STATE_S = 1.0  # how often the book is told how far the disk is


@dataclass(frozen=True)
class VaultSetup:
    """Where a vault stands. server: its server's name. book: where that listens. above: where the vault of the same
    pieces at the global server does; None: for a vault of the global server. mirror: where copies of its snapshots
    go; None: nowhere."""

    server: str
    address: Address
    book: Address
    above: Address | None
    folder: Path
    credentials: Credentials | None
    keep: int
    mirror: SnapshotMirror | None = None

    def trust(self, role: Any, name: str) -> Trust | None:
        return Trust(self.credentials, identity(role, name)) if self.credentials else None


def recover_vault(
    machine: VaultMachine, folder: Path, keep: int, shelf: Shelf | None = None
) -> tuple[SnapshotStore, Journal, int, int, list[str]]:
    """Bring the vault's state back from its folder; in an empty folder it stays as it is. Returns where it is kept,
    after how many orders its newest snapshot was taken (-1: there is none), how many messages were handled again, and
    sentences about what was found damaged. shelf: where its mirrors lie.

    Raises StoreError, JournalDamaged, LayoutError.
    """
    store = SnapshotStore(folder / SNAPSHOTS, keep, shelf)
    machine.vaults.put_mirrors_on(store.shelf)
    newest, faults = store.load_newest()
    if newest is None and faults:
        raise StoreError(
            "\n".join([*faults, f"{store.folder}: no snapshot is whole: docs/servers.md says what to do"])
        )
    if newest is not None:
        machine.load(newest.tensors, newest.meta["state"])
    journal = Journal(folder / JOURNAL, JOURNALED, limit_bytes=8 * machine.layout.numel + 65536)
    replayed = 0
    for message in journal.replay(newest.meta["segment"] if newest else 1):
        replayed += 1
        with suppress(Refused):  # as it was then; what it says was said then
            machine.handle(message)
    machine.end_life()
    saved = newest.meta["state"]["orders"] if newest else -1
    return store, journal, saved, replayed, faults + ([journal.cut] if journal.cut else [])


class VaultHost:
    """Runs a recovered vault in one event loop, until its book says farewell or SIGTERM comes."""

    def __init__(
        self, machine: VaultMachine, setup: VaultSetup, store: SnapshotStore, journal: Journal, events: EventLog,
        saved: int,
    ) -> None:  # fmt: skip
        self.machine, self.setup, self.store, self.journal, self.events = machine, setup, store, journal, events
        self.saved = saved  # after how many orders the newest snapshot was taken; -1: there is none
        self.writing: asyncio.Future[Any] | None = None  # a snapshot
        self.moment = max(store.moments().items(), default=(0, ""))[1]  # of that snapshot
        self.past = read_past(setup.folder)
        self.goes_back: Past | None = None  # what it is to take in its next life
        self.stop = asyncio.Event()
        self._dismissed = False  # its book has said farewell
        self.disk = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._out: asyncio.Queue[Any] = asyncio.Queue()  # what the book is to be told
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
        raise Refused("snapshots are ordered from the server: its vaults write theirs with it")

    # -- the stream to the book

    async def _sessions(self) -> None:
        setup, trouble = self.setup, ""
        role: Any = "global" if setup.server == GLOBAL else "region"
        while not self.stop.is_set():
            channel = open_channel(aio, str(setup.book), setup.trust(role, setup.server), CHANNEL_OPTIONS)
            call = channel.stream_stream(f"/{rpc.SERVICE}/vault")()
            try:
                await self._session(call)
            except aio.AioRpcError as error:
                refused = rpc.refusal_of(error)
                if refused is not None and refused.retry_s is None:
                    raise StoreError(refused.reason) from None
                if trouble != (trouble := str(refused or error.code().name.lower())):
                    log.warning("%s: its book at %s: %s; it is called again", setup.server, setup.book, trouble)
            except (wire.DamagedError, asyncio.InvalidStateError):
                pass  # the stream ended
            except Refused as refused:
                self._tell(refused.reason)
            finally:
                await self._end_session()
                ended_well = call.done() and await call.code() is StatusCode.OK
                await channel.close()
            # A stream that breaks has perhaps not carried this vault's farewell, for which its book waits as long as
            # this vault calls it then: FAREWELL_S.
            if (self._dismissed and ended_well) or self.goes_back is not None:
                self.stop.set()
                return
            await asyncio.sleep(random.uniform(*CALL_S))

    async def _session(self, call: Any) -> None:
        self._out = asyncio.Queue()
        machine = self.machine
        hello = rpc.VaultHello(self.setup.server, machine.index, machine.number, machine.orders, self.past.name)
        await call.write(wire.pack(hello))
        told: asyncio.Queue[Any] = asyncio.Queue(GROUP)
        parts = self._speak(call), self._tell_state(), self._listen(call, told), self._obey(told)
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
        before: rpc.VaultState | None = None
        process, rss_bytes = psutil.Process(), 0
        while True:
            with suppress(OSError, psutil.Error):  # where no file descriptor is free
                rss_bytes = process.memory_info().rss
            said = self.machine.orders, self.saved, self.journal.segment_bytes, rss_bytes, self.moment
            state = rpc.VaultState(*said)
            if state != before:
                self._out.put_nowait(state)
                before = state
            await asyncio.sleep(STATE_S)

    async def _listen(self, call: Any, told: asyncio.Queue[Any]) -> None:
        while True:
            for frame in wire.unbundle(await rpc.next_frame(call.read())):
                said = wire.unpack(frame, *TOLD)
                if isinstance(said, rpc.GoBack):
                    if self.past.name == said.past:
                        raise StoreError(f"{said.moment}, as it was copied, does not fit its book's")
                    self.goes_back = Past(said.past, said.moment, begun=True)
                    return
                await told.put(said)

    async def _obey(self, told: asyncio.Queue[Any]) -> None:
        """One thing after the other. Orders that wait together share a flush. None may be left out: where the disk is
        full for one of them this raises Refused, and the book begins a new life."""
        while True:
            waiting = [await told.get()]
            while not told.empty():
                waiting.append(told.get_nowait())
            for are_orders, several in groupby(waiting, key=lambda each: isinstance(each, ORDERS)):
                if are_orders:
                    await self.thread.say_all(*several)
                else:
                    for each in several:
                        await self._do(each)

    async def _do(self, told: NO_ORDERS) -> None:
        """What is no order, after those before it."""
        match told:
            case rpc.Bring(update):
                self._go(("up", *(d.piece for d in update.deltas)), update, self._bring)
            case rpc.Fetch():
                self._go(("down", *told.fragments), told, self._fetch)
            case rpc.Belong(past):
                self.past = Past(past, begun=True)
                write_past(self.setup.folder, self.past)
                self._out.put_nowait(told)
            case rpc.Upload():
                self._go("copy", told, self._upload)
            case rpc.Save(moment):
                try:
                    await self._save(moment)
                except StoreError as error:  # the older ones are whole
                    self._tell(str(error))
            case rpc.Farewell():
                self._dismissed = True
                asyncio.get_running_loop().call_later(FAREWELL_S, self.stop.set)
                self._out.put_nowait(told)  # the book ends the stream when it has written that down

    async def _end_session(self) -> None:
        await self.thread.read(self.machine.end_life)
        tasks = [task for _, task in self._errands.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._errands.clear()
        if self._above is not None:
            await self._above.close()
            self._above = None

    # -- what goes up, and comes down, beside the book

    def _go(self, what: Any, told: Any, errand: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Whoever is told the same again goes on: a long transfer would never end."""
        before, older = self._errands.get(what, (None, None))
        if older is not None and not older.done() and before == told:
            return
        if older is not None:
            older.cancel()
        self._errands[what] = told, asyncio.ensure_future(errand(told))

    def _link(self, incarnation: str) -> GrpcClient:
        """To the vault above, in the region's present life."""
        setup = self.setup
        assert setup.above is not None
        if self._above is None:
            self._above = GrpcClient(str(setup.above), setup.server, incarnation, setup.trust("vault", GLOBAL))
        self._above.incarnation = incarnation
        return self._above

    async def _bring(self, update: UpdatePart) -> None:
        own = await self.thread.read(lambda: self.machine.going_up(update))
        if own.deltas:
            link = self._link(update.incarnation)
            try:
                await link.persist(partial(link.push, own), ABOVE_S)
            except Refused as refused:  # the book above is asked too, and what it says counts
                self._tell(f"{self.setup.server}: the vault above refuses an update's pieces: {refused.reason}")

    async def _fetch(self, fetch: rpc.Fetch) -> None:
        wanted = {w.piece: w.version for w in fetch.answer.weights if w.piece in self.machine.pieces}
        if not wanted:
            return
        link, limit_bytes = self._link(fetch.incarnation), 8 * self.machine.layout.numel + 65536
        call = partial(link.pull, 0, fetch.answer.sequence, fetch.fragments, limit_bytes)
        while True:
            answer = await link.persist(call, ABOVE_S)
            given = {w.piece: w.version for w in answer.weights}
            if answer.life == fetch.answer.life and given == wanted:
                break
            await asyncio.sleep(AGAIN_S)  # book and vault above spoke in different lives
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
            number = next((n for n, moment in self.store.moments().items() if moment == told.moment), None)
            if mirror is None or number is None:
                raise StoreError(f"{self.store.folder}: has no snapshot {told.moment} to copy")
            with self.store.kept(number) as folder:
                size = await beside(lambda: mirror.upload(folder, told.moment))
            self.events.write(SnapshotUploaded(number, size, time.monotonic() - began_s))
        except StoreError as error:  # the book tries again
            trouble = str(error)[: wire.MAX_TEXT]
            self._tell(trouble)
        self._out.put_nowait(rpc.Uploaded(told.moment, trouble))

    async def _save(self, moment: str) -> None:
        """Write a snapshot beside further orders, which wait while the last one is still written. Raises
        StoreError."""
        if self.writing is not None:
            await asyncio.wait([self.writing])
        began_s, machine = time.monotonic(), self.machine
        orders, (frozen, meta) = await self.thread.alone(
            lambda: (machine.orders, begin_snapshot(machine, self.store, self.journal, False, moment))
        )
        self.writing = asyncio.get_running_loop().run_in_executor(
            self.disk, finish_snapshot, self.store, self.journal, frozen, meta
        )

        def done(written: Any) -> None:
            if (error := written.exception()) is not None:
                self._tell(str(error))
                return
            self.saved, self.moment = orders, moment
            self.events.write(SnapshotWritten(written.result(), time.monotonic() - began_s))

        self.writing.add_done_callback(done)


def run_vault(machine: VaultMachine, setup: VaultSetup, events: EventLog, shelf: Shelf) -> Past | None:
    """The vault's life. shelf: where its mirrors lie. Returns the past whose moment it is to take, if it ended for
    that."""
    store, journal, saved, replayed, faults = recover_vault(machine, setup.folder, setup.keep, shelf)
    for fault in faults:
        log.error("%s", fault)
        events.write(Trouble(fault))
    events.write(Recovery(replayed))
    host = VaultHost(machine, setup, store, journal, events, saved)
    asyncio.run(host.run())
    return host.goes_back
