"""Weights ↔ a checkpoint of torch.distributed.checkpoint (DCP) with the names and rotary order of torchtitan's Llama
and Qwen3 (0.3, `models/*/state_dict_adapter.py`), which it loads as its own: `checkpoint.initial_load_path`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from geotrain.common.files import whole_folder
from geotrain.config import ConfigError, RunConfig
from geotrain.families import Architecture, UnsupportedModelError
from geotrain.parameters.hf_checkpoint import DType, HFCheckpointError, read_start
from geotrain.parameters.parameter_map import canonical_parameters

ROTATES_PAIRS = {"llama": True, "qwen3": False}  # there, by family; here all rotate halves
METADATA = ".metadata"  # the file by which such a folder is known
NAMES = {
    r"model\.embed_tokens": "tok_embeddings",
    r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj": r"layers.\1.attention.qkv_linear.w\2",
    r"model\.layers\.(\d+)\.self_attn\.([qk])_norm": r"layers.\1.attention.\2_norm",
    r"model\.layers\.(\d+)\.self_attn\.o_proj": r"layers.\1.attention.wo",
    r"model\.layers\.(\d+)\.mlp\.gate_proj": r"layers.\1.feed_forward.w1",
    r"model\.layers\.(\d+)\.mlp\.down_proj": r"layers.\1.feed_forward.w2",
    r"model\.layers\.(\d+)\.mlp\.up_proj": r"layers.\1.feed_forward.w3",
    r"model\.layers\.(\d+)\.input_layernorm": r"layers.\1.attention_norm",
    r"model\.layers\.(\d+)\.post_attention_layernorm": r"layers.\1.ffn_norm",
    r"model\.norm": "norm",
    r"lm_head": "lm_head",
}


def names_of(architecture: Architecture) -> dict[str, str]:
    """Map canonical names to torchtitan's. Raises UnsupportedModelError for other families."""
    if architecture.model_type not in ROTATES_PAIRS:
        raise UnsupportedModelError(f"DCP: {architecture.model_type!r} has no layout here; export it without --dcp")
    found = {}
    for parameter in canonical_parameters(architecture):
        name = parameter.name.removesuffix(".weight")
        (theirs,) = [re.sub(own, made, name) for own, made in NAMES.items() if re.fullmatch(own, name)]
        found[parameter.name] = f"{theirs}.weight"
    return found


def turned(name: str, tensor: Tensor, architecture: Architecture, to_pairs: bool) -> Tensor:
    """Reorder the rows of a query's or key's projection, where a head's halves are rotated against each other here,
    and neighbours as pairs there. to_pairs: from here to there."""
    if not (ROTATES_PAIRS[architecture.model_type] and name.endswith(("q_proj.weight", "k_proj.weight"))):
        return tensor
    shape = (2, architecture.head_dim // 2) if to_pairs else (architecture.head_dim // 2, 2)
    return tensor.unflatten(0, (-1, *shape)).transpose(1, 2).flatten(0, 2)


def write_dcp(
    tensors: Iterable[tuple[str, Tensor]], architecture: Architecture, folder: Path, dtype: DType = "bfloat16"
) -> None:
    """Write a checkpoint folder; the whole model is held in memory once, in `dtype`. tensors: every canonical
    parameter once. Raises HFCheckpointError, UnsupportedModelError and OutputError; then nothing is left behind."""
    names, state = names_of(architecture), dict[str, Tensor]()
    for name, tensor in tensors:
        state[names[name]] = turned(name, tensor, architecture, True).to(getattr(torch, dtype)).contiguous()
        if not bool(state[names[name]].isfinite().all()):
            raise HFCheckpointError(f"export: tensor {name!r} is not finite in {dtype}")
    if missing := [name for name, theirs in names.items() if theirs not in state]:
        raise HFCheckpointError(f"export: {', '.join(missing)} missing")
    import torch.distributed.checkpoint as dcp

    with whole_folder(folder, "export") as target:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(target), no_dist=True)


def read_dcp(folder: Path, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Read a checkpoint's tensors, one at a time in canonical order; what else it holds is passed over. It has no
    config: names and shapes are compared before any weight is read. Raises HFCheckpointError and
    UnsupportedModelError."""
    import torch.distributed.checkpoint as dcp  # a fifth of a server's start, and few runs start from one

    names, reader = names_of(architecture), dcp.FileSystemReader(folder)
    try:
        held = reader.read_metadata().state_dict_metadata
    except Exception as error:  # it is a pickle: damage can look like anything
        raise HFCheckpointError(f"{folder / METADATA}: damaged or no DCP ({error}); fetch it again") from None
    empty: dict[str, Tensor] = {}
    for parameter in canonical_parameters(architecture):
        theirs, found = names[parameter.name], held.get(names[parameter.name])
        if not isinstance(found, dcp.TensorStorageMetadata) or tuple(found.size) != parameter.shape:
            said = list(found.size) if isinstance(found, dcp.TensorStorageMetadata) else "not there"
            raise HFCheckpointError(f"{folder}: {theirs!r} is {said}, in the run's model {list(parameter.shape)}")
        empty[parameter.name] = torch.empty(0, dtype=found.properties.dtype)

    def one(name: str, shape: tuple[int, ...]) -> Tensor:
        state = {names[name]: torch.empty(shape, dtype=empty[name].dtype)}
        dcp.load(state, storage_reader=reader, no_dist=True)
        return turned(name, state[names[name]], architecture, False)

    return ((p.name, one(p.name, p.shape)) for p in canonical_parameters(architecture))


def start_weights(run: RunConfig) -> Iterator[tuple[str, Tensor]]:
    """Read the weights of `model.init_from`, a Hugging Face checkpoint (see `read_start`) or a DCP folder. Raises
    ConfigError, and HFCheckpointError where a tensor cannot be read."""
    folder = Path(run.model.init_from or "")
    if not (folder / METADATA).exists():
        return read_start(run)
    if run.model.init_changes:
        raise ConfigError(f"model.init_changes: {folder} is a DCP checkpoint, which has no config; leave it out")
    try:
        return read_dcp(folder, run.architecture)
    except (HFCheckpointError, UnsupportedModelError) as error:
        raise ConfigError(f"model.init_from: {error}") from None
