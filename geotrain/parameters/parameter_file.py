"""A safetensors file of named parameters: what a run's `model.weights` names, for a loop of the user's own.

Names and shapes, and so the parameter map of a run, are read from the file's header without torch. Only servers
read values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from geotrain.config import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("F32", "BF16", "F16")
# What wrappers (DDP, torch.compile, activation checkpointing, Fabric) put into the names of a model's parameters.
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_forward_module.")


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


def read_fixed(path: Path) -> dict[str, int]:
    """Read name → fingerprint of what of the model is not trained, as `geotrain.save_parameters` noted it. Raises
    ConfigError."""
    with _opened(path, "numpy") as file:
        return json.loads((file.metadata() or {}).get("fixed", "{}"))


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
