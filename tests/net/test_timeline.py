"""The processes of a server go back to one checkpoint together, whole, whenever they are killed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.net.storage import timeline as timeline_module
from geotrain.net.storage.frozen_state import FrozenState
from geotrain.net.storage.recovery import JOURNAL
from geotrain.net.storage.remote_snapshots import Copies, RemoteSnapshots, number_of, superfluous, whole
from geotrain.net.storage.snapshots import SNAPSHOTS, SnapshotStore, StoreError
from geotrain.net.storage.timeline import (
    Timeline,
    clear_void,
    go_back,
    read_timeline,
    take,
    who_goes_back,
    write_timeline,
)


class Killed(BaseException):
    """As by SIGKILL: nothing after it is done."""


@contextmanager
def killed_after(steps: int, *places: tuple[Any, str]) -> Iterator[None]:
    """Every call of these functions is a step, as each changes something for good."""
    left, real = steps, [(owner, name, getattr(owner, name)) for owner, name in places]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **settings: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
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
    shutil.rmtree(folder / SNAPSHOTS)
    assert read_timeline(folder) == Timeline()  # with the state its timeline is gone


def test_a_kill_while_copies_are_made_and_dropped_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Of a coordinator and a shard, at each step of it; the next attempt brings the rest, and the state goes back."""
    for steps in range(60):
        root, ended = tmp_path / str(steps), 0
        mirrors = [RemoteSnapshots(f"file://{root}/far/{name}") for name in ("eu", "eu.shard-0")]
        copies, store = Copies(mirrors[0], 1, mirrors[1:]), SnapshotStore(root / "here", keep=3)
        for number in (1, 2, 3):
            state = FrozenState({f"at.{number}": torch.tensor([float(number)])})
            store.save(state, {"checkpoint_id": f"{number:08d}-a"})
        with killed_after(steps, *((type(mirrors[0]._files), name) for name in ("put_file", "rm_file", "rm"))):
            for number in (1, 2, 3):
                for upload in (mirrors[1].upload, copies.upload):
                    upload(store.path(number), f"{number:08d}-a")
                ended = number
        for attempt in range(2):
            for number in map(number_of, copies.whole()):
                for mirror in mirrors:
                    mirror.fetch(f"{number:08d}-a", root / f"looked/{number:08d}")
                    assert SnapshotStore(root / "looked").load(number).tensors[f"at.{number}"] == number
            assert max(map(number_of, copies.whole()), default=0) >= ended
            for upload in (mirrors[1].upload, copies.upload) if not attempt else ():
                upload(store.path(3), "00000003-a")
        assert [*copies.every()] == ["00000003-a"] and mirrors[0].checkpoint_ids() == mirrors[1].checkpoint_ids()
        mirrors[0]._files.touch(f"{root}/far/eu.shard-0/00000007-a")  # of a checkpoint that only one has begun
        go_back(root / "again", copies)
        assert SnapshotStore(root / "again" / SNAPSHOTS).numbers() == [7] and not read_timeline(root / "again").begun
        if ended == 3:
            break
    assert ended == 3 and steps > 15


def test_who_goes_back_depends_on_whether_the_others_have_begun() -> None:
    taken = Timeline("timeline", "2")
    assert [who_goes_back(taken, newest) for newest in (None, "2", "3")] == ["nobody", "shard", "all"]
    assert who_goes_back(replace(taken, begun=True), "2") == "all"


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
