"""Checkpoints: the same bits on the same layout, and never half-written."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.config import ParallelConfig
from geotrain.parameters.parameter_map import StridedSlice
from tests.support.checkpoints import load, save
from tests.support.families import DEEPSEEK, QWEN_MOE
from tests.support.inner_worlds import (
    LLAMA,
    MUON,
    QWEN_2,
    deepspeed_block,
    micro_batches,
    run_world,
    start,
    stop,
    train,
)

FIRST, THEN = range(3), range(3, 6)
Layout = tuple[int, int, int]  # tensor, pipeline, ZeRO stage
MUON_BLOCK = {**deepspeed_block(1), **MUON}
# Model, layout, DeepSpeed block: each goes on with the same bits; with close ones on other layouts (test_layouts.py).
BITS: dict[str, tuple[dict[str, Any], ParallelConfig, dict[str, Any]]] = {
    "adamw": (QWEN_2, ParallelConfig(), deepspeed_block(1)),
    "muon": (QWEN_2, ParallelConfig(), MUON_BLOCK),
    "experts": (DEEPSEEK, ParallelConfig(expert=2), deepspeed_block(1)),
    "context": (QWEN_MOE, ParallelConfig(context=2, expert=2), deepspeed_block(1)),
}


def engine_for(layout: Layout, model: dict[str, Any] = QWEN_2, **more: Any) -> Any:
    return start(model, ParallelConfig(tensor=layout[0], pipeline=layout[1]), deepspeed_block(layout[2], **more))


def save_and_go_on(folder: str) -> dict[str, list[Any]]:
    """Train, save, go on; and go on again from the checkpoint."""
    seen: dict[str, list[Any]] = {}
    for name, (model, parallel, block) in BITS.items():
        seen[name] = []
        for again in (False, True):
            engine = start(model, parallel, block)
            if again:
                extra = load(engine, f"{folder}/{name}")
            else:
                train(engine, FIRST)
                extra = {"lease": [1, 2]}
                save(engine, f"{folder}/{name}", "six", extra, keep=2, with_masters=True)
            drawn = torch.rand(3).tolist()
            curve, masters = train(engine, THEN), [shard.master.tolist() for shard in engine.shards()]
            seen[name].append((extra, drawn, curve, masters, engine.global_steps))
            stop(engine)
    return seen


@pytest.mark.slow
def test_the_same_layout_continues_bit_for_bit(tmp_path: Path) -> None:
    for seen in run_world(2, save_and_go_on, str(tmp_path)):
        for name, (straight, resumed) in seen.items():
            assert resumed == straight, name
            assert resumed[0] == {"lease": [1, 2]} and resumed[-1] == len(FIRST) + len(THEN)


def misuse(folder: str) -> dict[str, Any]:
    """Damage, lose and mistake checkpoints. On two ranks, TP 2."""
    import torch.distributed as dist

    from geotrain.checkpoint.folders import CheckpointError, sealed
    from geotrain.common.files import size_and_checksum

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
        manifest["files"][file.name] = size_and_checksum(file)
        (place / "two" / "manifest.json").write_text(sealed(manifest))
    dist.barrier()
    failure("incomplete", lambda: load(engine, folder, "two"))
    save(engine, folder, "six", {}, keep=3)
    seen["left-overs"] = sorted(p.name for p in place.glob("*.tmp"))
    stop(engine)
    engine = engine_for((2, 1, 1), LLAMA)
    failure("other model", lambda: load(engine, folder, "six"))
    seen["trains"] = engine.train_step(micro_batches(engine, 0), 0).loss > 0
    stop(engine)
    engine = engine_for((2, 1, 1), **MUON)
    failure("other optimizer", lambda: load(engine, folder, "six"))
    seen["trains"] = engine.train_step(micro_batches(engine, 0), 0).loss > 0
    stop(engine)
    return seen


@pytest.mark.slow
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
        assert (
            "holds the state of AdamW, not of Muon: each optimizer keeps other moments; set deepspeed.optimizer.type"
            in seen["other optimizer"]
        )
        assert seen["trains"]


def flip_bits(folder: str) -> list[tuple[str, int]]:
    """Flip bits of the newest checkpoint, one at a time; those that were loaded nevertheless."""
    engine = engine_for((1, 1, 0))
    for number in (1, 2):
        train(engine, range(1))
        save(engine, folder, f"job-{number}", {"job": number}, keep=2, with_masters=True)
    assert load(engine, folder) == {"job": 2}
    rng, unnoticed = np.random.default_rng(1), []
    for path in sorted((Path(folder) / "job-2").iterdir()):
        content = path.read_bytes()
        # The ends of each file are its header, its sizes and its last element.
        for at in {0, 7, 8, 100, len(content) - 1, *rng.integers(0, len(content), 20).tolist()}:
            damaged = bytearray(content)
            damaged[at] ^= 1 << int(rng.integers(0, 8))
            path.write_bytes(damaged)
            if load(engine, folder) != {"job": 1}:
                unnoticed.append((path.name, at))
        path.write_bytes(content)
    assert load(engine, folder) == {"job": 2}
    stop(engine)
    return unnoticed


@pytest.mark.slow
def test_a_flipped_bit_is_noticed_and_the_checkpoint_before_is_loaded(tmp_path: Path) -> None:
    assert run_world(1, flip_bits, str(tmp_path)) == [[]]


def set_the_clock_back(folder: str) -> list[Any]:
    engine = engine_for((1, 1, 0))
    real, seen = time.time, []
    for hour in range(4):
        train(engine, range(1))
        with mock.patch("time.time", lambda back=3600.0 * hour: real() - back):
            save(engine, folder, f"job-{9 - hour}", {"hour": hour}, keep=2)
        seen.append((load(engine, folder), len(list(Path(folder).iterdir()))))
    stop(engine)
    engine = engine_for((1, 1, 0))  # begins without them: its steps are fewer
    train(engine, range(1))
    save(engine, folder, "anew", {"hour": 4}, keep=2)
    seen.append((load(engine, folder), len(list(Path(folder).iterdir()))))
    stop(engine)
    return seen


@pytest.mark.slow
def test_the_newest_is_the_one_saved_last_whatever_the_clock_says(tmp_path: Path) -> None:
    (seen,) = run_world(1, set_the_clock_back, str(tmp_path))
    assert seen == [({"hour": hour}, min(hour + 1, 2)) for hour in range(5)]


@st.composite
def runs(draw: st.DrawFn) -> StridedSlice:
    length, count = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    stride = length + draw(st.integers(0, 9)) if count > 1 else 0
    return StridedSlice(draw(st.integers(0, 40)), length, stride, count, parameter="p")


def elements(run: StridedSlice) -> list[int]:
    return [run.start + row * run.stride + i for row in range(run.count) for i in range(run.length)]


@settings(deadline=None)  # the first example imports DeepSpeed
@given(runs(), runs())
def test_overlap_is_the_intersection(a: StridedSlice, b: StridedSlice) -> None:
    from geotrain.checkpoint.loading import overlap

    pairs = {
        (int(i) + k, int(j) + k)
        for i, j, n in zip(*overlap(a, b), strict=True)
        for k in range(int(n))
        if np.all(n > 0)
    }
    ours, theirs = elements(a), elements(b)
    assert pairs == {(ours.index(e), theirs.index(e)) for e in set(ours) & set(theirs)}
