"""Writes the file of initial weights that a run's `model.weights` names, and says what of a model is not trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from zlib_ng.zlib_ng import crc32

from geotrain.common.files import OutputError, make_folder, save_tensors, whole_file
from geotrain.parameters.parameter_file import plain_name


def save_parameters(path: str | Path, model: nn.Module) -> None:
    """Write a model's trainable parameters as the file that a run's `model.weights` names.

    model: before it is sharded; its values start the run. Of what does not require a gradient, and of buffers, which
    are neither trained nor exchanged, the file holds fingerprints: they must be the same in all regions. A parameter
    with two names (a tied one) is written once. They are stored in fp32.
    Raises OutputError: the file cannot be written, and an older one stays as it was; or the parameters are sharded,
    lack values, or are not of floating point.
    """
    path = Path(path)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not parameter.is_floating_point() or parameter.is_meta or type(parameter.data) is not torch.Tensor:
            raise OutputError(
                f"{path}: parameter {name} is a {type(parameter.data).__name__} of {parameter.dtype} on "
                f"{parameter.device}: save whole floating-point parameters, before they are sharded"
            )
        if parameter.numel():
            tensors[plain_name(name)] = parameter.detach().to("cpu", torch.float32).contiguous()
    if not tensors:
        raise OutputError(f"{path}: the model has no parameter that requires a gradient")
    fixed = {name: fingerprint(tensor) for name, tensor in named_tensors(model) if name not in tensors}
    try:
        make_folder(path.parent.absolute())
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from None
    with whole_file(path, "wb") as file:
        save_tensors(Path(file.name), tensors, {"format": "pt", "fixed": json.dumps(fixed, sort_keys=True)})


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (plain name, tensor) of each parameter, once, and of each buffer that `state_dict` would have."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield plain_name(name), buffer


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """Compute a checksum of shape and values. Floating-point values count as bf16, so that one region may hold in
    fp32 what another holds in bf16. Collective for what is sharded (FSDP2, ZeRO 3)."""
    values = whole(tensor)
    if values.is_floating_point():
        values = values.bfloat16()
    return crc32(values.view(-1).view(torch.uint8).numpy(), crc32(repr(tuple(values.shape)).encode()))


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor on the host, contiguous; not to be written. Collective for what is sharded (FSDP2, ZeRO 3)."""
    partitioned: Any = tensor if hasattr(tensor, "ds_id") else None
    if partitioned is None:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().contiguous()
    partitioned.all_gather()
    values = tensor.detach().to("cpu", copy=True).contiguous()
    partitioned.partition()
    return values
