"""Removes stale locks of torch's compiler of extensions, by which DeepSpeed compiles its kernels at their first use.

The lock is a file: who makes it holds it open and compiles, all others wait until it is gone, without a word and
without end (`torch.utils.file_baton`). A process that is killed meanwhile leaves it, and every later start waits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from geotrain.common.files import try_lock

# On these the processes of this machine are all that can hold a file open.
LOCAL_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs"}
COMPILED_S = 1800.0  # no extension takes longer
TURN_S = 10.0  # for the other ranks of this host, each of which takes a moment


def build_folder() -> Path:
    """The folder where torch builds extensions, found as `torch.utils.cpp_extension` does, which takes a while to
    import."""
    if folder := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder)
    return Path(os.path.realpath(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))) / "torch_extensions"


def release_stale_locks(folder: Path) -> list[str]:
    """Remove the locks whose owners are gone. Returns a line for each lock that was found.

    Ranks of one host take turns: a rank that looked before another made its own lock would remove that one.
    """
    if not _locks(folder):
        return []
    with _turn(folder):
        return [_look_at(lock) for lock in _locks(folder)]


def _locks(folder: Path) -> list[Path]:
    """List the locks. An extension's folder lies in the folder, or in one of it for each version of Python and
    CUDA."""
    return sorted(path for depth in ("*/lock", "*/*/lock") for path in folder.glob(depth))


def _look_at(lock: Path) -> str:
    try:
        age_s = time.time() - lock.stat().st_mtime
        holders = _holders(lock)
        if holders:
            return f"{lock}: process {holders[0]} compiles; this rank waits for it if it needs the same"
        if file_system(lock) in LOCAL_FILE_SYSTEMS or age_s > COMPILED_S:
            lock.unlink()
            return f"{lock}: removed, since whoever compiled was killed"
    except OSError as error:
        return f"{lock}: {error.strerror}"
    return (
        f"{lock}: {age_s:.0f} s old, held by no process of this host: if no other host that shares the folder "
        "compiles, remove it, or ranks wait for it"
    )


def _holders(lock: Path) -> list[int]:
    """Processes of this machine that have the file open, as far as this user may look."""
    path = str(lock.resolve())
    processes = psutil.process_iter(["open_files"])  # None: another user's
    return [each.pid for each in processes if any(file.path == path for file in each.info["open_files"] or ())]


def file_system(path: Path) -> str:
    """Name the type of the file system that the path lies on, as the kernel does."""
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounts[place] for place in path.resolve().parents if place in mounts), "")


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Let one process at a time of this host into the block; after TURN_S regardless."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + TURN_S
        while not try_lock(descriptor) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
