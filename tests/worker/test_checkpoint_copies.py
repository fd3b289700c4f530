"""A worker's checkpoints have copies elsewhere: they come back to hosts that lost theirs, in any layout."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from geotrain.config import CheckpointConfig, ParallelConfig
from geotrain.monitor.events import SnapshotUploaded, Trouble
from geotrain.net.storage.owner import OtherOwnerError, Owner
from geotrain.outer.events import Event
from tests.support.checkpoints import keep_masters, load
from tests.support.inner_worlds import QWEN_2, deepspeed_block, run_config, run_world, start, stop, train
from tests.support.object_storage import make_bucket, s3_server
from tests.support.process_trees import until
from tests.support.small_runs import BATCH, launched, prepare_text, status, write_files

BUSY_S = 60.0
THEN = range(4, 6)


def opened(engine: Any, folder: Path, url: str | None, told: list[Event]) -> Any:
    """The checkpoints of this rank, whose host shares no folder with the other's."""
    from geotrain.checkpoint.copies import CheckpointCopies
    from geotrain.checkpoint.saving import Checkpoints

    settings = CheckpointConfig(snapshots=url, every_minutes=1e-6)
    run = run_config(QWEN_2, deepspeed_block(1)).model_copy(update={"checkpoint": settings})
    checkpoints = Checkpoints(engine, folder / f"host-{engine.rank}", keep=2)
    CheckpointCopies(checkpoints.files, run, "w", told.append)
    return checkpoints


def losing_disks(place: str, url: str | None, environment: dict[str, str]) -> dict[str, Any]:
    """Two hosts save two checkpoints; then they lose their disks, and a copy is damaged."""
    from geotrain.checkpoint import copies
    from geotrain.checkpoint.folders import CheckpointError

    os.environ.update(environment)
    copies.PIECE_BYTES = 1 << 14  # so that a file has some
    folder, seen, told = Path(place), dict[str, Any](), list[Event]()
    engine = start(QWEN_2, ParallelConfig(pipeline=2), deepspeed_block(1))

    def again(what: str, *lost: int) -> None:
        if engine.rank in lost:
            shutil.rmtree(folder / f"host-{engine.rank}")
        checkpoints = opened(engine, folder, url, told)
        seen[what] = load(engine, folder, opened=checkpoints), train(engine, THEN), checkpoints.files.faults

    with closing(opened(engine, folder, url, told)) as checkpoints:
        for count in (1, 2):
            train(engine, range(count))
            checkpoints.save(f"job-{count}", keep_masters(engine, folder, f"job-{count}", {"job": count}))
            checkpoints.wait()
            assert url is None or until(lambda count=count: len(told) == count, BUSY_S)  # type: ignore[misc]
            engine.agree(True)  # so has the other host
    seen["straight"] = train(engine, THEN)
    again("one disk lost", 1)
    if url is not None:
        again("both disks lost", 0, 1)
    stop(engine)
    engine = start(QWEN_2, ParallelConfig(), deepspeed_block(1))
    again("in another layout", *((1,) if url is None else (0, 1)))
    if engine.rank == 0 and url is not None:
        files = fsspec.filesystem("s3")
        (newest,) = files.glob(f"{url}test/workers/w/rank-00001/00000002-*/rank-00001.safetensors")
        files.pipe_file(newest, b"not what it was")
    engine.agree(True)
    if url is not None:
        again("a copy damaged", 0, 1)
    for path in (folder / f"host-{engine.rank}").rglob("rank-00000.*"):
        path.unlink()
    try:
        again("all lost")
    except CheckpointError as error:
        seen["all lost"] = str(error)
    stop(engine)
    seen["told"] = told
    return seen


def test_what_is_elsewhere_is_held_to_the_same_and_names_no_other_folder(tmp_path: Path) -> None:
    from geotrain.checkpoint.folders import FORMAT, CheckpointError, CheckpointFolder, known

    ranks: Any = SimpleNamespace(together=lambda action, place: [action()], rank=0, world_size=1)
    files = CheckpointFolder(ranks, tmp_path, 2, "", "")
    kind = {"model": "m", "optimizer": "AdamW"}
    manifest: dict[str, Any] = {**kind, "tag": "job-9", "number": 9, "checksum": 1, "format": FORMAT}
    manifest["files"] = {"rank-0.x": [0, 0]}
    for other in ("model", "optimizer"):
        files.elsewhere = lambda other=other: [{**manifest, other: "another"}]  # type: ignore[misc]
        with pytest.raises(CheckpointError, match="'job-9' "):
            files.newest({**kind, "layout": {}})
    assert known(manifest)
    changes: list[dict[str, Any]] = [{"files": {"../x": [0, 0]}}, {"files": []}, {"number": "9"}, {"format": 0}]
    for changed in (*changes, *({"tag": tag} for tag in ("", "..", "job-9.tmp", 5))):
        assert not known({**manifest, **changed})


