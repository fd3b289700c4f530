"""A server as a process, from its start to its exit code.

It recovers its state, then lives as `geotrain.net.server.server_host` says. Where the disk is full it waits for room.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from geotrain.common.files import OutputError, out_of_room
from geotrain.common.names import GLOBAL
from geotrain.config import (
    EXIT_FOR_GOOD,
    ClusterConfig,
    ConfigError,
    RunConfig,
    Topology,
    UnsupportedModelError,
    shard_name,
    shards_of,
)
from geotrain.monitor.events import (
    EventLog,
    Recovery,
    Trouble,
)
from geotrain.net.server.server_host import RegionServerHost, ServerHost
from geotrain.net.server.server_setup import Evaluate, ServerSetup, mirror_of
from geotrain.net.server.shard_host import ShardSetup, run_shard
from geotrain.net.server.shard_sessions import ShardLost, TimelineLost
from geotrain.net.storage.disk_mirror_store import mirror_store_of
from geotrain.net.storage.journal import JournalDamaged
from geotrain.net.storage.recovery import JOURNAL, recover
from geotrain.net.storage.remote_snapshots import Copies, RemoteSnapshots, Uploader, number_of
from geotrain.net.storage.snapshots import SNAPSHOTS, DamagedSnapshot, SnapshotStore, StoreError, alone_in
from geotrain.net.storage.timeline import Timeline, clear_void, go_back, take
from geotrain.net.transport.certs import CertificateError, load_credentials
from geotrain.net.transport.grpc_client import Unreachable
from geotrain.net.transport.rpc import ListenError
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import sends_changes
from geotrain.outer.messages import Refused
from geotrain.outer.rules import region_rule, updates_in_run
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.server.server import Server, identity_of
from geotrain.outer.server.shard_server import PayloadLost, ShardServer
from geotrain.outer.shards.local import LocalShards
from geotrain.outer.shards.remote import RemoteShards
from geotrain.parameters.hf_checkpoint import HFCheckpointError, read_checkpoint
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_file import read_values
from geotrain.parameters.parameter_map import ParameterMap, ParameterMapError, parameter_map_of

log = logging.getLogger(__name__)

ROOM_BYTES = 8 << 20  # so much must be free before a server that found its disk full tries again
ROOM_LOOK_S = 2.0
STORE_RETRY_S = 5.0  # where the object storage does not give a shard what it is to take
EVENTS = "events.jsonl"
# Errors that a restart by the supervisor would meet again; and all that are reported in one line without a traceback.
FOR_GOOD = (JournalDamaged, CertificateError, ParameterMapError, ConfigError, UnsupportedModelError, PayloadLost)
EXPECTED = (*FOR_GOOD, Refused, ListenError, StoreError, Unreachable, OutputError)


def global_server(run: RunConfig, cluster: ClusterConfig, shards: int | RemoteShards) -> GlobalServer:
    parameter_map, regions = parameter_map_of(run), Topology(run, cluster).regions
    samples = run.data.train_samples, run.samples_per_step
    numbers = run.monitor.validate_every_samples, run.data.sequence_length
    return GlobalServer(
        identity_of(run, parameter_map), parameter_map, run.outer, regions, *samples, *numbers, shards
    )


def region_server(run: RunConfig, cluster: ClusterConfig, region: str, shards: int | RemoteShards) -> RegionServer:
    parameter_map, all_workers = parameter_map_of(run), Topology(run, cluster).home
    workers = tuple(w.name for w in cluster.region(region).workers)
    samples = run.data.train_samples, run.samples_per_step
    updates = updates_in_run(*samples, run.outer.local_steps, len(workers), len(all_workers))
    rule = region_rule(run.outer.rule, workers, updates)
    validates = run.monitor.validate_every_samples is not None
    server = RegionServer(
        region, identity_of(run, parameter_map), parameter_map, run.outer, rule, workers, validates, shards
    )
    server.leases.jobs_each = updates / len(workers)
    return server


def any_server(run: RunConfig, cluster: ClusterConfig, name: str, shards: int | RemoteShards) -> Server:
    """The global one or a region's."""
    return global_server(run, cluster, shards) if name == GLOBAL else region_server(run, cluster, name, shards)


