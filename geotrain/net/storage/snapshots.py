"""Writes and reads snapshots of a server's state. Each is a folder that exists whole or not at all.

    <folder>/<number>/meta.json            the format number, the JSON part of the state, and the length and checksum
                                           of every file, behind a checksum of its own
    <folder>/<number>/<tensor>.safetensors one tensor in each file, so that writing and reading go block by block

`Server.state()` names the tensors. `chunk.<i>.x` is the fp32 vector of chunk i of the parameter map, which export
reads.

`meta["checkpoint_id"]` names a snapshot in object storage, also where a server went back to an older one and counts
from there again. Each shard of a server writes snapshots of its own, when they are due there.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import shutil
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from geotrain.common.files import locked, make_folder, size_and_checksum, sync
from geotrain.config import shard_name
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.outer.mirror_store import MirrorStore
from geotrain.outer.server.store import DISPENSABLE, MIRRORS, check_whole
from geotrain.parameters.parameter_map import ParameterMap, ParameterMapError

FORMAT = 6  # number of the format; a snapshot with another one is refused
SNAPSHOTS = "snapshots"  # the name of the folder within a server's folder
META = "meta.json"
PINNED = "pinned"  # a snapshot with this empty file in its folder is not dropped
# Names of dtypes as the safetensors format has them.
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)  # what damage can look like
SYNC_BYTES = 2 << 20  # of a file are brought to the disk at a time: the journal's next flush waits for no more
HEADS_BYTES = 1 << 16  # room for a snapshot's JSON part and its files' headers


class StoreError(OSError):
    """Raised when a snapshot cannot be written or read. Says which, why and what to do. Nothing half-written is
    left."""


class OtherFormatError(StoreError):
    """Raised for a snapshot or a journal in a format that this version does not read; all stays as it is."""

    def __init__(self, place: Path | str, found: object, own: int) -> None:
        super().__init__(
            f"{place}: its format is {found}, and this version of GeoTrain reads format {own} only. Nothing was "
            "changed: resume with the version that wrote it, or export its weights with that and begin a new run "
            "from them"
        )


class DamagedSnapshot(ValueError):
    """Raised for a snapshot that is not what was written."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other servers out of it during the block. Raises StoreError.

    The kernel releases the lock when this process ends, however it does.
    """
    try:
        make_folder(folder)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be used: {error.strerror}") from error
    with locked(folder) as alone:
        if not alone:
            raise StoreError(f"{folder}: another server is running in this folder; stop it first")
        yield


@dataclass(frozen=True)
class Snapshot:
    number: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


class SnapshotStore:
    """Keeps the snapshots of one folder. keep: how many stay when a new one is written. mirror_store: where mirrors
    lie."""

    def __init__(self, folder: Path, keep: int = 2, mirror_store: MirrorStore | None = None) -> None:
        self.folder, self.keep, self.mirror_store = folder, keep, mirror_store or MirrorStore()
        self._kept: set[int] = set()  # numbers of snapshots that are in use, and must not be dropped
        self._damaged: set[int] = set()  # numbers of those that were passed over: the next one takes their places

    def save(self, state: FrozenState, meta: dict[str, Any]) -> int:
        """Write the next snapshot, delete all but the newest `keep` whole ones, and return its number. The state is
        closed afterwards. Raises StoreError."""
        with closing(state):
            numbers = self.numbers()
            number = max(numbers, default=0) + 1
            self._write(number, state, meta)
        whole = [each for each in (*numbers, number) if each not in self._damaged]
        for old in {*numbers} - {*whole[-self.keep :]} - self._kept:
            if not (self.path(old) / PINNED).exists():
                shutil.rmtree(self.path(old), ignore_errors=True)
        return number

    def _write(self, number: int, state: FrozenState, meta: dict[str, Any]) -> None:
        final, temporary = self.path(number), self.folder / f".{number:08d}.partial"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            make_folder(temporary)
            files = {name: _write_tensor(temporary / _file(name), name, state) for name in state.names()}
            if lacking := state.kinds.keys() - files.keys():
                raise OSError(errno.EIO, f"{len(lacking)} tensors of the state were not read, such as {min(lacking)}")
            write_meta(temporary, files, meta)
            # The files' contents are on disk (see `_write`). Their names go there next, and the final name last.
            sync(temporary)
            temporary.rename(final)
            sync(self.folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise StoreError(
                f"{final}: the snapshot cannot be written: {error.strerror or error}; "
                "the older ones are whole; make room or repair the disk"
            ) from error

    def check_room(self, state_bytes: int) -> None:
        """Raise StoreError, as for a full disk, if a snapshot of so many bytes cannot fit."""
        place = next(path for path in (self.folder, *self.folder.parents) if path.is_dir())
        free_bytes = shutil.disk_usage(place).free
        if free_bytes < state_bytes + HEADS_BYTES:
            raise StoreError(
                f"{self.folder}: a snapshot needs {state_bytes / 1e6:.1f} MB, but only {free_bytes / 1e6:.1f} MB are "
                "free; the older ones are whole; make room"
            ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def kept(self, number: int) -> Iterator[Path]:
        """Give the folder of a snapshot, which stays there during the block."""
        self._kept.add(number)
        try:
            yield self.path(number)
        finally:
            self._kept.discard(number)

    def adopt(self, folder: Path, number: int) -> None:
        """Take in a whole snapshot from `folder` (on the same disk), as that number. Raises OSError."""
        make_folder(self.folder)
        shutil.rmtree(self.path(number), ignore_errors=True)
        folder.rename(self.path(number))
        sync(self.folder)

    def branch(self, number: int, into: Path, change: Callable[[dict[str, Any]], None]) -> None:
        """Make a folder of snapshots of one that is here, with its JSON part as `change` leaves it. into: the folder,
        which exists whole or not at all. Raises StoreError, OtherFormatError, OSError."""
        source, partial = self.path(number), into.with_name(f".{into.name}.partial")
        check(source)
        saved = checked_meta((source / META).read_bytes(), source)
        change(saved["meta"])
        shutil.rmtree(partial, ignore_errors=True)
        target = partial / self.path(1).name
        make_folder(target)
        for name in saved["files"]:
            shutil.copy2(source / _file(name), target / _file(name))
            sync(target / _file(name))
        write_meta(target, saved["files"], saved["meta"])
        sync(target)
        partial.rename(into)
        sync(into.parent)

    def new_checkpoint_id(self) -> str:
        """Make the checkpoint id of the next snapshot. Later ones are greater. Raises StoreError."""
        return f"{max(self.numbers(), default=0) + 1:08d}-{uuid.uuid4().hex[:12]}"

    def checkpoint_ids(self) -> dict[int, str]:
        """List the checkpoint ids of the snapshots that are whole, by number, ascending. Raises StoreError."""
        found: dict[int, str] = {}
        for number in self.numbers():
            with suppress(DamagedSnapshot):
                found[number] = _load(self.path(number), number, ()).meta["checkpoint_id"]
        return found

    def newest_meta(self) -> dict[str, Any]:
        """Read the JSON part of the newest snapshot that has a whole one; empty: there is none. Raises StoreError."""
        for number in reversed(self.numbers()):
            with suppress(DamagedSnapshot):
                return _load(self.path(number), number, ()).meta
        return {}

    @property
    def ended(self) -> bool:
        """Whether the newest snapshot is of a server that ended in good order, so that its journal holds no more."""
        return bool(self.newest_meta().get("ended"))

    def load(self, number: int) -> Snapshot:
        """Read a snapshot whole. Raises DamagedSnapshot, OtherFormatError."""
        return _load(self.path(number), number, mirror_store=self.mirror_store)

    def load_newest(self, names: tuple[str, ...] | None = None) -> tuple[Snapshot | None, list[str]]:
        """Read the newest whole snapshot, None if there is none; returns also what is wrong with it or newer ones.

        names: read only these tensors. Raises StoreError if the folder cannot be read, OtherFormatError.
        """
        faults: list[str] = []
        for number in reversed(self.numbers()):
            try:
                return _load(self.path(number), number, names, faults, self.mirror_store), faults
            except DamagedSnapshot as error:
                self._damaged.add(number)
                faults.append(f"{self.path(number)}: damaged, passed over: {error}")
        return None, faults

    def numbers(self) -> list[int]:
        """List the numbers of all snapshots, ascending. Raises StoreError."""
        try:
            return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal() and p.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be read: {error.strerror}") from error

    def metas(self) -> list[dict[str, Any]]:
        """Read the JSON parts of all snapshots. Raises StoreError when one is damaged."""
        try:
            return [_load(self.path(number), number, ()).meta for number in self.numbers()]
        except DamagedSnapshot as error:
            raise StoreError(f"{self.folder}: a snapshot is damaged: {error}") from error

    def path(self, number: int) -> Path:
        return self.folder / f"{number:08d}"


def read_weights(
    folder: Path, parameter_map: ParameterMap, snapshots: Sequence[Snapshot] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the newest weights in a server's folder: (canonical name, fp32 tensor), one fragment in memory at a time.

    snapshots: of that folder, whose mean is taken instead. Raises StoreError when there is no whole snapshot,
    ParameterMapError when it is another model's, DamagedSnapshot.
    """
    store = SnapshotStore(folder / SNAPSHOTS)
    snapshots = snapshots or (newest_whole(store),)
    if snapshots[-1].meta["state"]["parameter_map_digest"] != parameter_map.digest:
        raise ParameterMapError(f"{folder}: holds weights of another model than the run file's")
    places = _places(folder, parameter_map, snapshots)
    for fragment in parameter_map.fragments:
        names = {f"chunk.{chunk.index}.x": chunk.index for chunk in parameter_map.chunks_of[fragment.index]}
        vectors = [_mean(name, [where[chunk] for where in places]) for name, chunk in names.items()]
        yield from parameter_map.split(fragment.index, vectors[0] if len(vectors) == 1 else torch.cat(vectors))


