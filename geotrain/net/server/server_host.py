"""The parts of one server process side by side in an event loop: the server thread, the gRPC service, snapshots,
events and, in a region server, the client to the global server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from geotrain.common.files import OutputError, out_of_room, whole_file
from geotrain.common.names import GLOBAL
from geotrain.config import is_loopback
from geotrain.monitor.events import (
    Acknowledged,
    EventLog,
    LinkTraffic,
    SnapshotWritten,
    Trouble,
    UpdatesLost,
)
from geotrain.monitor.monitor import Monitor
from geotrain.net.server.connection_guard import ConnectionGuard, raise_file_limit
from geotrain.net.server.failure_detector import REGION_SILENT_S, WORKER_SILENT_S
from geotrain.net.server.grpc_service import GrpcService
from geotrain.net.server.region_client import RegionClient
from geotrain.net.server.sampler import Sampler
from geotrain.net.server.server_setup import LISTENING, ServerSetup
from geotrain.net.server.server_thread import ServerThread
from geotrain.net.server.shard_sessions import FAREWELL_S, Lineage, ShardLost, ShardSessions
from geotrain.net.storage.journal import JOURNAL_PER_STATE, MIN_JOURNAL_BYTES, JournalFull
from geotrain.net.storage.recovery import Dismissed, Recovered, Stopped, begin_snapshot, finish_snapshot
from geotrain.net.storage.remote_snapshots import Uploader
from geotrain.net.storage.snapshots import StoreError
from geotrain.net.transport import rpc
from geotrain.net.transport.certs import Credentials, Trust, identity
from geotrain.net.transport.deadlines import within
from geotrain.net.transport.fragment_bytes import FragmentBytes
from geotrain.net.transport.tcp_counters import TcpCounters, Traffic
from geotrain.outer.messages import Send, Validated
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.shards.remote import RemoteShards

log = logging.getLogger(__name__)

SNAPSHOT_RETRY_S = 30.0
LAST_WRITE_S = 600.0  # how long a snapshot waits until the one before is written
TRAFFIC_EVENT_S = 5.0  # time between two events about the link's traffic
LAST_UPLOAD_S = 120.0  # how long the process waits at its end for the last snapshot's copy
FINAL_VALIDATION_S = 600.0  # at most, of the final weights; the launcher waits longer for its servers
LINGER_S = 2.0  # the server goes on for so long after its end, since a member whose last answer was lost asks again
SHARDS_LOOK_S = 0.05
TRAFFIC = "traffic.json"  # in the server's folder: bytes on its links so far in the run, for its next incarnation
STATUS = "status.json"  # in the server's folder once it has ended: its last status


class ServerHost:
    """Runs the parts of one server in one event loop. This is the global server's; `RegionServerHost` is a region
    server's."""

    def __init__(
        self,
        recovered: Recovered,
        events: EventLog,
        place: ServerSetup,
        credentials: Credentials | None,
        monitor: Monitor,
        uploader: Uploader | None,
    ) -> None:
        self.place, self.credentials, self.uploader = place, credentials, uploader
        self.server, self.store, self.journal = recovered.server, recovered.store, recovered.journal
        self.ended_before, self.dismissed = recovered.ended, recovered.dismissed
        self.events, self.folder, self.run_config, self.monitor = events, place.folder, place.run, monitor
        self.region_client: RegionClient | None = None
        self.guard: ConnectionGuard | None = None
        self.shards: ShardSessions | None = None  # where they are in processes of their own
        self.saved_updates, self.saved_s = self._updates(), time.monotonic()  # at the last snapshot, or the start
        # its shards have no snapshot of the newest one's moment
        self.alone = "" in self.store.checkpoint_ids().values()
        self.carried_bytes = 0  # the size of the journal's open segment at its beginning, where messages are repeated
        self.stop = asyncio.Event()
        self.saving = asyncio.Lock()
        self.writing: list[Future[int]] = []  # the last snapshot
        # A single thread: a write goes on when its caller is cancelled, and the next must wait for it.
        self.disk = ThreadPoolExecutor(1, thread_name_prefix="snapshots")

    async def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop.set)
        self.server_thread = ServerThread(self.server, self.journal, self._deliver, self.events.write)
        if isinstance(far := self.server.shards, RemoteShards):
            lineage = Lineage(self.folder, self.uploader.copies if self.uploader else None)
            names = self.server.name, self.server.incarnation
            self.shards = ShardSessions(
                self.server_thread, far, *names, lineage, self._note_dismissed, self.dismissed
            )
            if self.uploader is not None:
                self.uploader.shards = self.shards.upload
        of_regions = self.server.member_role == "region"
        self.service = GrpcService(
            self.server_thread,
            self._snapshot,
            self._status,
            silent_s=REGION_SILENT_S if of_regions else WORKER_SILENT_S,
            credentials=self.credentials,
            shards=self.shards,
        )
        address = self.place.address
        self.tcp_counters = TcpCounters(self._is_wide_area, self._traffic_before())
        self.sampler = Sampler(
            self.server_thread,
            self.service,
            self.events,
            self.folder,
            self._traffic,
            self.tcp_counters.total,
            self.run_config.monitor.sample_s,
            rpc.REGION_BEAT_S if of_regions else rpc.BEAT_S,
        )
        uploading: asyncio.Future[None] | None = None
        listening = self.folder / LISTENING
        try:
            if not self.store.numbers():
                # Before anybody can be answered: without a snapshot nothing was acknowledged (see `Journal.replay`).
                await self._snapshot()
            port = await self.service.start(address)
            (self.folder / STATUS).unlink(missing_ok=True)
            with whole_file(listening) as file:
                json.dump({"address": f"{address.host}:{port}", "pid": os.getpid()}, file)
            if self.credentials is None and not is_loopback(address.host):
                log.warning("listening on %s without TLS: set `security` in the cluster file", address)
            self.tcp_counters.start()
            self.guard = ConnectionGuard(port, self.service.peers, raise_file_limit(), self._tell)
            self.guard.start()
            uploading = asyncio.ensure_future(self.uploader.run()) if self.uploader else None
            await self._until_over()
            # Else some shards may be gone for good, and the journals hold all.
            whole = self.shards is None or (self.shards.ready and not self.stop.is_set())
            if whole:
                await self._last_snapshot()
            # Behind the joins with which the last snapshot's journal begins: these lives have ended with this one.
            await self._note(Stopped())
            if whole:
                await self._last_upload()
            if self.shards is not None:
                await self._farewell(self.shards)
        finally:
            if uploading is not None:
                uploading.cancel()
            listening.unlink(missing_ok=True)
            ended_early = self.shards is not None and self.shards.lost.done()
            await self.service.stop(0 if ended_early else LINGER_S)
            self.server_thread.close()
            self.disk.shutdown()
            self.journal.close()
            self.tcp_counters.stop()
            if self.guard is not None:
                self.guard.stop()

    async def _until_over(self) -> None:
        tasks: list[asyncio.Future[Any]] = [
            self.server_thread.failure,
            asyncio.ensure_future(self.stop.wait()),
            asyncio.ensure_future(self._snapshots()),
            asyncio.ensure_future(self._tell_traffic()),
            asyncio.ensure_future(self._until_finished()),
        ]
        if self.shards is not None:
            tasks.append(asyncio.ensure_future(self.shards.until_lost()))
        if self.run_config.monitor.enabled:
            tasks.append(asyncio.ensure_future(self.sampler.run()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            try:
                with whole_file(self.folder / STATUS) as file:  # before the links close, and their bytes are gone
                    json.dump({**self.service.status(), "page": None, "metrics": None}, file)
            except OutputError as error:  # it must not hide why the server ends
                self._tell(str(error))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.region_client is not None:
                await self.region_client.close()

    async def _last_snapshot(self) -> None:
        """The snapshot of the end, which waits for room on the disk. Who stops the server need not wait: the journal
        holds all that a snapshot would."""
        while True:
            try:
                await self._snapshot(ended=self.server.finished)
                return
            except StoreError as error:
                if not out_of_room(error):
                    raise
                self._tell(str(error))
                if self.stop.is_set():
                    return
                with suppress(TimeoutError):
                    await within(SNAPSHOT_RETRY_S, self.stop.wait())

    async def _note(self, what: Stopped | Dismissed) -> None:
        def note() -> None:
            with suppress(JournalFull):  # then lives count as restarted, and shards are waited for
                self.journal.append(what)
                self.journal.flush()

        await self.server_thread.alone(note)

    async def _note_dismissed(self, shard: int) -> None:
        await self._note(Dismissed(shard))

    async def _wait_for_shards(self) -> None:
        """Who had ended waits for none: to those that are left it says farewell."""
        if self.shards is not None and not self.ended_before:
            await self.shards.wait_ready()

    async def _farewell(self, shards: ShardSessions) -> None:
        """Wait until the shards have heard that the server ended in good order, or until this process is told to
        end, as they are then, too."""
        said = asyncio.ensure_future(shards.farewell(FAREWELL_S if shards.ready or self.ended_before else 0.0))
        told = asyncio.ensure_future(self.stop.wait())
        await asyncio.wait([said, told], return_when=asyncio.FIRST_COMPLETED)
        for shard in [] if told.done() else said.result():
            self._tell(f"{self.server.name}: shard {shard} has not heard that the server has ended: stop it")
        for task in (said, told):
            task.cancel()

    def _tell(self, what: str) -> None:
        log.error("%s", what)
        self.events.write(Trouble(what))

    async def _last_upload(self) -> None:
        """Wait for the last snapshot's copy. Without it the snapshot is still on this machine's disk, so it is no
        reason to fail."""
        if self.uploader is not None:
            try:
                await self.uploader.finish(LAST_UPLOAD_S)
            except StoreError as error:
                self._tell(str(error))

    async def _until_finished(self) -> None:
        """Returns when the server has finished and this process should end in good order."""
        await self._wait_for_shards()
        while True:
            await self.server_thread.until(lambda: self.server.finished or None, float("inf"))
            await self._validate_final_weights()
            await asyncio.sleep(LINGER_S)
            if self.server.finished:  # else somebody has joined meanwhile, and waits to be told that all is done
                return

    async def _validate_final_weights(self) -> None:
        """Once all data is trained. No worker is there any more, so this process does it, in a bounded time."""
        server, evaluate, began_s = self.server, self.place.evaluate, time.monotonic()
        if evaluate is None or not server.final_validation:
            return
        if self.shards is not None:
            self._tell("the final weights are in other processes: `geotrain eval` validates them, with an export")
            return
        given_up = threading.Event()

        def go_on() -> bool:
            return not given_up.is_set() and time.monotonic() - began_s < FINAL_VALIDATION_S

        parameter_map, number, version = server.parameter_map, server.final_validation, max(server.versions)
        weights = (w for f in parameter_map.fragments for w in parameter_map.split(f.index, server.weights(f.index)))
        try:
            loss = await asyncio.to_thread(evaluate, weights, go_on)
            seconds = time.monotonic() - began_s
            await self.server_thread.say(Validated(GLOBAL, number, version, loss, seconds))
        except Exception as error:  # whatever it is, the run is trained, and its weights are to be written
            self._tell(f"the final weights are not validated: {error}; `geotrain eval` does it with an export")
        finally:
            given_up.set()

    async def _snapshots(self) -> None:
        """Take a snapshot now and then, so that neither the journal nor the time to replay it grows without bound."""
        while True:
            await self.server_thread.until(lambda: self._snapshot_is_due() or None, float("inf"))
            try:
                await self._snapshot()
            except StoreError as error:  # the older ones are whole, so the server can go on
                self._tell(str(error))
                await asyncio.sleep(SNAPSHOT_RETRY_S)

    async def _tell_traffic(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await asyncio.sleep(TRAFFIC_EVENT_S)
            finally:  # also when cancelled at the end, so that the last seconds are told
                recent, seconds = self.tcp_counters.take_recent(), round(time.monotonic() - began_s, 3)
                sent = recent.sent_bytes, recent.peak_sent_bytes
                received = recent.received_bytes, recent.peak_received_bytes
                # A region server sends up and receives from above; the global server the other way round.
                up, down = (received, sent) if self.place.role == "global" else (sent, received)
                self.events.write(LinkTraffic(seconds, up[0], down[0], up[1], down[1]))
                self._keep_traffic()

    def _traffic_before(self) -> Traffic:
        """What earlier lives of this server have counted on its wide-area links; nothing where no file says so."""
        try:
            saved = json.loads((self.folder / TRAFFIC).read_text())
            self.peers_before = {name: Traffic(*counts) for name, counts in saved["peers"].items()}
            return Traffic(*saved["links"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self.peers_before = {}
            return Traffic()

    def _keep_traffic(self) -> None:
        """For the next incarnation. What is counted after the last call before a kill is missing there."""

        def counts(traffic: Traffic) -> list[int]:
            return [traffic.sent_bytes, traffic.received_bytes, traffic.peak_sent_bytes, traffic.peak_received_bytes]

        peers = {name: counts(traffic) for name, traffic in self._traffic().items()}
        with suppress(OutputError), whole_file(self.folder / TRAFFIC) as file:  # the disk may be full
            json.dump({"links": counts(self.tcp_counters.total), "peers": peers}, file)

    def _snapshot_is_due(self) -> bool:
        enough_bytes = max(MIN_JOURNAL_BYTES, JOURNAL_PER_STATE * 4 * self.server.parameter_map.numel)
        journal_bytes = self.journal.segment_bytes - self.carried_bytes
        if self.shards is not None:
            journal_bytes = max(journal_bytes, self.shards.journal_bytes)
        late = time.monotonic() - self.saved_s >= 60.0 * self.run_config.checkpoint.every_minutes
        due = (late and self._updates() > self.saved_updates) or journal_bytes >= enough_bytes
        return due or (self.alone and self.uploader is not None)

    async def _snapshot(self, ended: bool = False) -> str:
        """Freeze the state between two messages, then write it while the server goes on. Returns where it is.

        Raises StoreError.
        """
        async with self.saving:
            alone = self.shards is not None and not self.store.numbers()
            if self.shards is not None and not alone:
                await self.shards.wait_ready()
            checkpoint_id = "" if alone else self.store.new_checkpoint_id()
            began_s, updates = time.monotonic(), self._updates()
            try:
                writing = await self.server_thread.alone(partial(self._begin_snapshot, ended, checkpoint_id))
            except JournalFull as full:
                raise StoreError(str(full)) from full
            wrapped = asyncio.wrap_future(writing)
            wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever still waits for it
            number = await asyncio.shield(wrapped)
            self.alone = alone
            self.saved_updates, self.saved_s = updates, began_s
            self.events.write(SnapshotWritten(number, time.monotonic() - began_s))
            if self.uploader is not None:
                self.uploader.wake()
            return f"{socket.gethostname()}:{self.store.path(number).absolute()}"

    def _begin_snapshot(self, ended: bool, checkpoint_id: str) -> Future[int]:
        """Freeze the state, on the server's thread. It is written even if the caller is cancelled: what is frozen and
        never written would be copied in vain."""
        # One snapshot at a time: the one before may still be written, if its caller was cancelled.
        if wait(self.writing, timeout=LAST_WRITE_S).not_done:
            raise StoreError(f"{self.folder}: the snapshot before is still being written")
        frozen, meta = begin_snapshot(self.server, self.store, self.journal, ended, checkpoint_id, self.place.launch)
        self.carried_bytes = self.journal.segment_bytes
        if self.shards is not None:
            self.shards.tell_all(rpc.Save(checkpoint_id))
        finish = partial(finish_snapshot, self.store, self.journal, frozen, meta)
        self.writing = [self.disk.submit(self._finish, finish, checkpoint_id)]
        return self.writing[0]

    def _finish(self, finish: Callable[[], int], checkpoint_id: str) -> int:
        """Write the coordinator's part when the shards have written theirs: what is before it is then asked for by
        none."""
        deadline_s = time.monotonic() + LAST_WRITE_S
        while checkpoint_id and self.shards is not None and not self.shards.saved(checkpoint_id):
            if self.shards.lost.done():
                raise ShardLost(f"{self.folder}: no snapshot, since a shard was lost")
            if time.monotonic() > deadline_s:
                raise StoreError(f"{self.folder}: no snapshot, since not all shards have written theirs")
            time.sleep(SHARDS_LOOK_S)
        return finish()

    def _updates(self) -> int:
        return sum(member.updates for member in self.server.members.values())

    def _deliver(self, send: Send) -> None:
        if send.to != GLOBAL:
            self.service.deliver(send)
        elif self.region_client is not None:
            self.region_client.deliver(send)

    def _is_wide_area(self, peer: str) -> bool:
        """Whether a connection is on a link between regions: in the global server all are, in a region server those
        to the global server, which are told by its port."""
        return self.place.role == "global" or peer.rpartition(":")[2] == str(self.place.cluster.global_server.port)

    def _status(self) -> dict[str, Any]:
        """What the process adds to the server's status.

        links: bytes on the wide-area links, up towards the global server and down from it, their highest rates over a
        second, and each fragment's part of the bytes. peers: bytes with each member, and each fragment's part.
        """
        members = self._traffic()
        total = self.tcp_counters.total
        parameter_map, by_member = self.server.parameter_map, self.service.fragment_bytes
        fragments = FragmentBytes()
        above = [self.region_client.link.fragment_bytes] if self.region_client else []
        for counted in by_member.values() if self.place.role == "global" else above:
            fragments.add(counted)
        sent, received = ("up", "down") if self.place.role == "region" else ("down", "up")
        return {
            "links": {
                f"{sent}_bytes": total.sent_bytes,
                f"{received}_bytes": total.received_bytes,
                f"peak_{sent}_bytes_per_s": total.peak_sent_bytes,
                f"peak_{received}_bytes_per_s": total.peak_received_bytes,
                "fragments": fragments.status(parameter_map),
            },
            "peers": {
                name: {
                    "sent_bytes": t.sent_bytes,
                    "received_bytes": t.received_bytes,
                    "fragments": by_member[name].status(parameter_map),
                }
                for name, t in members.items()
            },
            "connected": self.region_client is None or self.region_client.connected,
            "snapshot_updates": self.saved_updates,
            "full": self.server_thread.full,
            "shards": self.shards.status() if self.shards else [],
            "page": self.monitor.page_url,
            "metrics": self.monitor.metrics_url,
            "snapshots": self.uploader.status() if self.uploader else None,
        }

    def _traffic(self) -> dict[str, Traffic]:
        """Bytes with each member, over all its connections, in this incarnation of the server and the earlier
        ones."""
        traffic = self.tcp_counters.traffic()
        members = {name: replace(before) for name, before in self.peers_before.items()}
        for peer, member in list(self.service.peers.items()):
            if peer in traffic:
                members.setdefault(member, Traffic()).join(traffic[peer])
        return members


class RegionServerHost(ServerHost):
    """A region server's parts. It ends when its client does, after the global server has taken the region's
    goodbye."""

    server: RegionServer

    def _until_finished(self) -> Coroutine[Any, Any, None]:
        # No coroutine function: the client is made at once, not when the task first runs. What the server sends
        # before there is a client would be lost.
        name, incarnation = self.server.name, self.server.incarnation
        self.region_client = self.sampler.region_client = RegionClient(
            self.server_thread,
            self.server,
            str(self.place.cluster.global_server),
            trust=Trust(self.credentials, identity("global", GLOBAL)) if self.credentials else None,
            on_lost=lambda updates: self.events.write(UpdatesLost(updates)),
            on_acknowledged=lambda sequence: self.events.write(Acknowledged(name, incarnation, sequence)),
            metrics=self.sampler.metrics,
            above=self.place.above(),
            own=self.shards,
        )
        return self._run_client(self.region_client)

    async def _run_client(self, client: RegionClient) -> None:
        await self._wait_for_shards()
        await client.run()
