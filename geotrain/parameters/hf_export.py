"""Writes canonical tensors as a Hugging Face checkpoint folder of safetensors files; `hf_checkpoint` reads one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from geotrain.common.files import save_tensors, whole_folder
from geotrain.families import architecture_from_hf, family_of
from geotrain.families.reading import SPECIAL_IDS, special_ids
from geotrain.parameters.hf_checkpoint import INDEX, SINGLE, DType, HFCheckpointError, some
from geotrain.parameters.parameter_map import Parameter, canonical_parameters

SHARD_BYTES = 5 << 30


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
            _write_json(target / INDEX, {"metadata": {"total_size": size_bytes}, "weight_map": weight_map})


def write_parameters(
    tensors: Iterable[tuple[str, torch.Tensor]], parameters: Iterable[Parameter], folder: Path, dtype: DType
) -> None:
    """Write the parameters of a model that is no Hugging Face family as model.safetensors, under their own names.
    Raises HFCheckpointError and OutputError."""
    with whole_folder(folder, "export") as target:
        _write_shards(tensors, {SINGLE: list(parameters)}, target, getattr(torch, dtype))


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
        return {SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], shards: dict[str, list[Parameter]], folder: Path, dtype: torch.dtype
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
            save_tensors(folder / file, waiting.pop(file), {"format": "pt"})
    if wanted:
        raise HFCheckpointError(f"export: {some(list(wanted))} missing")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
