"""The processes of a server go back to one checkpoint together, whole, whenever they are killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from geotrain.net.storage import timeline as timeline_module
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.recovery import JOURNAL
from geotrain.net.storage.remote_snapshots import Copies, RemoteSnapshots, number_of, superfluous, whole
from geotrain.net.storage.snapshots import SNAPSHOTS, DamagedSnapshot, SnapshotStore, StoreError
from geotrain.net.storage.timeline import (
    Timeline,
    clear_void,
    go_back,
    read_timeline,
    take,
    who_goes_back,
    write_timeline,
)

KEEP = 2


class Killed(BaseException):
    """As by SIGKILL: nothing after it is done."""


@contextmanager
def killed_after(steps: int | None, *places: tuple[Any, str]) -> Iterator[None]:
    """Every call of these functions is a step, as each changes something for good; None: nobody is killed."""
    left, real = steps, [(owner, name, getattr(owner, name)) for owner, name in places]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **settings: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left = None if left is None else left - 1
            return call(*arguments, **settings)

        return step

    try:
        for owner, name, call in real:
            setattr(owner, name, counted(call))
        yield
    except Killed:
        pass
    finally:
        for owner, name, call in real:
            setattr(owner, name, call)


class Sets(RuleBasedStateMachine):
    """A coordinator and two shards with folders, copies, and a value each that says what they hold. What
    `ShardSessions` and the processes around it do is told here; of `geotrain.net.storage.timeline` and the copies
    every line is the real one."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.fsync, os.fsync = os.fsync, lambda _: None  # processes are killed here, machines are not
        self.names = ["coordinator", "shard-0", "shard-1"]
        self.folders = [self.root / name for name in self.names]
        self.mirrors = [RemoteSnapshots(f"file://{self.root}/far/{name}") for name in self.names]
        self.copies = Copies(self.mirrors[0], KEEP, self.mirrors[1:])
        self.value = 0  # what the set has trained
        self.of: dict[str, int] = {}  # checkpoint id → what the set had trained then
        self.newest_known = ""  # the newest checkpoint id of which all were told that it is whole
        self.lost: set[int] = set()  # whose state is not that of the others

    def teardown(self) -> None:
        os.fsync = self.fsync
        shutil.rmtree(self.root)

    def places(self) -> list[tuple[Any, str]]:
        """All that changes something for good, in the store and on the disks."""
        far = [(type(self.mirrors[0]._files), name) for name in ("put_file", "rm_file", "rm")]
        near = [(timeline_module.shutil, "rmtree"), (timeline_module, "sync"), (timeline_module, "write_timeline")]
        return [*far, *near, (SnapshotStore, "adopt"), (RemoteSnapshots, "condemn")]

    def store(self, process: int) -> SnapshotStore:
        return SnapshotStore(self.folders[process] / SNAPSHOTS, KEEP)

    def held(self, process: int) -> tuple[str, int] | None:
        """The timeline of a process's state, and the value of its newest snapshot; None: it has none."""
        clear_void(self.folders[process])
        newest, faults = self.store(process).load_newest()
        assert not faults
        if newest is None:
            return None
        return read_timeline(self.folders[process]).name, int(newest.tensors["x"][0])

    @initialize()
    def begin(self) -> None:
        self.meet()
        self.save_all()

    def save_all(self) -> str:
        checkpoint_id = self.store(0).new_checkpoint_id()
        self.of[checkpoint_id] = self.value
        for process in range(3):
            # The names of the files, too, tell checkpoints apart.
            tensors = {"x": torch.tensor([float(self.value), process]), f"at.{self.value}": torch.zeros(1)}
            state = FrozenState(tensors)
            self.store(process).save(state, {"segment": 1, "ended": False, "checkpoint_id": checkpoint_id})
            (self.folders[process] / JOURNAL).mkdir(exist_ok=True)
        return checkpoint_id

    def meet(self) -> None:
        timeline = Timeline("first", begun=True)
        for folder in self.folders:
            folder.mkdir(parents=True, exist_ok=True)
        self.save_all()
        for folder in self.folders:
            write_timeline(folder, timeline)

    @rule()
    def train_and_save(self) -> None:
        if not self.lost:
            self.value += 1
            self.save_all()

    @rule(killed=st.none() | st.integers(0, 12))
    def copy(self, killed: int | None) -> None:
        """The coordinator tells its shards, and copies its own when all have said so. Killed at any point of it."""
        if self.lost:
            return
        checkpoint_ids = [self.store(p).checkpoint_ids() for p in range(3)]
        checkpoint_id = max(checkpoint_ids[0].values())
        numbers = [next(n for n, m in each.items() if m == checkpoint_id) for each in checkpoint_ids]
        with killed_after(killed, *self.places()):
            for process in (1, 2):
                self.mirrors[process].upload(self.store(process).path(numbers[process]), checkpoint_id)
            self.copies.upload(self.store(0).path(numbers[0]), checkpoint_id)
            self.newest_known = checkpoint_id
            there = [mirror.checkpoint_ids() for mirror in self.mirrors]
            assert there[0] == there[1] == there[2] and all(there[0].values()) and len(there[0]) <= KEEP

    @rule(process=st.integers(0, 2))
    def lose_a_disk(self, process: int) -> None:
        shutil.rmtree(self.folders[process], ignore_errors=True)
        self.lost.add(process)

    @rule(process=st.integers(0, 2))
    def damage_a_copy(self, process: int) -> None:
        """All but the oldest may be damaged, each by one process's copy."""
        checkpoint_ids = self.copies.whole()
        if len(checkpoint_ids) == KEEP:
            path = self.root / "far" / self.names[process] / checkpoint_ids[-1] / "x.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"!")

    @rule(killed=st.none() | st.integers(0, 25))
    def live_again(self, killed: int | None) -> None:
        """The processes begin new incarnations until they fit, with a kill somewhere on the way: then the next call
        begins anew."""
        if self.lost and self.copies.whole():
            with killed_after(killed, *self.places()):
                self.settle()

    def settle(self) -> None:
        if self.held(0) is None:
            go_back(self.folders[0], self.copies)
        for _ in range(20):
            coordinator = read_timeline(self.folders[0])
            unfit = [v for v in (1, 2) if (self.held(v) or ("",))[0] != coordinator.name]
            if not unfit:
                write_timeline(self.folders[0], replace(coordinator, begun=True))
                break
            newest = max(self.copies.whole(), default=None)
            who = who_goes_back(coordinator, newest)
            assert newest is not None and who != "nobody"
            if who == "all":
                go_back(self.folders[0], self.copies)
                continue
            try:
                take(
                    self.folders[unfit[0]],
                    self.mirrors[unfit[0]],
                    Timeline(coordinator.name, newest, True),
                    number_of(newest),
                )
            except DamagedSnapshot as error:
                self.mirrors[unfit[0]].condemn(newest, str(error))
        else:
            raise AssertionError("they never fit")
        checkpoint_id = read_timeline(self.folders[0]).checkpoint_id
        states = [self.held(process) for process in range(3)]
        assert states[0] == states[1] == states[2], "all on one timeline, at one checkpoint"
        assert states[0] is not None and states[0][1] == self.of[checkpoint_id]
        self.value, self.lost = self.of[checkpoint_id], set()
        assert self.store(0).new_checkpoint_id() > max(self.copies.every()), (
            "what follows is newer than all that is there"
        )

    @invariant()
    def a_moment_that_was_whole_has_a_whole_successor(self) -> None:
        checkpoint_ids = self.copies.whole() if self.newest_known else []
        if self.newest_known and not self.damaged():
            assert checkpoint_ids and checkpoint_ids[-1] >= self.newest_known
        for checkpoint_id in checkpoint_ids:
            for process, mirror in enumerate(self.mirrors):
                try:
                    mirror.fetch(checkpoint_id, self.root / "look")
                except DamagedSnapshot:
                    assert self.damaged()
                    continue
                SnapshotStore(self.root / "looked").adopt(self.root / "look", 1)
                found = SnapshotStore(self.root / "looked").load(1)
                assert found.meta["checkpoint_id"] == checkpoint_id
                assert found.tensors["x"].tolist() == [self.of[checkpoint_id], process]

    def damaged(self) -> bool:
        return any(b"!" in path.read_bytes()[-1:] for path in (self.root / "far").rglob("x.safetensors")) or any(
            (self.root / "far").rglob("damaged.txt")
        )


