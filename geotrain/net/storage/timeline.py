"""Names the timeline that each process of a server with shards is on, and takes all of them back to one checkpoint.

Where one of the processes has lost its disk, what all had acknowledged since the newest checkpoint in object storage
is lost, as it is where a server of one process loses its disk. So all take that checkpoint, each from its own copies,
and go on from there as that server does. From then on the server is on another timeline (as PostgreSQL calls it),
with other commands under the same numbers: each timeline has a name, which coordinator and shards keep in their
folders. Who is on another one than the coordinator goes back.

    <folder>/timeline.json  the timeline that the state in this folder belongs to
    <folder>/void           exists while the state is exchanged: without a whole state the folder counts as empty
"""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from geotrain.common.files import make_folder, sync, write_whole
from geotrain.net.storage.owner import Owner, new_origin
from geotrain.net.storage.recovery import JOURNAL
from geotrain.net.storage.remote_snapshots import Copies, RemoteSnapshots, check_is_known, condemned, number_of
from geotrain.net.storage.snapshots import SNAPSHOTS, DamagedSnapshot, SnapshotStore, StoreError

TIMELINE, VOID = "timeline.json", "void"
FETCHED = ".fetched"


@dataclass(frozen=True)
class Timeline:
    """Tells apart the histories that a server's state may have.

    name: "" for first weights, before coordinator and shards have met; it begins with the origin of the server's
    state (`geotrain.net.storage.owner`). checkpoint_id: where the timeline began; "": with the first weights.
    begun: all shards have been on it with their coordinator (kept by coordinators).
    """

    name: str = ""
    checkpoint_id: str = ""
    begun: bool = False

    @property
    def origin(self) -> str:
        return self.name.partition("-")[0]


def new_timeline(origin: str = "", checkpoint_id: str = "") -> Timeline:
    """Begin another timeline. origin: of the server's state; "": that begins now."""
    return Timeline(f"{origin or new_origin()}-{uuid.uuid4().hex[:16]}", checkpoint_id)


def read_timeline(folder: Path) -> Timeline:
    """Read which timeline the state in a server's or a shard's folder belongs to. Raises StoreError."""
    path = folder / TIMELINE
    if not SnapshotStore(folder / SNAPSHOTS).numbers():
        return Timeline()  # whatever was taken away with them
    try:
        return Timeline(**json.loads(path.read_text()))
    except FileNotFoundError:
        return Timeline()
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read: {error}; bring it back from a copy of the folder") from error


def write_timeline(folder: Path, timeline: Timeline) -> None:
    """Note which timeline the state in the folder belongs to. Raises OutputError."""
    write_whole(folder / TIMELINE, json.dumps(asdict(timeline)) + "\n")


def clear_void(folder: Path) -> None:
    """Make the folder one without a state, if a process died while it exchanged the state. Raises OSError."""
    if (folder / VOID).exists():
        shutil.rmtree(folder / FETCHED, ignore_errors=True)
        _exchange(folder, None)


def take(folder: Path, mirror: RemoteSnapshots, timeline: Timeline, number: int) -> None:
    """Put the copy of the timeline's checkpoint in the place of the folder's state, as snapshot `number`.

    Killed on the way, it leaves the former state or none. Raises StoreError and DamagedSnapshot, and then the former
    state is there; OSError.
    """
    make_folder(folder)
    mirror.fetch(timeline.checkpoint_id, folder / FETCHED)
    _exchange(folder, timeline, number)


def _exchange(folder: Path, timeline: Timeline | None, number: int = 0) -> None:
    """Put the fetched snapshot, which is of that timeline, in the place of the state; None: put nothing there."""
    void = folder / VOID
    void.touch()
    sync(folder)
    (folder / TIMELINE).unlink(missing_ok=True)
    for old in (SNAPSHOTS, JOURNAL):
        if (folder / old).exists():
            shutil.rmtree(folder / old)
    if timeline is not None:
        SnapshotStore(folder / SNAPSHOTS).adopt(folder / FETCHED, number)
        write_timeline(folder, timeline)
    sync(folder)
    void.unlink()
    sync(folder)


def go_back(folder: Path, copies: Copies) -> list[str]:
    """Take the newest checkpoint that a coordinator and all its shards have copies of, and begin a timeline with it:
    its shards follow. Returns sentences on that. Raises StoreError, when there is none; OSError."""
    faults: list[str] = []
    while checkpoint_ids := copies.whole():
        try:
            owner = copies.own.owner(checkpoint_ids[-1]) or Owner("", "")
            if origin := read_timeline(folder).origin:  # the disk is not lost
                replace(owner, origin=origin).check(owner, copies.url)
                check_is_known(SnapshotStore(folder / SNAPSHOTS), copies.own, checkpoint_ids[-1])
            timeline = new_timeline(origin or owner.origin, checkpoint_ids[-1])
            # What follows is then newer than all that is there, also than what only some have.
            take(folder, copies.own, timeline, number_of(max(copies.every())))
        except DamagedSnapshot as error:
            faults += condemned(copies.own, checkpoint_ids[-1], error)
            faults.append(f"{copies.url}/{checkpoint_ids[-1]}: passed over: {error}")
        else:
            faults.append(f"{folder}: goes back to {timeline.checkpoint_id}, which came from {copies.url}")
            return faults
    faults.append(f"{copies.url}: holds no checkpoint that the server and all its shards have")
    raise StoreError("\n".join(faults))


def who_goes_back(coordinator: Timeline, newest: str | None) -> Literal["nobody", "shard", "all"]:
    """Decide who goes back, where a shard's state does not fit its coordinator's.

    coordinator: its timeline. newest: the newest checkpoint id that all have copies of. "shard": the others have
    taken that checkpoint, or are about to. "nobody": there is none.
    """
    if newest is None:
        return "nobody"
    return "shard" if not coordinator.begun and coordinator.checkpoint_id == newest else "all"
