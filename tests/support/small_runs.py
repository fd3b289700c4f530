"""Small runs of real processes: files, launching, and what they leave behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from geotrain.config import load_run
from geotrain.data.prepare import prepare
from geotrain.data.tokenizer import byte_tokenizer
from geotrain.net.storage.snapshots import read_weights
from geotrain.parameters.parameter_map import parameter_map_of

LOCAL_STEPS, BATCH = 2, 4
MODEL = {
    "model_type": "qwen3", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip


@cache
def _prepared() -> tempfile.TemporaryDirectory[str]:
    """Prepare numpy's own source, as bytes, once a process."""
    folder = tempfile.TemporaryDirectory()
    text = Path(folder.name, "text.txt")
    text.write_text(Path(np.__file__).read_text() * 4)
    prepare([text], Path(folder.name, "data"), byte_tokenizer())
    return folder


def prepare_text(folder: Path) -> None:
    """<folder>/data: numpy's own source, as bytes."""
    shutil.copytree(Path(_prepared().name, "data"), folder / "data")


def run_of(folder: Path, samples: int, outer: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """Content of a run file, whose data is in <folder>/data. keys: laid over it.

    A run of more than 80 steps has a schedule as long: behind its end the rate is a ten-thousandth, and the update of
    a member that trains an earlier range again would be far out of the ordinary."""
    steps = max(80, samples // BATCH)
    return {
        "name": "small", "model": {"config": MODEL},
        "data": {"train": str(folder / "data/train"), "sequence_length": 32, "train_samples": samples},
        "deepspeed": {
            "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": steps, "warmup_num_steps": 8}},
        },
        "outer": {"local_steps": LOCAL_STEPS, "up": {"name": "fp32"}, "down": {"name": "fp32"}, **outer},
        **keys,
    }  # fmt: skip


def write_files(
    folder: Path,
    name: str,
    samples: int,
    workers: dict[str, list[int]],
    outer: dict[str, Any],
    restarts: int = 10,
    min_step_s: float = 0.0,
    shards: int = 0,
    first: dict[str, Any] | None = None,
    **run_keys: Any,
) -> tuple[Path, Path]:
    """Write a run and a cluster file.

    workers: region → ranks of each of its workers. restarts: of a process that died, at most. min_step_s: as in the
    cluster file, of every worker. run_keys: laid over the run file. shards: of each server, as processes. first: laid
    over the first worker.
    """
    run = {**run_of(folder, samples, outer), "folder": str(folder / name), **run_keys}
    regions: list[dict[str, Any]] = [
        {
            "name": region,
            "shards": [{}] * shards,
            "workers": [
                {"name": f"{region}-{i}", "hosts": [{"host": "localhost", "slots": n}], "min_step_s": min_step_s}
                for i, n in enumerate(ranks)
            ],
        }
        for region, ranks in workers.items()
    ]
    regions[0]["workers"][0].update(first or {})
    paths = folder / f"{name}.json", folder / f"{name}-cluster.json"
    cluster: dict[str, Any] = {"name": "local", "regions": regions, "restart": {"limit": restarts}}
    cluster["global_shards"] = [{}] * shards
    for path, content in zip(paths, (run, cluster), strict=True):
        path.write_text(json.dumps(content))
    return paths


def launched(files: tuple[Path, Path], *options: str) -> None:
    """Launch the run, and wait for its end, which must be good."""
    command = [sys.executable, "-m", "geotrain", "launch", *map(str, files), *options]
    done = subprocess.run(command, text=True, capture_output=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr


def weights(run_file: Path) -> dict[str, torch.Tensor]:
    run = load_run(run_file)
    return dict(read_weights(run.run_folder / "servers" / "global", parameter_map_of(run)))


def status(run_file: Path, server: str) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(
        (load_run(run_file).run_folder / "servers" / server / "status.json").read_text()
    )
    return status


def losses(run_file: Path) -> dict[tuple[str, int], float]:
    """(worker, job) → mean loss of the job."""
    events: list[dict[str, Any]] = []
    for path in sorted((load_run(run_file).run_folder / "events").glob("*.jsonl")):
        events += map(json.loads, path.read_text().splitlines())
    return {(e["worker"], e["job"]): e["loss"] for e in events if e["event"] == "JobTrained"}
