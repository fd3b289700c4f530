"""Writes a checkpoint's folder: by all ranks together, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from geotrain.common.files import make_folder, out_of_room, sync

T = TypeVar("T")
FORMAT = 2
_MANIFEST = "manifest.json"
_REPLACED = ".replaced.tmp"  # ends the name of a checkpoint that was moved aside for a newer one of the same tag
_TIMEOUT_S = 1800.0  # how long a rank that has written its file waits for the others


class CheckpointError(OSError):
    """A checkpoint cannot be written or read. The message says which and why.

    no_room: a disk was full, and nothing else is wrong; the same on every rank.
    """

    def __init__(self, message: str, no_room: bool = False) -> None:
        super().__init__(message)
        self.no_room = no_room


@dataclass(frozen=True)
class SharedFolder:
    """The ranks that see the same folder as this one.

    leads: whether this rank makes and renames folders for them. whole: these are all ranks of the worker.
    """

    leads: bool
    whole: bool


class RanksOfWorker:
    """The worker's ranks, in a process group of their own. Every rank must make it.

    A checkpoint is written by a thread of its own, while others' collectives go on.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_TIMEOUT_S))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._folders: dict[Path, SharedFolder] = {}  # whether hosts share one never changes while they run

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def together(self, action: Callable[[], T], place: Path) -> list[T]:
        """Run the action on every rank and return all results, by rank; if it fails on any, all raise the same error.

        Otherwise the ranks that succeeded would go on and wait in their next collective for the one that failed.
        """
        result = problem = None
        no_room = False
        try:
            result = action()
        except (OSError, SafetensorError, CheckpointError, ValueError, KeyError) as error:
            words = str(error)
            if isinstance(error, OSError) and error.strerror:  # its str() would add "[Errno 28]"
                words = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
            # safetensors raises an error of its own, which has no number but the system's words.
            no_room = out_of_room(error) or os.strerror(errno.ENOSPC) in words
            problem = f"rank {self.rank}: {words}"
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, (result, problem, no_room), group=self._group)
        problems = [problem for _, problem, _ in outcomes if problem]
        if problems:
            more = f" (and {len(problems) - 1} more ranks)" if len(problems) > 1 else ""
            room_only = all(full for _, problem, full in outcomes if problem)
            raise CheckpointError(f"checkpoint {place}: {problems[0]}{more}", room_only)
        return [result for result, _, _ in outcomes]

    def sharing(self, folder: Path) -> SharedFolder:
        """Find out which ranks see the same folder, by a file of each rank there."""
        if folder in self._folders:
            return self._folders[folder]
        rank, token = self.rank, uuid.uuid4().hex

        def probe(token: str, number: int) -> Path:
            # A name that nobody has asked for before: network file systems remember for a while that a file is not
            # there.
            return folder / f".seen-{token}-{number}"

        self.together(lambda: make_folder(folder), folder)
        token = self.together(lambda: token, folder)[0]
        try:
            self.together(lambda: probe(token, rank).touch(), folder)
            leaders = self.together(lambda: next(n for n in range(rank + 1) if probe(token, n).exists()), folder)
        finally:
            with contextlib.suppress(OSError):
                probe(token, rank).unlink(missing_ok=True)
        self._folders[folder] = SharedFolder(leaders[rank] == rank, set(leaders) == {0})
        return self._folders[folder]


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def prepare(temporary: Path) -> int:
    """Make the empty folder; returns the largest number of a checkpoint beside it."""
    make_folder(temporary.parent)
    bring_back(temporary.parent)
    for left_over in temporary.parent.glob("*.tmp"):  # of a save that was killed
        shutil.rmtree(left_over)
    temporary.mkdir()
    return max((manifest["number"] for manifest, _ in manifests(temporary.parent)), default=0)


def finish(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, make all durable, and give the folder its name."""
    path = temporary / _MANIFEST
    path.write_text(sealed(manifest))
    # First the files' contents and then their names go to disk, and only then the name that makes them a checkpoint:
    # a power failure in between leaves the temporary folder, which nobody reads.
    sync(path)
    sync(temporary)
    if final.exists():  # a folder cannot be renamed over another that is not empty
        # If this process is killed between the two renames, `bring_back` undoes the first.
        final.rename(final.with_name(final.name + _REPLACED))
    temporary.rename(final)
    sync(final.parent)


def drop(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for _, old in manifests(folder)[max(1, keep) :]:
        # Renamed before it is deleted, so that a deletion that is broken off leaves no checkpoint with files missing.
        old.rename(old.with_name(f"{old.name}.old.tmp"))
    for dropped in folder.glob("*.tmp"):
        shutil.rmtree(dropped, ignore_errors=True)


def sealed(manifest: dict[str, Any]) -> str:
    """Write a manifest as text, with a checksum of all that it says."""
    return json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1)


def _checksum(manifest: dict[str, Any]) -> int:
    said = {key: value for key, value in manifest.items() if key != "checksum"}
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())


def bring_back(folder: Path) -> None:
    """Give an older checkpoint its name back if a save was killed after it had moved that checkpoint aside."""
    for replaced in folder.glob(f"*{_REPLACED}"):
        final = replaced.with_name(replaced.name.removesuffix(_REPLACED))
        with contextlib.suppress(FileNotFoundError):  # another rank has just done it
            if not final.exists():
                replaced.rename(final)


def manifests(folder: Path) -> list[tuple[dict[str, Any], Path]]:
    """Find the checkpoints whose manifest is what was written; returns (manifest, folder), newest first.

    The newest has the highest number. Neither the clock nor the count of steps would do: the one may be set back, and
    the other begins anew when a worker begins without its checkpoint.
    """
    found = []
    for path in folder.glob(f"*/{_MANIFEST}"):
        if path.parent.suffix == ".tmp":
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads(path.read_text())
            if manifest["checksum"] == _checksum(manifest) and manifest["format"] == FORMAT:
                found.append((manifest, path.parent))
    return sorted(found, key=lambda pair: pair[0]["number"], reverse=True)
