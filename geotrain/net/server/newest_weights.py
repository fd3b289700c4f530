"""Reads the newest weights of a run's global server from its folder, whether its process runs, was killed or has
ended: its newest snapshot and, where the journal went on after that, a replay in memory. Nothing there is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from torch import Tensor

from geotrain.common.files import locked
from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, RunConfig, load_cluster, shard_name
from geotrain.net.server import server_process as process
from geotrain.net.storage import recovery
from geotrain.net.storage.disk_mirror_store import mirror_store_of
from geotrain.net.storage.journal import Journal
from geotrain.net.storage.recovery import JOURNAL, journal_limit, recover
from geotrain.net.storage.snapshots import META, SNAPSHOTS, Snapshot, SnapshotStore, newest_whole, read_weights
from geotrain.outer.messages import Join
from geotrain.outer.server.server import Server
from geotrain.parameters.parameter_map import ParameterMap, parameter_map_of

log = logging.getLogger(__name__)
# What a journal holds behind the last snapshot of a run's end.
CHANGE_NOTHING = Join, recovery.Restarted, recovery.Older, recovery.Stopped, recovery.Dismissed


@dataclass(frozen=True)
class Newest:
    """The newest weights. tensors: (canonical name, fp32 tensor), one fragment in memory at a time. version: the
    highest of the fragments'. samples: that are committed. changed_s: Unix time at which the state was written."""

    tensors: Iterator[tuple[str, Tensor]]
    version: int
    samples: int
    changed_s: float


def newest_weights(run: RunConfig, run_folder: Path, snapshot: Callable[[], object]) -> Newest:
    """Find the newest weights of the run in that folder. snapshot: called to have a running server write one.

    Raises StoreError where there is no whole snapshot, ParameterMapError where it is another model's, JournalDamaged,
    ConfigError, and what `snapshot` does.
    """
    folder = run_folder / "servers" / GLOBAL
    parameter_map = parameter_map_of(run)
    if folder.exists():
        with locked(folder) as rests:  # for no longer: a server that is restarted meanwhile must find it free
            pass
        if not rests:
            snapshot()
        elif _goes_on(folder, parameter_map):
            return _replayed(run, load_cluster(run_folder / "cluster.json"), folder, parameter_map)
    newest = newest_whole(SnapshotStore(folder / SNAPSHOTS))
    return Newest(read_weights(folder, parameter_map, (newest,)), *facts_of(folder, newest))


def facts_of(folder: Path, snapshot: Snapshot) -> tuple[int, int, float]:
    """Read of a global server's snapshot: version, committed samples, Unix time at which it was written."""
    state, path = snapshot.meta["state"], SnapshotStore(folder / SNAPSHOTS).path(snapshot.number) / META
    version = max((counts["version"] for _, counts in state["fragments"]), default=0)  # of a ledger: none yet
    return version, state["leases"]["committed_samples"], path.stat().st_mtime


def _goes_on(folder: Path, parameter_map: ParameterMap) -> bool:
    """Whether the journal holds anything behind the newest snapshot that may have changed the weights."""
    segment, limit = SnapshotStore(folder / SNAPSHOTS).newest_meta().get("segment"), journal_limit(parameter_map)
    with closing(Journal(folder / JOURNAL, recovery.KINDS, limit, read_only=True)) as journal:
        return segment is not None and any(not isinstance(each, CHANGE_NOTHING) for each in journal.replay(segment))


def _replayed(run: RunConfig, cluster: ClusterConfig, folder: Path, parameter_map: ParameterMap) -> Newest:
    """Recover the server in memory, and its shards, whose folders lie beside its own."""

    def read(shard: int | None, place: Path) -> Server:
        build = partial(process.any_server, run, cluster, GLOBAL, shard)
        mirrors, keep = mirror_store_of(run.outer, place, log.warning), run.checkpoint.keep
        begin = partial(process.begin_server, run=run)
        found = recover(build, begin, place, keep, None, mirrors, read_only=True)
        for fault in found.faults:
            log.warning("%s", fault)
        return found.server

    top = read(None, folder)
    shards = range(len(cluster.global_shards))
    parts = [top, *(read(shard, folder.with_name(shard_name(GLOBAL, shard))) for shard in shards)]
    of = {number: part for part in parts for number in part.numbers}
    every = range(len(parameter_map.fragments))
    tensors = chain.from_iterable(parameter_map.split(number, of[number].weights(number)) for number in every)
    changed_s = max(path.stat().st_mtime for path in (folder / JOURNAL).iterdir())
    version = max(of[number].fragments[number].version for number in every)
    return Newest(tensors, version, top.status()["committed_samples"], changed_s)
