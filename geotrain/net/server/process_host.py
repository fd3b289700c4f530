"""Runs one incarnation of a server process in an event loop: the frame of `geotrain.net.server.server_host`.

A state machine on its thread behind a journal, its gRPC service, its snapshots, its signals and its end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any

from geotrain.common.files import write_whole
from geotrain.config import host_port, is_loopback
from geotrain.monitor.events import EventLog, SnapshotWritten
from geotrain.net.server.connection_guard import ConnectionGuard, raise_file_limit
from geotrain.net.server.grpc_service import GrpcService
from geotrain.net.server.server_setup import LISTENING, ServerSetup
from geotrain.net.server.server_thread import ServerThread
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.journal import JournalFull
from geotrain.net.storage.recovery import Recovered, begin_snapshot, finish_snapshot
from geotrain.net.storage.snapshots import StoreError
from geotrain.net.transport.certs import Role, Trust, identity
from geotrain.net.transport.deadlines import first_of
from geotrain.outer.messages import Send
from geotrain.outer.server.server import Server

log = logging.getLogger(__name__)

LAST_WRITE_S = 600.0  # how long a snapshot waits until the one before is written


class ProcessHost(ABC):
    """Runs a recovered state machine in one event loop, from its first answer to its end."""

    def __init__(self, setup: ServerSetup, recovered: Recovered, events: EventLog) -> None:
        self.setup, self.events, self.folder = setup, events, setup.folder
        self.report = events.report
        self.server: Server = recovered.server
        self.store, self.journal = recovered.store, recovered.journal
        self.credentials = setup.credentials()
        self.stop = asyncio.Event()  # set by SIGTERM and SIGINT, among others
        self._writing: list[Future[int]] = []  # the last snapshot
        # A single thread: a write goes on when its caller is cancelled, and the next must wait for it.
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="snapshots")

    async def run(self) -> None:
        """Run until the machine's work is done, a signal comes, or something fails, whose exception is raised."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop.set)
        self.server_thread = ServerThread(self.server, self.journal, self._deliver, self.events.write)
        self.service = self._make_service()
        listening, address, guard = self.folder / LISTENING, self.setup.address, None
        try:
            if not self.store.numbers():
                # Before anybody can be answered: without a snapshot nothing was acknowledged (see `Journal.replay`).
                await self._snapshot()
            await self._before_service()
            port = await self.service.start(address)
            own = host_port(address.listening[0], port)
            write_whole(listening, json.dumps({"address": own, "pid": os.getpid()}))
            log.info("%s: listening on %s", self.setup.name, own)
            if self.credentials is None and not is_loopback(address.listening[0]):
                log.warning("listening on %s without TLS: set `security` in the cluster file", address)
            guard = ConnectionGuard(port, self.service.peers, raise_file_limit(), self.report)
            guard.start()
            await self._until_over()
            await self._end()
        finally:
            listening.unlink(missing_ok=True)
            # In this order: no call to a thread that has ended, no write to a journal that is closed.
            await self.service.stop(self._linger_s())
            self.server_thread.close()
            self._disk.shutdown()
            self.journal.close()
            if guard is not None:
                guard.stop()

    async def _until_over(self) -> None:
        """Return when one of the works is done. Raises what ended it."""
        await first_of(self.server_thread.failure, self.stop.wait(), *self._works())

    # -- what differs

    @abstractmethod
    def _make_service(self) -> GrpcService:
        """Make the service for members."""

    @abstractmethod
    def _works(self) -> list[Coroutine[Any, Any, None]]:
        """Begin what runs while the service listens. The process ends when the first of these does."""

    @abstractmethod
    def _deliver(self, send: Send) -> None:
        """Take what the machine sends; in the event loop."""

    @abstractmethod
    async def _before_service(self) -> None:
        """Do what must be done before anybody is answered."""

    @abstractmethod
    async def _end(self) -> None:
        """Do what is left to do after an end in good order; members are still answered meanwhile."""

    @abstractmethod
    def _linger_s(self) -> float:
        """Seconds that calls which are open at the end may still take."""

    # -- what all have

    def trust(self, role: Role, name: str) -> Trust | None:
        """Make what a link of this process to that server needs; None: plaintext."""
        return Trust(self.credentials, identity(role, name)) if self.credentials else None

    async def _snapshot(self) -> str:
        """Write a snapshot; returns where it is. Raises StoreError."""
        return await self._written(await self._save())

    async def _written(self, writing: asyncio.Future[int]) -> str:
        """Wait until a snapshot is written, which goes on if the caller is cancelled; returns where it is."""
        return f"{socket.gethostname()}:{self.store.path(await asyncio.shield(writing)).absolute()}"

    async def _save(self, ended: bool = False) -> asyncio.Future[int]:
        """Freeze the state between two messages, and write it while the machine goes on. The future gives the
        snapshot's number.

        ended: as `begin_snapshot` takes it. Raises StoreError, as the future does.
        """
        began_s = time.monotonic()
        try:
            begun = await self.server_thread.alone(partial(self._begin_snapshot, ended))
        except JournalFull as full:
            raise StoreError(str(full)) from full
        writing = asyncio.wrap_future(begun)

        def done(_: Any) -> None:
            if not writing.cancelled() and writing.exception() is None:
                self.events.write(SnapshotWritten(writing.result(), time.monotonic() - began_s))

        writing.add_done_callback(done)
        return writing

    def _begin_snapshot(self, ended: bool) -> Future[int]:
        """Freeze the state, on the machine's thread.

        It is written even if the caller is cancelled: what is frozen and never written would be copied in vain.
        """
        # One snapshot at a time: the one before may still be written, if its caller was cancelled.
        if wait(self._writing, timeout=LAST_WRITE_S).not_done:
            raise StoreError(f"{self.folder}: the snapshot before is still being written")
        owner, launch = replace(self.setup.owner, origin=self.server.origin), self.setup.launch
        frozen, meta = begin_snapshot(self.server, self.store, self.journal, ended, launch, owner)
        self._writing = [self._disk.submit(self._finish_snapshot, frozen, meta)]
        return self._writing[0]

    def _finish_snapshot(self, frozen: FrozenState, meta: dict[str, Any]) -> int:
        """Write the frozen state, on the disk's thread. Raises StoreError."""
        return finish_snapshot(self.store, self.journal, frozen, meta)
