"""A snapshot is read block by block beside the updates that change the state: it is of the time when it began."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from geotrain.config import codec_config
from geotrain.net.storage import frozen_state, snapshots
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.snapshots import SnapshotStore, StoreError
from geotrain.outer.messages import MemberSilent, UpdateRejected
from tests.support.disks import cached_bytes
from tests.support.outer_world import config, halves, make, random_deltas
from tests.support.process_trees import until

INT8 = codec_config("int8")
WAIT_S = 60.0
CHUNK_BYTES = frozen_state.CHUNK_BYTES
STEPS = READ, UPDATE, SETTLE, SILENT, START_OVER = range(5)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(frozen_state, "CHUNK_BYTES", 40)


def contents(server: Any) -> dict[str, bytes]:
    return {name: bytes(tensor.numpy().tobytes()) for name, tensor in server.state()[0].items()}


def chunks_of(frozen: FrozenState) -> Iterator[tuple[str, bytes]]:
    return ((name, bytes(chunk)) for name in frozen.names() for chunk in frozen.chunks(name))


@given(
    rule=st.sampled_from(["halos", "region_momentum", "sync"]),
    before=st.lists(st.sampled_from((UPDATE, SETTLE)), max_size=4),
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(1, 5)), max_size=24),
)
@example(
    rule="halos", before=[UPDATE, UPDATE], steps=[(READ, 3), (SETTLE, 1)]
)  # a merge is the first that comes between
@example(
    rule="region_momentum", before=[UPDATE, UPDATE, SETTLE, UPDATE], steps=[(READ, 3), (SILENT, 1)]
)  # a send of what was pending
def test_whatever_comes_between_its_chunks_it_is_the_state_of_its_beginning(rule, before, steps):
    """Of both servers."""
    every = {} if rule == "sync" else {"updates_per_send": 2}
    world = make(config(rule, up=INT8, down=INT8, **every), cut_a=halves, fragments=1)
    seeds = iter(range(1000))

    def happens(step: int) -> None:
        eu = world.regions["eu"]
        if step == UPDATE:
            for name, region in (("a", "eu"), ("b", "us")):
                if world.regions[region].fragments:
                    world.push(name, random_deltas(world, next(seeds)))
        elif step == SILENT:
            world.tell("eu", MemberSilent("a", "life-1"))
        elif step == START_OVER and rule != "sync":
            world.tell("eu", UpdateRejected("eu", eu.incarnation, "as the test says"))
        if step == SETTLE or rule == "sync":  # a round ends before the next begins
            for region in ("eu", "us", "eu"):
                world.settle(region)

    for step in before:
        happens(step)
    servers = world.top, world.regions["eu"]
    wanted, states = [contents(server) for server in servers], [FrozenState(server.state()[0]) for server in servers]
    for server, frozen in zip(servers, states, strict=True):
        server.store.will_change = frozen.before_write
    read = [dict.fromkeys(each, b"") for each in wanted]
    reading = [*map(chunks_of, states)]
    for step, count in [*steps, (READ, None)]:  # at last all that is left
        if step != READ:
            happens(step)
            continue
        for into, chunks in zip(read, reading, strict=True):
            for name, chunk in islice(chunks, count):
                into[name] += chunk
    assert read == wanted and not any(frozen.open for frozen in states)


def test_an_update_that_waits_and_gets_no_time_hides_nothing():
    """Its room was made, and the reader goes on before it has taken it."""
    frozen = FrozenState({name: torch.full((10,), 1.0) for name in "abc"}, largest_share=1 / 3)
    frozen.before_write(frozen._tensors["a"])
    frozen._waits = True
    assert [name for name, _ in chunks_of(frozen)] == ["a", "b", "c"] and not frozen.open


def test_copies_take_no_more_than_the_budget_and_an_update_waits_until_one_was_read():
    tensors = {name: torch.full((100,), float(i)) for i, name in enumerate("abc")}
    frozen = FrozenState(tensors, largest_share=1 / 3)
    frozen.before_write(tensors["a"])  # at once: nobody has read anything yet
    tensors["a"].fill_(-1.0)
    frozen.before_write(tensors["a"])  # it is safe already
    second = threading.Thread(target=frozen.before_write, args=(tensors["b"],))
    second.start()
    assert until(lambda: bool(vars(frozen._changed)["_waiters"])), "it waits for a copy to be read"
    assert frozen.most_copied_bytes == 400
    names = frozen.names()
    assert next(names) == "a"  # since an update waits for the memory that it takes
    assert b"".join(map(bytes, frozen.chunks("a"))) == torch.zeros(100).numpy().tobytes()
    second.join(WAIT_S)
    assert not second.is_alive()
    tensors["b"].fill_(-1.0)
    assert next(names) == "c" and frozen.most_copied_bytes == 400  # nobody waits now
    assert b"".join(map(bytes, frozen.chunks("c"))) == torch.full((100,), 2.0).numpy().tobytes()
    assert next(names) == "b"
    assert next(frozen.chunks("b")) == torch.ones(10).numpy().tobytes()
    frozen.close()
    assert not frozen.open and next(names, None) is None


def test_of_a_tensor_that_is_being_read_only_the_rest_is_copied():
    tensor = torch.arange(100.0)
    wanted = tensor.numpy().tobytes()
    frozen = FrozenState({"x": tensor})
    chunks = frozen.chunks(next(frozen.names()))
    read = bytes(next(chunks)) + bytes(next(chunks))
    frozen.before_write(tensor)
    tensor.zero_()
    assert frozen.most_copied_bytes == 400 - 80
    assert read + b"".join(map(bytes, chunks)) == wanted


def test_a_disk_that_stands_still_does_not_hold_the_server_for_ever(monkeypatch):
    monkeypatch.setattr(frozen_state, "PATIENCE_S", 0.2)
    tensors = {name: torch.zeros(100) for name in "ab"}
    frozen = FrozenState(tensors, largest_share=0.5)
    began_s = time.monotonic()
    for tensor in tensors.values():
        frozen.before_write(tensor)
    assert frozen.most_copied_bytes == 800 and time.monotonic() - began_s >= 0.2


def test_a_snapshot_that_fails_lets_the_server_go_on(tmp_path):
    tensors = {name: torch.zeros(100) for name in "ab"}
    frozen = FrozenState(tensors, largest_share=0.5)
    frozen.before_write(tensors["a"])
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        SnapshotStore(tmp_path / "file" / "below").save(frozen, {})
    frozen.before_write(tensors["b"])
    assert frozen.most_copied_bytes == 400 and not frozen.open


def test_what_follows_the_last_change_is_read_before_an_update_comes_to_it():
    """Where updates go through the state in its order, only the first of them copies anything."""
    tensors = {name: torch.zeros(100) for name in "abcdef"}
    frozen, read = FrozenState(tensors), ""
    for updated, name in zip("cdefab", frozen.names(), strict=True):
        read += name
        assert len([*frozen.chunks(name)]) == 10
        frozen.before_write(tensors[updated])
    assert frozen.most_copied_bytes == 400 and read == "adefbc" and not frozen.open


@pytest.mark.parametrize("direct", [True, False])
def test_a_snapshot_never_has_much_on_its_way_to_the_disk(tmp_path, monkeypatch, direct):
    """A flush of the journal waits for what of a snapshot is on its way: with a share of an update's bytes only, no
    update takes half as long again. Past the page cache nothing is on its way."""
    monkeypatch.setattr(frozen_state, "CHUNK_BYTES", CHUNK_BYTES)
    if not direct:
        monkeypatch.setattr(snapshots, "_set_direct", lambda file, direct: False)
    synced, most_bytes = Counter[int](), 0  # by file

    def noted(sync: Callable[[int], None], descriptor: int) -> None:
        nonlocal most_bytes
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            path = f"/proc/self/fd/{descriptor}"
            file = torch.from_file(path, shared=True, size=found.st_size, dtype=torch.uint8)
            most_bytes = max(most_bytes, cached_bytes(file) if direct else found.st_size - synced[found.st_ino])
            synced[found.st_ino] = found.st_size
        sync(descriptor)

    for name in ("fdatasync", "fsync"):
        monkeypatch.setattr(os, name, partial(noted, getattr(os, name)))
    SnapshotStore(tmp_path).save(FrozenState({"x": torch.ones(5 << 20)}), {})
    assert max(synced.values()) > 20 << 20 and most_bytes <= 4 << 20
