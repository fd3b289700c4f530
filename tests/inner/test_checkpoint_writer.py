"""Checkpoints are written beside training: what that may not change, and what happens when it fails or ends."""

from __future__ import annotations

import errno
import os
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from geotrain.config import ParallelConfig
from tests.support.checkpoints import keep_masters, load, save
from tests.support.inner_worlds import QWEN_2, deepspeed_block, run_world, start, stop, train

FIRST, THEN = range(3), range(3, 6)
DEADLINE_S = 120


def engine_for(stage: int = 1) -> Any:
    return start(QWEN_2, ParallelConfig(), deepspeed_block(stage))


def beside_training(folder: str) -> dict[str, Any]:
    """Trains while a checkpoint cannot be written yet, then saves the next one."""
    from geotrain.checkpoint import saving

    seen: dict[str, Any] = {}
    place, go, write, wait = Path(folder), threading.Event(), saving._write_file, saving.Checkpoints.wait

    def held(*args: Any) -> Any:
        assert go.wait(DEADLINE_S)
        return write(*args)

    def waiting(checkpoints: saving.Checkpoints) -> None:
        if checkpoints._under_way is not None:
            go.set()  # not before: who does not wait does not find it whole
        wait(checkpoints)

    engine = engine_for()
    train(engine, FIRST)
    checkpoints = saving.Checkpoints(engine, folder, keep=2)
    with (
        mock.patch.object(saving, "_write_file", held),
        mock.patch.object(saving.Checkpoints, "wait", waiting),
        closing(checkpoints),
    ):
        checkpoints.save("three", keep_masters(engine, folder, "three", {"steps": 3}))
        seen["expected"] = train(engine, THEN)
        seen["whole too early"] = (place / "three").exists()
        (buffer,) = checkpoints._staging._buffers.values()
        first = buffer.bytes.data_ptr(), buffer.bytes.numel()
        checkpoints.save("six", keep_masters(engine, folder, "six", {"steps": 6}))
        seen["whole then"] = (place / "three" / "manifest.json").exists()
        (buffer,) = checkpoints._staging._buffers.values()
        seen["one buffer"] = (buffer.bytes.data_ptr(), buffer.bytes.numel()) == first
    stop(engine)
    engine = engine_for()
    seen["extra"] = load(engine, folder, "three")
    seen["again"] = train(engine, THEN)
    seen["last"] = load(engine, folder)
    stop(engine)
    return seen


def on_bad_disks(folder: str) -> dict[str, Any]:
    """One rank's disk gives errors; then it is full."""
    import torch

    from geotrain.checkpoint import saving
    from geotrain.checkpoint.folders import CheckpointError

    seen: dict[str, Any] = {"told": []}

    def tell(error: CheckpointError) -> None:
        seen["told"].append((str(error), error.no_room, threading.current_thread() is threading.main_thread()))

    def broken(number: int, path: Path) -> Any:
        if path.name.startswith("rank-00001"):
            raise OSError(number, os.strerror(number), str(path))
        path.touch()

    engine = engine_for()
    train(engine, range(1))
    with closing(saving.Checkpoints(engine, folder, keep=2, no_room=tell)) as checkpoints:
        with mock.patch.object(saving, "_write_file", lambda path, *_: broken(errno.EIO, path)):
            checkpoints.save("one", {})
            try:
                checkpoints.save("two", {})
            except CheckpointError as error:
                seen["broken"] = str(error)
        with mock.patch.object(saving, "_write_file", lambda path, *_: broken(errno.ENOSPC, path)):
            checkpoints.save("three", {})
            checkpoints.wait()
        seen["left"] = sorted(path.name for path in Path(folder).iterdir())
        torch.distributed.barrier()  # both have looked, before either saves again
        checkpoints.save("four", {})
        seen["trains"] = train(engine, range(1, 2))[0][0] > 0
    seen["then"] = sorted(path.name for path in Path(folder).iterdir())
    stop(engine)
    return seen


def both(folder: str) -> dict[str, Any]:
    return {**beside_training(f"{folder}/beside"), "disks": on_bad_disks(f"{folder}/disks")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(2, both, str(tmp_path_factory.mktemp("checkpoints")))


def test_what_is_saved_is_the_state_at_the_save_though_training_goes_on(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert not seen["whole too early"]
        assert seen["extra"] == {"steps": 3} and seen["last"] == {"steps": 6}
        assert seen["again"] == seen["expected"], "bit for bit"


def test_one_is_under_way_at_most_and_its_memory_is_used_again(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["whole then"] and seen["one buffer"]


def test_the_next_save_tells_every_rank_what_became_of_the_last(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert "rank 1: Input/output error" in seen["disks"]["broken"]


def test_a_full_disk_is_told_at_once_and_training_goes_on(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        ((told, no_room, on_main_thread),) = seen["disks"]["told"]
        assert "rank 1: No space left on device" in told and no_room and not on_main_thread
        assert seen["disks"]["left"] == [] and seen["disks"]["then"] == ["four"]
        assert seen["disks"]["trains"]


# ------------------------------------------------------------------------------------------- a rank that dies


def killed(folder: str, job: int, module: str, where: str) -> Any:
    """Rank 1 is killed while this job's checkpoint is written: at its file, or before it gives the folder its name.
    Rank 0 trains meanwhile; gives what its next save says."""
    from geotrain.checkpoint import folders, saving

    patched = {"folders": folders, "saving": saving}[module]
    real = getattr(patched, where)

    def die(*args: Any) -> Any:
        if engine.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    engine = engine_for(stage=0)  # its ranks' steps wait for each other, and this test is of what they write
    mine = Path(folder) / f"host-{engine.rank}"
    seen = load(engine, mine)
    save(engine, mine, f"job-{job}", {"job": job}, keep=2)
    checkpoints = saving.Checkpoints(engine, mine, keep=2)
    with mock.patch.object(patched, where, die):
        checkpoints.save(f"job-{job + 1}", {"job": job + 1})
        try:
            checkpoints.wait()
        except RuntimeError as error:
            return seen, str(error)
    return seen, None


def resume(folder: str) -> Any:
    from geotrain.checkpoint.folders import manifests

    engine = engine_for(stage=0)
    mine = Path(folder) / f"host-{engine.rank}"
    found = load(engine, mine)
    save(engine, mine, "job-5", {"job": 5}, keep=2)
    numbers = [manifest["number"] for manifest, _ in manifests(mine)]
    return found, load(engine, mine), numbers


@pytest.mark.slow
def test_a_rank_that_dies_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """On hosts that share no file system, of which one has given its folder the name and the other has not."""
    (found, error), _ = run_world(2, killed, str(tmp_path), 1, "saving", "_write_file", lost=[1])
    assert found is None and "gloo" in error
    (found, error), _ = run_world(2, killed, str(tmp_path), 3, "folders", "finish", lost=[1])
    assert found == {"job": 1} and "gloo" in error
    assert (tmp_path / "host-0" / "job-4").exists() and not (tmp_path / "host-1" / "job-4").exists()
    for found, newest, numbers in run_world(2, resume, str(tmp_path)):
        assert found == {"job": 3} and newest == {"job": 5}
        assert numbers[0] > 3, "newer than what the one host has alone"
