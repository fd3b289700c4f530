"""A server as a process: its state machine, service, uplink, snapshots and diary, from start to exit code."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geotrain.canonical import UnsupportedModelError
from geotrain.config import Address, ClusterConfig, ConfigError, RunConfig
from geotrain.files import OutputError, whole_file
from geotrain.initial import initial_tensor
from geotrain.monitor.events import EventLog, SnapshotWritten, Trouble, UpdatesLost
from geotrain.net.diary import Diary
from geotrain.net.link import Unreachable
from geotrain.net.machine import Machine
from geotrain.net.meter import Meter
from geotrain.net.service import ListenError, Service
from geotrain.net.store import SNAPSHOTS, Store, StoreError
from geotrain.net.uplink import Uplink
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.layout import Layout, LayoutError, layout_of
from geotrain.outer.messages import GLOBAL, Refused, Send
from geotrain.outer.region_server import RegionServer
from geotrain.outer.server import identity_of

log = logging.getLogger(__name__)

LINGER_S = 2.0  # after the end: a member whose last acknowledgement was lost asks again
LISTENING = "listening.json"  # in the server's folder, while it listens: its address and process id
EVENTS = "events.jsonl"
EXPECTED = (
    ListenError,
    StoreError,
    LayoutError,
    Unreachable,
    Refused,
    ConfigError,
    UnsupportedModelError,
    OutputError,
)


def serve_global(run: RunConfig, cluster: ClusterConfig, folder: Path, resume: bool) -> int:
    """Run the global server until every member has left, or SIGTERM. Returns the process's exit code."""

    def build() -> GlobalServer:
        layout = layout_of(run)
        regions = {r.name: tuple(w.name for w in r.workers) for r in cluster.regions}
        return GlobalServer(
            identity_of(run, layout), layout, run.outer, regions, run.data.train_samples, run.samples_per_step
        )

    def first_weights(server: GlobalServer | RegionServer) -> None:
        server.set_weights(initial_weights(run, server.layout))

    return _serve(build, first_weights, cluster.global_server, None, run, folder, resume)


def serve_region(run: RunConfig, cluster: ClusterConfig, region: str, folder: Path, resume: bool) -> int:
    """Run a region's server until the global server took its goodbye, or SIGTERM. Returns the exit code."""

    def build() -> RegionServer:
        layout = layout_of(run)
        workers = tuple(w.name for w in cluster.region(region).workers)
        server = RegionServer(region, identity_of(run, layout), layout, run.outer, workers)
        server.incarnation = uuid.uuid4().hex
        return server

    try:
        address = cluster.region(region).server
    except ConfigError as error:
        return _failed(error)
    return _serve(build, None, address, cluster.global_server, run, folder, resume)


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
    build: Callable[[], GlobalServer | RegionServer],
    first_weights: Callable[[GlobalServer | RegionServer], None] | None,
    address: Address,
    above: Address | None,
    run: RunConfig,
    folder: Path,
    resume: bool,
) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        server, store = build(), Store(folder / SNAPSHOTS, run.checkpoint.keep)
        with EventLog(folder / EVENTS) as events:
            _load(server, store, resume, events)
            if first_weights is not None and not server.fragments:
                first_weights(server)
                store.save(*server.state())
            asyncio.run(_Host(server, store, events, folder, run.checkpoint.every_updates).run(address, above))
    except EXPECTED as error:
        return _failed(error)
    except OSError as error:
        return _failed(OSError(f"{folder}: {error.strerror or error}"))
    return 0


def _load(server: GlobalServer | RegionServer, store: Store, resume: bool, events: EventLog) -> None:
    if not resume and store.numbers():
        raise StoreError(f"{store.folder}: holds the state of a run already; resume it, or choose another folder")
    snapshot, faults = store.load_newest()
    for fault in faults:
        log.error("%s", fault)
        events.write(Trouble(fault))
    if snapshot is not None:
        server.load(snapshot.tensors, snapshot.meta)
    elif faults:
        raise StoreError(f"{store.folder}: no snapshot is whole; restore one from a copy, or begin in a new folder")


def _failed(error: Exception) -> int:
    print(f"geotrain serve: {error}", file=sys.stderr, flush=True)
    return 1