@pytest.mark.slow
def test_what_a_host_loses_comes_back_from_another(tmp_path: Path) -> None:
    for seen in run_world(2, losing_disks, str(tmp_path), None, {}):
        extra, curve, _ = seen["one disk lost"]
        assert extra == {"job": 2} and curve == seen["straight"]
        extra, curve, _ = seen["in another layout"]
        assert extra == {"job": 2} and curve[-1][0] == pytest.approx(seen["straight"][-1][0], rel=1e-3)
        assert "does not find rank-00000.safetensors" in seen["all lost"]


@pytest.mark.slow
def test_what_all_hosts_lose_comes_back_from_object_storage(tmp_path: Path) -> None:
    with s3_server() as environment, pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        url = make_bucket("states", environment) + "/here/"
        for seen in run_world(2, losing_disks, str(tmp_path), url, environment):
            assert [type(event) for event in seen["told"]] == [SnapshotUploaded, SnapshotUploaded]
            extra, curve, faults = seen["both disks lost"]
            assert extra == {"job": 2} and curve == seen["straight"]
            assert ["/00000002-" in fault for fault in faults] == [True, True], faults
            extra, curve, _ = seen["in another layout"]
            assert extra == {"job": 2} and curve[-1][0] == pytest.approx(seen["straight"][-1][0], rel=1e-3)
            extra, _, faults = seen["a copy damaged"]
            assert extra == {"job": 1} and any("has 15 bytes" in fault for fault in faults), faults


def test_copies_go_by_the_time_are_not_held_up_by_one_that_cannot_begin_and_name_nothing_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from geotrain.checkpoint import copies, folders

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "no room")

    settings, told = CheckpointConfig(snapshots=f"file://{tmp_path}/far", every_minutes=1.0), list[Event]()
    run = run_config(QWEN_2, deepspeed_block(1)).model_copy(update={"checkpoint": settings})
    files = folders.CheckpointFolder(folders.RanksOfWorker(BUSY_S), tmp_path / "here", 2, "", "safetensors")
    made = copies.CheckpointCopies(files, run, "w", told.append)
    files.origin = "this run"
    for tag, link, now_s, events in (("first", full, 0, 1), ("second", os.link, 61, 2), ("third", os.link, 120, 2)):
        monkeypatch.setattr(copies.os, "link", link)
        monkeypatch.setattr(copies, "time", SimpleNamespace(monotonic=lambda now_s=now_s: now_s))
        files.write(tag, {}, lambda path: path.write_bytes(b"state"))
        assert until(lambda events=events: len(told) == events, BUSY_S)  # type: ignore[misc]
    assert [*made.checkpoint_ids()] == [2], "the third came a minute less a second later"
    trouble, uploaded = told
    assert isinstance(trouble, Trouble) and "not copied to object storage" in trouble.what
    assert isinstance(uploaded, SnapshotUploaded) and uploaded.number == 2
    (kept,) = copies.stored(run, "w").whole()
    with pytest.raises(OtherOwnerError, match="another run"):
        Owner(run.name, "w", "another of its name").check(Owner.of(copies.stored(run, "w").meta(kept)), "far")
    for number, (tag, name) in enumerate((("../out", "rank"), ("in", "../out"), ("good", "rank"))):
        (place := tmp_path / f"{number:08d}-ab").mkdir()
        copies.write_meta(
            place, {}, {"manifest": {"tag": tag, "files": {name: []}, "number": 1, "format": folders.FORMAT}}
        )
        copies.stored(run, "w").upload(place, place.name)
    assert {each["tag"] for each in made.elsewhere()} == {"good", "second"}


@pytest.mark.slow
@pytest.mark.long("geotrain/checkpoint", "launch")
def test_a_launched_worker_goes_on_from_its_copy(tmp_path: Path) -> None:
    prepare_text(tmp_path)
    settings = {"every_jobs": 1, "every_minutes": 1e-6, "snapshots": f"file://{tmp_path}/far"}
    for samples, options in ((12 * BATCH, ()), (16 * BATCH, ("--resume",))):
        files = write_files(tmp_path, "run", samples, {"eu": [1]}, {}, checkpoint=settings)
        launched(files, *options)
        assert status(files[0], "global")["complete"]
        shutil.rmtree(tmp_path / "run/checkpoints")
    lines = (tmp_path / "run/events/eu-0.jsonl").read_text().splitlines()
    troubles = [event["what"] for event in map(json.loads, lines) if event["event"] == "Trouble"]
    assert len(troubles) == 1 and f"came from file://{tmp_path}/far/small/workers/eu-0/rank-00000/" in troubles[0]