def serve_global(
    run: RunConfig, cluster: ClusterConfig, folder: Path, resume: bool, evaluate: Evaluate | None = None,
    launch: str = "",
) -> int:  # fmt: skip
    """Run the global server until every member has left, or SIGTERM. Returns the process's exit code.

    evaluate, launch: see `ServerSetup`."""

    def build() -> Server:
        server = global_server(run, cluster, remote_shards(run, cluster, GLOBAL))
        server.validation_steps = validation_steps(run)
        return server

    place = ServerSetup(run, cluster, "global", GLOBAL, folder, evaluate, launch)
    return _serve(build, partial(begin_server, run=run), place, resume)


def serve_region(
    run: RunConfig, cluster: ClusterConfig, region: str, folder: Path, resume: bool, launch: str = ""
) -> int:
    """Run a region's server until the global server took its goodbye, or SIGTERM. Returns the exit code.

    launch: see `ServerSetup`."""

    def build() -> Server:
        server = region_server(run, cluster, region, remote_shards(run, cluster, region))
        server.validation_steps = validation_steps(run)
        return server

    place = ServerSetup(run, cluster, "region", region, folder, launch=launch)
    return _serve(build, partial(begin_server, run=run), place, resume)


def begin_server(server: Server, run: RunConfig) -> None:
    """Give a server what it has when a run begins: the global one's first weights. A region gets its from there.
    Raises ConfigError."""
    if server.name == GLOBAL:
        if isinstance(server.shards, RemoteShards):  # they begin with the weights themselves
            server.begin()
        else:
            server.set_weights(initial_weights(run, server.parameter_map))


def remote_shards(run: RunConfig, cluster: ClusterConfig, server: str) -> int | RemoteShards:
    """The server's shards: one in its process, or those that the cluster file names."""
    if not (number := len(shards_of(cluster, server))):
        return 1
    down = run.outer.down if server == GLOBAL else run.outer.local
    return RemoteShards(parameter_map_of(run), number, make_codec(run.outer.up), sends_changes(down))


def serve_shard(run: RunConfig, cluster: ClusterConfig, server: str, index: int, folder: Path, resume: bool) -> int:
    """Run one shard of a server until its coordinator says that the server has ended, or SIGTERM. Returns the exit
    code."""

    def live(new: bool) -> None:
        mirror = mirror_of(run, shard_name(server, index))
        clear_void(folder)
        if new:
            _check_is_new(folder, mirror)
        addresses, top = shards_of(cluster, server), server == GLOBAL
        if not 0 <= index < len(addresses):
            raise ConfigError(f"server {server!r} has {len(addresses)} shards in the cluster file, and no {index}")
        coordinator = cluster.global_server if top else cluster.region(server).server
        above = None if top else cluster.global_shards[index]
        own = load_credentials(Path(cluster.security.folder), "shard", server) if cluster.security else None
        setup = ShardSetup(server, addresses[index], coordinator, above, folder, own, run.checkpoint.keep, mirror)
        with EventLog(folder / EVENTS, source=shard_name(server, index), enabled=run.monitor.enabled) as events:
            mirror_store = mirror_store_of(run.outer, folder, events)
            while True:
                machine = shard_server(run, cluster, server, index)
                if not SnapshotStore(folder / SNAPSHOTS).numbers():
                    begin_shard(machine, run)
                if (timeline := run_shard(machine, setup, events, mirror_store)) is None:
                    return
                _go_back(setup, timeline, events)

    return _live_on(folder, live, resume)


