"""The run's weights ↔ a Hugging Face checkpoint folder. Works on canonical tensors; needs no training job."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from geotrain.canonical import (
    Architecture,
    Parameter,
    UnsupportedModelError,
    architecture_from_hf,
    canonical_parameters,
)
from geotrain.config import load_run
from geotrain.data.tokenizer import copy_tokenizer, special_token_ids
from geotrain.files import whole_folder
from geotrain.net.store import read_weights
from geotrain.outer.layout import layout_of

DType = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SHARD_BYTES = 5 << 30
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written. Says which folder or tensor, and what to do."""


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
    An existing folder is replaced only when it is an older export. Raises CheckpointError (a tensor is missing,
    unknown, given twice, of the wrong shape or not finite), UnsupportedModelError and OutputError; then nothing
    is left behind.
    """
    architecture = architecture_from_hf(hf_config)
    parameters = canonical_parameters(architecture)
    shards = _plan_shards(parameters, DTYPES[dtype].itemsize, max_shard_bytes)
    with whole_folder(folder, "export") as target:
        config = _exported_config(hf_config, architecture, dtype)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, target)
            config.update(_special_ids(hf_config, special_token_ids(tokenizer)))
        _write_json(target / "config.json", config)
        generation = {key: config[key] for key in _SPECIAL_IDS}
        _write_json(target / "generation_config.json", {"do_sample": True, **generation})
        _write_shards(tensors, shards, target, DTYPES[dtype])
        if len(shards) > 1:
            size_bytes = sum(p.numel for p in parameters) * DTYPES[dtype].itemsize
            weight_map = {p.name: file for file, members in shards.items() for p in members}
            _write_json(target / _INDEX, {"metadata": {"total_size": size_bytes}, "weight_map": weight_map})


def export_run(run_folder: Path, output: Path, dtype: DType = "bfloat16") -> None:
    """Write the newest global weights of a run, which may be running, resting or finished, as a checkpoint folder.

    Raises ConfigError (no run there), StoreError (no whole snapshot), LayoutError, and what `write_checkpoint` does.
    """
    run = load_run(run_folder / "run.json")
    assert isinstance(run.model.config, dict)  # load_run puts it inline
    tensors = read_weights(run_folder / "servers" / "global", layout_of(run))
    tokenizer = Path(run.data.tokenizer) if run.data.tokenizer else None
    write_checkpoint(tensors, run.model.config, output, tokenizer, dtype)


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], Iterator[tuple[str, torch.Tensor]]]:
    """Read a checkpoint's config and, one at a time in canonical order, its tensors as they are stored.

    Names, shapes and dtypes are checked against the config before any weight is read. Raises CheckpointError or
    UnsupportedModelError.
    """
    config = _read_json(folder / "config.json")
    try:
        architecture = architecture_from_hf(config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{folder / 'config.json'}: {error}") from None
    parameters = canonical_parameters(architecture)
    files = _locate(folder)
    _check_names(folder, parameters, files, architecture.tied_embeddings)
    for parameter in parameters:
        _check_stored(files[parameter.name], parameter)
    if architecture.tied_embeddings and HEAD in files:
        embedding, head = _load(files[EMBEDDING], EMBEDDING), _load(files[HEAD], HEAD)
        if not torch.equal(embedding, head):
            raise CheckpointError(
                f"{folder}: {HEAD} differs from {EMBEDDING}, but config.json ties them; "
                "set tie_word_embeddings to false"
            )
    return config, ((p.name, _load(files[p.name], p.name)) for p in parameters)


# ---------------------------------------------------------------------------------------------------- writing


def _plan_shards(parameters: list[Parameter], itemsize: int, max_shard_bytes: int) -> dict[str, list[Parameter]]:
    """File name → its parameters, in canonical order. A parameter larger than a shard has one of its own."""
    shards: list[list[Parameter]] = []
    free_bytes = 0
    for parameter in parameters:
        size_bytes = parameter.numel * itemsize
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
            raise CheckpointError(f"export: tensor {name!r} is no parameter of this model, or was given twice")
        parameter, file = wanted.pop(name)
        if tuple(tensor.shape) != parameter.shape:
            raise CheckpointError(
                f"export: tensor {name!r} has shape {list(tensor.shape)}; the model's config says "
                f"{list(parameter.shape)}"
            )
        converted = tensor.detach().to("cpu", dtype).contiguous()
        if not bool(converted.isfinite().all()):
            raise CheckpointError(f"export: tensor {name!r} is not finite in {str(dtype).removeprefix('torch.')}")
        waiting[file][name] = converted
        if len(waiting[file]) == len(shards[file]):
            save_file(waiting.pop(file), folder / file, metadata={"format": "pt"})
    if wanted:
        raise CheckpointError(f"export: {_some(list(wanted))} missing")


def _exported_config(hf_config: dict[str, Any], a: Architecture, dtype: DType) -> dict[str, Any]:
    """The run's config with every value stated that was trained with: defaults of transformers' classes differ."""
    config = {key: value for key, value in hf_config.items() if key not in ("torch_dtype", "rope_scaling")}
    return {
        **config,
        "architectures": [_CLASSES[a.model_type]],
        "dtype": dtype,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": a.rope_theta},
        "max_position_embeddings": a.max_positions,
        "tie_word_embeddings": a.tied_embeddings,
        "initializer_range": a.init_std,
        **{key: hf_config.get(key) for key in _SPECIAL_IDS},
    }


def _special_ids(hf_config: dict[str, Any], of_tokenizer: dict[str, int | None]) -> dict[str, Any]:
    """The tokenizer's ids, except where the config names the same one among others."""

    def chosen(key: str) -> Any:
        stated, own = hf_config.get(key), of_tokenizer[key]
        return stated if isinstance(stated, list) and own in stated else own

    return {key: chosen(key) for key in _SPECIAL_IDS}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


