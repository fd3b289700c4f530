"""Checkpoints: bitwise on the same layout, equal on every other, and never half-written."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inner_worlds import LLAMA, QWEN, deepspeed_block, micro_batches, run_world, start, stop, train

from geotrain.canonical import Run
from geotrain.config import ParallelConfig
from geotrain.inner.reshard import overlap

FIRST, THEN = range(6), range(6, 12)
Layout = tuple[int, int, int]  # tensor, pipeline, ZeRO stage


def engine_for(layout: Layout, model: dict[str, Any] = QWEN) -> Any:
    return start(model, ParallelConfig(tensor=layout[0], pipeline=layout[1]), deepspeed_block(layout[2]))


def save_and_go_on(folder: str) -> dict[str, Any]:
    """DP 2: train, save, go on; and go on again from the checkpoint."""
    from geotrain.inner.checkpoint import load, save

    engine = engine_for((1, 1, 1))
    train(engine, FIRST)
    save(engine, folder, "six", {"lease": [1, 2]}, keep=2, with_masters=True)
    drawn = torch.rand(3).tolist()
    expected = train(engine, THEN)
    masters = [shard.master.clone() for shard in engine.shards()]
    stop(engine)

    engine = engine_for((1, 1, 1))
    extra = load(engine, folder)
    drawn_again = torch.rand(3).tolist()
    again = train(engine, THEN)
    same = all(torch.equal(a, s.master) for a, s in zip(masters, engine.shards(), strict=True))
    steps = engine.global_steps
    stop(engine)
    return {
        "expected": expected,
        "extra": extra,
        "again": again,
        "same": same,
        "steps": steps,
        "drawn": (drawn, drawn_again),
    }


def load_elsewhere(folder: str, layouts: list[Layout]) -> list[Any]:
    from geotrain.inner.checkpoint import load

    curves = []
    for layout in layouts:
        engine = engine_for(layout)
        assert load(engine, folder, "six") == {"lease": [1, 2]}
        curves.append(train(engine, THEN))
        stop(engine)
    return curves


@pytest.mark.slow
def test_it_continues_on_every_layout(tmp_path: Path) -> None:
    saved = run_world(2, save_and_go_on, str(tmp_path))
    for result in saved:
        assert result["again"] == result["expected"], "the same layout continues bit for bit"
        assert result["same"]
        assert result["drawn"][0] == result["drawn"][1]
        assert result["extra"] == {"lease": [1, 2]}
        assert result["steps"] == len(FIRST) + len(THEN)
    expected = saved[0]["expected"]
    layouts: list[list[Layout]] = [[(1, 1, 0)], [(2, 1, 1), (1, 2, 0), (1, 1, 2)]]
    for ranks, here in zip((1, 2), layouts, strict=True):
        for curves in run_world(ranks, load_elsewhere, str(tmp_path), here):
            for layout, curve in zip(here, curves, strict=True):
                torch.testing.assert_close(curve, expected, rtol=1e-4, atol=1e-5, msg=str(layout))


def misuse(folder: str) -> dict[str, Any]:
    """What happens to checkpoints when things go wrong. On two ranks, TP 2."""
    import torch.distributed as dist

    from geotrain.inner.checkpoint import CheckpointError, load, save

    seen: dict[str, Any] = {}

    def failure(name: str, action: Any) -> None:
        try:
            action()
            seen[name] = None
        except CheckpointError as error:
            seen[name] = str(error)
        dist.barrier()

    place = Path(folder)
    engine = engine_for((2, 1, 1))
    seen["nothing"] = load(engine, folder)
    for tag in ("one", "two", "three"):
        train(engine, range(1))
        save(engine, folder, tag, {"tag": tag}, keep=2)
    save(engine, folder, "three", {"tag": "three, again"}, keep=2)
    seen["kept"] = sorted(p.name for p in place.iterdir())
    before = [shard.master.clone() for shard in engine.shards()]
    seen["newest"] = load(engine, folder)
    seen["masters untouched"] = all(torch.equal(a, s.master) for a, s in zip(before, engine.shards(), strict=True))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # the kernel refuses to write more to a file
    failure("full", lambda: save(engine, folder, "four", {}, keep=2))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    seen["after full"] = sorted(p.name for p in place.iterdir())
    failure("no folder", lambda: save(engine, place / "two" / "manifest.json" / "here", "x", {}, keep=2))
    failure("no tag", lambda: load(engine, folder, "nine"))

    if engine.rank == 0:
        (place / "five.tmp").mkdir()
        (place / "two").rename(place / "two.replaced.tmp")  # as a kill leaves it when "two" is saved once more
        file = place / "three" / "rank-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    seen["whole"] = load(engine, folder)
    failure("damaged", lambda: load(engine, folder, "three"))
    if engine.rank == 0:  # in full length, but with a rank's shards of another rank
        file = place / "two" / "rank-00001.safetensors"
        file.write_bytes((place / "two" / "rank-00000.safetensors").read_bytes())
        manifest = json.loads((place / "two" / "manifest.json").read_text())
        manifest["files"][file.name] = file.stat().st_size
        (place / "two" / "manifest.json").write_text(json.dumps(manifest))
    dist.barrier()
    failure("incomplete", lambda: load(engine, folder, "two"))
    save(engine, folder, "six", {}, keep=3)
    seen["left-overs"] = sorted(p.name for p in place.glob("*.tmp"))
    stop(engine)
    engine = engine_for((2, 1, 1), LLAMA)
    failure("other model", lambda: load(engine, folder, "six"))
    seen["trains"] = engine.train_step(micro_batches(engine, 0), 0).loss > 0
    stop(engine)
    return seen


def test_nothing_half_written_is_left_or_loaded(tmp_path: Path) -> None:
    for seen in run_world(2, misuse, str(tmp_path)):
        assert seen["nothing"] is None
        assert seen["kept"] == ["three", "two"]
        assert seen["newest"] == {"tag": "three, again"}
        assert seen["masters untouched"]
        assert "rank 1" in seen["full"] and "too large" in seen["full"], seen["full"]
        assert seen["after full"] == ["three", "two"]
        assert "Not a directory" in seen["no folder"]
        assert "no whole checkpoint 'nine'" in seen["no tag"]
        assert seen["whole"] == {"tag": "two"}
        assert "no whole checkpoint 'three'" in seen["damaged"]
        assert "wanted elements were saved" in seen["incomplete"]
        assert seen["left-overs"] == []
        assert "another model" in seen["other model"]
        assert seen["trains"]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    length, count = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    stride = length + draw(st.integers(0, 9)) if count > 1 else 0
    return Run("p", draw(st.integers(0, 40)), length, stride, count)


def elements(run: Run) -> list[int]:
    return [run.start + row * run.stride + i for row in range(run.count) for i in range(run.length)]


@given(runs(), runs())
def test_overlap_is_the_intersection(a: Run, b: Run) -> None:
    pairs = {
        (int(i) + k, int(j) + k)
        for i, j, n in zip(*overlap(a, b), strict=True)
        for k in range(int(n))
        if np.all(n > 0)
    }
    ours, theirs = elements(a), elements(b)
    assert pairs == {(ours.index(e), theirs.index(e)) for e in set(ours) & set(theirs)}