def _go_back(setup: ShardSetup, timeline: Timeline, events: EventLog) -> None:
    """Take the moment from which the past of the shard's coordinator began, if its copy is there and good; else the
    shard is as it was, and its coordinator says what to do when it looks for good copies again. Raises StoreError,
    OSError."""
    if (mirror := setup.mirror) is None:
        raise StoreError(
            f"{setup.folder}: is to go back to {timeline.checkpoint_id}, and has no checkpoint.snapshots"
        )
    said = f"{setup.folder}: goes back to {timeline.checkpoint_id}, which came from {mirror.url}"
    try:
        take(setup.folder, mirror, timeline, number_of(timeline.checkpoint_id))
    except DamagedSnapshot as error:
        said = f"{mirror.url}/{timeline.checkpoint_id}: damaged: {error}"
        mirror.condemn(timeline.checkpoint_id, str(error))
    except StoreError as error:
        if out_of_room(error):
            raise
        said = str(error)
        time.sleep(STORE_RETRY_S)
    _say(said)
    events.write(Trouble(said))


def shard_server(run: RunConfig, cluster: ClusterConfig, server: str, index: int) -> ShardServer:
    """A shard in a process of its own, without state."""
    number = len(shards_of(cluster, server))
    whole = any_server(run, cluster, server, number)
    assert isinstance(whole.shards, LocalShards)
    return ShardServer(whole.shards.all[index], index, number, tuple(whole.members), whole.member_role)


def begin_shard(machine: ShardServer, run: RunConfig) -> None:
    """As `begin_server`, of a shard in a process of its own. Raises ConfigError."""
    if machine.name != GLOBAL:
        return
    machine.shard.set_weights(initial_weights(run, machine.parameter_map))
    for v in machine.shard.vectors.values():
        v.x = v.x.clone()  # views would keep the other shards' weights in memory


def validation_steps(run: RunConfig) -> int:
    """Inner steps that cost a worker at least as much as a validation, whose samples take a third of training's."""
    return ceil(run.data.validation_samples / run.samples_per_step)


def initial_weights(run: RunConfig, parameter_map: ParameterMap) -> list[Tensor]:
    """The run's initial weights, from its seed, its Hugging Face checkpoint or its file of any model's parameters: a
    1-D fp32 vector for each fragment.

    Raises ConfigError.
    """
    vectors = [torch.empty(f.numel) for f in parameter_map.fragments]
    places = {
        name: view for f in parameter_map.fragments for name, view in parameter_map.split(f.index, vectors[f.index])
    }
    if run.model.weights is not None:
        for name, tensor in read_values(Path(run.model.weights)):
            places[name].copy_(tensor)
        for fragment in parameter_map.fragments:
            if (bad := parameter_map.not_finite(fragment.index, vectors[fragment.index])) is not None:
                raise ConfigError(f"model.weights: {run.model.weights}: {bad} holds infinities or NaN")
        return vectors
    if run.model.init_from is None:
        for parameter in parameter_map.parameters:
            places[parameter.name].copy_(initial_tensor(parameter, run.seed))
        return vectors
    try:
        _, tensors = read_checkpoint(Path(run.model.init_from))
        for name, tensor in tensors:
            if name not in places or places[name].shape != tensor.shape:
                raise ConfigError(f"model.init_from: {run.model.init_from}: tensor {name} is not the run's model's")
            places.pop(name).copy_(tensor)
    except (HFCheckpointError, UnsupportedModelError) as error:
        raise ConfigError(f"model.init_from: {error}") from None
    if places:
        raise ConfigError(f"model.init_from: {run.model.init_from}: has no tensor {next(iter(places))}")
    return vectors


def _serve(build: Callable[[], Server], begin: Callable[[Server], None], place: ServerSetup, resume: bool) -> int:
    """Run a server and return the process's exit code. build, begin: as `recover` takes them."""

    def live(new: bool) -> None:
        copies = place.copies()
        clear_void(place.folder)
        if new:
            _check_is_new(place.folder, copies.own if copies else None)
        shards = len(copies.all) > 1 if copies else False
        if copies and shards and not SnapshotStore(place.folder / SNAPSHOTS).numbers() and copies.whole():
            go_back_to_newest(copies)
        while True:
            try:
                return _live(build, begin, place, copies)
            except ShardLost as lost:
                _say(f"{lost}; the server begins a new incarnation")
                if isinstance(lost, TimelineLost) and copies is not None:
                    go_back_to_newest(copies)

    def go_back_to_newest(copies: Copies) -> None:
        with EventLog(place.folder / EVENTS, source=place.name, enabled=place.run.monitor.enabled) as events:
            for fault in go_back(place.folder, copies):
                _say(fault)
                events.write(Trouble(fault))

    return _live_on(place.folder, live, resume)


