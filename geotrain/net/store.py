"""Snapshots of a server's state: a folder each, whole or not there.

    <folder>/<number>/meta.json            the JSON part of the state, and length and checksum of each file
    <folder>/<number>/<tensor>.safetensors one tensor a file, so that writing and reading never need a second copy

Tensors are named by `Server.state()`: `fragment.<i>.x` is fragment i's fp32 vector, which is all that export reads.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geotrain.files import sync
from geotrain.outer.layout import Layout, LayoutError

SNAPSHOTS = "snapshots"  # within a server's folder
META = "meta.json"
DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
KINDS = {name: dtype for dtype, name in DTYPES.items()}
STEP_BYTES = 16 << 20


class StoreError(OSError):
    """A snapshot cannot be written or read. Says which, why and what to do. Nothing half-written is left."""


class DamagedSnapshot(ValueError):
    """This snapshot is not what was written."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other servers out of it for as long as this process lives. Raises StoreError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise StoreError(f"{folder}: another server is running in this folder; stop it first") from None
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Snapshot:
    number: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


class Store:
    """keep: how many snapshots stay."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        self._kept: set[int] = set()  # in use: not to be dropped

    def save(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> int:
        """Write the next snapshot and drop the oldest; returns its number. Raises StoreError."""
        numbers = self.numbers()
        number = max(numbers, default=0) + 1
        final, temporary = self.path(number), self.folder / f".{number:08d}.partial"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            files = {name: _write(temporary / _file(name), tensor) for name, tensor in tensors.items()}
            _write_bytes(temporary / META, json.dumps({"files": files, "meta": meta}).encode())
            sync(temporary)
            temporary.rename(final)
            sync(self.folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise StoreError(
                f"{final}: the snapshot cannot be written: {error.strerror or error}; "
                "the older ones are whole; make room or repair the disk"
            ) from error
        for old in set((*numbers, number)[: -self.keep]) - self._kept:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return number

    @contextmanager
    def kept(self, number: int) -> Iterator[Path]:
        """The folder of a snapshot, which stays there during the block."""
        self._kept.add(number)
        try:
            yield self.path(number)
        finally:
            self._kept.discard(number)

    def adopt(self, folder: Path, number: int) -> Snapshot:
        """Take in a snapshot that was copied into `folder` (on the same disk), as that number.

        Raises DamagedSnapshot when it is not whole, OSError.
        """
        try:
            snapshot = _load(folder, number, None)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise DamagedSnapshot(str(error)) from error
        for path in (*folder.iterdir(), folder):
            sync(path)
        shutil.rmtree(self.path(number), ignore_errors=True)
        folder.rename(self.path(number))
        sync(self.folder)
        return snapshot

    def load_newest(self, names: tuple[str, ...] | None = None) -> tuple[Snapshot | None, list[str]]:
        """The newest snapshot that is whole (None: there is none), and what is wrong with those that are newer.

        names: read only these tensors. Raises StoreError when the folder cannot be read.
        """
        faults: list[str] = []
        for number in reversed(self.numbers()):
            try:
                return self._load(number, names), faults
            except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
                faults.append(f"{self.path(number)}: damaged, passed over: {error}")
        return None, faults

    def numbers(self) -> list[int]:
        """Of the snapshots that are there, ascending."""
        try:
            return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal() and p.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be read: {error.strerror}") from error

    def metas(self) -> list[dict[str, Any]]:
        """The JSON parts of all snapshots. Raises StoreError when one is damaged."""
        try:
            return [self._load(number, ()).meta for number in self.numbers()]
        except (DamagedSnapshot, OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self.folder}: a snapshot is damaged: {error}") from error

    def path(self, number: int) -> Path:
        return self.folder / f"{number:08d}"

    def _load(self, number: int, names: tuple[str, ...] | None) -> Snapshot:
        return _load(self.path(number), number, names)


def read_weights(folder: Path, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The newest weights in a server's folder: (canonical name, fp32 tensor), one fragment in memory at a time.

    Raises StoreError when there is no whole snapshot, LayoutError when it is another model's, DamagedSnapshot.
    """
    store = Store(folder / SNAPSHOTS)
    newest, faults = store.load_newest(names=())
    if newest is None:
        raise StoreError("\n".join([f"{folder}: holds no snapshot that is whole", *faults]))
    if newest.meta["state"]["layout_digest"] != layout.digest:
        raise LayoutError(f"{folder}: holds weights of another model than the run file's")
    for fragment in layout.fragments:
        vector = store._load(newest.number, (name := f"fragment.{fragment.index}.x",)).tensors[name]
        yield from layout.split(fragment.index, vector)


