"""Weights ↔ a Hugging Face checkpoint folder of safetensors files. Works on canonical tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from geotrain.common.files import whole_folder
from geotrain.config import ConfigError, RunConfig
from geotrain.families import UnsupportedModelError, architecture_from_hf, family_of
from geotrain.families.reading import SPECIAL_IDS, special_ids
from geotrain.parameters.hub import SCHEME, HubError, download
from geotrain.parameters.parameter_map import Parameter, canonical_parameters

DType = Literal["float32", "bfloat16", "float16"]
SHARD_BYTES = 5 << 30
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FREE = {  # keys of an export that say how it was trained, or what others say: a run that goes on may differ in them
    "architectures", "rope_parameters", "initializer_range", "max_position_embeddings", "router_aux_loss_coef",
    "router_z_loss_coef", "aux_loss_alpha", "router_bias_update_rate",
}  # fmt: skip
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class HFCheckpointError(ValueError):
    """A checkpoint folder cannot be read or written. Says which folder or tensor, and what to do."""


# ---------------------------------------------------------------------------------------------------- writing


def write_checkpoint(
    tensors: Iterable[tuple[str, torch.Tensor]],
    hf_config: dict[str, Any],
    folder: Path,
    tokenizer: Path | None = None,
    dtype: DType = "bfloat16",
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint folder that transformers loads. Equal input gives equal bytes.

    tensors: every canonical parameter once; in canonical order at most one shard is held in memory.
    An existing folder is replaced only when it is an older export. Raises HFCheckpointError (a tensor is missing,
    unknown, given twice, of the wrong shape or not finite), UnsupportedModelError and OutputError; then nothing
    is left behind.
    """
    architecture = architecture_from_hf(hf_config)
    family, parameters = family_of(architecture.model_type), canonical_parameters(architecture)
    config = family.hf_config(architecture) | {"dtype": dtype} | special_ids(hf_config, architecture.vocab_size)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    shards = _plan_shards(list(parameters), torch_dtype, max_shard_bytes)
    padding = config["pad_token_id"]
    with whole_folder(folder, "export") as target:
        if tokenizer is not None:
            from geotrain.data.tokenizer import copy_tokenizer, finish_export  # slow to import

            copy_tokenizer(tokenizer, target)
            # The config comes first: its model type decides as which class transformers loads the tokenizer, and so
            # which tokens are special.
            _write_json(target / "config.json", config)
            ids = finish_export(target, architecture.max_positions)
            padding = ids["pad_token_id"]
            if padding == ids["eos_token_id"]:
                ids["pad_token_id"] = None  # a config's is the embedding's `padding_idx`, which is never trained
            for key, own in ids.items():
                stated = hf_config.get(key)
                if not (isinstance(stated, list) and own in stated):  # one id of several that the config names
                    config[key] = own
        _write_json(target / "config.json", config)
        generation = {key: config[key] for key in SPECIAL_IDS} | {"pad_token_id": padding}
        _write_json(target / "generation_config.json", {"do_sample": True, **generation})
        _write_shards(tensors, shards, target, torch_dtype)
        if len(shards) > 1:
            size_bytes = sum(_bytes(p, torch_dtype) for p in parameters)
            weight_map = {p.name: file for file, members in shards.items() for p in members}
            _write_json(target / _INDEX, {"metadata": {"total_size": size_bytes}, "weight_map": weight_map})


def write_parameters(
    tensors: Iterable[tuple[str, torch.Tensor]], parameters: Iterable[Parameter], folder: Path, dtype: DType
) -> None:
    """Write the parameters of a model that is no Hugging Face family as model.safetensors, under their own names.
    Raises HFCheckpointError and OutputError."""
    with whole_folder(folder, "export") as target:
        _write_shards(tensors, {_SINGLE: list(parameters)}, target, getattr(torch, dtype))


def _bytes(parameter: Parameter, dtype: torch.dtype) -> int:
    return parameter.numel * _stored(parameter, dtype).itemsize


def _stored(parameter: Parameter, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if parameter.wide else dtype


def _plan_shards(parameters: list[Parameter], dtype: torch.dtype, max_shard_bytes: int) -> dict[str, list[Parameter]]:
    """Plan the files: name → its parameters, in canonical order. A parameter larger than a shard has one of its
    own."""
    shards: list[list[Parameter]] = []
    free_bytes = 0
    for parameter in parameters:
        size_bytes = _bytes(parameter, dtype)
        if not shards or size_bytes > free_bytes:
            shards.append([])
            free_bytes = max_shard_bytes
        shards[-1].append(parameter)
        free_bytes -= size_bytes
    if len(shards) == 1:
        return {_SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]],
    shards: dict[str, list[Parameter]],
    folder: Path,
    dtype: torch.dtype,
) -> None:
    wanted = {p.name: (p, file) for file, members in shards.items() for p in members}
    waiting: dict[str, dict[str, torch.Tensor]] = {file: {} for file in shards}
    for name, tensor in tensors:
        if name not in wanted:
            raise HFCheckpointError(f"export: tensor {name!r} is no parameter of this model, or was given twice")
        parameter, file = wanted.pop(name)
        if tuple(tensor.shape) != parameter.shape:
            raise HFCheckpointError(
                f"export: tensor {name!r} has shape {list(tensor.shape)}; the model's config says "
                f"{list(parameter.shape)}"
            )
        converted = tensor.detach().to("cpu", _stored(parameter, dtype)).contiguous()
        if not bool(converted.isfinite().all()):
            raise HFCheckpointError(f"export: tensor {name!r} is not finite in {str(dtype).removeprefix('torch.')}")
        waiting[file][name] = converted
        if len(waiting[file]) == len(shards[file]):  # whole: write it, and let go of its memory
            save_file(waiting.pop(file), folder / file, metadata={"format": "pt"})
    if wanted:
        raise HFCheckpointError(f"export: {_some(list(wanted))} missing")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


