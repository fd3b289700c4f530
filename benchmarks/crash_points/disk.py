"""A disk that fails at a chosen system call, in a process of its own; and what a power cut would leave of it."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

SHIM = "GEOTRAIN_CRASH_SHIM"  # in the environment of a process that has disk.c preloaded
# As disk.c has them; and at which kinds of calls each makes a difference. To end after a call is to end before the
# next.
HOW = {"before": 0, "half": 1, "power": 2, "full": 3, "broken": 4}
AT = {"before": "wro", "half": "w", "power": "wro", "full": "wr", "broken": "wro"}
CRASHED = 99
DEADLINE_S = 60


def preloaded(folder: Path) -> None:
    """Go on with disk.c preloaded: this program is started once more, by the same command line."""
    if SHIM in os.environ:
        return
    shim = folder / "disk.so"
    source = Path(__file__).with_name("disk.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    # The suite's and the launcher's own preloads are none of this program's business.
    os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": str(shim), SHIM: str(folder)})


def attempt(folder: Path, life: Callable[[Callable[[Any], None]], None], how: str, at: int) -> tuple[str, list[Any]]:
    """Run `life` in a process of its own, whose `at`-th change of a file below the folder goes wrong as `how` says
    (0: none does). Returns how it ended ("crashed", "ended", or a traceback), and what it said.

    life: gets a function to say things with. The last thing said, if it ended, is the kinds of its calls, as disk.c
    names them.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        code = 1
        try:
            signal.alarm(DEADLINE_S)
            _live(folder, life, how, at, write)
            code = 0
        except BaseException:
            _arm(folder, 0, "before")
            os.write(write, json.dumps({"error": traceback.format_exc()}).encode() + b"\n")
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = [json.loads(line) for line in pipe]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if said and isinstance(said[-1], dict) and "error" in said[-1]:
        return said.pop()["error"], said
    return {0: "ended", CRASHED: "crashed"}.get(status, f"ended with {status}"), said


def _live(folder: Path, life: Callable[[Callable[[Any], None]], None], how: str, at: int, write: int) -> None:
    def say(what: Any) -> None:
        os.write(write, json.dumps(what).encode() + b"\n")

    _arm(folder, at, how)
    if how == "power":
        with Durable(folder).watching():
            life(say)
    else:
        life(say)
    say(_shim().crash_kinds().decode())


def _arm(folder: Path, at: int, how: str) -> None:
    _shim().crash_arm(str(folder).encode(), at, HOW[how])


def _shim() -> ctypes.CDLL:
    shim = ctypes.CDLL(None)
    shim.crash_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
    shim.crash_kinds.restype = ctypes.c_char_p
    return shim


class Durable:
    """What of a folder is on the disk: the contents of files when they were last synced, and the names in folders
    when these were. It is kept beside the folder, in `<folder>.durable`, by inode: so it outlives the process."""

    forgets = False  # True: to see whether the explorer notices that syncs are missing

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder, folder.with_name(folder.name + ".durable")

    def begin(self) -> None:
        """All that is there now counts as being on the disk."""
        shutil.rmtree(self.kept, ignore_errors=True)
        self.kept.mkdir()
        for path in (self.folder, *self.folder.rglob("*")):
            self._keep(path)

    def watching(self) -> Any:
        real = {"fsync": os.fsync, "fdatasync": os.fdatasync}

        def syncing(name: str) -> Callable[[int], None]:
            def sync(descriptor: int) -> None:
                path = Path(f"/proc/self/fd/{descriptor}").readlink()
                # Kept first: the process may be ended right after the call. A call that ends it before has synced
                # nothing, but what it would have synced is then no more than what could be there.
                if path.is_relative_to(self.folder) and not self.forgets:
                    self._keep(path)
                real[name](descriptor)

            return sync

        return patch.multiple(os, fsync=syncing("fsync"), fdatasync=syncing("fdatasync"))

    def _keep(self, path: Path) -> None:
        inode = path.stat().st_ino
        if path.is_dir():
            names = {entry.name: [entry.inode(), entry.is_dir()] for entry in os.scandir(path)}
            (self.kept / f"{inode}.names").write_text(json.dumps(names))
        else:
            shutil.copyfile(path, self.kept / str(inode))

    def cut_power(self) -> None:
        """Leave of the folder what is on the disk."""
        top = self.folder.stat().st_ino
        shutil.rmtree(self.folder)
        self._bring_back(self.folder, top)

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
