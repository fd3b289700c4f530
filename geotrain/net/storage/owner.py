"""Says whose state a folder or an object store holds, so that what belongs to another run is refused, untouched.

Every snapshot names its owner: run, process and *origin*, which the run's global server draws where the run begins.
Two runs of one name differ in it. Regions get it when they join, shards by their ledger, and a copy in object
storage keeps it. It lies beside the folders of a run's servers on each machine, so that another run's state is known
for that also while no global server answers.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zlib_ng.zlib_ng import crc32

from geotrain.common.files import OutputError, write_whole
from geotrain.net.storage.snapshots import StoreError

log = logging.getLogger(__name__)

ORIGIN = "origin"  # beside the folders of a run's servers


class OtherOwnerError(StoreError):
    """Raised for a state that is another run's or another process's; all stays as it is."""


@dataclass(frozen=True)
class Owner:
    """Whose state it is. run, process: their names. origin: "" while it is not known."""

    run: str
    process: str
    origin: str = ""

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Owner | None:
        """Read the owner in a snapshot's JSON part; None: it names none."""
        return cls(**meta["owner"]) if meta.get("owner") else None

    def plain(self) -> dict[str, str]:
        return asdict(self)

    def check(self, found: Owner | None, place: Path | str) -> Owner:
        """Raise OtherOwnerError if what was found at that place is somebody else's. Returns whose it is, with the
        origin that either knows."""
        if found is None or not self.run:
            return found or self
        if (found.run, found.process) != (self.run, self.process):
            raise OtherOwnerError(
                f"{place}: holds the state of {found.process!r} of run {found.run!r}, and this is {self.process!r} "
                f"of {self.run!r}. Nothing was changed: give this process its own folder and store"
            )
        if self.origin and found.origin and self.origin != found.origin:
            raise OtherOwnerError(
                f"{place}: holds the state of another run of the name {self.run!r}. Nothing was changed: give each "
                "run a folder, and a name or checkpoint.snapshots, of its own"
            )
        return replace(self, origin=self.origin or found.origin)


def note_origin(folder: Path, origin: str) -> None:
    """Note to which run the servers in that folder belong, where there is room, behind a checksum."""
    with suppress(OutputError):
        write_whole(folder / ORIGIN, f"{crc32(origin.encode()):08x} {origin}\n")


def check_origin(folder: Path, origin: str) -> None:
    """Raise OtherOwnerError if the state in a server's folder is of another run than its neighbours'. origin: that of
    the run to which the state belongs; "": it is of none yet. A note that is damaged says nothing, and is written
    anew. Raises OSError."""
    noted = folder.parent / ORIGIN
    checksum, _, named = noted.read_bytes().strip().partition(b" ") if noted.exists() else (b"", b"", b"")
    whole = checksum == b"%08x" % crc32(named)
    if noted.exists() and not whole:
        log.warning("%s: damaged, passed over", noted)
    if origin and whole and named != origin.encode():
        raise OtherOwnerError(
            f"{folder}: holds the state of another run than {noted} names. Nothing was changed: bring this run's "
            "state back, or move the folder away, to begin from the run's weights"
        )


def new_origin() -> str:
    """Draw an origin. It begins with the Unix time, so that a state knows when its run began (`begun_s`)."""
    return f"{int(time.time()):08x}{uuid.uuid4().hex[:8]}"


def begun_s(origin: str) -> int:
    """The Unix time at which a state of that origin began."""
    return int(origin[:8], 16)