class _Host:
    """One server's parts in one event loop."""

    def __init__(
        self, server: GlobalServer | RegionServer, store: Store, events: EventLog, folder: Path, every_updates: int
    ) -> None:
        self.server, self.store, self.events, self.folder = server, store, events, folder
        self.every_updates = every_updates
        self.diary = Diary(server, events)
        self.uplink: Uplink | None = None
        self.saved_updates = self._updates()
        self.stop = asyncio.Event()
        self.saving = asyncio.Lock()
        self.above: Address | None = None

    async def run(self, address: Address, above: Address | None) -> None:
        self.machine = Machine(self.server, self._deliver, self.diary.watch)
        self.service = Service(self.machine, self._control, self._status)
        self.above = above
        self.meter = Meter(self._is_wide_area)
        port = await self.service.start(address)
        listening = self.folder / LISTENING
        with whole_file(listening) as file:
            json.dump({"address": f"{address.host}:{port}", "pid": os.getpid()}, file)
        if not _is_loopback(address):
            log.warning("listening on %s without TLS: set `security` in the cluster file", address)
        self.meter.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop.set)
        try:
            await self._until_over()
            await self._snapshot()
        finally:
            listening.unlink(missing_ok=True)
            await self.service.stop(LINGER_S)
            self.machine.close()
            self.meter.stop()

    async def _until_over(self) -> None:
        tasks: list[asyncio.Future[Any]] = [
            self.machine.failure,
            asyncio.ensure_future(self.stop.wait()),
            asyncio.ensure_future(self._snapshots()),
        ]
        if isinstance(self.server, RegionServer):
            assert self.above is not None
            self.uplink = Uplink(self.machine, str(self.above), on_lost=lambda n: self.events.write(UpdatesLost(n)))
            tasks.append(asyncio.ensure_future(self.uplink.run()))
        else:
            tasks.append(asyncio.ensure_future(self._finished(self.server)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _finished(self, server: GlobalServer) -> None:
        await self.machine.until(lambda: server.finished or None, float("inf"))
        await self._snapshot()
        await asyncio.sleep(LINGER_S)

    async def _snapshots(self) -> None:
        while True:
            await self.machine.until(
                lambda: self._updates() - self.saved_updates >= self.every_updates or None, float("inf")
            )
            try:
                await self._snapshot()
            except StoreError as error:  # the older ones are whole: go on, and try again at the next turn
                log.error("%s", error)
                self.events.write(Trouble(str(error)))

    async def _snapshot(self) -> None:
        """Copy the state between two messages, write the copy beside the work."""
        async with self.saving:
            began_s = time.monotonic()
            self.saved_updates = self._updates()
            tensors, meta = await self.machine.read(self._copy)
            number = await asyncio.to_thread(self.store.save, tensors, meta)
            self.events.write(SnapshotWritten(number, time.monotonic() - began_s))

    def _copy(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = self.server.state()
        return {name: tensor.clone() for name, tensor in tensors.items()}, meta

    def _updates(self) -> int:
        return sum(member.updates for member in self.server.members.values())

    def _deliver(self, send: Send) -> None:
        if send.to == GLOBAL:
            self.diary.sent(send)
            if self.uplink is not None:
                self.uplink.deliver(send)
        else:
            self.service.deliver(send)

    async def _control(self, what: str) -> None:
        await self._snapshot()
        if what == "stop":
            self.stop.set()

    def _is_wide_area(self, peer: str) -> bool:
        """A region server's wide-area link is the one to the global server; all of the global server's are."""
        return self.above is None or peer.rpartition(":")[2] == str(self.above.port)

    def _status(self) -> dict[str, Any]:
        """links: bytes on the wide-area links, up towards the global server and down from it, and their highest
        rates over a second."""
        traffic, total = self.meter.traffic(), self.meter.total
        to_global = (total.sent_bytes, total.peak_sent_bytes), (total.received_bytes, total.peak_received_bytes)
        (up, peak_up), (down, peak_down) = to_global if self.above else reversed(to_global)
        peers: dict[str, tuple[int, int]] = {}
        for peer, member in self.service.peers.items():
            sent, received = (traffic[peer].sent_bytes, traffic[peer].received_bytes) if peer in traffic else (0, 0)
            before = peers.get(member, (0, 0))
            peers[member] = (before[0] + sent, before[1] + received)
        return {
            "links": {
                "up_bytes": up,
                "down_bytes": down,
                "peak_up_bytes_per_s": peak_up,
                "peak_down_bytes_per_s": peak_down,
            },
            "peers": {m: {"sent_bytes": s, "received_bytes": r} for m, (s, r) in peers.items()},
            "connected": self.uplink is None or self.uplink.connected,
            "snapshot_updates": self.saved_updates,
        }


def _is_loopback(address: Address) -> bool:
    return address.host in ("localhost", "::1") or address.host.startswith("127.")
