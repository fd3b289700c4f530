"""A server as a process: its state machine, service, uplink, snapshots and diary, from start to exit code."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geotrain.canonical import UnsupportedModelError
from geotrain.config import EXIT_FOR_GOOD, Address, ClusterConfig, ConfigError, RunConfig, is_loopback
from geotrain.files import OutputError, whole_file
from geotrain.initial import initial_tensor
from geotrain.monitor.events import (
    Acknowledged,
    EventLog,
    LinkTraffic,
    Recovery,
    SnapshotWritten,
    Trouble,
    UpdatesLost,
)
from geotrain.monitor.history import facts
from geotrain.monitor.monitor import Monitor
from geotrain.net import calls
from geotrain.net.certs import CertificateError, Credentials, Role, Trust, identity, load_credentials
from geotrain.net.diary import Diary
from geotrain.net.journal import JournalDamaged, JournalFull
from geotrain.net.link import Unreachable
from geotrain.net.machine import AnyServer, Machine
from geotrain.net.meter import Meter, Traffic
from geotrain.net.pulse import REGION_SILENT_S, WORKER_SILENT_S
from geotrain.net.recovery import JOURNAL, Recovered, begin_snapshot, finish_snapshot, recover
from geotrain.net.remote import Remote, Uploader
from geotrain.net.service import ListenError, Service
from geotrain.net.store import SNAPSHOTS, Store, StoreError, alone_in
from geotrain.net.tally import Tally
from geotrain.net.uplink import Uplink
from geotrain.net.watch import Watch
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.layout import Layout, LayoutError, layout_of
from geotrain.outer.messages import GLOBAL, Refused, Send
from geotrain.outer.region_server import RegionServer
from geotrain.outer.server import identity_of

log = logging.getLogger(__name__)

SNAPSHOT_RETRY_S = 30.0
MIN_JOURNAL_BYTES = 256 << 20
JOURNAL_PER_STATE = 8  # a journal segment may grow to so many times the model's size in fp32
TRAFFIC_EVENT_S = 5.0
LAST_UPLOAD_S = 120.0  # at the end
LINGER_S = 2.0  # after the end: a member whose last acknowledgement was lost asks again
LISTENING = "listening.json"  # in the server's folder, while it listens: its address and process id
STATUS = "status.json"  # in the server's folder, once it has ended: what it last said of itself
EVENTS = "events.jsonl"
FOR_GOOD = (JournalDamaged, CertificateError, LayoutError, ConfigError, UnsupportedModelError)
EXPECTED = (*FOR_GOOD, Refused, ListenError, StoreError, Unreachable, OutputError)


def serve_global(run: RunConfig, cluster: ClusterConfig, folder: Path, resume: bool) -> int:
    """Run the global server until every member has left, or SIGTERM. Returns the process's exit code."""

    def build() -> GlobalServer:
        layout = layout_of(run)
        regions = {r.name: tuple(w.name for w in r.workers) for r in cluster.serving}
        samples = run.data.train_samples, run.samples_per_step
        every = run.monitor.validate_every_samples
        server = GlobalServer(identity_of(run, layout), layout, run.outer, regions, *samples, every)
        server.incarnation = uuid.uuid4().hex
        return server

    def begin(server: AnyServer) -> None:
        server.set_weights(initial_weights(run, server.layout))

    role: Role = "worker" if run.outer.levels == 1 else "region"
    return _serve(build, begin, _Place(cluster, "global", GLOBAL, role), run, folder, resume)


def serve_region(run: RunConfig, cluster: ClusterConfig, region: str, folder: Path, resume: bool) -> int:
    """Run a region's server until the global server took its goodbye, or SIGTERM. Returns the exit code."""

    def build() -> RegionServer:
        layout = layout_of(run)
        workers = tuple(w.name for w in cluster.region(region).workers)
        validates = run.monitor.validate_every_samples is not None
        server = RegionServer(region, identity_of(run, layout), layout, run.outer, workers, validates)
        server.incarnation = uuid.uuid4().hex
        return server

    def begin(server: AnyServer) -> None:
        """It gets its weights from the global server."""

    return _serve(build, begin, _Place(cluster, "region", region, "worker"), run, folder, resume)