# ---------------------------------------------------------------------------------------------------- files


def _load(folder: Path, number: int, names: tuple[str, ...] | None) -> Snapshot:
    saved = checked_meta((folder / META).read_bytes())
    wanted = saved["files"] if names is None else {name: saved["files"][name] for name in names}
    tensors = {name: _read(folder / _file(name), *stated) for name, stated in wanted.items()}
    return Snapshot(number, tensors, saved["meta"])


def checked_meta(content: bytes) -> dict[str, Any]:
    """What stands in a META file: `files` (name → bytes, checksum) and `meta`. Raises DamagedSnapshot."""
    checksum, _, body = content.partition(b"\n")
    if checksum != b"%08x" % zlib.crc32(body):
        raise DamagedSnapshot(f"{META} differs from what was written (its checksum is wrong)")
    saved: dict[str, Any] = json.loads(body)
    return saved


def _file(tensor: str) -> str:
    return f"{tensor}.safetensors"


def _write(path: Path, tensor: Tensor) -> tuple[int, int]:
    """One 1-D tensor as a safetensors file. Returns (bytes, crc32) of the file."""
    header = {
        "tensor": {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [0, tensor.numel() * tensor.element_size()],
        }
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = _bytes_of(tensor.detach().contiguous())
    head = struct.pack("<Q", len(text)) + text
    crc = zlib.crc32(head)
    with path.open("xb") as file:
        file.write(head)
        for start in range(0, len(data), STEP_BYTES):
            crc = zlib.crc32(data[start : start + STEP_BYTES], crc)
            file.write(data[start : start + STEP_BYTES])
        file.flush()
        os.fsync(file.fileno())
    return len(head) + len(data), crc


def _read(path: Path, size: int, crc: int) -> Tensor:
    """The tensor of a file that `_write` wrote. Raises DamagedSnapshot."""
    if path.stat().st_size != size:
        raise DamagedSnapshot(f"{path.name} has {path.stat().st_size} bytes instead of {size}")
    with path.open("rb") as file:
        head = file.read(8)
        text_bytes = struct.unpack("<Q", head)[0]
        if text_bytes > size - len(head):
            raise DamagedSnapshot(f"{path.name}: its header is said to have {text_bytes} bytes")
        text = file.read(text_bytes)
        found = zlib.crc32(head + text)
        stated = json.loads(text)["tensor"]
        dtype = KINDS[stated["dtype"]]
        if prod(stated["shape"]) * dtype.itemsize != size - len(head) - len(text):
            raise DamagedSnapshot(f"{path.name}: its header does not fit its size")
        tensor = torch.empty(stated["shape"], dtype=dtype)
        data = _bytes_of(tensor)
        for start in range(0, len(data), STEP_BYTES):
            piece = data[start : start + STEP_BYTES]
            if file.readinto(piece) != len(piece):
                raise DamagedSnapshot(f"{path.name} ends early")
            found = zlib.crc32(piece, found)
    if found != crc:
        raise DamagedSnapshot(f"{path.name} differs from what was written (its checksum is wrong)")
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_bytes(path: Path, content: bytes) -> None:
    """Content, behind its checksum in a line of its own."""
    with path.open("xb") as file:
        file.write(b"%08x\n" % zlib.crc32(content) + content)
        file.flush()
        os.fsync(file.fileno())
