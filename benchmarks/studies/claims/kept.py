"""The whole state of a run on disk, so that one that was ended goes on, to the last bit as if it had not been.

A run's state are two files: NAME.N.state, what torch.save makes of it, and NAME.json, which names that file, its size
and its checksum, and takes its predecessor's place in one step. NAME is the run's key and a digest of the code, since
a pickle is of use to the code only that wrote it.
"""

from __future__ import annotations

import copyreg
import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import platform
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from benchmarks import ROOT
from benchmarks.common import hardware
from geotrain.common.files import write_whole

# What a run's numbers follow from, and whose objects are in its state.
FOLDERS = (
    "common", "config", "families", "optimizers", "outer", "outer/*", "parallelism", "parameters", "plan/model",
    "simulate", "staging",
)  # fmt: skip
CODE = (
    *(f"geotrain/{folder}/*" for folder in FOLDERS),
    *("kernels/**/*", "benchmarks/studies/learner/*", "benchmarks/studies/claims/kept.py"),
)
EVERY_S = 300.0
RARELY = 20  # so many times as long as keeping a state takes, nothing is kept
AT_ONCE = 1 << 24  # bytes that are read at once

# A server's first weights travel as a view of its mirror's memory, which it copies before it changes it.
copyreg.pickle(memoryview, lambda view: (bytes, (bytes(view),)))


@cache
def code() -> str:
    """A digest of the files of CODE, and of the versions of Python and torch. The files are those on disk: what is
    edited while a run goes on is another's code, so run in a checkout of its own."""
    found = hashlib.sha256(f"{platform.python_version()} {torch.__version__}".encode())
    for pattern in CODE:
        for path in sorted(path for path in ROOT.glob(pattern) if path.suffix in (".py", ".c", ".h")):
            found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:12]


@dataclass(frozen=True)
class Spent:
    """Time that a run took, over all its sittings."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    hardware: tuple[str, ...] = ()

    def with_sitting(self, begin_cpu_s: float, begin_s: float) -> Spent:
        """Add this sitting, which began then, by the processor's time and the wall's, and lasts until now."""
        return Spent(
            self.cpu_s + time.process_time() - begin_cpu_s,
            self.wall_s + time.perf_counter() - begin_s,
            tuple(dict.fromkeys((*self.hardware, hardware()))),
        )


class Foreign(Exception):
    """A state that is none, or of something else. Says why."""


class Kept:
    """The state of one run in a folder: a context, which one process at a time may be in. tell: is told what happens
    to it."""

    def __init__(self, folder: Path, key: str, tell: Callable[[str], None] = print) -> None:
        self.folder, self.key, self.tell = folder, key, tell
        self.name = f"{key}-{code()}"
        self.about = folder / f"{self.name}.json"
        self._lock: IO[str] | None = None

    def __enter__(self) -> Kept:
        """Raises BlockingIOError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / f"{self.name}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            why = f"another process is at this run; wait for it, end it, or name another folder than {self.folder}"
            raise BlockingIOError(errno.EWOULDBLOCK, why) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lock is not None
        self._lock.close()

    def load(self) -> Any | None:
        """Load what was kept last; None, and it is told why, if there is nothing that can be used."""
        for other in sorted(self.folder.glob(f"{self.key}-*.json")):
            if other != self.about:
                self.tell(f"{other}: a state that other code, Python or torch wrote; it is left alone, and not used")
        if not self.about.exists():
            return None
        try:
            return self._read(json.loads(self.about.read_text()))
        except (Foreign, OSError, ValueError, KeyError, TypeError) as why:
            self.tell(f"{self.about}: {why}: the run begins anew")
            return None

    def save(self, what: Any, about: dict[str, Any]) -> None:
        """about: JSON data for people. A full disk ends no run: it is told, and what was kept before stays."""
        number = 1 + max((int(path.name.split(".")[-2]) for path in self._bodies()), default=0)
        body = self.folder / f"{self.name}.{number}.state"
        try:
            with body.open("wb") as file:
                summed = _Summed(file)
                torch.save(what, summed)
                file.flush()
                os.fsync(file.fileno())
            known = {"key": self.key, "state": body.name, "bytes": summed.bytes, "crc32": summed.crc32}
            write_whole(self.about, json.dumps(known | about, indent=1) + "\n")
        except OSError as error:
            body.unlink(missing_ok=True)
            self.tell(f"{self.about}: cannot be written ({error}): the run goes on without it")
            return
        for older in self._bodies():
            if older != body:
                older.unlink()

    def drop(self) -> None:
        """The run is over, and its row is on disk."""
        for path in (self.about, *self._bodies(), self.folder / f"{self.name}.lock"):
            path.unlink(missing_ok=True)

    def _bodies(self) -> list[Path]:
        return list(self.folder.glob(f"{self.name}.*.state"))

    def _read(self, known: dict[str, Any]) -> Any:
        body = self.folder / known["state"]
        if known["key"] != self.key:
            raise Foreign(f"it is of the run {known['key']}, not {self.key}")
        crc32 = size = 0
        with body.open("rb") as file:
            while part := file.read(AT_ONCE):
                crc32, size = zlib.crc32(part, crc32), size + len(part)
        if (size, crc32) != (known["bytes"], known["crc32"]):
            raise Foreign(f"{body.name} is damaged: its checksum is not the one noted")
        # Anything may be in a pickle: this one is what this code has written, bit for bit.
        return torch.load(body, weights_only=False)


class _Summed:
    """A file that counts the size and checksum of what is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.bytes, self.crc32 = file, 0, 0

    def write(self, part: Any) -> int:
        self.bytes += len(part)
        self.crc32 = zlib.crc32(part, self.crc32)
        return self.file.write(part)

    def flush(self) -> None:
        self.file.flush()


class Keeper:
    """Keeps what `state` gives (what, about) now and then. every_s: seconds between two, at least."""

    def __init__(
        self, kept: Kept, every_s: float, may: Callable[[], bool], state: Callable[[], tuple[Any, dict[str, Any]]]
    ) -> None:
        self.kept, self.every_s, self.may, self.state = kept, every_s, may, state
        self._due_s = time.monotonic() + every_s
        self._parent = multiprocessing.parent_process()

    def look(self) -> None:
        """Keep the state if it is time and it `may` be kept now. Raises SystemExit when the process that wants the
        result is no more."""
        if self._parent is not None and not self._parent.is_alive():
            raise SystemExit("the program that this run was for has ended")
        begin_s = time.monotonic()
        if begin_s < self._due_s or not self.may():
            return
        self.kept.save(*self.state())
        now_s = time.monotonic()
        self._due_s = now_s + max(self.every_s, RARELY * (now_s - begin_s) if self.every_s else 0)
