"""Data and files of small runs that are launched on this machine, for benchmarks of real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

# 0.04 M parameters, over bytes: its steps take no time, so that a worker's least time of a step sets the pace.
MODEL = {
    "model_type": "qwen3", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip


def llama(
    hidden: int, layers: int, heads: int, ffn: int, vocabulary: int, positions: int, **more: Any
) -> dict[str, Any]:
    """Hugging Face's config of a Llama of these sizes. more: keys that are added or differ."""
    return {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "max_position_embeddings": positions, "tie_word_embeddings": True, **more,
    }  # fmt: skip


def deepspeed_block(batch: int, micro_batch: int, lr: float, **more: Any) -> dict[str, Any]:
    """A DeepSpeed block with AdamW, ZeRO-1 and clipping. more: keys that are added or differ."""
    optimizer = {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1}}
    return {
        "train_batch_size": batch, "train_micro_batch_size_per_gpu": micro_batch, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1}, "optimizer": optimizer, **more,
    }  # fmt: skip


def schedule_block(warmup: int, steps: int) -> dict[str, Any]:
    """DeepSpeed's scheduler: a warm-up, then a cosine to the end."""
    return {"type": "WarmupCosineLR", "params": {"total_num_steps": steps, "warmup_num_steps": warmup}}


def prepare_text(folder: Path, copies: int) -> Path:
    """A tokenized data set of a few kilobytes of Python source, so many times."""
    from geotrain.data.prepare import prepare
    from geotrain.data.tokenizer import byte_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(Path(np.__file__).read_text() * copies)
    prepare([folder / "text.txt"], folder / "data", byte_tokenizer())
    return folder / "data" / "train"


def run_file(
    folder: Path, name: str, samples: int, batch: tuple[int, int], schedule: tuple[int, int]
) -> dict[str, Any]:
    """A run of MODEL on that text, without its outer block.

    batch: of a step, and of a micro-batch. schedule: steps of the learning rate's warm-up, and of all of it.
    """
    return {
        "name": name, "folder": str(folder / "run"), "model": {"config": MODEL},
        "data": {"train": str(prepare_text(folder, 4)), "sequence_length": 32, "train_samples": samples},
        "deepspeed": deepspeed_block(*batch, 3e-3, scheduler=schedule_block(*schedule)),
    }  # fmt: skip


def cluster_file(
    name: str, workers: dict[str, dict[str, tuple[int, float]]], links: dict[str, tuple[float, float]], **more: Any
) -> dict[str, Any]:
    """Regions on this machine over emulated links. workers: region → worker → ranks, and least seconds of an inner
    step. links: region → Gbit/s and round trip in ms to the global server."""

    def region(name: str) -> dict[str, Any]:
        mine = [
            {"name": worker, "hosts": [{"host": "localhost", "slots": ranks}], "min_step_s": pace_s}
            for worker, (ranks, pace_s) in workers[name].items()
        ]
        return {"name": name, "workers": mine}

    return {
        "name": name,
        "regions": [region(r) for r in workers],
        "links": [{"regions": [r, "global"], "gbps": gbps, "rtt_ms": rtt_ms} for r, (gbps, rtt_ms) in links.items()],
        "emulate_links": True,
        **more,
    }


def write_files(folder: Path, run: dict[str, Any], cluster: dict[str, Any]) -> tuple[Path, Path]:
    paths = folder / "run.json", folder / "cluster.json"
    for path, content in zip(paths, (run, cluster), strict=True):
        path.write_text(json.dumps(content))
    return paths
