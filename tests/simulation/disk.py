"""Knows what a loss of power leaves of files: their content at the last fsync, and any part of what came later."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
from pathlib import Path

SECTOR_BYTES = 512


class Disk:
    """Watches `os.fsync`, `os.fdatasync` and `os.pwrite` while `World` lets it take their places.

    full: folders in which there is no room for what `os.pwrite` writes, that is for records of a journal.
    The order of renames and of names in folders is kept: `tests.chaos.crash_points` has those.
    """

    def __init__(self, drawn: random.Random) -> None:
        self.random = drawn
        self.synced: dict[int, bytes] = {}  # inode → content at its last fsync
        self.full: set[Path] = set()
        self.syncs = 0
        self._pwrite = os.pwrite

    def fsync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            self.syncs += 1
            try:
                self.synced[status.st_ino] = os.pread(descriptor, status.st_size, 0)
            except OSError:  # it was opened for writing only
                self.synced[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def pwrite(self, descriptor: int, content: bytes, position: int) -> int:
        if self.full:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if any(path.is_relative_to(folder) for folder in self.full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._pwrite(descriptor, content, position)

    def after(self, folder: Path, power_lost: bool) -> Path:
        """Copy the folder as the next process finds it: as it is, or after a loss of power. What the dead process
        still writes then goes to the old one."""
        name, _, number = folder.name.partition("~")
        copy = folder.with_name(f"{name}~{int(number or 0) + 1}")
        shutil.copytree(folder, copy)
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            now, durable = path.read_bytes(), self.synced.get(path.stat().st_ino, b"")
            left = self._left(now, durable) if power_lost else now
            twin = copy / path.relative_to(folder)
            twin.write_bytes(left)
            self.synced[twin.stat().st_ino] = left if power_lost else durable
        return copy

    def rot(self, folder: Path) -> str:
        """Flip a bit of the newest of several snapshots: whoever reads it takes the one before. Returns the file's
        name; "": there is one at most."""
        snapshots = sorted(p for p in folder.iterdir() if p.name.isdecimal()) if folder.exists() else []
        if len(snapshots) > 1:
            path = self.random.choice(sorted(snapshots[-1].iterdir()))
            content = bytearray(path.read_bytes())
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            path.write_bytes(content)
            return path.name
        return ""

    def _left(self, now: bytes, durable: bytes) -> bytes:
        """What is left of a file: each byte range is old or new, and the end may be missing."""
        size = self.random.randint(min(len(durable), len(now)), len(now))
        cut = self.random.randint(0, size) // SECTOR_BYTES * SECTOR_BYTES  # a sector is old or new as a whole
        left = bytearray(now[:size])
        if self.random.random() < 0.5:  # what was overwritten in place is the old
            left[: min(cut, len(durable))] = durable[: min(cut, len(durable))]
        return bytes(left)
