"""`geotrain rollback`: begins a run anew from an older snapshot of the global server, without the data since.

It is a branch: another folder, with that snapshot alone. So the run stays as it is, a kill leaves the new folder or
none, and no journal, region or worker has to be taken back: they join the new run without a state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geotrain.commands.telling import age_s
from geotrain.common.files import make_folder
from geotrain.common.names import GLOBAL
from geotrain.config import ConfigError, load_run
from geotrain.net.server.newest_weights import facts_of
from geotrain.net.storage.owner import new_origin
from geotrain.net.storage.snapshots import SNAPSHOTS, Snapshot, SnapshotStore, alone_in
from geotrain.outer.server.leases import LeaseTable


def snapshots_of(folder: Path) -> list[dict[str, Any]]:
    """List the global server's snapshots: number, version, committed samples, age, and whether the run had ended; if
    not, its journal holds more. Raises StoreError."""
    load_run(folder / "run.json")
    server, found = folder / "servers" / GLOBAL, list[dict[str, Any]]()
    store = SnapshotStore(server / SNAPSHOTS)
    for number, meta in zip(store.numbers(), store.metas(), strict=True):
        version, samples, changed_s = facts_of(server, Snapshot(number, {}, meta))
        told = {"committed_samples": samples, "version": version, "age_s": age_s(changed_s)}
        found.append({"snapshot": number, **told, "ended": meta["ended"]})
    return found


def roll_back(folder: Path, number: int, out: Path) -> int:
    """Make the new run's folder; returns the samples that are skipped. Raises ConfigError, StoreError."""
    run, server = load_run(folder / "run.json"), folder / "servers" / GLOBAL
    if run.outer.rule.synchronous:
        raise ConfigError(f"{folder}: a synchronous run cannot skip data: its rounds are laid out; set data.skip")
    if out.exists():
        raise ConfigError(f"--out {out} exists; name a folder that does not")
    with alone_in(server):
        store = SnapshotStore(server / SNAPSHOTS)
        known, newest = store.numbers(), store.newest_meta()
        if number not in known:
            raise ConfigError(f"--to {number}: {store.folder} has snapshots {', '.join(map(str, known)) or 'none'}")
        if not newest["ended"]:
            raise ConfigError(
                f"{folder}: its global server did not end in good order, so that it is not known which data came "
                "last: `geotrain launch … --resume`, then `geotrain stop`"
            )
        if newest["state"]["part"]["dealt"]:
            raise ConfigError(f"{folder}: its vectors are in shards of their own, of which no branch can be made")
        skipped = 0

        def change(meta: dict[str, Any]) -> None:
            nonlocal skipped
            ramp = run.data.rampup_batch_size
            table, newer = (LeaseTable(run.data.train_samples, run.samples_per_step, 1, ramp=ramp) for _ in range(2))
            table.load(meta["state"]["leases"])
            newer.load(newest["state"]["leases"])
            skipped = table.skip_to(newer)
            table.trained_s, origin = 0.0, new_origin()  # another run's life begins
            meta["state"].update(leases=table.state(), origin=origin)
            owner = meta["owner"] and {**meta["owner"], "origin": origin}
            meta.update(segment=1, checkpoint_id="", launch="", owner=owner)

        new = out / "servers" / GLOBAL
        make_folder(new)
        store.branch(number, new / SNAPSHOTS, change)
    return skipped
