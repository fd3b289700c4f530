"""Runs a server, or one of its shards, as a process: from its start, over its incarnations, to its exit code.

Each incarnation recovers the state machine and runs it in a `geotrain.net.server.process_host.ProcessHost`. Where the
disk is full the process waits for room.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from geotrain.common.files import OutputError, out_of_room
from geotrain.common.names import GLOBAL
from geotrain.config import (
    EXIT_FOR_GOOD,
    ClusterConfig,
    ConfigError,
    RunConfig,
    Topology,
    UnsupportedModelError,
    parse,
    shards_of,
)
from geotrain.monitor.events import EventLog, Recovery
from geotrain.net.server.first_weights import initial_weights
from geotrain.net.server.server_host import Grown, ServerHost
from geotrain.net.server.server_setup import ServerSetup
from geotrain.net.storage.disk_mirror_store import mirror_store_of
from geotrain.net.storage.journal import JournalDamaged
from geotrain.net.storage.owner import OtherOwnerError, Owner, new_origin
from geotrain.net.storage.recovery import JOURNAL, Recovered, recover
from geotrain.net.storage.remote_snapshots import Copies, RemoteSnapshots
from geotrain.net.storage.snapshots import (
    SNAPSHOTS,
    OtherFormatError,
    SnapshotStore,
    StoreError,
    alone_in,
)
from geotrain.net.transport.certs import CertificateError
from geotrain.net.transport.grpc_client import Unreachable
from geotrain.net.transport.rpc import ListenError
from geotrain.outer.identity import identity_of
from geotrain.outer.messages import Refused
from geotrain.outer.rules import region_rule
from geotrain.outer.rules.region_momentum import updates_in_run
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.parts import WHOLE, ServerPart
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.server.server import Server
from geotrain.parameters.chunks import deal
from geotrain.parameters.parameter_map import ParameterMapError, parameter_map_of

log = logging.getLogger(__name__)

ROOM_BYTES = 8 << 20  # so much must be free before a server that found its disk full tries again
ROOM_LOOK_S = 2.0
# Of a run file, what decides how a server handles a message. The model cannot change.
DECIDES = "seed", "data", "outer", "monitor", "deepspeed"
# Errors with which a restart by the supervisor would end again; all that are reported in one line, with no traceback.
FOR_GOOD = (
    JournalDamaged,
    OtherFormatError,
    OtherOwnerError,
    CertificateError,
    ParameterMapError,
    ConfigError,
    UnsupportedModelError,
)
EXPECTED = (*FOR_GOOD, Refused, ListenError, StoreError, Unreachable, OutputError)


def part_of(run: RunConfig, cluster: ClusterConfig, server: str, shard: int | None) -> ServerPart:
    """The part of a server that its process, or that of one of its shards, is. Raises ConfigError."""
    if not (number := len(shards_of(cluster, server))):
        return WHOLE
    fragments = parameter_map_of(run).fragments
    if len(fragments) < number:
        raise ConfigError(
            f"server {server!r} has {number} shards, but the model has {len(fragments)} fragments, each of which is "
            "whole in one: set outer.fragments.pieces, which cuts them"
        )
    return ServerPart(deal(fragments, number), shard)


def global_server(run: RunConfig, cluster: ClusterConfig, part: ServerPart = WHOLE) -> GlobalServer:
    parameter_map, regions = parameter_map_of(run), Topology(run, cluster).regions
    return GlobalServer(
        identity_of(run, parameter_map), parameter_map, run.outer, regions, run.data.train_samples,
        run.samples_per_step, run.monitor.validate_every_samples, run.data.sequence_length, part,
        run.data.rampup_batch_size,
    )  # fmt: skip


def region_server(run: RunConfig, cluster: ClusterConfig, region: str, part: ServerPart = WHOLE) -> RegionServer:
    parameter_map, all_workers = parameter_map_of(run), Topology(run, cluster).home
    workers = tuple(w.name for w in cluster.region(region).workers)
    updates = updates_in_run(run.inner_steps, run.outer.local_steps, len(workers), len(all_workers))
    rule = region_rule(run.outer, workers, updates)
    validates = run.monitor.validate_every_samples is not None
    server = RegionServer(
        region, identity_of(run, parameter_map), parameter_map, run.outer, rule, workers, validates, part
    )
    server.worker_data.leases.jobs_each = updates / len(workers)
    return server


def any_server(run: RunConfig, cluster: ClusterConfig, name: str, shard: int | None = None) -> Server:
    """Make the global server or a region's, or one of its shards, without state."""
    part = part_of(run, cluster, name, shard)
    server = global_server(run, cluster, part) if name == GLOBAL else region_server(run, cluster, name, part)
    server.membership.validation_steps = validation_steps(run)
    plain = run.model_dump(by_alias=True, mode="json", include=set(DECIDES))
    server.settings = json.dumps([plain, {r.name: [w.name for w in r.workers] for r in cluster.serving}])

    def remade(settings: str) -> Server:
        then, regions = json.loads(settings)
        of: dict[str, Any] = {"name": run.name, "global_server": cluster.global_server.model_dump(mode="json")}
        of["regions"] = [{"name": n, "workers": [{"name": w} for w in names]} for n, names in regions.items()]
        of |= {"global_shards": [each.model_dump(mode="json") for each in cluster.global_shards]}
        for each in of["regions"]:
            shards = next((r.shards for r in cluster.regions if r.name == each["name"]), ())
            each["shards"] = [address.model_dump(mode="json") for address in shards]
        then = parse(RunConfig, {**run.model_dump(by_alias=True, mode="json"), **then}, "a server's settings")
        return any_server(then, parse(ClusterConfig, of, "a server's members"), name, shard)

    server.remade = remade
    return server


