"""Begins a run anew from an older snapshot of the global server, without the data since (`geotrain rollback`).

It is a branch: another folder, with that snapshot alone, and of each shard the newest that is not newer. So the run
stays as it is, a kill leaves the new folder or none, and no journal, region or worker has to be taken back: they join
the new run without a state.

While its launcher runs, a run is taken back by a request in its folder: the launcher has the run stop, and launches
the branch. A launcher that is killed before does so when the run is launched again, with --resume.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from geotrain.common.files import make_folder, write_whole
from geotrain.common.names import GLOBAL
from geotrain.config import ConfigError, RunConfig, load_run, shard_name
from geotrain.launch.branches import GOES_ON, MADE, REQUEST, rollbacks
from geotrain.net.server.newest_weights import facts_of
from geotrain.net.storage.owner import new_origin
from geotrain.net.storage.snapshots import PINNED, SNAPSHOTS, Snapshot, SnapshotStore, alone_in
from geotrain.outer.server.leases import LeaseTable


def snapshots_of(folder: Path) -> list[dict[str, Any]]:
    """List the global server's snapshots: number, version, committed samples, age, and whether the run had ended; if
    not, its journal holds more. Raises StoreError."""
    load_run(folder / "run.json")
    server, found = folder / "servers" / GLOBAL, list[dict[str, Any]]()
    store = SnapshotStore(server / SNAPSHOTS)
    for number, meta in zip(store.numbers(), store.metas(), strict=True):
        version, samples, changed_s = facts_of(server, Snapshot(number, {}, meta))
        facts = {"committed_samples": samples, "version": version, "age_s": time.time() - changed_s}
        found.append({"snapshot": number, **facts, "ended": meta["ended"]})
    return found


def check(run: RunConfig, folder: Path, number: int, known: Collection[int]) -> None:
    """Refuse, by a ConfigError, to go back to a snapshot that is not `known`, or in a run that can skip no data."""
    if run.outer.rule.synchronous:
        raise ConfigError(f"{folder}: a synchronous run cannot skip data: its rounds are laid out; set data.skip")
    if number not in known:
        raise ConfigError(f"--to {number}: {folder} has snapshots {', '.join(map(str, known)) or 'none'}")


def request(folder: Path, number: int) -> None:
    """Ask the run's launcher to take it back to that snapshot, which is kept until then. Raises OutputError,
    OSError."""
    servers = folder / "servers"
    of_shards = (path for path in servers.glob(f"{shard_name(GLOBAL, 0)[:-1]}*/{SNAPSHOTS}/*") if path.is_dir())
    for snapshot in (SnapshotStore(servers / GLOBAL / SNAPSHOTS).path(number), *of_shards):
        (snapshot / PINNED).touch()
    write_whole(folder / REQUEST, json.dumps(number))


def take_back(folder: Path) -> Path | None:
    """Do what was requested of a run that has ended; returns the folder in which it goes on. None: it did not end in
    good order, and is first to be launched again; or it was done. Raises ConfigError, StoreError."""
    if (folder / GOES_ON).exists() or not SnapshotStore(folder / "servers" / GLOBAL / SNAPSHOTS).ended:
        return None
    first = folder.name.partition("-rollback-")[0]
    out = next(out for i in count(1) if not (out := folder.with_name(f"{first}-rollback-{i}")).exists())
    try:
        if not (number := (folder / REQUEST).read_text()).isdecimal():
            raise ConfigError(f"{folder / REQUEST}: {number[:40]!r} is no snapshot's number")
        roll_back(folder, int(number), out)
    except ConfigError:
        (folder / REQUEST).unlink()  # else the run could not be launched again, either
        raise
    write_whole(out / MADE, json.dumps([*rollbacks(folder), time.time()]))
    write_whole(folder / GOES_ON, json.dumps(out.name))
    return out


def roll_back(folder: Path, number: int, out: Path) -> int:
    """Make the new run's folder; returns the samples that are skipped. Raises ConfigError, StoreError."""
    run, server = load_run(folder / "run.json"), folder / "servers" / GLOBAL
    if out.exists():
        raise ConfigError(f"--out {out} exists; name a folder that does not")
    with ExitStack() as alone:
        alone.enter_context(alone_in(server))
        store = SnapshotStore(server / SNAPSHOTS)
        metas = dict(zip(store.numbers(), store.metas(), strict=True))
        check(run, folder, number, metas)
        newest, then = store.newest_meta(), metas[number]["state"]
        if not newest["ended"]:
            raise ConfigError(
                f"{folder}: its global server did not end in good order, so that it is not known which data came "
                "last: `geotrain launch … --resume`, then `geotrain stop`"
            )
        folders = [server.with_name(shard_name(GLOBAL, shard)) for shard in range(len(then["part"]["dealt"]))]
        for each in folders:
            alone.enter_context(alone_in(each))
        shards = [_not_newer(each, known) for each, known in zip(folders, then["part"]["taken"], strict=True)]
        origin, skipped = new_origin(), 0  # another run's life begins

        def change(meta: dict[str, Any]) -> None:
            meta["state"]["origin"] = origin
            owner = meta["owner"] and {**meta["owner"], "origin": origin}
            meta.update(segment=1, checkpoint_id="", launch="", owner=owner)

        def change_leases(meta: dict[str, Any]) -> None:
            nonlocal skipped
            change(meta)
            ramp, state = run.data.rampup_batch_size, meta["state"]
            table, newer = (LeaseTable(run.data.train_samples, run.samples_per_step, 1, ramp=ramp) for _ in range(2))
            table.load(state["leases"])
            newer.load(newest["state"]["leases"])
            # What the shards' snapshots do not have yet is not trained, either.
            table.go_back(dict(chain.from_iterable(each.versions for each in shards)))
            state["part"]["taken"] = [each.facts for each in shards]
            skipped = table.skip_to(newer)
            table.trained_s = 0.0
            state["leases"] = table.state()

        partial = out.with_name(f".{out.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        of_shards = [(each.store, each.number, change) for each in shards]
        branched = [(store, number, change_leases), *of_shards]
        for process, (of, which, changed) in zip([server, *folders], branched, strict=True):
            new = partial / "servers" / process.name
            make_folder(new)
            of.branch(which, new / SNAPSHOTS, changed)
        partial.rename(out)
    return skipped


@dataclass(frozen=True)
class ShardSnapshot:
    """The snapshot of a shard that a new run begins with. facts: how many it had to say by then. versions: of each of
    its fragments."""

    store: SnapshotStore
    number: int
    facts: int
    versions: tuple[tuple[int, int], ...]


def _not_newer(folder: Path, known: int) -> ShardSnapshot:
    """Choose a shard's newest snapshot of which the ledger's knows all `known` facts. Raises ConfigError."""
    store = SnapshotStore(folder / SNAPSHOTS)
    for number, meta in sorted(
        zip(store.numbers(), store.metas(), strict=True), reverse=True, key=lambda each: each[0]
    ):
        part = meta["state"]["part"]
        if (facts := part["said"] + len(part["unsaid"])) <= known:
            versions = ((fragment, counts["version"]) for fragment, counts in meta["state"]["fragments"])
            return ShardSnapshot(store, number, facts, tuple(versions))
    raise ConfigError(
        f"{store.folder} has no snapshot as old: choose a newer one, and have more kept (checkpoint.keep)"
    )