def initial_weights(run: RunConfig, layout: Layout) -> list[Tensor]:
    """One fp32 vector a fragment, from the run's seed or its Hugging Face checkpoint. Raises ConfigError."""
    vectors = [torch.empty(f.numel) for f in layout.fragments]
    places = {name: view for f in layout.fragments for name, view in layout.split(f.index, vectors[f.index])}
    if run.model.init_from is None:
        for parameter in layout.parameters:
            places[parameter.name].copy_(initial_tensor(parameter, run.seed))
        return vectors
    from geotrain.export import CheckpointError, read_checkpoint  # brings tokenizers with it: only when asked for

    try:
        _, tensors = read_checkpoint(Path(run.model.init_from))
        for name, tensor in tensors:
            if name not in places or places[name].shape != tensor.shape:
                raise ConfigError(f"model.init_from: {run.model.init_from}: tensor {name} is not the run's model's")
            places.pop(name).copy_(tensor)
    except (CheckpointError, UnsupportedModelError) as error:
        raise ConfigError(f"model.init_from: {error}") from None
    if places:
        raise ConfigError(f"model.init_from: {run.model.init_from}: has no tensor {next(iter(places))}")
    return vectors


def _serve(
    build: Callable[[], AnyServer],
    begin: Callable[[AnyServer], None],
    place: _Place,
    run: RunConfig,
    folder: Path,
    resume: bool,
) -> int:
    try:
        credentials = place.credentials()
        with (
            alone_in(folder),
            EventLog(folder / EVENTS, source=place.name, enabled=run.monitor.enabled) as events,
            _monitor(run, place, events) as monitor,
        ):
            if not resume and (Store(folder / SNAPSHOTS).numbers() or any((folder / JOURNAL).glob("*"))):
                raise StoreError(f"{folder}: holds the state of a run already; resume it, or choose another folder")
            remote = place.remote(run)
            if not resume and remote is not None and remote.numbers():
                raise StoreError(f"{remote.url}: holds the state of a run already; resume it, or choose another URL")
            recovered = recover(build, begin, folder, run.checkpoint.keep, remote)
            for fault in recovered.faults:
                log.error("%s", fault)
                events.write(Trouble(fault))
            events.write(Recovery(recovered.replayed))
            host = _Host(recovered, events, folder, run, place, credentials, monitor, remote)
            asyncio.run(host.run())
    except EXPECTED as error:
        return _failed(error)
    except OSError as error:
        return _failed(OSError(f"{folder}: {error.strerror or error}"))
    return 0


def _monitor(run: RunConfig, place: _Place, events: EventLog) -> Monitor:
    """Raises ConfigError."""
    layout = layout_of(run)
    names = tuple(fragment.name for fragment in layout.fragments)
    top = facts(run, place.cluster, layout.numel, names) if place.role == "global" else None
    return Monitor(run, place.cluster, place.name, events, top)


def _failed(error: Exception) -> int:
    print(f"geotrain serve: {error}", file=sys.stderr, flush=True)
    return EXIT_FOR_GOOD if isinstance(error, FOR_GOOD) else 1


@dataclass(frozen=True)
class _Place:
    """A server's place in the cluster."""

    cluster: ClusterConfig
    role: Role
    name: str
    member_role: Role

    @property
    def address(self) -> Address:
        """Raises ConfigError."""
        return self.cluster.global_server if self.role == "global" else self.cluster.region(self.name).server

    def credentials(self) -> Credentials | None:
        """Raises CertificateError."""
        security = self.cluster.security
        return load_credentials(Path(security.folder), self.role, self.name) if security else None

    def remote(self, run: RunConfig) -> Remote | None:
        """Where copies of this server's snapshots go. Raises ConfigError."""
        url = run.checkpoint.snapshots
        return Remote(f"{url.rstrip('/')}/{run.name}/{self.name}", run.checkpoint.keep) if url else None