def snapshots_of_last(folder: Path, share: float) -> list[Snapshot]:
    """List the whole snapshots in a global server's folder that were taken in the last `share` of what is trained by
    now, one of each number of committed samples, without their tensors. Raises StoreError where there are not two."""
    store, found = SnapshotStore(folder / SNAPSHOTS), dict[int, Snapshot]()
    least = (1 - share) * _committed(newest_whole(store))
    for number in store.numbers():
        with suppress(DamagedSnapshot):
            snapshot = _load(store.path(number), number, ())
            if _committed(snapshot) >= least:
                found[_committed(snapshot)] = snapshot
    if len(found) < 2:
        raise StoreError(
            f"{store.folder}: of the last {share:g} of the run there is {len(found)} snapshot, a mean needs two; "
            "average a larger share, or give the next run a larger checkpoint.keep and a smaller "
            "checkpoint.every_minutes, so that some are taken and kept in its last part"
        )
    return list(found.values())


def newest_whole(store: SnapshotStore) -> Snapshot:
    """Read the newest whole snapshot, without its tensors. Raises StoreError."""
    newest, faults = store.load_newest(names=())
    if newest is None:
        raise StoreError("\n".join([f"{store.folder.parent}: holds no snapshot that is whole", *faults]))
    return newest


def _committed(snapshot: Snapshot) -> int:
    return int(snapshot.meta["state"]["leases"]["committed_samples"])


