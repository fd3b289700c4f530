"""Writes and finds checkpoints' folders, whatever ranks' files hold: by all ranks together, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shutil
import socket
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from geotrain.common.files import make_folder, out_of_room, size_and_checksum, sync
from geotrain.config import ConfigError

T = TypeVar("T")
FORMAT = 3
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

    leads: whether this rank makes and renames folders for them. leaders: by rank of the worker, who leads those that
    see its folder; rank 0 leads all where all see the same.
    """

    leads: bool
    leaders: tuple[int, ...]


class RanksOfWorker:
    """The worker's ranks, in a process group of their own, of gloo; without torch's default group, this process
    alone. Every rank must make it.

    A checkpoint is written by a thread of its own, while others' collectives go on. timeout_s: how long a rank waits
    for the others.
    """

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank()
        self.world_size = 1 if self.alone else dist.get_world_size()
        self.group = None if self.alone else dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        if self.group is not None:
            dist.barrier(group=self.group)  # who closed it at once would be lost to a rank that connects still
        self._folders: dict[Path, SharedFolder] = {}  # whether hosts share one never changes while they run

    def close(self) -> None:
        if not self.alone:
            dist.destroy_process_group(self.group)

    def gather(self, value: Any) -> list[Any]:
        """Give every rank the values of all ranks. A collective."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, action: Callable[[], T], place: Path) -> list[T]:
        """Run the action on every rank and return all results, by rank; if it fails on any, all raise the same error.

        Otherwise the ranks that succeeded would go on and wait in their next collective for the one that failed.
        """
        result, problem, no_room = None, None, False
        try:
            result = action()
        except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError, ValueError, KeyError) as error:
            words = str(error)
            if isinstance(error, OSError) and error.strerror:  # its str() would add "[Errno 28]"
                words = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
            # safetensors raises an error of its own, which has no number but the system's words.
            no_room = out_of_room(error) or os.strerror(errno.ENOSPC) in words
            problem = f"rank {self.rank}: {words}"
        outcomes = self.gather((result, problem, no_room))
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
        return self._folders.setdefault(folder, SharedFolder(leaders[rank] == rank, tuple(leaders)))


class CheckpointFolder:
    """A worker's checkpoints in one folder. Every rank makes the same calls; they contain collectives.

    keep: how many stay. otherwise: what to do where the newest one holds another optimizer's state. suffix: of ranks'
    files. faults: sentences about what `newest` passed over, the same on every rank. may_lack: is set where ranks may
    not be those that saved, as without a host that is lost: what they cannot read is passed over, too. origin: of the
    run, as `geotrain.net.storage.owner` has it; "": not known.

    `copies.py` sets what makes and finds copies elsewhere, as in object storage. written: called by every rank with a
    folder in which its file is, and the manifest. elsewhere: gives manifests that are nowhere here. bring: called by
    every rank with a manifest and the files that it reads; brings those that are not here.
    """

    def __init__(self, ranks: RanksOfWorker, folder: Path, keep: int, otherwise: str, suffix: str) -> None:
        self.ranks, self.folder, self._keep, self._otherwise = ranks, folder, keep, otherwise
        self.file = f"rank-{ranks.rank:05d}.{suffix}"
        self.faults: list[str] = []
        self.may_lack, self.origin = False, ""
        self._highest = 0  # number of a checkpoint that was found
        self.written: Callable[[Path, dict[str, Any]], None] = lambda folder, manifest: None
        self.elsewhere: Callable[[], list[dict[str, Any]]] = list
        self.bring: Callable[[dict[str, Any], list[str]], None] = lambda manifest, names: None

    def claim(self, origin: str) -> None:
        """Keep this folder for the run of that origin. A collective. Raises ConfigError: it holds checkpoints of
        another run, which this one would begin with, or delete, as if they were its own."""
        self.origin = origin
        found = [of for of, _ in manifests(self.folder) if len({origin, of.get("origin", "")} - {""}) > 1]
        if others := [place for place in self.ranks.gather([self.folder / of["tag"] for of in found][:1]) if place]:
            raise ConfigError(
                f"checkpoint {others[0][0]}: is of another run. Nothing was changed: give each run a folder "
                "(checkpoint.folder, where it is set) and a name of its own, or move that away"
            )

    def write(self, tag: str, manifest: dict[str, Any], write_file: Callable[[Path], object]) -> None:
        """Write a checkpoint; when it is whole, all but the newest `keep` go.

        manifest: `model`, `optimizer` and `layout`, which `newest` compares; `own_files`: whether each rank reads its
        own file and no other; and anything else that JSON can hold. write_file: writes this rank's file and brings it
        to the disk. Each `together` is also a barrier: no rank writes before its folder is there, the folders are
        renamed only when every rank's file is on disk, and older checkpoints go only when the new one is whole on
        every host. Raises CheckpointError on every rank if any rank failed; earlier checkpoints stay.
        """
        together, shared = self.ranks.together, self.ranks.sharing(self.folder)
        final, temporary = self.folder / tag, self.folder / f"{tag}.tmp"

        def written() -> tuple[str, tuple[int, int]]:
            write_file(temporary / self.file)
            return self.file, size_and_checksum(temporary / self.file)

        try:
            numbers = together(lambda: prepare(temporary) if shared.leads else 0, temporary)
            whole = {"format": FORMAT, "tag": tag, **manifest, "number": 1 + max(*numbers, self._highest)}
            whole |= {"files": dict(together(written, temporary)), "leaders": shared.leaders, "origin": self.origin}
            self.written(temporary, whole)
            together(lambda: finish(temporary, final, whole) if shared.leads else None, temporary)
            together(lambda: drop(self.folder, self._keep) if shared.leads else None, self.folder)
        except CheckpointError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def newest(self, wanted: dict[str, Any], tag: str | None = None) -> dict[str, Any] | None:
        """Find the newest whole checkpoint, or the one called `tag`; returns its manifest, None where there is none.

        wanted: this worker's `model`, `optimizer` and `layout`. Damaged checkpoints are passed over (`faults`).
        Raises CheckpointError on every rank: the newest is of another model or optimizer, all need another layout or
        files that are not here, or there is none called `tag`.
        """
        together, folder = self.ranks.together, self.folder
        together(lambda: bring_back(folder), folder)
        found = together(lambda: self._found(wanted, tag), folder)
        self._highest = max((number for here in found for number, _ in here), default=0)
        damaged = together(lambda: {*places(folder)} - {path for _, path in manifests(folder)}, folder)
        self.faults = [f"{p}: passed over: damaged {_MANIFEST}" for p in sorted(set[Path]().union(*damaged))]
        elsewhere: list[str] = []
        for key in sorted({key for here in found for key in here}, reverse=True):
            manifest = next(here[key] for here in found if key in here)
            place = folder / manifest["tag"]
            together(partial(self._check_kind, manifest, wanted), folder)
            self.bring(manifest, needed := self.needed(manifest, wanted["layout"]))
            lacks = [fault for fault in together(partial(self._lacks, needed, manifest), place) if fault]
            faults = lacks or [fault for fault in together(partial(self._damage, needed, manifest), place) if fault]
            if not faults:
                return manifest
            elsewhere += lacks
            self.faults.append(f"{place}: passed over: {faults[0]}")
        if elsewhere and not self.may_lack:
            raise CheckpointError(f"checkpoint {folder}: {elsewhere[0]}")
        if tag is not None:
            raise CheckpointError(f"checkpoint {folder}: there is no whole checkpoint {tag!r} in {folder}")
        return None

    def needed(self, manifest: dict[str, Any], layout: dict[str, Any]) -> list[str]:
        """List the files that this rank reads in the layout: all, or its own."""
        own = manifest["own_files"] and manifest["layout"] == layout
        return [self.file] if own else list(manifest["files"])

    def _found(self, wanted: dict[str, Any], tag: str | None) -> dict[tuple[int, int], dict[str, Any]]:
        """Find the manifests that this rank sees, by number and checksum."""
        every = [*(manifest for manifest, _ in manifests(self.folder)), *self.elsewhere()]
        found = [manifest for manifest in every if tag in (None, manifest["tag"])]
        return {(manifest["number"], manifest["checksum"]): manifest for manifest in found}

    def _check_kind(self, manifest: dict[str, Any], wanted: dict[str, Any]) -> None:
        if (of := manifest["model"]) != wanted["model"]:
            raise CheckpointError(f"{manifest['tag']!r} is of another model ({of}, not {wanted['model']})")
        if (kind := manifest["optimizer"]) != wanted["optimizer"]:
            held = f"{manifest['tag']!r} holds the state of {kind}, not of {wanted['optimizer']}"
            raise CheckpointError(f"{held}: {self._otherwise}")

    def _lacks(self, needed: list[str], manifest: dict[str, Any]) -> str | None:
        """Say why this rank cannot read the checkpoint, other than damage; None: it can."""
        here = self.folder / manifest["tag"]
        if missing := [name for name in needed if not (here / name).exists()]:
            return (
                f"rank {self.ranks.rank} on {socket.gethostname()} does not find {missing[0]} in {here}: start the "
                f"worker on the same hosts in the same order, in the layout {manifest['layout']}, or set "
                "checkpoint.folder to one that all its hosts share"
            )
        return None

    def _damage(self, needed: list[str], manifest: dict[str, Any]) -> str | None:
        """Say what is wrong with the files that this rank checks; None: nothing. Each rank checks a part of shared
        files."""
        for name in needed if manifest["own_files"] else needed[self.ranks.rank :: self.ranks.world_size]:
            try:
                if list(size_and_checksum(self.folder / manifest["tag"] / name)) != manifest["files"][name]:
                    return f"damaged: {name} differs from what was written (its length or its checksum is wrong)"
            except OSError as error:
                return f"{name}: {error.strerror}"
        return None


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
    """Delete all but the newest `keep` checkpoints, and those whose manifest is damaged."""
    for old in {*places(folder)} - {path for _, path in manifests(folder)[: max(1, keep)]}:
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


def known(manifest: dict[str, Any]) -> bool:
    """Whether it is of this format, and names files of one folder only: a checksum does not say who wrote it."""
    names = [manifest.get("tag"), *files] if isinstance(files := manifest.get("files"), dict) else [None]
    plain = (isinstance(name, str) and Path(name).name == name and Path(name).suffix != ".tmp" for name in names)
    of_kind = manifest.get("format") == FORMAT and isinstance(manifest.get("number"), int)
    return of_kind and all(plain) and not {"", ".."} & {*names}


def places(folder: Path) -> list[Path]:
    """List the folders of checkpoints, whole or damaged."""
    return [path.parent for path in folder.glob(f"*/{_MANIFEST}") if path.parent.suffix != ".tmp"]


def manifests(folder: Path) -> list[tuple[dict[str, Any], Path]]:
    """Find the checkpoints whose manifest is what was written; returns (manifest, folder), newest first.

    The newest has the highest number. Neither the clock nor the count of steps would do: the one may be set back, and
    the other begins anew when a worker begins without its checkpoint.
    """
    found = []
    for place in places(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = json.loads((place / _MANIFEST).read_text())
            if manifest["checksum"] == _checksum(manifest) and known(manifest) and manifest["tag"] == place.name:
                found.append((manifest, place))
    return sorted(found, key=lambda pair: pair[0]["number"], reverse=True)