class _Host:
    """One server's parts in one event loop."""

    def __init__(
        self,
        recovered: Recovered,
        events: EventLog,
        folder: Path,
        run: RunConfig,
        place: _Place,
        credentials: Credentials | None,
        monitor: Monitor,
        remote: Remote | None,
    ) -> None:
        self.place, self.credentials, self.remote = place, credentials, remote
        self.server, self.store, self.journal = recovered.server, recovered.store, recovered.journal
        self.events, self.folder, self.run_config, self.monitor = events, folder, run, monitor
        self.diary = Diary(self.server, events, run.data.sequence_length)
        self.uplink: Uplink | None = None
        self.uploader: Uploader | None = None
        self.saved_updates = self._updates()
        self.carried_bytes = 0  # what the journal's open segment began with
        self.stop = asyncio.Event()
        self.saving = asyncio.Lock()
        self.disk = ThreadPoolExecutor(1, thread_name_prefix="snapshots")  # one at a time, also after a cancellation

    async def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop.set)
        self.machine = Machine(self.server, self.journal, self._deliver, self.diary.watch)
        self.service = Service(
            self.machine,
            self._snapshot,
            self._status,
            member_role=self.place.member_role,
            silent_s=REGION_SILENT_S if self.place.member_role == "region" else WORKER_SILENT_S,
            credentials=self.credentials,
        )
        if self.remote is not None:
            self.uploader = Uploader(self.store, self.remote, self.events.write)
        address = self.place.address
        self.meter = Meter(self._is_wide_area)
        beat_s = calls.REGION_BEAT_S if self.place.member_role == "region" else calls.BEAT_S
        sample_s = self.run_config.monitor.sample_s
        self.watch = Watch(
            self.machine, self.service, self.events, self.folder, self._traffic, self.meter.total, sample_s, beat_s
        )
        if not self.store.numbers():
            await self._snapshot()  # so that there is one, whatever happens
        port = await self.service.start(address)
        (self.folder / STATUS).unlink(missing_ok=True)
        listening = self.folder / LISTENING
        with whole_file(listening) as file:
            json.dump({"address": f"{address.host}:{port}", "pid": os.getpid()}, file)
        if self.credentials is None and not is_loopback(address.host):
            log.warning("listening on %s without TLS: set `security` in the cluster file", address)
        self.meter.start()
        uploading = asyncio.ensure_future(self.uploader.run()) if self.uploader else None
        try:
            await self._until_over()
            await self._snapshot(ended=self._is_over())
            await self._last_upload()
        finally:
            if uploading is not None:
                uploading.cancel()
            listening.unlink(missing_ok=True)
            await self.service.stop(LINGER_S)
            self.machine.close()
            self.disk.shutdown()
            self.journal.close()
            self.meter.stop()

    async def _until_over(self) -> None:
        tasks: list[asyncio.Future[Any]] = [
            self.machine.failure,
            asyncio.ensure_future(self.stop.wait()),
            asyncio.ensure_future(self._snapshots()),
            asyncio.ensure_future(self._tell_traffic()),
        ]
        if self.run_config.monitor.enabled:
            tasks.append(asyncio.ensure_future(self.watch.run()))
        if isinstance(self.server, RegionServer):
            trust = Trust(self.credentials, identity("global", GLOBAL)) if self.credentials else None
            above = str(self.place.cluster.global_server)
            name, life = self.server.name, self.server.incarnation
            self.uplink = self.watch.uplink = Uplink(
                self.machine,
                above,
                trust=trust,
                on_lost=lambda n: self.events.write(UpdatesLost(n)),
                on_acknowledged=lambda sequence: self.events.write(Acknowledged(name, life, sequence)),
                metrics=self.watch.metrics,
            )
            tasks.append(asyncio.ensure_future(self.uplink.run()))
        else:
            tasks.append(asyncio.ensure_future(self._finished(self.server)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            with whole_file(self.folder / STATUS) as file:  # while its links are still open
                json.dump({**self.service.status(), "page": None, "metrics": None}, file)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self.uplink is not None:
                await self.uplink.close()

    async def _last_upload(self) -> None:
        """What is not copied is on this machine's disk: no reason to fail."""
        if self.uploader is not None:
            try:
                await self.uploader.finish(LAST_UPLOAD_S)
            except StoreError as error:
                log.error("%s", error)
                self.events.write(Trouble(str(error)))

    async def _finished(self, server: GlobalServer) -> None:
        await self.machine.until(lambda: server.finished or None, float("inf"))
        await asyncio.sleep(LINGER_S)

    async def _snapshots(self) -> None:
        """One now and then, so that neither the journal nor the time to replay it grows without bound."""
        while True:
            await self.machine.until(lambda: self._snapshot_is_due() or None, float("inf"))
            try:
                await self._snapshot()
            except StoreError as error:  # the older ones are whole: go on, and try again later
                log.error("%s", error)
                self.events.write(Trouble(str(error)))
                await asyncio.sleep(SNAPSHOT_RETRY_S)

    async def _tell_traffic(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await asyncio.sleep(TRAFFIC_EVENT_S)
            finally:  # the last one tells of the time until the end
                recent = self.meter.take_recent()
                seconds = round(time.monotonic() - began_s, 3)
                sent, received = recent.sent_bytes, recent.received_bytes
                peaks = recent.peak_sent_bytes, recent.peak_received_bytes
                if self.place.role == "global":
                    sent, received, peaks = received, sent, peaks[::-1]
                self.events.write(LinkTraffic(seconds, sent, received, *peaks))

    def _snapshot_is_due(self) -> bool:
        enough_bytes = max(MIN_JOURNAL_BYTES, JOURNAL_PER_STATE * 4 * self.server.layout.numel)
        journal_bytes = self.journal.segment_bytes - self.carried_bytes
        return (
            self._updates() - self.saved_updates >= self.run_config.checkpoint.every_updates
            or journal_bytes >= enough_bytes
        )

    async def _snapshot(self, ended: bool = False) -> str:
        """Copy the state between two messages, write the copy beside the work; says where. Raises StoreError."""
        async with self.saving:
            began_s, updates = time.monotonic(), self._updates()
            try:
                tensors, meta = await self.machine.alone(lambda: begin_snapshot(self.server, self.journal, ended))
            except JournalFull as full:
                raise StoreError(str(full)) from full
            self.carried_bytes = self.journal.segment_bytes
            write = partial(finish_snapshot, self.store, self.journal, tensors, meta)
            number = await asyncio.get_running_loop().run_in_executor(self.disk, write)
            self.saved_updates = updates
            self.events.write(SnapshotWritten(number, time.monotonic() - began_s))
            if self.uploader is not None:
                self.uploader.wake()
            return f"{socket.gethostname()}:{self.store.path(number).absolute()}"

    def _is_over(self) -> bool:
        """Everyone has left in good order."""
        return self.server.done if isinstance(self.server, RegionServer) else self.server.finished

    def _updates(self) -> int:
        return sum(member.updates for member in self.server.members.values())

    def _deliver(self, send: Send) -> None:
        if send.to == GLOBAL:
            self.diary.sent(send)
            if self.uplink is not None:
                self.uplink.deliver(send)
        else:
            self.service.deliver(send)

    def _is_wide_area(self, peer: str) -> bool:
        """A region server's wide-area link is the one to the global server; the global server's are all it has."""
        return self.place.role == "global" or peer.rpartition(":")[2] == str(self.place.cluster.global_server.port)

    def _status(self) -> dict[str, Any]:
        """links: bytes on the wide-area links, up towards the global server and down from it, their highest rates
        over a second, and what of them each fragment moved. peers: bytes with each member, likewise."""
        members = self._traffic()
        total = self.meter.total
        fragments = Tally()
        layout, tallies = self.server.layout, self.service.tallies
        above = [self.uplink.link.tally] if self.uplink else []
        for tally in tallies.values() if self.place.role == "global" else above:
            fragments.add(tally)
        sent, received = ("up", "down") if self.place.role == "region" else ("down", "up")
        return {
            "links": {
                f"{sent}_bytes": total.sent_bytes,
                f"{received}_bytes": total.received_bytes,
                f"peak_{sent}_bytes_per_s": total.peak_sent_bytes,
                f"peak_{received}_bytes_per_s": total.peak_received_bytes,
                "fragments": fragments.status(layout),
            },
            "peers": {
                name: {
                    "sent_bytes": t.sent_bytes,
                    "received_bytes": t.received_bytes,
                    "fragments": tallies.get(name, Tally()).status(layout),
                }
                for name, t in members.items()
            },
            "connected": self.uplink is None or self.uplink.connected,
            "snapshot_updates": self.saved_updates,
            "page": self.monitor.page_url,
            "metrics": self.monitor.metrics_url,
            "snapshots": self.uploader.status() if self.uploader else None,
        }

    def _traffic(self) -> dict[str, Traffic]:
        """Bytes with each member, over all its connections."""
        traffic = self.meter.traffic()
        members: dict[str, Traffic] = {}
        for peer, member in list(self.service.peers.items()):
            if peer in traffic:
                members.setdefault(member, Traffic()).join(traffic[peer])
        return members