def _places(folder: Path, parameter_map: ParameterMap, snapshots: Sequence[Snapshot]) -> list[dict[int, Path]]:
    """Find, for each of a server's snapshots, the folder of each chunk's weights. Of a server whose shards have them,
    the newest of each shard, whose folders lie beside the server's: as many. Raises StoreError."""
    dealt = snapshots[-1].meta["state"]["part"]["dealt"]
    if not dealt:
        store, chunks = SnapshotStore(folder / SNAPSHOTS), [chunk.index for chunk in parameter_map.chunks]
        return [dict.fromkeys(chunks, store.path(snapshot.number)) for snapshot in snapshots]
    places: list[dict[int, Path]] = [{} for _ in snapshots]
    for shard, fragments in enumerate(dealt):
        store = SnapshotStore(folder.with_name(shard_name(folder.name, shard)) / SNAPSHOTS)
        newest = store.numbers()[-len(snapshots) :]
        if len(newest) < len(snapshots):
            raise StoreError(
                f"{store.folder}: holds {len(newest)} snapshots, {len(snapshots)} are wanted: bring the shards' "
                "folders here, beside the server's"
            )
        for where, number in zip(places, newest, strict=True):
            where |= {c.index: store.path(number) for f in fragments for c in parameter_map.chunks_of[f]}
    return places


def _mean(name: str, places: Sequence[Path]) -> Tensor:
    """Average a tensor over snapshots, two in memory at a time."""
    mean = _load(places[0], 0, (name,)).tensors[name]
    for count, place in enumerate(places[1:], 2):
        mean.lerp_(_load(place, 0, (name,)).tensors[name], 1 / count)
    return mean


# ---------------------------------------------------------------------------------------------------- files


def _load(
    folder: Path, number: int, names: tuple[str, ...] | None = None, faults: list[str] | None = None,
    mirror_store: MirrorStore | None = None,
) -> Snapshot:  # fmt: skip
    """Read a snapshot. names: read only these tensors. faults: gets a sentence for each damaged tensor that a server
    can do without (`DISPENSABLE`), which is left out; None: there may be none. mirror_store: where mirrors then lie.

    Raises DamagedSnapshot, whatever it is that makes the snapshot unreadable, and OtherFormatError.
    """
    try:
        saved = checked_meta((folder / META).read_bytes(), folder)
        wanted = saved["files"] if names is None else {name: saved["files"][name] for name in names}
        tensors = {}
        for name, stated in wanted.items():
            try:
                tensors[name] = _read(folder / _file(name), *stated)
                if mirror_store is not None and name.startswith(MIRRORS):
                    tensors[name] = mirror_store.put(tensors[name])
            except UNREADABLE as error:
                if faults is None or not name.startswith(DISPENSABLE):
                    raise
                faults.append(f"{folder / _file(name)}: damaged ({error}): that member's next weights go whole")
        return Snapshot(number, tensors, saved["meta"])
    except OtherFormatError:
        raise
    except UNREADABLE as error:
        raise DamagedSnapshot(str(error)) from error


