"""How good a Hugging Face checkpoint folder is, by transformers: independent of how it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from geotrain.data.loader import open_source
from geotrain.data.tokens import DataError
from geotrain.export import CheckpointError


def evaluate(folder: Path, validation: Path, samples: int | None, sequence_length: int, batch: int = 16) -> float:
    """Mean loss in nats a token over the first `samples` samples (None: all) of a prepared data set, in fp32.

    validation: prefix of its .bin/.idx pair. A sample is `sequence_length` tokens and the one that follows, as in
    training. Runs on CUDA when there is one. Raises CheckpointError, DataError.
    """
    from transformers import AutoModelForCausalLM  # slow to import
    from transformers.utils import logging

    from geotrain.inner.dataset import open_tokens  # imports Megatron-core

    logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    except Exception as error:  # the library raises whatever its parsers raise
        lines = str(error).strip().splitlines()
        raise CheckpointError(f"{folder}: cannot be loaded: {lines[0] if lines else type(error).__name__}") from None
    source = open_source(validation, open_tokens, sequence_length, model.config.vocab_size, None)
    samples = source.samples_per_epoch if samples is None else samples
    if samples > source.samples_per_epoch:
        raise DataError(f"{validation}: {samples} samples are wanted, but there are {source.samples_per_epoch}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    total = 0.0
    with torch.inference_mode():
        for start in range(0, samples, batch):
            tokens = source.batch(np.arange(start, min(start + batch, samples))).to(device)
            logits = model(tokens[:, :-1]).logits.float()
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
            ).item()
    return total / (samples * sequence_length)


def run_tasks(folder: Path, tasks: list[str], limit: int | None, batch: int) -> dict[str, dict[str, float]]:
    """Tasks of EleutherAI's lm-evaluation-harness: task → its figures, as the harness names them.

    limit: examples a task at most. Raises CheckpointError, DataError (no such task), ModuleMissing.
    """
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{folder}: is no checkpoint folder (no config.json); make one with `geotrain export`")
    try:
        import lm_eval
    except ImportError:
        raise ModuleMissing(
            "geotrain eval --tasks needs lm-evaluation-harness, which is not installed: pip install lm-eval"
        ) from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32"},
            tasks=tasks,
            limit=limit,
            batch_size=batch,
            device=device,
        )
    except (KeyError, ValueError) as error:  # what the harness raises for names that it does not know
        raise DataError(f"lm-evaluation-harness, tasks {', '.join(tasks)}: {error}") from None
    return {
        task: {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
        for task, figures in found["results"].items()
    }


class ModuleMissing(OSError):
    """An optional package is not installed. Says which, and how to install it."""
