"""A safetensors file of named parameters: what a run's `model.weights` names, for a loop of the user's own.

Names and shapes, and so the parameter map of a run, are read from the file's header without torch. Only the global
server reads values.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from geotrain.common.files import OutputError, make_folder, sync
from geotrain.config import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

DTYPES = ("F32", "BF16", "F16")
# What wrappers (DDP, torch.compile, activation checkpointing) put into the names of a model's parameters.
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def plain_name(name: str) -> str:
    """Strip from a parameter's name what wrappers of the model have put into it."""
    for wrapper in _WRAPPERS[1:]:
        name = name.replace(wrapper, "")
    return name.removeprefix(_WRAPPERS[0])


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read name → shape of each tensor of the file, in the order in which they lie there. Raises ConfigError."""
    with _opened(path, "numpy") as file:
        kinds = {name: file.get_slice(name) for name in file.offset_keys()}
        for name, tensor in kinds.items():
            if (dtype := tensor.get_dtype()) not in DTYPES:
                raise ConfigError(f"model.weights: {path}: {name} is stored as {dtype}; use {', '.join(DTYPES)}")
        shapes = {name: tuple(tensor.get_shape()) for name, tensor in kinds.items() if 0 not in tensor.get_shape()}
    if not shapes:
        raise ConfigError(f"model.weights: {path}: holds no parameters")
    return shapes


def read_values(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor as stored) of each parameter, one at a time. Raises ConfigError."""
    with _opened(path, "pt") as file:
        for name in read_shapes(path):
            yield name, file.get_tensor(name)


@contextmanager
def _opened(path: Path, framework: str) -> Iterator[Any]:
    """Open a safetensors file, whose library checks its header against its size. Raises ConfigError."""
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except OSError as error:
        raise ConfigError(f"model.weights: {path}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ConfigError(f"model.weights: {path}: not a whole safetensors file ({error}); write it anew") from None


def save_parameters(path: str | Path, model: nn.Module | Iterable[tuple[str, Tensor]]) -> None:
    """Write a model's trainable parameters as the file that a run's `model.weights` names.

    model: a module, or its named parameters, before they are sharded; their values start the run. What does not
    require a gradient is left out, and so are buffers: neither is trained nor exchanged. A parameter with two names
    (a tied one) is written once. They are stored in fp32.
    Raises OutputError: the file cannot be written, and an older one stays as it was; or the parameters are sharded,
    lack values, or are not of floating point.
    """
    import torch
    from safetensors.torch import save_file

    path = Path(path)
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else model
    tensors: dict[str, Tensor] = {}
    for name, parameter in named:
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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        make_folder(path.parent.absolute())
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from None