# ---------------------------------------------------------------------------------------------------- reading


def _locate(folder: Path) -> dict[str, Path]:
    """Tensor name → the file that holds it, from the index or from the only file."""
    index = folder / _INDEX
    if not index.exists():
        single = folder / _SINGLE
        if not single.exists():
            raise CheckpointError(f"{folder}: no {_SINGLE} and no {_INDEX}; GeoTrain reads safetensors only")
        return dict.fromkeys(_names(single), single)
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: damaged: no weight_map")
    held: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if file != Path(file).name:
            raise CheckpointError(f"{index}: {file!r} lies outside the folder")
        if file not in held:
            held[file] = set(_names(folder / file))
        if name not in held[file]:
            raise CheckpointError(f"{folder / file}: tensor {name!r} is missing, though {_INDEX} puts it there")
    return {name: folder / file for name, file in weight_map.items()}


def _check_names(folder: Path, parameters: list[Parameter], files: dict[str, Path], tied: bool) -> None:
    wanted = {p.name for p in parameters}
    present = {name for name in files if not name.endswith(".rotary_emb.inv_freq")}  # a table in old checkpoints
    missing = [p.name for p in parameters if p.name not in present]
    if missing:
        hint = "; set tie_word_embeddings to true if the head is tied" if missing == [HEAD] else ""
        raise CheckpointError(f"{folder}: {_some(missing)} missing, which config.json asks for{hint}")
    extra = sorted(present - wanted - ({HEAD} if tied else set()))
    if extra:
        raise CheckpointError(f"{folder}: {_some(extra)} unknown: no part of the model that config.json describes")


def _names(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


def _check_stored(path: Path, parameter: Parameter) -> None:
    with _opened(path) as file:
        stored = file.get_slice(parameter.name)
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if shape != parameter.shape:
        raise CheckpointError(
            f"{path}: tensor {parameter.name!r} has shape {list(shape)}; config.json says {list(parameter.shape)}"
        )
    if dtype not in ("F32", "BF16", "F16"):
        raise CheckpointError(f"{path}: tensor {parameter.name!r} is stored as {dtype}; use F32, BF16 or F16")


def _load(path: Path, name: str) -> torch.Tensor:
    with _opened(path) as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; fetch the checkpoint again") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: damaged or not safetensors ({error}); fetch the checkpoint again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; is this a Hugging Face folder?") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"tensor{'s' if len(names) > 1 else ''} {shown} {'are' if len(names) > 1 else 'is'}"