# ---------------------------------------------------------------------------------------------------- reading


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
    parameters = canonical_parameters(architecture)
    files = _locate(folder)
    missing = [p.name for p in parameters if p.name not in files]
    if missing:
        hint = "; set tie_word_embeddings to true if the head is tied" if missing == [HEAD] else ""
        raise HFCheckpointError(f"{folder}: {_some(missing)} missing, which config.json asks for{hint}")
    expected = {p.name for p in parameters} | ({HEAD} if architecture.tied_embeddings else set())
    # Old checkpoints hold a table of rotary frequencies, which follows from the config.
    extra = sorted(name for name in files if name not in expected and not name.endswith(".rotary_emb.inv_freq"))
    if extra:
        raise HFCheckpointError(f"{folder}: {_some(extra)} unknown: no part of the model that config.json describes")
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

    What a model computes of its weights must be the same, too, but for `model.init_changes`. Raises ConfigError with
    each key and both values, and HFCheckpointError where a tensor cannot be read.
    """
    place = f"model.init_from = {run.model.init_from!r}"
    try:
        stated = run.model.init_from or ""
        config, tensors = read_checkpoint(download(stated) if stated.startswith(SCHEME) else Path(stated))
    except (HFCheckpointError, HubError, UnsupportedModelError) as error:
        raise ConfigError(f"model.init_from: {error}") from None
    theirs, ours = architecture_from_hf(config), run.architecture
    both = [family_of(each.model_type).hf_config(each) for each in (theirs, ours)]
    keys = [key for key in dict.fromkeys((*both[1], *both[0])) if key not in _FREE]
    differing = {key: [each.get(key) for each in both] for key in keys if both[0].get(key) != both[1].get(key)}
    told = [
        f"{key} = {a!r}, in the run's model {b!r}"
        for key, (a, b) in differing.items()
        if key not in run.model.init_changes
    ]
    if told:
        raise ConfigError(
            f"{place}: is another model: {'; '.join(told)}; use that checkpoint's config.json as model.config, or "
            "name in model.init_changes what is to change"
        )
    if idle := [key for key in run.model.init_changes if key not in differing]:
        raise ConfigError(f"model.init_changes: {', '.join(idle)}: is the same in {place}; leave it out")
    for left, right in zip_longest(*map(canonical_parameters, (theirs, ours))):
        found, wanted = (f"{each.name} {list(each.shape)}" if each else "no more" for each in (left, right))
        if found != wanted:
            raise ConfigError(f"{place}: is another model: it has {found}, the run's model {wanted}")
    return tensors


def _locate(folder: Path) -> dict[str, Path]:
    """Map each tensor's name to the file that holds it, by the index or from the only file."""
    index, single = folder / _INDEX, folder / _SINGLE
    if not index.exists():
        if not single.exists():
            raise HFCheckpointError(f"{folder}: no {_SINGLE} and no {_INDEX}; GeoTrain reads safetensors only")
        with _opened(single) as opened:
            return dict.fromkeys(opened.keys(), single)
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise HFCheckpointError(f"{index}: damaged: no weight_map")
    held: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if file != Path(file).name:
            raise HFCheckpointError(f"{index}: {file!r} lies outside the folder")
        if file not in held:
            with _opened(folder / file) as opened:
                held[file] = set(opened.keys())
        if name not in held[file]:
            raise HFCheckpointError(f"{folder / file}: tensor {name!r} is missing, though {_INDEX} puts it there")
    return {name: folder / file for name, file in weight_map.items()}


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
        raise HFCheckpointError(f"{path}: damaged or not safetensors ({error}); fetch the checkpoint again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise HFCheckpointError(f"{path}: cannot be read: {error.strerror}; is this a Hugging Face folder?") from None
    except ValueError as error:
        raise HFCheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise HFCheckpointError(f"{path}: not a JSON object")
    return content


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"tensor{'s' if len(names) > 1 else ''} {shown} {'are' if len(names) > 1 else 'is'}"