def check(folder: Path) -> None:
    """Read a snapshot's files without keeping them, and bring them to the disk. Raises DamagedSnapshot, OSError."""
    for tensor, stated in checked_meta((folder / META).read_bytes(), folder)["files"].items():
        _verify(folder / _file(tensor), *stated)
    for path in (*folder.iterdir(), folder):
        sync(path)


def checked_meta(content: bytes, place: Path | str = META) -> dict[str, Any]:
    """Read the content of a META file: `files` (tensor → bytes and checksum of its file) and `meta`.

    place: of the snapshot, for messages. Raises DamagedSnapshot, OtherFormatError.
    """
    checksum, _, body = content.partition(b"\n")
    if checksum != b"%08x" % crc32(body):
        raise DamagedSnapshot(f"{META} differs from what was written (its checksum is wrong)")
    saved: dict[str, Any] = json.loads(body)
    if saved.get("format") != FORMAT:
        raise OtherFormatError(place, saved.get("format", "unknown"), FORMAT)
    # A checksum says that nothing was damaged, not who wrote it: whoever may write to a store can make one.
    for name in saved["files"]:
        if "/" in name or "\0" in name:
            raise DamagedSnapshot(f"{META} names a file outside its folder: {name!r}")
    try:
        check_whole(saved["files"], saved["meta"].get("state", {}))
    except ParameterMapError as error:
        raise DamagedSnapshot(str(error)) from None
    return saved


def _file(tensor: str) -> str:
    return f"{tensor}.safetensors"


def _write_tensor(path: Path, name: str, state: FrozenState) -> tuple[int, int]:
    """Write a tensor of the state as a safetensors file. Returns (bytes, crc32) of the file."""
    dtype, shape = state.kinds[name]
    data_bytes = prod(shape) * dtype.itemsize
    header = {"tensor": {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [0, data_bytes]}}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % mmap.PAGESIZE)  # so that the data begins with a page, as direct I/O needs it
    return _write(path, chain((struct.pack("<Q", len(text)) + text,), state.chunks(name)))


def write_meta(folder: Path, files: dict[str, Any], meta: dict[str, Any]) -> None:
    """Write META: `files` and `meta` as `checked_meta` reads them. Raises OSError."""
    body = json.dumps({"format": FORMAT, "files": files, "meta": meta}).encode()
    _write(folder / META, (b"%08x\n" % crc32(body), body))


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, int]:
    """Write a new file, which is on disk when this returns. Returns (bytes, crc32) of it.

    chunks: memoryviews begin with a page of memory. Those of whole pages go past the page cache: the disk takes twice
    the bytes a second then, for a fifth of the processor's time, which the updates beside it need.
    """
    size = crc = synced = 0
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
            crc = crc32(chunk, crc)
            direct = _set_direct(file, isinstance(chunk, memoryview) and not len(chunk) % mmap.PAGESIZE)
            if file.write(chunk) != len(chunk):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            size += len(chunk)
            if direct:
                synced = size
            elif size - synced >= SYNC_BYTES:
                os.fdatasync(file.fileno())
                synced = size
        os.fsync(file.fileno())
    return size, crc


def _set_direct(file: FileIO, direct: bool) -> bool:
    """Let writes go past the page cache, or not. Returns whether they do: not every file system can."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    with suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        return direct
    return False


def _read(path: Path, size: int, crc: int) -> Tensor:
    """Read the tensor of a file that `_write_tensor` wrote. size, crc: what it returned. Raises DamagedSnapshot."""
    _verify(path, size, crc)
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("tensor").clone()


def _verify(path: Path, size: int, crc: int) -> None:
    """Compare a file with its length and checksum. Raises DamagedSnapshot, OSError."""
    read, found = size_and_checksum(path)
    if read != size:
        raise DamagedSnapshot(f"{path.name} has {read} bytes instead of {size}")
    if found != crc:
        raise DamagedSnapshot(f"{path.name} differs from what was written (its checksum is wrong)")
