"""Reads a Hugging Face checkpoint folder of safetensors files, as canonical tensors; `hf_export` writes one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from geotrain.common.files import git_lfs_pointer
from geotrain.config import Architecture, ConfigError, RunConfig
from geotrain.families import UnsupportedModelError, architecture_from_hf, family_of
from geotrain.parameters.hub import SCHEME, HubError, download
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import Parameter, canonical_parameters

log = logging.getLogger(__name__)
DType = Literal["float32", "bfloat16", "float16"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FREE = {  # keys of an export that say how it was trained, or what others say: a run that goes on may differ in them
    "architectures", "rope_parameters", "initializer_range", "max_position_embeddings", "router_aux_loss_coef",
    "router_z_loss_coef", "aux_loss_alpha", "router_bias_update_rate", "mtp_loss_factor",
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# How many layers predict further tokens: where a family does not build them, they are left out.
PREDICTING = "num_nextn_predict_layers", "num_mtp_layers"


class HFCheckpointError(ValueError):
    """A checkpoint folder cannot be read or written. Says which folder or tensor, and what to do."""


def predicting_names(a: Architecture) -> tuple[str, ...]:
    """List what the names of the tensors of each layer that predicts further tokens begin with."""
    return tuple(f"model.layers.{layer}." for layer in range(a.decoder_layers, a.layers))


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], Iterator[tuple[str, torch.Tensor]]]:
    """Read a checkpoint's config and, one at a time in canonical order, its tensors as they are stored.

    Names, shapes and dtypes are checked against the config before any weight is read. Raises HFCheckpointError or
    UnsupportedModelError.
    """
    config = _read_json(folder / "config.json")
    try:
        architecture = architecture_from_hf(config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{folder / 'config.json'}: {error}") from None
    files = _locate(folder)
    further = predicting_names(architecture)
    if further and not any(name.startswith(further) for name in files):
        log.warning(
            "%s: has none of its config's layers that predict further tokens, as transformers saves it", folder
        )
        config = {**config, "num_nextn_predict_layers": 0}
        architecture = architecture_from_hf(config)
    parameters = canonical_parameters(architecture)
    missing = [p.name for p in parameters if p.name not in files]
    if missing:
        hint = "; set tie_word_embeddings to true if the head is tied" if missing == [HEAD] else ""
        raise HFCheckpointError(f"{folder}: {some(missing)} missing, which config.json asks for{hint}")
    expected = {p.name for p in parameters} | ({HEAD} if architecture.tied_embeddings else set())
    # Layers that predict further tokens may hold the embedding and the head once more. Old checkpoints also hold a
    # table of rotary frequencies, which follows from the config.
    expected |= {f"{layer}{copy}.weight" for layer in further for copy in ("embed_tokens", "shared_head.head")}
    last = architecture.decoder_layers + sum(int(config.get(key) or 0) for key in PREDICTING)
    beyond = "mtp.", *(f"model.layers.{layer}." for layer in range(architecture.layers, last))
    left_out = [name for name in files if name.startswith(beyond)]
    if left_out:
        log.warning("%s: %s of multi-token prediction, and left out", folder, some(left_out))
    expected.update(left_out)
    extra = sorted(name for name in files if name not in expected and not name.endswith(".rotary_emb.inv_freq"))
    if extra:
        raise HFCheckpointError(f"{folder}: {some(extra)} unknown: no part of the model that config.json describes")
    for parameter in parameters:
        path, name = files[parameter.name], parameter.name
        with _opened(path) as file:
            stored = file.get_slice(name)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if shape != parameter.shape:
            raise HFCheckpointError(
                f"{path}: tensor {name!r} has shape {list(shape)}; config.json says {list(parameter.shape)}"
            )
        if dtype not in ("F32", "BF16", "F16"):
            raise HFCheckpointError(f"{path}: tensor {name!r} is stored as {dtype}; use F32, BF16 or F16")
    tied = architecture.tied_embeddings and HEAD in files
    if tied and not torch.equal(_load(files, EMBEDDING), _load(files, HEAD)):
        raise HFCheckpointError(
            f"{folder}: {HEAD} differs from {EMBEDDING}, but config.json ties them; set tie_word_embeddings to false"
        )
    return config, ((p.name, _load(files, p.name)) for p in parameters)


def read_start(run: RunConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the weights of `model.init_from`, as `read_checkpoint` does, if they are the run's model's.

    What a model computes of its weights must be the same, too, but for `model.init_changes`, which may change the
    vocabulary's size and whether the head is tied: what is then new or left out is logged. Raises ConfigError with
    each key and both values, and HFCheckpointError where a tensor cannot be read.
    """
    place = f"model.init_from = {run.model.init_from!r}"
    try:
        stated = run.model.init_from or ""
        config, tensors = read_checkpoint(download(stated) if stated.startswith(SCHEME) else Path(stated))
    except (HFCheckpointError, HubError, UnsupportedModelError) as error:
        raise ConfigError(f"model.init_from: {error}") from None
    theirs, ours = architecture_from_hf(config), run.architecture
    if theirs.predicting and not ours.predicting:
        log.warning("%s: its layers that predict further tokens are left out", place)
        theirs = replace(theirs, layers=theirs.decoder_layers, predicting=0)
    both = [family_of(each.model_type).hf_config(each) for each in (theirs, ours)]
    keys = [key for key in dict.fromkeys((*both[1], *both[0])) if key not in _FREE]
    differing = {key: [each.get(key) for each in both] for key in keys if both[0].get(key) != both[1].get(key)}
    unlike = [
        f"{key} = {a!r}, in the run's model {b!r}"
        for key, (a, b) in differing.items()
        if key not in run.model.init_changes
    ]
    known, wanted = ({p.name: p for p in canonical_parameters(each)} for each in (theirs, ours))
    # Rows of the vocabulary may be more or fewer, and a head may come or go; all else has the shapes that it has.
    fits = _without_rows(known) == _without_rows(wanted)
    if unlike:
        way = ", or name in model.init_changes what is to change" if fits else ""
        raise ConfigError(
            f"{place}: is another model: {'; '.join(unlike)}; use that checkpoint's config.json as model.config{way}"
        )
    if idle := [key for key in run.model.init_changes if key not in differing]:
        raise ConfigError(f"model.init_changes: {', '.join(idle)}: is the same in {place}; leave it out")
    for left, right in () if fits else zip_longest(known.values(), wanted.values()):
        here, there = (f"{each.name} {list(each.shape)}" if each else "no more" for each in (left, right))
        if here != there:
            raise ConfigError(f"{place}: is another model: it has {here}, the run's model {there}")
    rows, own_rows = theirs.vocab_size, ours.vocab_size
    if rows < own_rows:
        log.warning("%s: rows %d to %d of the vocabulary begin as a new model's", place, rows, own_rows - 1)
    elif rows > own_rows:
        log.warning("%s: rows %d to %d of the vocabulary are left out", place, own_rows, rows - 1)
    if (HEAD in known) != (HEAD in wanted):
        log.warning("%s: %s %s", place, HEAD, "is left out" if HEAD in known else "begins as a copy of the embedding")
    return _fitted(tensors, wanted, run.seed, HEAD not in known)


