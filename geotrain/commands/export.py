"""Writes a run's weights as a Hugging Face checkpoint folder. Needs no training job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from geotrain.commands.output import age_s, duration
from geotrain.common.files import MARKER, write_whole
from geotrain.common.names import GLOBAL
from geotrain.config import load_run
from geotrain.net.server.newest_weights import Newest, facts_of, newest_weights
from geotrain.net.storage.snapshots import read_weights, snapshots_of_last
from geotrain.parameters.dcp import write_dcp
from geotrain.parameters.hf_checkpoint import DType
from geotrain.parameters.hf_export import write_checkpoint, write_parameters
from geotrain.parameters.hub import repository, upload
from geotrain.parameters.parameter_map import parameter_map_of


def export_to_hub(
    run_folder: Path, url: str, dtype: DType = "bfloat16", average: float = 0.0
) -> tuple[str, dict[str, Any]]:
    """Write a run's newest global weights, as `export_run`, into a repository of a hub; returns the commit's address,
    and what that does. Raises HubError besides."""
    repository(url)
    with TemporaryDirectory(dir=run_folder) as made:
        written = export_run(run_folder, folder := Path(made) / "export", dtype, average)
        return upload(folder, url, f"Weights of {load_run(run_folder / 'run.json').name}, by GeoTrain"), written


def export_run(
    run_folder: Path, output: Path, dtype: DType = "bfloat16", average: float = 0.0, as_dcp: bool = False
) -> dict[str, Any]:
    """Write the newest global weights of a run, which may be running, killed or finished, as a checkpoint folder. Of
    a model that `model.weights` names, it holds a model.safetensors with the same names. as_dcp: see `write_dcp`.

    average: share of what is trained by the newest snapshot, counted from its end; the weights are then the mean of
    the snapshots that were taken in it. Returns which weights these are, as `about` does, and how many snapshots were
    averaged.

    Raises ConfigError (no run there), StoreError (no whole snapshot), ParameterMapError, JournalDamaged, what
    `LiveRun.snapshot_of` and what `write_checkpoint` does.
    """
    from geotrain.commands.operate import LiveRun

    run = load_run(run_folder / "run.json")
    parameter_map, server = parameter_map_of(run), run_folder / "servers" / GLOBAL
    snapshots = snapshots_of_last(server, average) if average else []
    if snapshots:
        newest = Newest(read_weights(server, parameter_map, snapshots), *facts_of(server, snapshots[-1]))
    else:
        newest = newest_weights(run, run_folder, lambda: LiveRun(run_folder).snapshot_of(GLOBAL))
    tensors = newest.tensors
    if as_dcp:
        write_dcp(tensors, run.architecture, output, dtype)
    elif run.model.weights is not None:
        write_parameters(tensors, parameter_map.parameters, output, dtype)
    else:
        tokenizer = Path(run.data.tokenizer) if run.data.tokenizer else None
        write_checkpoint(tensors, run.model.config, output, tokenizer, dtype)
    marker = json.loads((output / MARKER).read_text())
    noted = {"version": newest.version, "samples": newest.samples, "changed_s": newest.changed_s}
    write_whole(output / MARKER, json.dumps({**marker, "weights": noted}, indent=1) + "\n")
    return {**about(output), "snapshots": len(snapshots)}


def about(folder: Path) -> dict[str, Any]:
    """Read which weights an export holds: their version, committed samples and age in seconds. Empty for any other
    folder."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads((folder / MARKER).read_text())["weights"]
        return {**noted, "age_s": age_s(noted["changed_s"])}
    return {}


def in_words(weights: Mapping[str, Any]) -> str:
    """Describe what `about` returns."""
    return f"version {weights['version']}, {weights['samples']:,} samples, {duration(weights['age_s'])} old"
