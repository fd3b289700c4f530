"""The outer loop's view of the model: fragments, and slices of a fragment's vector.

A *fragment* is a set of whole parameters that is synchronized together; its vector is those parameters, flattened
and laid end to end in canonical order. A *slice* is a piece of that vector that one rank owns. Pure data, but for
`gather` and `scatter`, which move elements between a fragment's vector and a rank's payload.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided

from geotrain.canonical import Parameter, Run, architecture_from_hf, canonical_parameters, digest
from geotrain.config import RunConfig

if TYPE_CHECKING:  # importing it takes seconds, and commands that only speak to servers need no tensor
    from torch import Tensor


class LayoutError(ValueError):
    """Slices that do not fit the layout. The message names the fragment and what is wrong."""


@dataclass(frozen=True)
class Slice:
    """`count` rows of `length` consecutive elements, `stride` apart, of one fragment's vector."""

    start: int
    length: int
    stride: int = 0
    count: int = 1

    @property
    def numel(self) -> int:
        return self.length * self.count

    @property
    def stop(self) -> int:
        return self.start + (self.count - 1) * self.stride + self.length


@dataclass(frozen=True)
class Fragment:
    index: int
    name: str
    parameters: tuple[Parameter, ...]
    offsets: tuple[int, ...]  # of each parameter in the vector
    numel: int


class Layout:
    """Parameters grouped into fragments.

    layers_per_fragment: None puts the whole model into one fragment. Otherwise layers are dealt out in strides
    (Streaming DiLoCo, arXiv 2501.18512, §3.2): with P layer fragments, layer i belongs to fragment i mod P.
    Embedding and head (with the final norm) are fragments of their own.
    """

    def __init__(self, parameters: Sequence[Parameter], layers_per_fragment: int | None = None) -> None:
        self.parameters = tuple(parameters)
        self.digest = digest(self.parameters)
        self.fragments = tuple(_fragments(self.parameters, layers_per_fragment))
        self._place = {
            p.name: (f.index, offset, p.numel)
            for f in self.fragments
            for p, offset in zip(f.parameters, f.offsets, strict=True)
        }

    @property
    def numel(self) -> int:
        return sum(f.numel for f in self.fragments)

    def fragment_of(self, parameter: str) -> int:
        return self._find(parameter)[0]

    def slices(self, runs: Iterable[Run], fragment: int) -> tuple[Slice, ...]:
        """Runs of parameters as slices of their fragment's vector. Raises LayoutError when one lies elsewhere."""
        result = []
        for run in runs:
            index, offset, numel = self._find(run.parameter)
            if index != fragment:
                name = self.fragments[fragment].name
                raise LayoutError(f"parameter {run.parameter!r} does not belong to fragment {name!r}")
            piece = Slice(offset + run.start, run.length, run.stride, run.count)
            if run.start < 0 or piece.stop > offset + numel:
                raise LayoutError(f"parameter {run.parameter!r}: a run reaches beyond its {numel} elements")
            result.append(piece)
        return tuple(result)

    def whole(self, fragment: int) -> tuple[Slice, ...]:
        return (Slice(0, self.fragments[fragment].numel),)

    def split(self, fragment: int, vector: Tensor) -> Iterable[tuple[str, Tensor]]:
        """(name, tensor of the parameter's shape) for each parameter; views of the vector."""
        f = self.fragments[fragment]
        for p, offset in zip(f.parameters, f.offsets, strict=True):
            yield p.name, vector[offset : offset + p.numel].view(p.shape)

    def not_finite(self, fragment: int, vector: Tensor) -> str | None:
        """The first parameter whose part of the fragment's vector holds infinities or NaN."""
        bad = (name for name, part in self.split(fragment, vector) if not bool(part.isfinite().all()))
        return next(bad, None)

    def check_cover(self, fragment: int, slices: Iterable[Slice]) -> None:
        """Raises LayoutError unless the slices cover every element of the fragment exactly once."""
        f = self.fragments[fragment]
        times = np.zeros(f.numel, np.int32)
        for piece in slices:
            _check(piece, f.numel, f.name)
            rows = times[piece.start : piece.stop]
            as_strided(rows, (piece.count, piece.length), (piece.stride * times.itemsize, times.itemsize))[...] += 1
        if not bool((times == 1).all()):
            at = int((times != 1).argmax())
            what = "covered by no rank" if times[at] == 0 else f"covered {int(times[at])} times"
            raise LayoutError(f"fragment {f.name!r}: element {at} of {f.numel} is {what}")

    def check_slices(self, fragment: int, slices: Iterable[Slice]) -> None:
        """Raises LayoutError when a slice reaches outside the fragment, or together they are more than it."""
        f = self.fragments[fragment]
        total = 0
        for piece in slices:
            _check(piece, f.numel, f.name)
            total += piece.numel
        if total > f.numel:
            raise LayoutError(f"fragment {f.name!r}: slices of {total} elements overlap, it has {f.numel}")

    def _find(self, parameter: str) -> tuple[int, int, int]:
        try:
            return self._place[parameter]
        except KeyError:
            raise LayoutError(f"the model has no parameter {parameter!r}") from None


