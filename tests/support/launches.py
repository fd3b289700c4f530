"""Counts the kernels that a piece of code would launch on a GPU, without one and without computing: on "meta"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from geotrain.kernels import dispatch, triton_ops

# They give a tensor, but launch nothing.
ALLOCATES = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::resize_")
ALLOCATES += ("aten::detach", "aten::detach_", "aten::lift_fresh", "aten::set_")


class Launches(TorchDispatchMode):
    """While it is entered: by name, the operators of torch on devices other than the host and the kernels of ours.

    An operator counts as one launch. Several kernels hide behind some, and none is counted too much.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, result)) if torch.is_tensor(t)]
        on_device = any(t.device.type != "cpu" for t in tensors)
        if on_device and not (func.is_view or name in ALLOCATES or name.startswith("c10d::")):
            self.counts[name] += 1
        return result

    @property
    def total(self) -> int:
        return self.counts.total()


@contextmanager
def counted_launches() -> Iterator[Launches]:
    """Inside it tensors on "meta" are computed by the kernels for GPUs, which are counted instead of launched."""
    launches = Launches()

    def record(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        launches.counts[kernel.__name__] += 1

    with (
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(dispatch, "_pick", lambda tensor: triton_ops),
        launches,
    ):
        yield launches
