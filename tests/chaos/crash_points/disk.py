"""A disk that fails at a chosen system call, in a process of its own; and what a power cut would leave of it."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any
from unittest.mock import patch

SHIM = "GEOTRAIN_CRASH_SHIM"  # in the environment of a process that has disk.c preloaded
HOW = {"before": 0, "full": 1, "broken": 2}  # as disk.c has them
# At which kinds of calls each makes a difference. To end after a call is to end before the next.
AT = {"before": "wro", "half": "w", "power": "wro", "full": "wr", "broken": "wro"}
CRASHED = 99
DEADLINE_S = 300


def preloaded(folder: Path) -> None:
    """Go on with disk.c preloaded: this program is started once more, by the same command line."""
    if SHIM in os.environ:
        return
    shim = folder / "disk.so"
    source = Path(__file__).with_name("disk.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    # The suite's and the launcher's own preloads are none of this program's business.
    os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": str(shim), SHIM: str(folder)})


Say = Callable[[Any], None]


def attempt(
    folder: Path, incarnation: Callable[[Say], None], how: str = "before", at: int = 0
) -> tuple[str, list[Any]]:
    """Run `incarnation` in a process of its own, whose `at`-th change of a file below the folder goes wrong as `how`
    says (0: none does). Returns how it ended ("crashed", "ended", or a traceback), and what it said.

    incarnation: gets a function to say things with. The last thing said, if it ended, is the kinds of its calls, as
    disk.c names them.
    """

    def lived(say: Say) -> None:
        _shim().crash_arm(str(folder).encode(), at, HOW[how])
        incarnation(say)
        say(_shim().crash_kinds().decode())

    return _apart(lived)


def states(
    folder: Path, incarnation: Callable[[Say], None], kept: Path, wanted: Container[tuple[str, int]]
) -> list[tuple[str, int, int, str]]:
    """Run `incarnation` in a process of its own, where nothing goes wrong, and keep what the disk would hold if it
    ended at a call that changes a file: before it ("before"), after half of a write ("half"), or after it, with all
    gone that was not synced ("power"). wanted: which of these at which calls.

    Returns (which of these, number of the call, last thing said, name of the state, which is a folder in `kept`) for
    each. States that are alike have one name.
    """
    found: list[tuple[str, int, int, str]] = []
    said, calls, faults = 0, 0, list[str]()
    durable = Durable(folder)

    def note(how: str, at: int, state: Callable[[], Path]) -> None:
        if (how, at) not in wanted:
            return
        name = digest(place := state())
        if not (kept / name).exists():
            shutil.copytree(place, kept / name)
        found.append((how, at, said, name))

    def seen(half: int) -> None:
        nonlocal calls
        try:
            if half:
                note("half", calls + 1, lambda: folder)
                return
            calls += 1
            note("before", calls + 1, lambda: folder)
            note("power", calls, durable.left)
        except BaseException:  # which would not leave this call, made by disk.c
            faults.append(traceback.format_exc())

    def lived(say: Say) -> None:
        def heard(what: int) -> None:
            nonlocal said
            said = max(said, what)

        durable.begin()
        note("before", 1, lambda: folder)
        watcher = ctypes.CFUNCTYPE(None, ctypes.c_int)(seen)
        _shim().crash_arm(str(folder).encode(), 0, HOW["before"])
        _shim().crash_watch(watcher)
        with durable.watching():
            incarnation(heard)
        _shim().crash_watch(None)
        if faults:
            raise AssertionError(faults[0])
        say(found)

    ended, told = _apart(lived)
    assert ended == "ended", ended
    return [tuple(each) for each in told[-1]]


def _apart(incarnation: Callable[[Say], None]) -> tuple[str, list[Any]]:
    """Run it in a process of its own: (how it ended, what it said)."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        code = 1

        def say(what: Any) -> None:
            rest = json.dumps(what).encode() + b"\n"
            while rest:
                rest = rest[os.write(write, rest) :]

        try:
            signal.alarm(DEADLINE_S)
            incarnation(say)
            code = 0
        except BaseException:
            _shim().crash_arm(b"", 0, 0)
            _shim().crash_watch(None)
            say({"error": traceback.format_exc()})
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = [json.loads(line) for line in pipe]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if told and isinstance(told[-1], dict) and "error" in told[-1]:
        return told.pop()["error"], told
    return {0: "ended", CRASHED: "crashed"}.get(status, f"ended with {status}"), told


def _shim() -> ctypes.CDLL:
    shim = ctypes.CDLL(None)
    shim.crash_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
    shim.crash_kinds.restype = ctypes.c_char_p
    return shim


def digest(folder: Path) -> str:
    """Digest of all names and contents below a folder."""
    found = hashlib.blake2b(digest_size=12)
    for path in sorted(folder.rglob("*")):
        content = b"" if path.is_dir() else path.read_bytes()
        found.update(f"{path.relative_to(folder)}/{path.is_dir()}/{len(content)}/".encode() + content)
    return found.hexdigest()


class Durable:
    """The part of a folder that is on the disk: the contents of files when they were last synced, and the names in
    folders when these were. It is kept beside the folder, in `<folder>.durable`, by inode."""

    forgets = False  # True: to see whether the explorer notices that syncs are missing

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder, folder.with_name(folder.name + ".durable")
        self._left, self._changed = folder.with_name(folder.name + ".left"), True

    def begin(self) -> None:
        """Count all that is there now as being on the disk."""
        shutil.rmtree(self.kept, ignore_errors=True)
        self.kept.mkdir()
        for path in (self.folder, *self.folder.rglob("*")):
            self._keep(path)

    def watching(self) -> Any:
        real = {"fsync": os.fsync, "fdatasync": os.fdatasync}

        def syncing(name: str) -> Callable[[int], None]:
            def sync(descriptor: int) -> None:
                path = Path(f"/proc/self/fd/{descriptor}").readlink()
                # Kept first, since what is left is looked at when the call has been made.
                if path.is_relative_to(self.folder) and not self.forgets:
                    self._keep(path)
                real[name](descriptor)

            return sync

        return patch.multiple(os, fsync=syncing("fsync"), fdatasync=syncing("fdatasync"))

    def _keep(self, path: Path) -> None:
        self._changed = True
        inode = path.stat().st_ino
        if path.is_dir():
            names = {entry.name: [entry.inode(), entry.is_dir()] for entry in os.scandir(path)}
            (self.kept / f"{inode}.names").write_text(json.dumps(names))
        else:
            shutil.copyfile(path, self.kept / str(inode))

    def left(self) -> Path:
        """A folder with what is on the disk, good until the next call."""
        if self._changed:
            shutil.rmtree(self._left, ignore_errors=True)
            self._bring_back(self._left, self.folder.stat().st_ino)
            self._changed = False
        return self._left

    def _bring_back(self, place: Path, inode: int) -> None:
        place.mkdir()
        names = self.kept / f"{inode}.names"
        for name, (number, is_folder) in (json.loads(names.read_text()) if names.exists() else {}).items():
            if is_folder:
                self._bring_back(place / name, number)
            elif (content := self.kept / str(number)).exists():
                shutil.copyfile(content, place / name)
            else:
                (place / name).touch()  # its name was synced, and nothing of what it holds
