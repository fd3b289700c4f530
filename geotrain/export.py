"""A run's weights as a Hugging Face checkpoint folder. Needs no training job."""

from __future__ import annotations

from pathlib import Path

from geotrain.config import load_run
from geotrain.hf_checkpoint import DType, write_checkpoint
from geotrain.layout import layout_of
from geotrain.net.snapshots import read_weights


def export_run(run_folder: Path, output: Path, dtype: DType = "bfloat16") -> None:
    """Write the newest global weights of a run, which may be running, resting or finished, as a checkpoint folder.

    Raises ConfigError (no run there), StoreError (no whole snapshot), LayoutError, and what `write_checkpoint` does.
    """
    run = load_run(run_folder / "run.json")
    tensors = read_weights(run_folder / "servers" / "global", layout_of(run))
    tokenizer = Path(run.data.tokenizer) if run.data.tokenizer else None
    write_checkpoint(tensors, run.model.config, output, tokenizer, dtype)