TestSets = Sets.TestCase
TestSets.settings = settings(stateful_step_count=20)


def test_a_state_is_exchanged_whole_or_the_folder_counts_as_empty(tmp_path: Path) -> None:
    """A kill at each step of it."""
    for steps in range(30):
        root = tmp_path / str(steps)
        folder, mirror = root / "eu.shard-0", RemoteSnapshots(f"file://{root}/far")
        store = SnapshotStore(folder / SNAPSHOTS)
        for value in (1, 2):
            meta = {"segment": value, "ended": False, "checkpoint_id": store.new_checkpoint_id()}
            store.save(FrozenState({"x": torch.tensor([float(value)])}), meta)
        checkpoint_ids = store.checkpoint_ids()
        mirror.upload(store.path(1), checkpoint_ids[1])
        (folder / JOURNAL).mkdir()
        (folder / JOURNAL / "00000002.journal").write_bytes(b"what was said since")
        write_timeline(folder, Timeline("before", begun=True))
        ended = False
        near = [(timeline_module.shutil, "rmtree"), (timeline_module, "sync"), (timeline_module, "write_timeline")]
        with killed_after(steps, *near, (SnapshotStore, "adopt")):
            take(folder, mirror, Timeline("after", checkpoint_ids[1]), 7)
            ended = True
        clear_void(folder)
        timeline, numbers = read_timeline(folder), store.numbers()
        if ended:
            assert (timeline, numbers) == (Timeline("after", checkpoint_ids[1]), [7]) and not (
                folder / JOURNAL
            ).exists()
            break
        before = timeline == Timeline("before", begun=True) and numbers == [1, 2] and (folder / JOURNAL).exists()
        nothing = timeline == Timeline() and numbers == [] and not (folder / JOURNAL).exists()
        after = (
            timeline == Timeline("after", checkpoint_ids[1]) and numbers == [7] and not (folder / JOURNAL).exists()
        )
        assert before or nothing or after, steps
        assert {path.name for path in folder.iterdir()} <= {SNAPSHOTS, JOURNAL, "timeline.json"}
    assert ended and steps > 8


