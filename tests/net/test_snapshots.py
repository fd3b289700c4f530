"""Snapshots: whole or not there, damaged ones passed over and named."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from geotrain.net.storage import snapshots as store_module
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.recovery import recover
from geotrain.net.storage.snapshots import (
    META,
    PINNED,
    SNAPSHOTS,
    OtherFormatError,
    SnapshotStore,
    StoreError,
    read_weights,
    snapshots_of_last,
)
from geotrain.outer.messages import Identity
from geotrain.outer.server.global_server import GlobalServer
from geotrain.parameters.parameter_map import ParameterMapError
from tests.support.local_servers import first_weights
from tests.support.net_worlds import outer, same, tiny_layout

TENSORS = {
    "fragment.0.x": torch.arange(100_000.0),
    "chunk.1.aux.momentum": torch.arange(5.0).bfloat16(),
    "in_flight.3.0": torch.arange(7, dtype=torch.uint8),
    "none": torch.empty(0),
}


def test_a_snapshot_comes_back_as_it_was(tmp_path):
    store = SnapshotStore(tmp_path / "s")
    assert store.load_newest() == (None, [])
    assert store.save(FrozenState(TENSORS), {"a": [1, {"b": None}]}) == 1
    newest, faults = SnapshotStore(tmp_path / "s").load_newest()
    assert newest is not None and newest.meta == {"a": [1, {"b": None}]} and not faults
    assert same(newest.tensors, TENSORS)


def test_only_the_newest_are_kept(tmp_path):
    store = SnapshotStore(tmp_path, keep=2)
    for i in range(5):
        store.save(FrozenState({"x": torch.full((3,), float(i))}), {"i": i})
    assert store.numbers() == [4, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000004", "00000005"]
    (store.path(4) / PINNED).touch()
    for i in range(5, 8):
        store.save(FrozenState({"x": torch.zeros(3)}), {"i": i})
    assert store.numbers() == [4, 7, 8] and store.load(4).meta == {"i": 3}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", [META, "fragment.0.x.safetensors", "in_flight.3.0.safetensors"])
@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda p: os.truncate(p, 12), lambda p: p.write_bytes(b"")])
def test_a_damaged_snapshot_is_passed_over_and_named(tmp_path, name, damage):
    store = SnapshotStore(tmp_path)
    store.save(FrozenState(TENSORS), {"i": 1})
    store.save(FrozenState(TENSORS), {"i": 2})
    damage(tmp_path / "00000002" / name)
    newest, faults = store.load_newest()
    assert newest is not None and newest.meta == {"i": 1}
    assert len(faults) == 1 and "00000002: damaged, passed over" in faults[0]
    store.save(FrozenState(TENSORS), {"i": 3})  # in its place, so that two can be read again
    assert [meta["i"] for meta in store.metas()] == [1, 3]


def test_a_snapshot_that_lacks_tensors_of_the_state_is_neither_written_nor_read(tmp_path, monkeypatch):
    store = SnapshotStore(tmp_path)
    store.save(FrozenState(TENSORS), {"i": 1})
    few = {name: tensor for name, tensor in TENSORS.items() if name != "none"}
    store.save(FrozenState(few), {"i": 2, "state": {"tensors": [*TENSORS]}})
    newest, [fault] = store.load_newest()
    assert newest is not None and newest.meta["i"] == 1 and "such as none" in fault
    monkeypatch.setattr(FrozenState, "names", lambda self: iter(few))
    with pytest.raises(StoreError, match="1 tensors of the state were not read, such as none"):
        store.save(FrozenState(TENSORS), {"i": 3})
    assert store.numbers() == [1, 2]


def test_another_format_is_refused_and_nothing_is_changed(tmp_path, monkeypatch):
    """Also where an older snapshot could be read: what it would forget was acknowledged."""
    store = SnapshotStore(tmp_path / SNAPSHOTS)
    store.save(FrozenState(TENSORS), {"i": 1})
    monkeypatch.setattr(store_module, "FORMAT", 7)
    store.save(FrozenState(TENSORS), {"i": 2})
    monkeypatch.undo()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refused = pytest.raises(OtherFormatError, match=r"00000002: its format is 7, .* reads format \d only")
    build = partial(pytest.fail, "no state is built")
    for work in (store.load_newest, store.metas, partial(recover, build, build, tmp_path, keep=1)):
        with refused:
            work()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_was_half_written_is_no_snapshot(tmp_path):
    store = SnapshotStore(tmp_path)
    store.save(FrozenState(TENSORS), {"i": 1})
    (tmp_path / ".00000002.partial").mkdir()
    (tmp_path / ".00000002.partial" / META).write_text("x")
    assert store.numbers() == [1]
    assert store.save(FrozenState(TENSORS), {"i": 2}) == 2
    assert store.load_newest()[0].meta == {"i": 2}


def test_a_full_disk_is_said_and_leaves_nothing_behind(tmp_path, monkeypatch):
    store = SnapshotStore(tmp_path)
    store.save(FrozenState(TENSORS), {"i": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store_module.os, "fsync", full)
    with pytest.raises(StoreError, match="00000002: the snapshot cannot be written: No space left on device"):
        store.save(FrozenState(TENSORS), {"i": 2})
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    assert store.load_newest()[0].meta == {"i": 1}


def test_files_are_plain_safetensors(tmp_path):
    SnapshotStore(tmp_path).save(FrozenState(TENSORS), {})
    with safe_open(tmp_path / "00000001" / "fragment.0.x.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("tensor"), TENSORS["fragment.0.x"])


def test_weights_are_read_by_name(tmp_path):
    config = outer()
    parameter_map = tiny_layout(config)
    server = GlobalServer(Identity("r", "c", parameter_map.digest, "m"), parameter_map, config, {"eu": ("a",)}, 8, 2)
    server.set_weights(first_weights(parameter_map))
    tensors, state = server.state()
    SnapshotStore(tmp_path / SNAPSHOTS).save(FrozenState(tensors), {"state": state, "checkpoint_id": ""})
    weights = dict(read_weights(tmp_path, parameter_map))
    assert list(weights) == [p.name for f in parameter_map.fragments for p in f.parameters]
    for p in parameter_map.parameters:
        fragment = parameter_map.fragment_of(p.name)
        want = dict(parameter_map.split(fragment, server.weights(fragment)))[p.name]
        assert torch.equal(weights[p.name], want) and weights[p.name].shape == p.shape
    with pytest.raises(ParameterMapError, match="another model"):
        next(iter(read_weights(tmp_path, type(parameter_map)(parameter_map.parameters[:-1]))))
    with pytest.raises(StoreError, match="holds no snapshot"):
        next(iter(read_weights(tmp_path / "nowhere", parameter_map)))


def test_the_mean_of_the_last_snapshots(tmp_path):
    """Of three, two lie in the last tenth; one that a later one repeats counts once, a damaged one not at all."""
    config = outer()
    parameter_map = tiny_layout(config)
    store, first = SnapshotStore(tmp_path / SNAPSHOTS, keep=9), first_weights(parameter_map)
    for committed, times in ((80, 9.0), (90, 1.0), (95, 7.0), (100, 3.0), (100, 3.0)):
        server = GlobalServer(
            Identity("r", "c", parameter_map.digest, "m"), parameter_map, config, {"eu": ("a",)}, 100, 1
        )
        server.set_weights([times * vector for vector in first])
        server.lease_table.committed_samples = committed
        tensors, state = server.state()
        store.save(FrozenState(tensors), {"state": state, "checkpoint_id": ""})
    flip(store.path(3) / META)
    last = snapshots_of_last(tmp_path, 0.1)
    assert [snapshot.number for snapshot in last] == [2, 5]
    for (name, mean), (_, newest) in zip(
        read_weights(tmp_path, parameter_map, last), read_weights(tmp_path, parameter_map), strict=True
    ):
        torch.testing.assert_close(mean, newest * 2 / 3, msg=name)
    with pytest.raises(StoreError, match=r"of the last 0.05 of the run there is 1 snapshot.*larger checkpoint.keep"):
        snapshots_of_last(tmp_path, 0.05)
