"""Keeps mirrors of members on the disk, in files that exist for one process alone.

They have no name (O_TMPFILE), so whatever ends the process frees their room, and nothing has to be found again: a
recovery makes them anew from snapshot and journal. What is changed is read into a kept buffer and written back from
there, past the page cache (O_DIRECT). Whoever only reads, a snapshot or a payload of whole weights, maps the file.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, LifoQueue

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from geotrain.config import OuterConfig
from geotrain.outer.mirror_store import MirrorStore

BUFFERS = 3  # for a vector that is read ahead, one that is changed, one that is written
IO_BYTES = 8 << 20
WAIT_S = 600.0  # for a buffer
_C = ctypes.CDLL(None, use_errno=True)
_MADV_PAGEOUT = 21
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # by their number in statfs(2)


class _File:
    """The file of a vector. buffer: what is changed, between page_in and page_out. leaving: its last write."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # direct I/O takes whole sectors
        self.number = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        self.buffer: mmap.mmap | None = None
        self.leaving: Future[None] | None = None
        os.posix_fallocate(self.number, 0, self.size_bytes)  # a full disk is noticed here, not at a write

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)

    def transfer(self, call: Callable[[int, list[memoryview], int], int], buffer: mmap.mmap) -> None:
        """Read (os.preadv) or write (os.pwritev) all of the file. Raises OSError."""
        done, view = 0, memoryview(buffer)
        while done < self.size_bytes:
            moved = call(self.number, [view[done : min(done + IO_BYTES, self.size_bytes)]], done)
            if not moved:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            done += moved


class DiskMirrorStore(MirrorStore):
    """Keeps vectors (1-D) in files of this folder, each of which takes a file descriptor.

    report: called with a sentence where vectors must stay in memory: on a file system that is memory itself or knows
    no nameless files or no direct I/O, and while the disk is full. A vector that cannot be read or written ends the
    server: OSError, of the latter at the next call. All calls but `release` are of one thread.
    """

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self._folder, self._report = folder, report
        self._reported: set[str] = set()
        self._failed: OSError | None = None
        self._files = WeakTensorKeyDictionary()
        self._wanted: list[Tensor] = []  # to be read ahead, behind `_coming`
        self._coming: tuple[Tensor, Future[mmap.mmap]] | None = None
        self._free: LifoQueue[mmap.mmap | None] = LifoQueue()  # buffers; None: one that is not allocated yet
        for _ in range(BUFFERS):
            self._free.put(None)
        self._reader, self._writer = (ThreadPoolExecutor(1, f"mirrors-{what}") for what in ("read", "write"))

    def put(self, vector: Tensor) -> Tensor:
        self._check()
        if vector in self._files:
            return vector
        try:
            if (kind := _IN_MEMORY.get(_kind_of(self._folder))) is not None:
                raise OSError(errno.EOPNOTSUPP, f"it is on {kind}")
            file = _File(self._folder, vector.nbytes)
            path = f"/proc/self/fd/{file.number}"
            kept = torch.from_file(path, shared=True, size=vector.numel(), dtype=vector.dtype)
        except (OSError, RuntimeError) as error:  # torch raises the latter where a file cannot be mapped
            self._say(f"{self._folder}: mirrors stay in memory: {getattr(error, 'strerror', error)}")
            return vector
        buffer = self._buffer(file)
        _tensor(buffer, vector).copy_(vector)
        self._write(file, buffer)
        self._check()
        self._files[kept] = file
        return kept

    def fetch(self, vectors: Sequence[Tensor]) -> None:
        self._wanted = [vector for vector in vectors if vector in self._files]
        if self._coming is not None:
            vector, buffer = self._coming
            if self._wanted and vector is self._wanted[0]:
                del self._wanted[0]
                return
            self._coming = None
            self._free.put(buffer.result())
        self._begin()

    def page_in(self, vector: Tensor) -> Tensor:
        self._check()
        file = self._files.get(vector)
        if file is None:
            return vector
        if file.buffer is None and self._coming is not None and self._coming[0] is vector:
            file.buffer, self._coming = self._coming[1].result(), None
            self._begin()
        elif file.buffer is None:
            file.buffer = self._read(file)
        return _tensor(file.buffer, vector)

    def page_out(self, vector: Tensor) -> None:
        self._check()
        file = self._files.get(vector)
        if file is not None and file.buffer is not None:
            buffer, file.buffer = file.buffer, None
            file.leaving = self._writer.submit(self._write, file, buffer)

    def settle(self) -> None:
        self._writer.submit(lambda: None).result()
        self._check()

    def release(self, vector: Tensor) -> None:
        if on_disk(vector):
            storage = vector.untyped_storage()
            # A kernel that does not know it takes pages when it needs them.
            _C.madvise(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), _MADV_PAGEOUT)

    # -- inside

    def _begin(self) -> None:
        if self._wanted:
            vector = self._wanted.pop(0)
            self._coming = vector, self._reader.submit(self._read, self._files[vector])

    def _buffer(self, file: _File) -> mmap.mmap:
        """Take a buffer that holds the file, once one is free."""
        try:
            buffer = self._free.get(timeout=WAIT_S)
        except Empty:
            raise OSError(errno.ETIMEDOUT, f"no mirror was written for {WAIT_S:g} s", str(self._folder)) from None
        if buffer is None or len(buffer) < file.size_bytes:
            buffer = mmap.mmap(-1, file.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return buffer

    def _read(self, file: _File) -> mmap.mmap:
        if file.leaving is not None:
            file.leaving.result()
        buffer = self._buffer(file)
        try:
            file.transfer(os.preadv, buffer)
        except OSError as error:
            self._free.put(buffer)
            raise self._error(error, "read") from error
        return buffer

    def _write(self, file: _File, buffer: mmap.mmap) -> None:
        try:
            file.transfer(os.pwritev, buffer)
        except OSError as error:
            self._failed = self._error(error, "written")
        finally:
            self._free.put(buffer)

    def _error(self, error: OSError, what: str) -> OSError:
        return OSError(error.errno, f"a mirror cannot be {what}: {error.strerror}", str(self._folder))

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _say(self, what: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            self._report(what)


def mirror_store_of(outer: OuterConfig, folder: Path, report: Callable[[str], None]) -> MirrorStore:
    """Make the mirror store of the server whose state is in `folder`. report: see `DiskMirrorStore`."""
    return DiskMirrorStore(folder, report) if outer.mirrors == "disk" else MirrorStore()


def on_disk(vector: Tensor) -> bool:
    """Whether a vector lies in a file."""
    return vector.untyped_storage().filename is not None


def _tensor(buffer: mmap.mmap, like: Tensor) -> Tensor:
    """View the beginning of a buffer as a tensor like this one."""
    return torch.frombuffer(buffer, dtype=like.dtype, count=like.numel())


def _kind_of(folder: Path) -> int:
    """Read the number of the kind of file system that the folder is on. Raises OSError."""
    found = (ctypes.c_long * 32)()
    if _C.statfs(os.fsencode(folder), found):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found[0]) & 0xFFFFFFFF
