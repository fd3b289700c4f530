"""Torch's collectives, watched: which there are, and what each sends."""

from __future__ import annotations

import contextlib
from collections import Counter
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


class Later:
    """A collective that happens when it is waited for: what is used earlier is old."""

    def __init__(self, collective: Callable[[], Any]) -> None:
        self.wait = collective


def delayed() -> Any:
    def later(real: Any) -> Any:
        def collective(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            if not async_op:
                return real(*args, **kwargs)
            return Later(lambda: real(*args, **kwargs))

        return collective

    return replaced(dict.fromkeys(("all_to_all_single", "all_gather_into_tensor"), later))


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Bytes of `Collective.size_bytes` that this rank has to send inside it, by kind and ranks among which."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    groups = {
        "context": parallel_state.get_context_parallel_group(),
        "expert": parallel_state.get_expert_model_parallel_group(),
        "tensor": parallel_state.get_expert_tensor_parallel_group(),
        "tensor and expert": parallel_state.get_expert_tensor_and_model_parallel_group(),
    }
    found: Counter[tuple[str, str]] = Counter()

    def counting(kind: str, real: Any, part: int) -> Any:
        """part: which argument is this rank's part, or all that it divides; a list has its own last."""

        def call(*args: Any, group: Any = None, **more: Any) -> Any:
            for among, known in groups.items():
                if known is group and group.size() > 1:
                    sent = args[part]
                    found[kind, among] += sent.numel() * sent.element_size()
            return real(*args, group=group, **more)

        return call

    def unequal(real: Any) -> Any:
        """The stand-ins for gloo: what they send is what NCCL's would."""

        def call(one: Any, other: Any, group: Any = None) -> Any:
            own = other if isinstance(one, list) else one
            found["ring", "tensor"] += own.numel() * own.element_size() if group is groups["tensor"] else 0
            with mock.patch.object(dist, "all_to_all_single", plain):
                return real(one, other, group=group)

        return call

    from geotrain.inner.runtime import platform

    plain = dist.all_to_all_single
    with (
        mock.patch.object(dist, "all_to_all_single", counting("all-to-all", plain, 1)),
        mock.patch.object(mappings, "dist_all_gather_func", counting("ring", mappings.dist_all_gather_func, 1)),
        mock.patch.object(
            mappings, "dist_reduce_scatter_func", counting("ring", mappings.dist_reduce_scatter_func, 0)
        ),
        mock.patch.object(platform, "_gather_unequal", unequal(platform._gather_unequal)),
        mock.patch.object(platform, "_scatter_unequal", unequal(platform._scatter_unequal)),
    ):
        yield found