def serve(setup: ServerSetup, resume: bool) -> int:
    """Run a server or one of its shards until it has ended in good order, or SIGTERM; returns the exit code.

    Where the disk is full it waits for room and begins again. resume: False: the folder must hold no state yet.
    """
    folder = setup.folder
    try:
        while True:
            try:
                with alone_in(folder):
                    new, resume = not resume, True  # what is left behind without room is this run's own
                    _run_incarnations(setup, new)
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


def _run_incarnations(setup: ServerSetup, new: bool) -> None:
    """Run one incarnation after the other, until one ends in good order. new: the folder must hold no state yet."""
    folder, copies = setup.folder, setup.copies()
    setup.credentials()  # what is wrong with them is said before a large state is read
    if here := Owner.of(SnapshotStore(folder / SNAPSHOTS).newest_meta()):
        setup.owner.check(here, folder)
    if new:
        _check_is_new(folder, copies.own if copies else None)
    while True:
        try:
            return _run_incarnation(setup, copies)
        except Grown as grown:
            _say(str(grown))
            setup = replace(setup, run=grown.run, cluster=grown.cluster)


def _run_incarnation(setup: ServerSetup, copies: Copies | None) -> None:
    """Run one incarnation, from its recovery to its end. Raises Grown: a server begins another."""
    with setup.events() as events, setup.monitor(events) as monitor:
        incarnation = uuid.uuid4().hex

        def build() -> Server:
            server = any_server(setup.run, setup.cluster, setup.server, setup.shard)
            server.incarnation = incarnation
            return server

        recovered = _recovered(setup, events, build, copies.own if copies else None)
        if recovered.ended:
            log.warning("it ended in launch %s, and stays ended: only another launch begins again", setup.launch)
        host = ServerHost(setup, recovered, events, monitor, copies)
        try:
            asyncio.run(host.run())
        except Grown:
            if not host.stop.is_set():  # else it is asked to end, and no new incarnation is wanted
                raise


def _recovered(
    setup: ServerSetup, events: EventLog, build: Callable[[], Server], mirror: RemoteSnapshots | None
) -> Recovered:
    """Recover the process's state machine, and report what was found."""
    run, folder = setup.run, setup.folder
    mirror_store = mirror_store_of(run.outer, folder, events.report)
    keep, begin = run.checkpoint.keep, partial(begin_server, run=run)
    recovered = recover(build, begin, folder, keep, mirror, mirror_store, setup.launch, owner=setup.owner)
    for fault in recovered.faults:
        events.report(fault)
    events.write(Recovery(recovered.replayed))
    return recovered


def begin_server(server: Server, run: RunConfig) -> None:
    """Give a server what it has when a run begins: the global one's first weights. A region gets its from there.
    Raises ConfigError."""
    if server.name == GLOBAL:
        server.origin = new_origin() if server.ledger else ""
        server.set_weights(initial_weights(run, server.parameter_map, server.numbers))


def validation_steps(run: RunConfig) -> int:
    """Count the inner steps that cost a worker as much as a validation, whose samples take a third of training's."""
    return ceil(run.data.validation_samples / run.samples_per_step)


def _check_is_new(folder: Path, mirror: RemoteSnapshots | None = None) -> None:
    """Raise StoreError if there is a state already, which a new run must not take up or overwrite."""
    if SnapshotStore(folder / SNAPSHOTS).numbers() or any((folder / JOURNAL).glob("*")):
        raise StoreError(f"{folder}: holds the state of a run already; resume it, or choose another folder")
    if mirror is not None and mirror.whole():
        raise StoreError(f"{mirror.url}: holds the state of a run already; resume it, or choose another URL")


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
