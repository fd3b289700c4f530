"""Keeps mirrors of members on the disk, in mapped files that exist for one process alone.

They have no name (O_TMPFILE), so whatever ends the process frees their room, and nothing has to be found again: a
recovery makes them anew from snapshot and journal. A vector that is paged out is written to its file and leaves the
memory of the process and the page cache (Linux's MADV_PAGEOUT, which changes no content, whatever it does).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from threading import BoundedSemaphore

import torch
from torch import Tensor

from geotrain.config import OuterConfig
from geotrain.monitor.events import EventLog
from geotrain.outer.mirror_store import MirrorStore

LEAVING = 1  # so many vectors may be on their way to the disk while another is used
_C = ctypes.CDLL(None, use_errno=True)
_MS_SYNC, _MADV_PAGEOUT, _MADV_POPULATE_WRITE = 4, 21, 23
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # by their number in statfs(2)


class DiskMirrorStore(MirrorStore):
    """Keeps vectors in files of this folder.

    report: called with a sentence where vectors must stay in memory: on a file system that is memory itself or knows
    no nameless files, and while the disk is full. Any thread may call it. A vector that cannot be read or written
    ends the server: OSError, of the latter at the next call.
    """

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self._folder, self._report = folder, report
        self._reported: set[str] = set()
        self._failed: OSError | None = None
        self._leaving = BoundedSemaphore(LEAVING)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="mirrors")

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = prod(shape) * dtype.itemsize
        try:
            if (kind := _IN_MEMORY.get(_kind_of(self._folder))) is not None:
                raise OSError(errno.EOPNOTSUPP, f"it is on {kind}")
            file = os.open(self._folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            try:
                # Without room from the start a full disk would end the process, at some write into memory.
                os.posix_fallocate(file, 0, max(1, size))
                flat = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=prod(shape), dtype=dtype)
            finally:
                os.close(file)
            return flat.view(*shape)
        except (OSError, RuntimeError) as error:  # torch raises the latter where a file cannot be mapped
            self._say(f"{self._folder}: mirrors stay in memory: {getattr(error, 'strerror', error)}")
            return super().room(shape, dtype)

    def put(self, vector: Tensor) -> Tensor:
        self._check()
        if on_disk(vector):
            return vector
        kept = self.room(vector.shape, vector.dtype)
        return kept.copy_(vector) if on_disk(kept) else vector

    def page_in(self, vector: Tensor) -> None:
        self._check()
        if on_disk(vector):
            # All at once, not page by page as each is touched. What the disk cannot give is an error, and no signal.
            failed = _C.madvise(*_range(vector), _MADV_POPULATE_WRITE) and ctypes.get_errno()
            if failed not in (0, errno.EINVAL):  # the latter: Linux before 5.14
                raise self._error(failed, "read")

    def page_out(self, vector: Tensor) -> None:
        self._check()
        if on_disk(vector):
            self._leaving.acquire()  # so that no more is in memory than the disk can take
            self._writer.submit(self._leave, vector)

    def settle(self) -> None:
        """Wait until all that was paged out has left memory."""
        self._writer.submit(lambda: None).result()
        self._check()

    def _leave(self, vector: Tensor) -> None:
        try:
            place = _range(vector)
            if _C.msync(*place, _MS_SYNC):
                self._failed = self._error(ctypes.get_errno(), "written")
            else:
                _C.madvise(*place, _MADV_PAGEOUT)  # a kernel that does not know it takes pages when it needs them
        finally:
            self._leaving.release()

    def _error(self, number: int, what: str) -> OSError:
        return OSError(number, f"a mirror cannot be {what}: {os.strerror(number)}", str(self._folder))

    def _check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _say(self, what: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            self._report(what)


def mirror_store_of(outer: OuterConfig, folder: Path, events: EventLog) -> MirrorStore:
    """Make the mirror store of the server whose state is in `folder`."""
    return DiskMirrorStore(folder, events.report) if outer.mirrors == "disk" else MirrorStore()


def on_disk(vector: Tensor) -> bool:
    """Whether a vector lies in a file."""
    return vector.untyped_storage().filename is not None


def _range(vector: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    storage = vector.untyped_storage()
    return ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())


def _kind_of(folder: Path) -> int:
    """Read the number of the kind of file system that the folder is on. Raises OSError."""
    found = (ctypes.c_long * 32)()
    if _C.statfs(os.fsencode(folder), found):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found[0]) & 0xFFFFFFFF
