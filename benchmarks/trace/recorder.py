"""Counts what torch and the kernels of ours would do on a GPU, without one and without computing: on "meta"."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from triton.runtime.jit import JITFunction

from geotrain.kernels import dispatch, triton_ops

# They give a tensor, but launch nothing.
ALLOCATES = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
ALLOCATES += (
    "aten::resize_",
    "aten::detach",
    "aten::detach_",
    "aten::lift_fresh",
    "aten::set_",
    "aten::_unsafe_view",
)


@dataclass
class Recorder(TorchDispatchMode):
    """While it is entered: launches by (phase, name), FLOPs of products by phase, and where the host would wait for
    the device.

    An operator counts as one launch; several kernels hide behind some. So does a function that torch.compile or a
    kernel of torch's that "meta" lacks would fuse (`fused`).
    """

    phase: str = ""
    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    waits: list[tuple[str, str]] = field(default_factory=list)  # (phase, what for)
    routed: int = 0  # tokens that a rank sends to experts, each as often as to one, and as many that it gets
    _inside: int | None = None  # launches of the operators of a fused function

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        given = tensors(args, kwargs)
        if name == "aten::_local_scalar_dense" and on_device(given):
            self.waits.append((self.phase, "item"))
            return 1.0
        if name == "aten::masked_select" and on_device(given):  # of a map of tokens and experts
            self.waits.append((self.phase, "masked_select"))  # for how many there are
            result = given[0].new_empty(self.routed)
        elif name == "aten::nonzero_static":  # which "meta" lacks
            result = given[0].new_empty(kwargs["size"], given[0].dim(), dtype=torch.int64)
        elif self._reads_back(name, given, kwargs):
            if not kwargs.get("non_blocking"):
                self.waits.append((self.phase, "copy to the host"))
            counts = given[-1]  # of tokens, all alike
            return torch.full(counts.shape, self.routed // max(counts.numel(), 1), dtype=counts.dtype)
        else:
            result = func(*args, **kwargs)
        results = tensors(result)
        if not on_device(given + results) or func.is_view or name in ALLOCATES:
            return result
        blocks = not (kwargs.get("non_blocking") or any(argument is True for argument in args[2:]))
        if name in ("aten::_to_copy", "aten::copy_") and not on_device(given[-1:]) and blocks:
            self.waits.append((self.phase, "copy from the host"))
        if name.startswith("c10d::"):
            return result
        if self._inside is not None:
            self._inside += 1
        else:
            self.launches[self.phase, name] += 1
            self.flops[self.phase] += flops(name, given)
        return result

    def _reads_back(self, name: str, given: list[Tensor], kwargs: Any) -> bool:
        target = kwargs.get("device")
        if name == "aten::_to_copy":
            return target is not None and torch.device(target).type == "cpu" and on_device(given)
        return name == "aten::copy_" and not on_device(given[:1]) and on_device(given[1:])

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Count what is inside as one launch."""
        if self._inside is not None:
            yield
            return
        self._inside = 0
        try:
            yield
        finally:
            self.launches[self.phase, name] += bool(self._inside)
            self._inside = None


_recorders: list[Recorder] = []


class _Fused(torch.autograd.Function):
    """A function, and its backward, in one launch each."""

    @staticmethod
    def forward(ctx: Any, name: str, function: Callable[..., Any], spec: Any, *leaves: Any) -> Any:
        inputs = [
            leaf.detach().requires_grad_(leaf.requires_grad) if torch.is_tensor(leaf) else leaf for leaf in leaves
        ]
        args, kwargs = tree_unflatten(inputs, spec)
        with _recorders[-1].one(name), torch.enable_grad():
            result = function(*args, **kwargs)
        many = isinstance(result, tuple)
        ctx.name, ctx.inputs, ctx.results = name, inputs, result if many else (result,)
        detached = tuple(t.detach() if torch.is_tensor(t) else t for t in ctx.results)
        return detached if many else detached[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        wanted = [t for t in ctx.inputs if torch.is_tensor(t) and t.requires_grad]
        pairs = [
            (r, g) for r, g in zip(ctx.results, gradients, strict=True) if torch.is_tensor(r) and r.requires_grad
        ]
        with _recorders[-1].one(f"{ctx.name} backward"):
            results, given = [r for r, _ in pairs], [g for _, g in pairs]
            found = torch.autograd.grad(results, wanted, given, allow_unused=True, retain_graph=True)
        each = iter(found)
        back = [next(each) if torch.is_tensor(t) and t.requires_grad else None for t in ctx.inputs]
        return None, None, None, *back


def fused(function: Any = None, **_: Any) -> Any:
    """Stands for torch.compile, and for kernels of torch's that "meta" lacks; also as a decorator."""
    if function is None:
        return fused
    name = getattr(function, "__name__", str(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        if not _recorders:
            return function(*args, **kwargs)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors(leaves)):
            return _Fused.apply(name, function, spec, *leaves)
        with _recorders[-1].one(name):
            return function(*args, **kwargs)

    return call


@contextmanager
def recorded(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Inside it tensors on "meta" are computed by the kernels for GPUs, which are counted instead of launched."""
    recorder = recorder or Recorder()

    def launch(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        recorder.launches[recorder.phase, kernel.__name__] += 1

    with (
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(dispatch, "_pick", lambda tensor, on_gpu=True: triton_ops),
        recorder,
    ):
        _recorders.append(recorder)
        try:
            yield recorder
        finally:
            _recorders.pop()


def tensors(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if torch.is_tensor(leaf)]


def on_device(found: Sequence[Tensor]) -> bool:
    return any(t.device.type != "cpu" for t in found)


def flops(name: str, given: list[Tensor]) -> int:
    """FLOPs of a product with a matrix; two for each multiplication with its sum."""
    short = name.removeprefix("aten::")
    if short in ("mm", "bmm"):
        a, b = given[:2]
        return 2 * a.numel() * b.shape[-1]
    if short in ("addmm", "baddbmm"):
        _, a, b = given[:3]
        return 2 * a.numel() * b.shape[-1]
    return 0
