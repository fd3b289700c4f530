"""Recompute what a faulty run must have kept, from its servers' whole journals by an uninterrupted replay
(`tests.chaos.faults.replay`), and its accounts."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from geotrain.common.names import GLOBAL
from geotrain.config import load_run, shard_name
from geotrain.net.server.server_process import any_server, begin_server
from geotrain.net.storage.journal import Journal
from geotrain.net.storage.recovery import KINDS
from geotrain.net.storage.snapshots import META, Snapshot, SnapshotStore, checked_meta
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.server.server import Server
from geotrain.parameters.parameter_map import parameter_map_of
from tests.chaos.faults.replay import ServerReplay, Written
from tests.chaos.faults.runner import FaultyRun


def replayed(run: FaultyRun, site: str) -> ServerReplay:
    """A server, with its shards."""
    config, cluster = load_run(run.folder / "run.json"), run.cluster  # as launched: with the data's digest
    kept = snapshots(run, site)

    def begin(server: Server) -> None:
        begin_server(server, config)
        if site == GLOBAL and server.ledger:  # it was drawn at random
            server.origin = kept[min(kept)]().meta["state"]["origin"]

    def written(name: str, shard: int | None = None) -> Written:
        build = partial(any_server, config, cluster, site, shard)
        return Written(build, begin, segments(run, name), snapshots(run, name))

    return ServerReplay(written(site), [written(name, shard) for shard, name in enumerate(run.shards[site])])


def segments(run: FaultyRun, name: str) -> Iterator[tuple[int, Iterator[Any]]]:
    """(number, messages) of each segment of the journal. Each is read in a folder of its own, because the journal's
    reader refuses gaps, and the first segment may be missing: it ends before a new server listens, so that the server
    may drop it before it was linked into the archive.
    """
    folder = run.archive / name / "journal"
    limit_bytes = 8 * parameter_map_of(run.run).numel + 65536
    paths = sorted(folder.glob("*.journal"))
    numbers = [int(path.stem) for path in paths]
    if not numbers or numbers[0] > 2 or numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise AssertionError(f"{folder}: the archive has gaps: {numbers}")
    for path in paths:
        with tempfile.TemporaryDirectory() as alone:
            os.link(path, Path(alone) / path.name) if _same_disk(path, alone) else _copy(path, Path(alone))
            journal = Journal(Path(alone), KINDS, limit_bytes)
            yield int(path.stem), journal.replay(int(path.stem), is_whole=False)
            journal.close()


def _same_disk(path: Path, folder: str) -> bool:
    return path.stat().st_dev == Path(folder).stat().st_dev


def _copy(path: Path, folder: Path) -> None:
    (folder / path.name).write_bytes(path.read_bytes())


def snapshots(run: FaultyRun, name: str) -> dict[int, partial[Snapshot]]:
    """By the segment of the journal that follows each."""
    paths = (run.archive / name / "snapshots").iterdir()
    return {checked_meta((path / META).read_bytes())["meta"]["segment"]: partial(_read, path) for path in paths}


def _read(snapshot: Path) -> Snapshot:
    with tempfile.TemporaryDirectory() as alone:
        (Path(alone) / snapshot.name).symlink_to(snapshot.absolute(), target_is_directory=True)
        found, faults = SnapshotStore(Path(alone)).load_newest()
        assert found is not None, faults
        return found


# ---------------------------------------------------------------------------------------------- the accounts


def accounts(run: FaultyRun) -> dict[str, Any]:
    """The figures of a run that has ended."""
    servers = {site: replayed(run, site) for site in (GLOBAL, *run.regions)}
    top = servers[GLOBAL]
    above = Counter((member, fragment, sequence) for member, _, fragment, sequence, _ in top.applied)
    acknowledged = lost = twice = 0
    for region, workers in run.regions.items():
        below = servers[region]
        told = {
            (w, e["incarnation"], e["fragment"], e["sequence"]) for w in workers for e in _acknowledgements(run, w)
        }
        lost += len(told - {tuple(update) for *update, _ in below.applied})
        processes = (region, *run.shards[region])
        told_up = {(e["fragment"], e["sequence"]) for name in processes for e in _acknowledgements(run, name)}
        lost += sum((region, *update) not in above for update in {*told_up, *below.sent_up})
        lost += sum(cast(RegionServer, process.now).uplink.lost_updates for process in below.processes)
        acknowledged += len(told) + len(told_up)
    for server in servers.values():
        numbers = Counter((member, fragment, sequence) for member, _, fragment, sequence, _ in server.applied)
        contents = Counter((member, digest) for member, *_, digest in server.applied)
        twice += max(sum(numbers.values()) - len(numbers), sum(contents.values()) - len(contents))
    leases = cast(GlobalServer, top.ledger.now).lease_table
    out = [(lease.start, lease.samples) for lease in leases.open.values()]
    committed = [(lease.start, lease.samples) for lease in top.ledger.committed.values()]
    once, overlapping = coverage([*committed, *leases.pool, *leases.aside, *out])
    wrong = [
        f"{site if shard is None else shard_name(site, shard)}: {text}"
        for site, server in servers.items()
        for shard, text in server.mismatches
    ]
    return {
        "acknowledged_updates": acknowledged,
        "lost_acknowledged": lost,
        "applied_twice": twice,
        "replay_mismatches": len(wrong),
        "mismatches": wrong[:10],
        "server_deaths": sum(server.ledger.recoveries for server in servers.values()),
        "snapshots_compared": sum(server.ledger.snapshots for server in servers.values()),
        "samples_skipped": leases.next_start - once,
        "samples_twice_uncounted": overlapping,
        "committed_samples": leases.committed_samples,
        **_of_shards(list(servers.values())),
    }


def _of_shards(servers: list[ServerReplay]) -> dict[str, Any]:
    """Nothing, where no server has shards in processes of their own."""
    shards = [shard for server in servers for shard in server.shards]
    figures = {
        "processes": len(shards),
        "facts": sum(len(shard.facts) for shard in shards),
        "behind": sum(server.behind for server in servers),
        "snapshots_compared": sum(shard.snapshots for shard in shards),
        "recoveries_compared": sum(shard.recoveries for shard in shards),
    }
    return {"shards": figures} if shards else {}


def coverage(ranges: list[tuple[int, int]]) -> tuple[int, int]:
    """(samples in any of the ranges (start, length), samples counted again)."""
    once = again = end = 0
    for start, length in sorted(ranges):
        fresh = max(0, start + length - max(start, end))
        once, again, end = once + fresh, again + length - fresh, max(end, start + length)
    return once, again


def _acknowledgements(run: FaultyRun, source: str) -> list[dict[str, Any]]:
    return [e for e in run.events(source) if e["event"] == "Acknowledged"]