def layout_of(run: RunConfig) -> Layout:
    """The layout of a run's model. The run must come from `load_run`, which puts the model's config inline."""
    assert isinstance(run.model.config, dict)
    parameters = canonical_parameters(architecture_from_hf(run.model.config))
    return Layout(parameters, run.outer.fragments.layers_per_fragment)


def numel(slices: Iterable[Slice]) -> int:
    return sum(piece.numel for piece in slices)


def joined(slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """The same elements in the same order, in as few slices as neighbours allow: each is a copy of its own."""
    result: list[Slice] = []
    for piece in slices:
        last = result[-1] if result else None
        if last and last.count == piece.count == 1 and last.stop == piece.start:
            result[-1] = Slice(last.start, last.length + piece.length)
        else:
            result.append(piece)
    return tuple(result)


def gather(vector: Tensor, slices: Sequence[Slice]) -> Tensor:
    """The elements that the slices name, in order: 1-D, contiguous. A view where one plain slice allows it."""
    if len(slices) == 1 and slices[0].count == 1:
        return vector[slices[0].start : slices[0].stop]
    out = vector.new_empty(numel(slices))
    position = 0
    for piece in slices:
        out[position : position + piece.numel].view(piece.count, piece.length).copy_(_view(vector, piece))
        position += piece.numel
    return out


def scatter(values: Tensor, slices: Sequence[Slice], vector: Tensor) -> None:
    """Write values (1-D, as `gather` orders them) to where the slices point."""
    position = 0
    for piece in slices:
        _view(vector, piece).copy_(values[position : position + piece.numel].view(piece.count, piece.length))
        position += piece.numel


def fragments_due(fragment_count: int, period: int, step: int) -> tuple[int, ...]:
    """Fragments whose delta leaves after inner step `step` (counted from 1): those with
    (step − offset) mod period = 0, the offsets spread evenly over the period and the last at its end.

    Integers only, so every rank computes the same schedule.
    """
    return tuple(
        p
        for p in range(fragment_count)
        if (step - ((p + 1) * period + fragment_count - 1) // fragment_count) % period == 0
    )


def _fragments(parameters: tuple[Parameter, ...], layers_per_fragment: int | None) -> Iterable[Fragment]:
    if layers_per_fragment is None:
        yield _fragment(0, "all", parameters)
        return
    layers = 1 + max(p.layer for p in parameters if p.layer is not None)
    count = -(-layers // layers_per_fragment)
    groups: dict[str, list[Parameter]] = {f"layers-{i}": [] for i in range(count)}
    embedding, *rest = (p for p in parameters if p.layer is None)
    for p in parameters:
        if p.layer is not None:
            groups[f"layers-{p.layer % count}"].append(p)
    groups["embedding"] = [embedding]
    groups["head"] = rest
    for index, (name, members) in enumerate(groups.items()):
        yield _fragment(index, name, tuple(members))


def _fragment(index: int, name: str, parameters: tuple[Parameter, ...]) -> Fragment:
    offsets, total = [], 0
    for p in parameters:
        offsets.append(total)
        total += p.numel
    return Fragment(index, name, parameters, tuple(offsets), total)


def _check(piece: Slice, size: int, name: str) -> None:
    rows_overlap = piece.count > 1 and piece.stride < piece.length
    negative = piece.start < 0 or piece.length < 1 or piece.count < 1 or piece.stride < 0
    if negative or rows_overlap or piece.stop > size:
        raise LayoutError(f"fragment {name!r}: {piece} does not lie within its {size} elements")


def _view(vector: Tensor, piece: Slice) -> Tensor:
    return vector.as_strided((piece.count, piece.length), (piece.stride, 1), vector.storage_offset() + piece.start)
