"""Torch's collectives, watched: which there are, and what each sends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

# What a rank of n sends on average, from a collective's tensors in the order of its arguments: of rings, as NCCL and
# gloo have them.
SENT: dict[str, Callable[[Any, int], float]] = {
    "all_reduce": lambda given, n: 2 * (n - 1) / n * given[0].nbytes,
    "all_to_all_single": lambda given, n: (n - 1) / n * given[1].nbytes,
    "all_gather_into_tensor": lambda given, n: (n - 1) * given[1].nbytes,
    "reduce_scatter_tensor": lambda given, n: (n - 1) / n * given[1].nbytes,
    "broadcast": lambda given, n: given[0].nbytes,
    "reduce": lambda given, n: given[0].nbytes,
}


@contextlib.contextmanager
def replaced(by_name: dict[str, Callable[[Any], Any]]) -> Iterator[None]:
    """torch's collectives of these names, each by what is made of it."""
    from deepspeed.comm import comm

    with contextlib.ExitStack() as stack:
        for name, make in by_name.items():
            stack.enter_context(mock.patch.object(dist, name, make(getattr(dist, name))))
        # DeepSpeed keeps this one under a name of its own.
        gather = by_name["all_gather_into_tensor"](comm.cdb.all_gather_function)
        stack.enter_context(mock.patch.object(comm.cdb, "all_gather_function", gather))
        yield


def watched(seen: list[tuple[str, float]]) -> Any:
    """Every collective of torch is noted with the bytes that it sends."""

    def noted(name: str, real: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            tensors = [given for given in (*args, *kwargs.values()) if isinstance(given, torch.Tensor)]
            seen.append((name, SENT[name](tensors, dist.get_world_size(kwargs.get("group")))))
            return real(*args, **kwargs)

        return collective

    return replaced({name: partial(noted, name) for name in SENT})
