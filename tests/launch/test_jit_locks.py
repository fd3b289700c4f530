"""A compile that was killed leaves torch's lock; the next rank removes it, and one that is held stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.utils.cpp_extension
from torch.utils.file_baton import FileBaton

from geotrain.launch import jit_locks
from geotrain.launch.jit_locks import build_folder, release_stale_locks

HOLD = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("baton", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)  # of torch, without torch
baton = module.FileBaton(sys.argv[2])
print(baton.try_acquire(), flush=True)
time.sleep(300)
"""
BATON = sys.modules[FileBaton.__module__].__file__


@contextmanager
def compiling(lock: Path) -> Iterator[int]:
    """A process that has taken torch's lock, in the block; then it is killed."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-S", "-c", HOLD, str(BATON), str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "True\n"
        yield process.pid
        process.kill()


def test_a_lock_is_named_while_it_is_held_and_removed_when_its_owner_is_gone(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cu130/fused_adam/lock"
    assert release_stale_locks(tmp_path) == []
    with compiling(lock) as pid:
        (said,) = release_stale_locks(tmp_path)
        assert said == f"{lock}: process {pid} compiles; this rank waits for it if it needs the same"
        assert lock.exists()
    assert lock.exists()  # the process was killed
    assert release_stale_locks(tmp_path) == [f"{lock}: removed, since whoever compiled was killed"]
    assert FileBaton(str(lock)).try_acquire()


def test_on_a_shared_file_system_only_time_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "fused_adam/lock"
    with compiling(lock):
        pass
    monkeypatch.setattr(jit_locks, "file_system", lambda path: "nfs4")
    (said,) = release_stale_locks(tmp_path)
    assert "held by no process of this host: if no other host that shares the folder compiles, remove it" in said
    assert lock.exists()
    os.utime(lock, (0, time.time() - jit_locks.COMPILED_S - 1))
    (said,) = release_stale_locks(tmp_path)
    assert said.endswith("removed, since whoever compiled was killed") and not lock.exists()


def test_the_kind_of_a_file_system() -> None:
    assert jit_locks.file_system(Path("/proc/self/status")) == "proc"


def test_locks_are_looked_for_where_torch_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("HOME", tmp_path / "home"),
        ("XDG_CACHE_HOME", tmp_path),
        ("TORCH_EXTENSIONS_DIR", tmp_path),
    ):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setenv(name, str(value))
        built = Path(torch.utils.cpp_extension._get_build_directory("fused_adam", False))
        assert build_folder() in built.parents and len(built.relative_to(build_folder()).parts) <= 2
