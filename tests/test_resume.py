"""A run of real processes, stopped half-way and resumed: the same bits on the same layout, equal loss on another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from geotrain.config import load_run
from geotrain.data.prepare import prepare
from geotrain.data.tokenizer import byte_tokenizer
from geotrain.inner.dataset import TokenWriter
from geotrain.net.store import read_weights
from geotrain.outer.layout import layout_of

ROUNDS, LOCAL_STEPS, BATCH = 20, 2, 4
SAMPLES_PER_ROUND = 2 * LOCAL_STEPS * BATCH  # two workers
MODEL = {
    "model_type": "qwen3", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip


def write_files(folder: Path, name: str, rounds: int, us_ranks: int = 1) -> tuple[Path, Path]:
    run = {
        "name": "resume", "folder": str(folder / name), "model": {"config": MODEL},
        "data": {"train": str(folder / "data/train"), "sequence_length": 32,
                 "train_samples": rounds * SAMPLES_PER_ROUND},
        "deepspeed": {
            "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 80, "warmup_num_steps": 8}},
        },
        "outer": {"rule": "sync", "local_steps": LOCAL_STEPS, "up": {"name": "fp32"}, "down": {"name": "fp32"}},
    }  # fmt: skip
    cluster = {
        "name": "two",
        "regions": [
            {"name": "eu", "workers": [{"name": "eu-0", "hosts": [{"host": "localhost", "slots": 1}]}]},
            {"name": "us", "workers": [{"name": "us-0", "hosts": [{"host": "localhost", "slots": us_ranks}]}]},
        ],
    }
    paths = folder / f"{name}-{rounds}.json", folder / f"{name}-{rounds}-cluster.json"
    for path, content in zip(paths, (run, cluster), strict=True):
        path.write_text(json.dumps(content))
    return paths


def launch(files: tuple[Path, Path], *more: str) -> None:
    command = [sys.executable, "-m", "geotrain", "launch", *map(str, files), *more]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr


def weights(run_file: Path) -> dict[str, torch.Tensor]:
    run = load_run(run_file)
    return dict(read_weights(run.run_folder / "servers" / "global", layout_of(run)))


def losses(run_file: Path) -> dict[tuple[str, int], float]:
    events: list[dict[str, Any]] = []
    for path in sorted((load_run(run_file).run_folder / "events").glob("*.jsonl")):
        events += map(json.loads, path.read_text().splitlines())
    return {(e["worker"], e["job"]): e["loss"] for e in events if e["event"] == "JobTrained"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """straight: 20 rounds. stopped: 10, then 10 more. other: the same 10, then 10 more with two ranks in `us`."""
    folder = tmp_path_factory.mktemp("resume")
    text = folder / "text.txt"
    text.write_text(Path(np.__file__).read_text() * 4)
    prepare([text], folder / "data", byte_tokenizer(), TokenWriter)
    straight = write_files(folder, "straight", ROUNDS)
    launch(straight)
    launch(write_files(folder, "stopped", ROUNDS // 2))
    shutil.copytree(folder / "stopped", folder / "other")
    stopped = write_files(folder, "stopped", ROUNDS)
    launch(stopped, "--resume")
    other = write_files(folder, "other", ROUNDS, us_ranks=2)
    launch(other, "--resume")
    return {"straight": straight[0], "stopped": stopped[0], "other": other[0]}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_and_ten_rounds_are_twenty_bitwise(runs: dict[str, Path]) -> None:
    straight, stopped = weights(runs["straight"]), weights(runs["stopped"])
    assert straight.keys() == stopped.keys() and len(straight) > 20
    for name, tensor in straight.items():
        assert torch.equal(tensor, stopped[name]), name
    assert losses(runs["stopped"]) == losses(runs["straight"])
    assert len(losses(runs["straight"])) == 2 * ROUNDS


@pytest.mark.slow
def test_another_data_parallel_size_resumes_with_equal_loss(runs: dict[str, Path]) -> None:
    straight, other = losses(runs["straight"]), losses(runs["other"])
    assert other.keys() == straight.keys()
    for job, loss in straight.items():
        assert other[job] == pytest.approx(loss, rel=1e-4), job
    assert min(straight.values()) < 0.9 * max(straight.values())