def test_what_is_whole_and_what_may_go() -> None:
    assert whole([["1", "2", "3"], ["3", "1"], ["0", "1", "3"]]) == ["1", "3"]
    there = [["1", "2", "3", "4"], ["1", "3", "4"], ["0", "1", "3", "4", "5"]]
    assert superfluous(there, ["1", "3", "4"], "4", keep=2) == ["0", "1", "2", "5"]
    assert superfluous(there, ["1", "3", "4"], "3", keep=1) == ["0", "1", "2", "5"]  # what was just copied stays


def test_where_no_moment_is_whole_the_book_says_so(tmp_path: Path) -> None:
    copies = Copies(*[RemoteSnapshots(f"file://{tmp_path}/far/eu"), 2, [RemoteSnapshots(f"file://{tmp_path}/far/v")]])
    store = SnapshotStore(tmp_path / "one")
    store.save(FrozenState({"x": torch.zeros(1)}), {"checkpoint_id": "00000001-a"})
    copies.own.upload(store.path(1), "00000001-a")
    with pytest.raises(StoreError, match="holds no checkpoint that the server and all its shards have"):
        go_back(tmp_path / "eu", copies)
    with pytest.raises(StoreError, match=r"far/v: has no whole copy of 00000001-a, which was copied"):
        copies.upload(store.path(1), "00000001-a")