def _live_on(folder: Path, live: Callable[[bool], None], resume: bool) -> int:
    """Live, again and again where the disk is full, and return the process's exit code. live: is told whether the
    folder must be new."""
    try:
        while True:
            try:
                with alone_in(folder):
                    new, resume = not resume, True  # what a incarnation without room leaves behind is this run's own
                    live(new)
                return 0
            except OSError as error:
                if not out_of_room(error):
                    raise
                _say(f"{error}; the server waits until there is room")
            # Here and not by a restart: the launcher grants few of those, and a disk may be full for hours.
            wait_for_room(folder)
    except (*EXPECTED, OSError) as error:
        _say(str(error) if isinstance(error, EXPECTED) else f"{folder}: {error.strerror or error}")
        return EXIT_FOR_GOOD if isinstance(error, FOR_GOOD) else 1


def _check_is_new(folder: Path, mirror: RemoteSnapshots | None = None) -> None:
    """Raises StoreError if there is a state already, which a new run must not take up or overwrite."""
    if SnapshotStore(folder / SNAPSHOTS).numbers() or any((folder / JOURNAL).glob("*")):
        raise StoreError(f"{folder}: holds the state of a run already; resume it, or choose another folder")
    if mirror is not None and mirror.whole():
        raise StoreError(f"{mirror.url}: holds the state of a run already; resume it, or choose another URL")


def _live(
    build: Callable[[], Server], begin: Callable[[Server], None], place: ServerSetup, copies: Copies | None
) -> None:
    """One incarnation of the server, from its recovery to its end."""
    run, folder = place.run, place.folder
    credentials = place.credentials()
    mirror = copies.own if copies and len(copies.all) == 1 else None
    with (
        EventLog(folder / EVENTS, source=place.name, enabled=run.monitor.enabled) as events,
        place.monitor(events) as monitor,
    ):
        incarnation = uuid.uuid4().hex

        mirror_store = mirror_store_of(run.outer, folder, events)

        def named() -> Server:
            server = build()
            server.incarnation = incarnation
            if isinstance(server.shards, LocalShards):
                server.shards.set_mirror_store(mirror_store)
            return server

        recovered = recover(named, begin, folder, run.checkpoint.keep, mirror, mirror_store, place.launch)
        if recovered.ended:
            log.warning("it had ended in launch %s, and stays ended: only another launch begins again", place.launch)
        for fault in recovered.faults:
            log.error("%s", fault)
            events.write(Trouble(fault))
        events.write(Recovery(recovered.replayed))
        kind = ServerHost if place.role == "global" else RegionServerHost
        uploader = Uploader(recovered.store, copies, events.write) if copies is not None else None
        host = kind(recovered, events, place, credentials, monitor, uploader)
        try:
            asyncio.run(host.run())
        except ShardLost:
            if not host.stop.is_set():  # else both are told to end, and no new incarnation is wanted
                raise


def wait_for_room(folder: Path) -> None:
    """Return when a file of `ROOM_BYTES` fits onto the folder's disk. Only a person can make room, however long that
    takes, so there is no deadline; SIGTERM ends the process."""
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    while True:
        time.sleep(ROOM_LOOK_S)
        with suppress(OSError), tempfile.TemporaryFile(dir=place) as trial:
            os.posix_fallocate(trial.fileno(), 0, ROOM_BYTES)
            return


def _say(what: str) -> None:
    with suppress(OSError):  # standard error may be a file on the full disk
        print(f"geotrain serve: {what}", file=sys.stderr, flush=True)