def _without_rows(parameters: dict[str, Parameter]) -> dict[str, tuple[int, ...]]:
    """Name → shape, without the head and the number of the embedding's rows."""
    return {name: p.shape[name == EMBEDDING :] for name, p in parameters.items() if name != HEAD}


def _fitted(
    tensors: Iterable[tuple[str, torch.Tensor]], wanted: dict[str, Parameter], seed: int, head_is_embedding: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each wanted parameter, its missing rows as a new model has them. head_is_embedding: of the checkpoint."""
    for given, tensor in tensors:
        for name in (EMBEDDING, HEAD) if given == EMBEDDING and head_is_embedding else (given,):
            if name not in wanted:
                continue
            values = tensor
            if tensor.shape != wanted[name].shape:
                values = initial_tensor(wanted[name], seed)
                values[: len(tensor)] = tensor[: len(values)]
            yield name, values


def _locate(folder: Path) -> dict[str, Path]:
    """Map each tensor's name to the file that holds it, as transformers chooses: the file of the whole, and only
    without one those of the index, which a later save of the whole leaves behind; of two that hold it, the last."""
    index, single = folder / INDEX, folder / SINGLE
    if single.is_file():
        with _opened(single) as opened:
            return dict.fromkeys(opened.keys(), single)
    if not index.is_file():
        raise HFCheckpointError(f"{folder}: no {SINGLE} and no {INDEX}; GeoTrain reads safetensors only")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise HFCheckpointError(f"{index}: damaged: no weight_map")
    found: dict[str, Path] = {}
    for file in sorted({*weight_map.values()}):
        if file != Path(file).name:
            raise HFCheckpointError(f"{index}: {file!r} lies outside the folder")
        with _opened(folder / file) as opened:
            found |= dict.fromkeys(opened.keys(), folder / file)
    if lost := [name for name in weight_map if name not in found]:
        raise HFCheckpointError(f"{folder}: tensor {lost[0]!r} is missing, though {INDEX} puts it there")
    return {name: found[name] for name in weight_map}


def _load(files: dict[str, Path], name: str) -> torch.Tensor:
    with _opened(files[name]) as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise HFCheckpointError(f"{path}: missing; fetch the checkpoint again") from None
    except (OSError, SafetensorError) as error:
        why = git_lfs_pointer(path) or f"damaged or not safetensors ({error}); fetch the checkpoint again"
        raise HFCheckpointError(f"{path}: {why}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise HFCheckpointError(f"{path}: cannot be read: {error.strerror}; is this a Hugging Face folder?") from None
    except ValueError as error:
        raise HFCheckpointError(f"{path}: {git_lfs_pointer(path) or f'not JSON: {error}'}") from None
    if not isinstance(content, dict):
        raise HFCheckpointError(f"{path}: not a JSON object")
    return content


def some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"tensor{'s' if len(names) > 1 else ''} {shown} {'are' if len(names) > 1 else 'is'}"
