"""Mirrors on the disk: they leave memory, come back as they were, and are in memory where a disk will not do."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from geotrain.config import OuterConfig
from geotrain.net.storage import disk_mirror_store
from geotrain.net.storage.disk_mirror_store import DiskMirrorStore, on_disk
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.snapshots import SnapshotStore
from geotrain.outer.shards import shard as shard
from tests.support.disks import small_disk

MIB = 1 << 20
LEFT = 0.1  # of a vector's pages that the kernel may keep: it is asked, and decides


def resident_bytes() -> int:
    """Of this process: its own memory, and mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Rss"))


def cached_bytes(vector: Tensor) -> int:
    """How much of it is in the machine's memory."""
    pages = (ctypes.c_ubyte * -(-vector.nbytes // 4096))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(vector.data_ptr()), ctypes.c_size_t(vector.nbytes), pages)
    return 4096 * sum(page & 1 for page in pages)


def test_what_goes_back_leaves_the_memory_of_process_and_machine_and_comes_as_it_was(tmp_path: Path) -> None:
    mirror_store, size = DiskMirrorStore(tmp_path, pytest.fail), 64 * MIB
    values = torch.arange(size // 4, dtype=torch.float32)
    vectors = [mirror_store.put(values.clone()) for _ in range(4)]
    before = resident_bytes()
    assert all(cached_bytes(vector) == size for vector in vectors)
    for vector in vectors:
        mirror_store.page_out(vector)
    mirror_store.settle()
    assert before - resident_bytes() > 0.95 * 4 * size
    assert all(cached_bytes(vector) <= LEFT * size for vector in vectors)
    assert list(tmp_path.iterdir()) == []
    for i, vector in enumerate(vectors):
        mirror_store.page_in(vector)
        assert torch.equal(vector, values)
        vector += i
        mirror_store.page_out(vector)
    mirror_store.settle()
    assert all(torch.equal(vector, values + i) for i, vector in enumerate(vectors))
    assert mirror_store.put(vectors[0]) is vectors[0]


def test_its_room_is_free_when_nobody_has_the_vector_any_more(tmp_path: Path) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(f"{tmp_path}/")

    mirror_store = DiskMirrorStore(tmp_path, pytest.fail)
    vectors = [mirror_store.put(torch.zeros(1000)) for _ in range(3)]
    assert mapped() == 3
    mirror_store.page_out(vectors.pop())
    mirror_store.settle()
    assert mapped() == 2
    vectors.clear()
    assert mapped() == 0


@pytest.mark.root
def test_on_a_file_system_in_memory_they_are_in_memory_and_it_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    with small_disk(tmp_path / "disk", "8m") as place:
        mirror_store = DiskMirrorStore(place, said.append)
        vectors = [mirror_store.put(torch.ones(1000)) for _ in range(3)]
        mirror_store.page_out(vectors[0])
    assert not any(map(on_disk, vectors)) and torch.equal(vectors[0], torch.ones(1000))
    assert len(said) == 1 and "mirrors stay in memory: it is on tmpfs" in said[0]


@pytest.mark.parametrize("what", ["posix_fallocate", "open"])
def test_on_a_full_disk_or_one_that_knows_no_such_files_they_are_in_memory(tmp_path: Path, monkeypatch, what) -> None:
    said: list[str] = []
    mirror_store, number = (
        DiskMirrorStore(tmp_path, said.append),
        {"posix_fallocate": errno.ENOSPC, "open": errno.EOPNOTSUPP}[what],
    )

    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(disk_mirror_store.os, what, refuse)
        vectors = [mirror_store.put(torch.ones(1000)) for _ in range(3)]
    assert not any(map(on_disk, vectors)) and len(said) == 1 and os.strerror(number) in said[0]
    assert on_disk(mirror_store.put(vectors[0]))  # there is room again


def test_one_that_cannot_be_written_ends_the_server(tmp_path: Path, monkeypatch) -> None:
    def fails(*_: Any) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    mirror_store = DiskMirrorStore(tmp_path, pytest.fail)
    vector = mirror_store.put(torch.ones(1000))
    monkeypatch.setattr(disk_mirror_store, "_C", SimpleNamespace(msync=fails, madvise=pytest.fail))
    mirror_store.page_out(vector)
    with pytest.raises(OSError, match="a mirror cannot be written") as raised:
        mirror_store.settle()
    assert raised.value.errno == errno.EIO
    for use in (mirror_store.put, mirror_store.page_in, mirror_store.page_out):
        with pytest.raises(OSError, match="cannot be written"):
            use(vector)


@pytest.mark.parametrize("number", [errno.EFAULT, errno.EINVAL])
def test_one_that_cannot_be_read_ends_the_server_an_older_kernel_does_not(
    tmp_path: Path, monkeypatch, number
) -> None:
    def fails(*_: Any) -> int:
        ctypes.set_errno(number)
        return -1

    mirror_store = DiskMirrorStore(tmp_path, pytest.fail)
    vector = mirror_store.put(torch.ones(1000))
    monkeypatch.setattr(disk_mirror_store, "_C", SimpleNamespace(madvise=fails))
    if number == errno.EINVAL:
        mirror_store.page_in(vector)
    else:
        with pytest.raises(OSError, match="a mirror cannot be read") as raised:
            mirror_store.page_in(vector)
        assert raised.value.errno == errno.EFAULT


def test_a_snapshot_gives_mirrors_to_the_shelf_and_what_it_read_goes_back(tmp_path: Path) -> None:
    mirror_store, size = DiskMirrorStore(tmp_path, pytest.fail), 4 * MIB
    values = torch.arange(size // 4, dtype=torch.float32)
    tensors = {
        "held.eu.0": mirror_store.put(values.clone()),
        "mirror.1": mirror_store.put(2 * values),
        "chunk.0.x": values,
    }
    (tmp_path / "s").mkdir()
    SnapshotStore(tmp_path / "s").save(FrozenState(tensors, done=mirror_store.page_out), {})
    mirror_store.settle()
    assert all(cached_bytes(tensors[name]) <= LEFT * size for name in ("held.eu.0", "mirror.1"))
    newest, faults = SnapshotStore(tmp_path / "s", 2, mirror_store).load_newest()
    assert newest is not None and not faults
    mirror_store.settle()
    found = newest.tensors
    assert [name for name, x in found.items() if on_disk(x)] == ["held.eu.0", "mirror.1"]
    assert all(cached_bytes(found[name]) <= LEFT * size for name in ("held.eu.0", "mirror.1"))
    assert all(torch.equal(found[name], x) for name, x in tensors.items())


def test_the_setting_is_refused_where_it_would_do_nothing() -> None:
    with pytest.raises(ValueError, match="mirrors: without effect where weights travel whole"):
        OuterConfig.model_validate({"mirrors": "disk"})
    assert OuterConfig.model_validate({"mirrors": "disk", "down": {"name": "int4"}}).mirrors == "disk"
