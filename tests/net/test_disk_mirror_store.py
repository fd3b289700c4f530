"""Mirrors on the disk: they leave memory, come back as they were, and are in memory where a disk will not do."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as data

from geotrain.config import OuterConfig, codec_config
from geotrain.net.storage import disk_mirror_store
from geotrain.net.storage.disk_mirror_store import BUFFERS, DiskMirrorStore, on_disk
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.snapshots import SnapshotStore
from geotrain.outer.codec import make_codec
from geotrain.outer.messages import Join
from geotrain.outer.mirror_store import MirrorStore
from geotrain.outer.rules import global_rule
from geotrain.outer.server.store import Store
from tests.support.disks import cached_bytes, small_disk
from tests.support.outer_world import parameter_map

MIB = 1 << 20
INT4 = codec_config("int4")
CODEC, LAYOUT = make_codec(INT4), parameter_map(1)
LEFT = 0.1  # of a vector's pages that the kernel may keep: it is asked, and decides


def resident_bytes() -> int:
    """Of this process: its own memory, and mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Rss"))


def test_a_store_takes_its_buffers_alone_and_gives_back_what_was_changed(tmp_path: Path) -> None:
    mirror_store, size = DiskMirrorStore(tmp_path, pytest.fail), 32 * MIB
    values = torch.arange(size // 4, dtype=torch.float32)
    before = resident_bytes()
    vectors = [mirror_store.put(values) for _ in range(8)]
    assert all(cached_bytes(vector) <= LEFT * size for vector in vectors)
    for turn in (1, 2):
        mirror_store.fetch(vectors)
        for i, vector in enumerate(vectors):
            changed = mirror_store.page_in(vector)
            assert torch.equal(changed, values + (turn - 1) * i) and mirror_store.page_in(vector) is not vector
            changed += i
            mirror_store.page_out(vector)
    mirror_store.settle()
    assert resident_bytes() - before < (BUFFERS + 0.5) * size
    assert all(cached_bytes(vector) <= LEFT * size for vector in vectors)
    assert list(tmp_path.iterdir()) == []
    for i, vector in enumerate(vectors):
        assert torch.equal(vector, values + 2 * i)
        mirror_store.release(vector)
        assert cached_bytes(vector) <= LEFT * size
    assert mirror_store.put(vectors[0]) is vectors[0]


@given(
    data.lists(
        data.tuples(data.sampled_from(["change", "change", "fetch", "settle", "anew"]), data.integers(0, 3)),
        max_size=30,
    ),
    data.integers(0, 3),
)
@settings(max_examples=60)
def test_in_any_order_of_calls_a_store_on_the_disk_holds_what_one_in_memory_does(calls, ahead: int) -> None:
    with TemporaryDirectory() as folder:
        stores = DiskMirrorStore(Path(folder), pytest.fail), MirrorStore()
        sizes = 3000, 1024, 1, 70_000
        held = [[store.put(torch.full((size,), 7.0)) for size in sizes] for store in stores]
        for number, (call, which) in enumerate(calls):
            for store, vectors in zip(stores, held, strict=True):
                match call:
                    case "fetch":
                        store.fetch([vectors[(which + i) % 4] for i in range(ahead)])
                    case "settle":
                        store.settle()
                    case "anew":
                        vectors[which] = store.put(torch.full((sizes[which],), float(number)))
                    case "change":
                        store.page_in(vectors[which]).add_(number)
                        store.page_out(vectors[which])
        stores[0].settle()
        assert all(map(torch.equal, *held)) and all(map(on_disk, held[0]))


def test_what_was_fetched_in_vain_keeps_no_buffer(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(disk_mirror_store, "WAIT_S", 10.0)
    mirror_store = DiskMirrorStore(tmp_path, pytest.fail)
    vectors = [mirror_store.put(torch.full((1000,), float(i))) for i in range(2 * BUFFERS)]
    for vector in vectors:
        mirror_store.fetch([vector])
    assert all(torch.equal(mirror_store.page_in(vector), vector) for vector in vectors[: BUFFERS - 1])


def test_a_vector_is_read_again_only_when_it_is_written(tmp_path: Path, monkeypatch) -> None:
    mirror_store, read = DiskMirrorStore(tmp_path, pytest.fail), Event()
    vector = mirror_store.put(torch.ones(1000))
    early = []

    def slow(*how: Any) -> int:
        early.append(read.wait(0.2))
        return pwritev(*how)

    def noted(*how: Any) -> int:
        read.set()
        return preadv(*how)

    pwritev, preadv = os.pwritev, os.preadv
    mirror_store.page_in(vector).neg_()
    monkeypatch.setattr(disk_mirror_store.os, "pwritev", slow)
    monkeypatch.setattr(disk_mirror_store.os, "preadv", noted)
    mirror_store.page_out(vector)
    mirror_store.fetch([vector])
    assert torch.equal(mirror_store.page_in(vector), -torch.ones(1000)) and early == [False]


def test_its_room_is_free_when_nobody_has_the_vector_any_more(tmp_path: Path) -> None:
    def taken() -> tuple[int, int]:
        files = [path for file in Path("/proc/self/fd").iterdir() if (path := os.path.realpath(file))]
        return Path("/proc/self/maps").read_text().count(f"{tmp_path}/"), str(files).count(f"{tmp_path}/")

    mirror_store = DiskMirrorStore(tmp_path, pytest.fail)
    vectors = [mirror_store.put(torch.zeros(1000)) for _ in range(3)]
    assert taken() == (3, 3)
    mirror_store.page_in(vectors[2])
    mirror_store.page_out(vectors.pop())
    mirror_store.settle()
    assert taken() == (2, 2)
    vectors.clear()
    assert taken() == (0, 0)


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


def broken(*_: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_one_that_cannot_be_written_ends_the_server(tmp_path: Path, monkeypatch) -> None:
    mirror_store = DiskMirrorStore(tmp_path, pytest.fail)
    vector = mirror_store.put(torch.ones(1000))
    mirror_store.page_in(vector)
    monkeypatch.setattr(disk_mirror_store.os, "pwritev", broken)
    mirror_store.page_out(vector)
    with pytest.raises(OSError, match="a mirror cannot be written") as raised:
        mirror_store.settle()
    assert raised.value.errno == errno.EIO
    for use in (mirror_store.put, mirror_store.page_in, mirror_store.page_out):
        with pytest.raises(OSError, match="cannot be written"):
            use(vector)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("how", [broken, lambda *_: 0])
def test_one_that_cannot_be_read_ends_the_server(tmp_path: Path, monkeypatch, how, ahead: bool) -> None:
    mirror_store = DiskMirrorStore(tmp_path, pytest.fail)
    vector = mirror_store.put(torch.ones(1000))
    monkeypatch.setattr(disk_mirror_store.os, "preadv", how)
    mirror_store.fetch([vector] if ahead else [])
    with pytest.raises(OSError, match="a mirror cannot be read") as raised:
        mirror_store.page_in(vector)
    assert raised.value.errno == errno.EIO


def test_a_state_holds_changes_that_were_still_on_their_way_to_the_disk(tmp_path: Path, monkeypatch) -> None:
    """And a store on the disk changes no bit of answers and state."""
    may_write, found = Event(), []
    for store in (MirrorStore(), DiskMirrorStore(tmp_path, pytest.fail)):
        numbers = range(len(LAYOUT.fragments))
        shard = Store("g", LAYOUT, numbers, global_rule(OuterConfig().rule, ("a", "b")), CODEC, INT4)
        shard.mirror_store = store
        shard.set_weights([torch.arange(f.numel, dtype=torch.float32) for f in LAYOUT.fragments])
        whole, payloads = tuple(map(LAYOUT.whole, range(len(LAYOUT.chunks)))), []
        for turn, name in enumerate(("a", "b") * 3):
            shard.receive_join(Join("r", "c", LAYOUT.digest, "m", name, "1", 0, 1, whole, whole))
            if turn == 5 and isinstance(store, DiskMirrorStore):
                store.settle()
                patched(monkeypatch, store, may_write)
            for vectors in shard.vectors.values():
                vectors.x += 0.37
            for fragment in numbers:
                shard.freeze(name, fragment, turn, turn)
            answers = shard.members[name].answers.values()
            payloads += [bytes(w.payload) for answer in answers for w in answer.weights.values()]
        found.append(({name: tensor.clone() for name, tensor in shard.state()[0].items()}, payloads))
        may_write.set()
    (memory, answers), (disk, same) = found
    assert answers == same and memory.keys() == disk.keys()
    assert all(torch.equal(memory[name], disk[name]) for name in memory)


def patched(monkeypatch: pytest.MonkeyPatch, store: DiskMirrorStore, may_write: Event) -> None:
    """Let the store write only what is waited for."""
    pwritev, settle = os.pwritev, store.settle
    may_write.clear()

    def held(*how: Any) -> int:
        may_write.wait(60)
        return pwritev(*how)

    monkeypatch.setattr(disk_mirror_store.os, "pwritev", held)
    for _ in range(16):
        store._free.put(None)
    monkeypatch.setattr(store, "settle", lambda: (may_write.set(), settle()))


def test_a_snapshot_gives_mirrors_to_the_shelf_and_what_it_read_goes_back(tmp_path: Path) -> None:
    mirror_store, size = DiskMirrorStore(tmp_path, pytest.fail), 4 * MIB
    values = torch.arange(size // 4, dtype=torch.float32)
    tensors = {
        "held.eu.0": mirror_store.put(values.clone()),
        "mirror.1": mirror_store.put(2 * values),
        "chunk.0.x": values,
    }
    (tmp_path / "s").mkdir()
    SnapshotStore(tmp_path / "s").save(FrozenState(tensors, done=mirror_store.release), {})
    assert all(cached_bytes(tensors[name]) <= LEFT * size for name in ("held.eu.0", "mirror.1"))
    newest, faults = SnapshotStore(tmp_path / "s", 2, mirror_store).load_newest()
    assert newest is not None and not faults
    found = newest.tensors
    assert [name for name, x in found.items() if on_disk(x)] == ["held.eu.0", "mirror.1"]
    assert all(cached_bytes(found[name]) <= LEFT * size for name in ("held.eu.0", "mirror.1"))
    assert all(torch.equal(found[name], x) for name, x in tensors.items())


def test_the_setting_is_refused_where_it_would_do_nothing() -> None:
    with pytest.raises(ValueError, match="mirrors: without effect where weights travel whole"):
        OuterConfig.model_validate({"mirrors": "disk"})
    assert OuterConfig.model_validate({"mirrors": "disk", "down": {"name": "int4"}}).mirrors == "disk"
