"""Small disks, to be filled, and emptied again; and what of a file the kernel keeps in memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

BALLAST = "ballast"


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size (as mount has it, "64k"), mounted in a folder."""
    assert os.geteuid() == 0, "mounting a file system needs root"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "geotrain-test", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave not a byte of room."""
    with (folder / BALLAST).open("ab", buffering=0) as file:
        step = 1 << 20
        while step:
            try:
                file.write(bytes(step))
            except OSError:
                step //= 2


def cached_bytes(vector: Tensor) -> int:
    """How much of a vector that is a mapped file is in the machine's memory."""
    pages = (ctypes.c_ubyte * -(-vector.nbytes // 4096))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(vector.data_ptr()), ctypes.c_size_t(vector.nbytes), pages)
    return 4096 * sum(page & 1 for page in pages)
