"""Counts what torch and the kernels of ours would do on a GPU, without one and without computing: on "meta"."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
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
# What they read of their first argument is as much as they give, not all of it.
PICKS = ("aten::embedding", "aten::index_select", "aten::gather", "aten::index", "aten::masked_select", "aten::slice")
FILLS = ("aten::zero_", "aten::fill_", "aten::copy_", "aten::_foreach_zero_", "aten::_foreach_copy_")
# The kernels' arguments: those that are only written, and those that are changed in place.
ONLY_WRITTEN = {"out", "codes", "scales", "words", "all_finite"}
CHANGED = {
    "adam_kernel": ("weights", "exp_avg", "exp_avg_sq"),
    **dict.fromkeys(("quantize_dense", "quantize_plain", "quantize_topk"), ("residual",)),
}


@dataclass
class Tally:
    """read, written: bytes of the device's memory. sent: bytes that a rank gives to a collective."""

    launches: int = 0
    read: int = 0
    written: int = 0
    flops: int = 0
    sent: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def __add__(self, other: Tally) -> Tally:
        return self.combined(other, 1, 1)

    def combined(self, other: Tally, own: int, others: int) -> Tally:
        return Tally(*(own * a + others * b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class _Inside:
    """Work of the operators of a fused function. read, changed: storages."""

    launches: int = 0
    read: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)

    def note(self, reads: list[Tensor], changed: list[Tensor]) -> None:
        self.launches += 1
        self.read |= {storage(tensor) for tensor in reads}
        self.changed |= {storage(tensor) for tensor in changed}


@dataclass
class Recorder(TorchDispatchMode):
    """While it is entered: tallies by (phase, name), and where the host would wait for the device.

    An operator counts as one launch; several kernels hide behind some. So does a function that torch.compile or a
    kernel of torch's that "meta" lacks would fuse (`fused`), with what goes in and comes out as its bytes.
    """

    phase: str = ""
    tallies: dict[tuple[str, str], Tally] = field(default_factory=lambda: defaultdict(Tally))
    waits: list[tuple[str, str]] = field(default_factory=list)  # (phase, what for)
    routed: int = 0  # tokens that a rank sends to experts, each as often as to one, and as many that it gets
    _inside: _Inside | None = None

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def launches(self) -> dict[str, int]:
        """By name, in all phases, without collectives."""
        found: dict[str, int] = defaultdict(int)
        for (_, name), tally in self.tallies.items():
            if tally.launches:
                found[name] += tally.launches
        return dict(found)

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
        changed = written(func, args, kwargs)
        fresh = [t for t in results if all(storage(t) != storage(g) for g in given)]
        shapes_only = name.endswith("_like") or name.startswith("aten::new_")
        overwritten = changed if name in FILLS else tensors(kwargs.get("out"))
        reads = [t for t in given if not (shapes_only or any(t is other for other in overwritten))]
        if self._inside is not None:
            self._inside.note(reads, changed)
        elif name.startswith("c10d::"):
            self.tallies[self.phase, name] += Tally(sent=sum(map(size, sent(name, given))))
        else:
            read = sum(map(size, reads))
            if name in PICKS:
                read += sum(map(size, results)) - size(given[0])
            self.tallies[self.phase, name] += Tally(1, read, sum(map(size, changed + fresh)), flops(name, given))
        return result

    def _reads_back(self, name: str, given: list[Tensor], kwargs: Any) -> bool:
        target = kwargs.get("device")
        if name == "aten::_to_copy":
            return target is not None and torch.device(target).type == "cpu" and on_device(given)
        return name == "aten::copy_" and not on_device(given[:1]) and on_device(given[1:])

    @contextmanager
    def one(self, name: str, given: Sequence[Any], reads_all: bool = False) -> Iterator[Callable[[Any], None]]:
        """Count what is inside as one launch. Gives a function to be told the results. reads_all: what is given is
        read, though by way of what forward kept of it."""
        if self._inside is not None:
            yield lambda results: None
            return
        inside = self._inside = _Inside()
        told: list[Any] = []
        try:
            yield told.append
        finally:
            self._inside = None
        outside = {storage(t): t for t in tensors(given) if on_device([t])}
        made = {storage(t): t for t in tensors(told) if on_device([t]) and storage(t) not in outside}
        read = sum(size(t) for key, t in outside.items() if reads_all or key in inside.read)
        changed = sum(size(t) for key, t in outside.items() if key in inside.changed)
        if inside.launches:
            self.tallies[self.phase, name] += Tally(1, read, changed + sum(map(size, made.values())))


_recorders: list[Recorder] = []


class _Fused(torch.autograd.Function):
    """A function, and its backward, in one launch each."""

    @staticmethod
    def forward(ctx: Any, name: str, function: Callable[..., Any], spec: Any, *leaves: Any) -> Any:
        inputs = [
            leaf.detach().requires_grad_(leaf.requires_grad) if torch.is_tensor(leaf) else leaf for leaf in leaves
        ]
        args, kwargs = tree_unflatten(inputs, spec)
        with _recorders[-1].one(name, leaves) as tell:
            with torch.enable_grad():
                result = function(*args, **kwargs)
            tell(result)
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
        with _recorders[-1].one(f"{ctx.name} backward", [ctx.inputs, gradients], reads_all=True) as tell:
            results, given = [r for r, _ in pairs], [g for _, g in pairs]
            found = torch.autograd.grad(results, wanted, given, allow_unused=True, retain_graph=True)
            tell(found)
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
        with _recorders[-1].one(name, leaves) as tell:
            result = function(*args, **kwargs)
            tell(result)
        return result

    return call


@contextmanager
def recorded(recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Inside it tensors on "meta" are computed by the kernels for GPUs, which are counted instead of launched."""
    recorder = recorder or Recorder()

    def launch(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        name = kernel.__name__
        given = {key: size(value) for key, value in named.items() if torch.is_tensor(value)}
        read = sum(moved for key, moved in given.items() if key not in ONLY_WRITTEN)
        wrote = sum(moved for key, moved in given.items() if key in ONLY_WRITTEN or key in CHANGED.get(name, ()))
        recorder.tallies[recorder.phase, name] += Tally(1, read, wrote)

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


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def size(tensor: Tensor) -> int:
    """Bytes of the elements; what is only repeated counts once."""
    distinct = prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return distinct * tensor.element_size() if tensor.numel() else 0


def written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator changes, as its schema says."""
    changed: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return tensors(changed)


def sent(name: str, given: list[Tensor]) -> list[Tensor]:
    """The tensors of a collective that leave."""
    return given if name in ("c10d::send", "c10d::allreduce_", "c10d::broadcast_") else given[len(given) // 2 :]


def flops(name: str, given: list[Tensor]) -> int:
    """FLOPs of products and attention; two for each multiplication with its sum. Attention is causal: half of all
    pairs."""
    short = name.removeprefix("aten::")
    if short in ("mm", "bmm"):
        a, b = given[:2]
        return 2 * a.numel() * b.shape[-1]
    if short in ("addmm", "baddbmm"):
        _, a, b = given[:3]
        return 2 * a.numel() * b.shape[-1]
    if "attention" in short:
        backward = short.endswith("backward")
        q, k, v = given[1:4] if backward else given[:3]
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] / 2  # [batch, heads, tokens, width]
        # Backward: scores again, and gradients of values, of scores, of queries, of keys.
        products = 3 * q.shape[3] + 2 * v.shape[3] if backward else q.shape[3] + v.shape[3]
        return int(2 * pairs * products)
    return 0
