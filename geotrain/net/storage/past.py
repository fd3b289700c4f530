"""The past of a server whose vaults are processes of their own, and how its processes go back to a moment together.

Where one of them has lost its disk, what all had acknowledged since the newest moment in object storage is lost, as
it is where a server of one process loses its disk. So all take that moment, each from its own copies, and go on from
there as that server does. From then on the server has another past than before, with other orders under the same
numbers: each past has a name, which book and vaults keep in their folders. Who has another than the book goes back.

    <folder>/past.json   the past that the state in this folder belongs to
    <folder>/void        exists while the state is exchanged: without a whole state the folder counts as empty
"""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from geotrain.common.files import make_folder, sync, write_whole
from geotrain.net.storage.recovery import JOURNAL
from geotrain.net.storage.snapshot_mirror import Copies, SnapshotMirror, number_of
from geotrain.net.storage.snapshots import SNAPSHOTS, DamagedSnapshot, SnapshotStore, StoreError

PAST, VOID = "past.json", "void"
FETCHED = ".fetched"


@dataclass(frozen=True)
class Past:
    """name: "" for first weights, before book and vaults have met. moment: from which the past began; "": from there.
    begun: all vaults have been in it with their book (kept by books)."""

    name: str = ""
    moment: str = ""
    begun: bool = False


def read_past(folder: Path) -> Past:
    """Of the state in a server's or a vault's folder. Raises StoreError."""
    path = folder / PAST
    if not SnapshotStore(folder / SNAPSHOTS).numbers():
        return Past()  # whatever was taken away with them
    try:
        return Past(**json.loads(path.read_text()))
    except FileNotFoundError:
        return Past()
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path}: cannot be read: {error}; bring it back from a copy of the folder") from error


def write_past(folder: Path, past: Past) -> None:
    """Raises OutputError."""
    write_whole(folder / PAST, json.dumps(asdict(past)) + "\n")


def clear_void(folder: Path) -> None:
    """Make the folder one without a state, if a process died while it exchanged the state. Raises OSError."""
    shutil.rmtree(folder / FETCHED, ignore_errors=True)
    if (folder / VOID).exists():
        _exchange(folder, None)


def take(folder: Path, mirror: SnapshotMirror, past: Past, number: int) -> None:
    """Put the copy of the past's moment in the place of the folder's state, as snapshot `number`.

    Killed on the way, it leaves the former state or none. Raises StoreError and DamagedSnapshot, and then the former
    state is there; OSError.
    """
    make_folder(folder)
    mirror.fetch(past.moment, folder / FETCHED)
    _exchange(folder, past, number)


def _exchange(folder: Path, past: Past | None, number: int = 0) -> None:
    """The fetched snapshot takes the place of the state. past: of the snapshot; None: nothing takes its place."""
    void = folder / VOID
    void.touch()
    sync(folder)
    (folder / PAST).unlink(missing_ok=True)
    for old in (SNAPSHOTS, JOURNAL):
        if (folder / old).exists():
            shutil.rmtree(folder / old)
    if past is not None:
        SnapshotStore(folder / SNAPSHOTS).adopt(folder / FETCHED, number)
        write_past(folder, past)
    sync(folder)
    void.unlink()
    sync(folder)


def go_back(folder: Path, copies: Copies) -> list[str]:
    """A book takes the newest moment that it and all its vaults have copies of, and begins a past with it: its vaults
    follow. Returns sentences on that. Raises StoreError, when there is none; OSError."""
    faults: list[str] = []
    while moments := copies.whole():
        past = Past(uuid.uuid4().hex, moments[-1])
        try:
            # What follows is then newer than all that is there, also than what only some have.
            take(folder, copies.own, past, number_of(max(copies.every())))
        except DamagedSnapshot as error:
            copies.own.condemn(past.moment, str(error))
            faults.append(f"{copies.url}/{past.moment}: passed over: {error}")
        else:
            faults.append(f"{folder}: goes back to {past.moment}, which came from {copies.url}")
            return faults
    raise StoreError("\n".join([*faults, f"{copies.url}: holds no moment that the server and all its vaults have"]))


def who_goes_back(book: Past, newest: str | None) -> Literal["nobody", "vault", "all"]:
    """A vault has come whose state does not fit its book's. book: its past. newest: the newest moment that all have
    copies of. "vault": the others have taken that moment, or are about to. "nobody": there is none."""
    if newest is None:
        return "nobody"
    return "vault" if not book.begun and book.moment == newest else "all"
