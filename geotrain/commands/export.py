"""Writes a run's weights as a Hugging Face checkpoint folder. Needs no training job."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from geotrain.config import load_run
from geotrain.net.storage.snapshots import read_weights, snapshots_of_last
from geotrain.parameters.dcp import write_dcp
from geotrain.parameters.hf_checkpoint import DType
from geotrain.parameters.hf_export import write_checkpoint, write_parameters
from geotrain.parameters.hub import repository, upload
from geotrain.parameters.parameter_map import parameter_map_of


def export_to_hub(run_folder: Path, url: str, dtype: DType = "bfloat16", average: float = 0.0) -> str:
    """Write a run's newest global weights, as `export_run`, into a repository of a hub; returns the commit's address.
    Raises HubError besides."""
    repository(url)
    with TemporaryDirectory(dir=run_folder) as made:
        export_run(run_folder, Path(made) / "export", dtype, average)
        return upload(Path(made) / "export", url, f"Weights of {load_run(run_folder / 'run.json').name}, by GeoTrain")


def export_run(
    run_folder: Path, output: Path, dtype: DType = "bfloat16", average: float = 0.0, as_dcp: bool = False
) -> int:
    """Write the newest global weights of a run, which may be running, resting or finished, as a checkpoint folder. Of
    a model that `model.weights` names, it holds a model.safetensors with the same names. as_dcp: see `write_dcp`.

    average: share of what is trained by now, counted from its end; the weights are then the mean of the snapshots
    that were taken in it. Returns how many snapshots were read.

    Raises ConfigError (no run there), StoreError (no whole snapshot), ParameterMapError, and what `write_checkpoint`
    does.
    """
    run = load_run(run_folder / "run.json")
    parameter_map = parameter_map_of(run)
    server = run_folder / "servers" / "global"
    snapshots = snapshots_of_last(server, average) if average else []
    tensors = read_weights(server, parameter_map, snapshots)
    if as_dcp:
        write_dcp(tensors, run.architecture, output, dtype)
    elif run.model.weights is not None:
        write_parameters(tensors, parameter_map.parameters, output, dtype)
    else:
        tokenizer = Path(run.data.tokenizer) if run.data.tokenizer else None
        write_checkpoint(tensors, run.model.config, output, tokenizer, dtype)
    return len(snapshots) or 1
