"""The whole state of a run on disk, so that one that was ended goes on, to the last bit as if it had not been."""

from __future__ import annotations

import copyreg
import hashlib
import multiprocessing
import platform
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from geotrain.common.files import whole_file

# What a run's numbers follow from, and whose objects are in its state.
CODE = (
    *("geotrain/**/*.py", "kernels/*.py", "kernels/csrc/*"),
    *("benchmarks/studies/learner/*.py", "benchmarks/studies/claims/*.py"),
)
EVERY_S = 300.0

# A server's first weights travel as a view of its mirror's memory, which it copies before it changes it.
copyreg.pickle(memoryview, lambda view: (bytes, (bytes(view),)))


@cache
def code() -> str:
    """Digest of the files of CODE and of the versions of Python and torch: a pickle is of use only to the code that
    wrote it. The files are those on disk, so a run needs a checkout that nobody edits."""
    found = hashlib.sha256(f"{platform.python_version()} {torch.__version__}".encode())
    for path in sorted(path for pattern in CODE for path in ROOT.glob(pattern) if path.is_file()):
        found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


class Kept:
    """The state of one run in a folder: a file named by the run's key and the digest of the code.

    every_s: seconds between two savings, at least.
    """

    def __init__(self, folder: Path, key: str, every_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.every_s = folder / f"{key}-{code()}.state", every_s
        self._due_s = time.monotonic() + every_s

    def load(self) -> Any | None:
        """Load what was saved last; None if there is nothing."""
        return torch.load(self.path, weights_only=False) if self.path.exists() else None

    def save_if_due(self, state: Callable[[], Any]) -> None:
        """Save `state()` if it is time. Raises SystemExit when the process that wants the result is no more,
        OutputError when the disk is full: what was saved before stays."""
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise SystemExit("the program that this run was for has ended")
        if time.monotonic() >= self._due_s:
            with whole_file(self.path, "wb") as file:
                torch.save(state(), file)
            self._due_s = time.monotonic() + self.every_s


def drop(folder: Path, key: str) -> None:
    """Remove the states of a run whose row is on disk."""
    for path in folder.glob(f"{key}-*.state"):
        path.unlink()
