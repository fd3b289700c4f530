"""The canonical address space: the names of a model's parameters, and where in them the chunks that ranks own lie.

Canonical names and shapes are those of the Hugging Face checkpoint (`model.layers.3.self_attn.q_proj.weight`), or of
the file that `model.weights` names; never those of a parallel layout. Servers, exports and checkpoints speak only of
them, so regions may differ in tensor, pipeline and data parallelism. A *fragment* is a set of whole parameters that
is synchronized together; its vector is those parameters, flattened and laid end to end in canonical order. It is cut
into *chunks*, the unit of what is coded, sent and stored (`geotrain.parameters.chunks` cuts a rank's slices at them).
Everything here is plain data, except `gather` and `scatter`, which move elements between a fragment's vector and a
rank's payload.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from geotrain.config import ConfigError, RunConfig
from geotrain.families import Architecture, family_of
from geotrain.families.weights import Init
from geotrain.parameters.parameter_file import read_fixed, read_shapes

if TYPE_CHECKING:  # importing it takes seconds, and commands that only speak to servers need no tensor
    from torch import Tensor

_NUMBER = re.compile(r"(?:^|[._])(\d+)(?=[._]|$)")  # in the name of a parameter


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model under its Hugging Face name and shape.

    layer: index of its transformer layer; None for embeddings, final norm and head.
    init_std: standard deviation of its initial normal distribution (of "normal" only).
    decays: whether weight decay applies (matrices and embeddings; not norms).
    wide: whether it is fp32 in an exported checkpoint of any type.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    init: Init
    init_std: float = 0.0
    decays: bool = True
    wide: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class StridedSlice:
    """`count` rows of `length` consecutive elements of a flat vector, the rows `stride` elements apart.

    The vector is a fragment's or, if `parameter` names one, a flattened canonical parameter; slices of parameters are
    called *runs*. Tensor parallelism that splits a matrix by columns takes a part of each row, hence the stride.

    A rank's local tensor, read flat, is a sequence of runs: its first `length` elements are
    canonical[start : start+length], the next ones canonical[start+stride : …], and so on.
    """

    start: int
    length: int
    stride: int = 0
    count: int = 1
    parameter: str = ""

    @property
    def numel(self) -> int:
        return self.length * self.count

    @property
    def stop(self) -> int:
        return self.start + (self.count - 1) * self.stride + self.length


def clip_runs(runs: Iterable[StridedSlice], begin: int, end: int) -> list[StridedSlice]:
    """Cut runs to the local elements [begin, end): what a ZeRO rank owns of a tensor that these runs describe."""
    clipped: list[StridedSlice] = []
    position = 0
    for run in runs:
        low, high = max(begin - position, 0), min(end - position, run.numel)
        position += run.numel
        # A cut may fall within a row, so up to three chunks come of a run: a row's end, whole rows, a row's begin.
        while low < high:
            row, column = divmod(low, run.length)
            rows = 0 if column else (high - low) // run.length
            length = run.length if rows else min(run.length - column, high - low)
            start, stride = run.start + row * run.stride + column, run.stride if rows > 1 else 0
            clipped.append(StridedSlice(start, length, stride, max(rows, 1), run.parameter))
            low += clipped[-1].numel
    return clipped


def digest(parameters: Sequence[Parameter], fixed: Mapping[str, int] | None = None) -> str:
    """Hex digest of names and shapes: processes with the same digest mean the same elements by the same addresses,
    and what is not trained (`fixed`) is the same."""
    text = json.dumps([[p.name, list(p.shape)] for p in parameters], separators=(",", ":"))
    text += json.dumps(fixed, sort_keys=True) if fixed else ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@lru_cache(maxsize=8)  # a plan asks many times, and a model with experts has ten thousands
def canonical_parameters(a: Architecture) -> tuple[Parameter, ...]:
    """Return every parameter once, in Hugging Face order: embedding, layers, final norm, head.

    A tied head is not a parameter of its own. Initialization is Megatron's and GPT-2's: normal with `init_std`, and
    with `init_std / sqrt(2 · layers)` for the two projections of a layer that write to the residual stream.
    """
    return tuple(
        Parameter(w.name, w.whole or w.shape, i, w.init, w.init_std, w.decays, w.untrained)
        for i, w in family_of(a.model_type).weights(a)
        if not w.offset
    )


def parameter_count(architecture: Architecture) -> int:
    """Count the elements of all parameters, each once."""
    return sum(p.numel for p in canonical_parameters(architecture))


def active_parameter_count(a: Architecture) -> int:
    """Count the elements that a token uses: all but the matrices of experts that it is not sent to."""
    if a.experts is None:
        return parameter_count(a)
    of_experts = sum(w.numel for _, w in family_of(a.model_type).weights(a) if w.expert is not None)
    return parameter_count(a) - of_experts // a.experts.count * (a.experts.count - a.experts.per_token)


class ParameterMapError(ValueError):
    """Slices that do not fit the parameter map, or a state of another one. The message names the fragment and what is
    wrong."""


@dataclass(frozen=True)
class Fragment:
    """A set of whole parameters that travels together. group: of fragments that travel at the same time. numel:
    length of its vector."""

    index: int
    group: int
    name: str
    parameters: tuple[Parameter, ...]
    offsets: tuple[int, ...]  # where each parameter begins in the vector
    numel: int


@dataclass(frozen=True)
class Chunk:
    """`numel` elements of a fragment's vector from `start` on. index: of the chunk, counted through all fragments."""

    index: int
    fragment: int
    start: int
    numel: int


class ParameterMap:
    """Parameters grouped into fragments, and these cut into chunks of `chunk_elements` (the last of each is shorter).

    layers_per_fragment: None puts the whole model into one fragment. Otherwise layers are dealt out in strides
    (Streaming DiLoCo, arXiv 2501.18512, §3.2): with P layer fragments, layer i belongs to fragment i mod P, so that
    each fragment has layers of all depths. Embedding and head (with the final norm) are fragments of their own.

    pieces: that each of these is cut into, of whole parameters and nearly equal size: they travel at the same time.
    fixed: name → fingerprint of what of the model is not trained, which the digest covers.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        layers_per_fragment: int | None = None,
        chunk_elements: int = 1 << 27,
        pieces: int = 1,
        fixed: Mapping[str, int] | None = None,
    ) -> None:
        self.parameters, self.fixed = tuple(parameters), fixed or {}
        self.digest = digest(self.parameters, self.fixed)
        self.fragments = tuple(_fragments(self.parameters, layers_per_fragment, pieces))
        self.groups = tuple(fragment.group for fragment in self.fragments)  # of each fragment
        self.chunk_elements = chunk_elements
        starts = [(f, start) for f in self.fragments for start in range(0, f.numel, chunk_elements)]
        self.chunks = tuple(
            Chunk(i, f.index, start, min(chunk_elements, f.numel - start)) for i, (f, start) in enumerate(starts)
        )
        self.chunks_of = tuple(tuple(p for p in self.chunks if p.fragment == f.index) for f in self.fragments)
        self._place = {  # parameter → (fragment, offset in its vector, elements)
            p.name: (f.index, offset, p.numel)
            for f in self.fragments
            for p, offset in zip(f.parameters, f.offsets, strict=True)
        }

    @property
    def numel(self) -> int:
        return sum(f.numel for f in self.fragments)

    @property
    def group_numel(self) -> tuple[int, ...]:
        """Elements of each group's fragments."""
        return tuple(sum(f.numel for f in self.fragments if f.group == group) for group in range(self.groups[-1] + 1))

    @property
    def chunk_numbers(self) -> list[list[int]]:
        """The indices of the chunks of each fragment."""
        return [[chunk.index for chunk in chunks] for chunks in self.chunks_of]

    def check_digest(self, digest: str) -> None:
        """Raise ParameterMapError unless a state with this digest is of the same parameters."""
        if digest != self.digest:
            raise ParameterMapError(f"the state is of parameter map {digest}, the run's is {self.digest}")

    def fragment_of(self, parameter: str) -> int:
        """Index of the fragment of this parameter. Raises ParameterMapError."""
        return self._find(parameter)[0]

    def slices(self, runs: Iterable[StridedSlice], fragment: int) -> tuple[StridedSlice, ...]:
        """Translate runs of parameters to slices of the fragment's vector. Raises ParameterMapError if one lies
        elsewhere."""
        result = []
        for run in runs:
            index, offset, numel = self._find(run.parameter)
            if index != fragment:
                name = self.fragments[fragment].name
                raise ParameterMapError(f"parameter {run.parameter!r} does not belong to fragment {name!r}")
            chunk = StridedSlice(offset + run.start, run.length, run.stride, run.count)
            if run.start < 0 or chunk.stop > offset + numel:
                raise ParameterMapError(f"parameter {run.parameter!r}: a run reaches beyond its {numel} elements")
            result.append(chunk)
        return tuple(result)

    def whole(self, chunk: int) -> tuple[StridedSlice, ...]:
        """Return the slice that is the whole chunk."""
        return (StridedSlice(0, self.chunks[chunk].numel),)

    def called(self, chunk: int) -> str:
        """Name the chunk for people: "fragment 2", or "fragment 2, chunk 1 of 3"."""
        p = self.chunks[chunk]
        count, which = len(self.chunks_of[p.fragment]), p.start // self.chunk_elements
        return f"fragment {p.fragment}" + (f", chunk {which + 1} of {count}" if count > 1 else "")

    def split(self, fragment: int, vector: Tensor) -> Iterable[tuple[str, Tensor]]:
        """Yield (name, tensor of the parameter's shape) for each parameter; views of the vector."""
        f = self.fragments[fragment]
        for p, offset in zip(f.parameters, f.offsets, strict=True):
            yield p.name, vector[offset : offset + p.numel].view(p.shape)

    def not_finite(self, fragment: int, vector: Tensor, start: int = 0) -> str | None:
        """Find the first parameter whose part of the vector holds infinities or NaN; None: all is finite.

        vector: the fragment's, from element `start` on.
        """
        f = self.fragments[fragment]
        for p, offset in zip(f.parameters, f.offsets, strict=True):
            part = vector[max(0, offset - start) : max(0, offset + p.numel - start)]
            if not bool(part.isfinite().all()):
                return p.name
        return None

    def check_slices(self, chunk: int, slices: Iterable[StridedSlice]) -> None:
        """Raise ParameterMapError when a slice reaches outside the chunk, or when together they have more elements
        than it has: a server allocates by their sum."""
        size, name = self.chunks[chunk].numel, self.fragments[self.chunks[chunk].fragment].name
        total = 0
        for each in slices:
            _check(each, size, name)
            total += each.numel
        if total > size:
            raise ParameterMapError(f"fragment {name!r}: slices of {total} elements overlap, it has {size}")

    def _find(self, parameter: str) -> tuple[int, int, int]:
        try:
            return self._place[parameter]
        except KeyError:
            raise ParameterMapError(f"the model has no parameter {parameter!r}") from None


def parameter_map_of(run: RunConfig) -> ParameterMap:
    """Build the parameter map of a run's model. Raises UnsupportedModelError; ConfigError, where its weights' file is
    no good."""
    if run.model.weights is not None:
        path = Path(run.model.weights)
        return map_of_any(run, read_shapes(path), read_fixed(path))
    f = run.outer.fragments
    return _map_of(run.architecture, f.layers_per_fragment, f.chunk_elements, f.pieces)


@lru_cache(maxsize=8)  # a plan asks many times
def _map_of(a: Architecture, layers: int | None, chunk_elements: int, pieces: int) -> ParameterMap:
    return ParameterMap(canonical_parameters(a), layers, chunk_elements, pieces)


def map_of_any(run: RunConfig, shapes: Mapping[str, tuple[int, ...]], fixed: dict[str, int]) -> ParameterMap:
    """Build the parameter map of any model from name → shape, and the fingerprints of what it does not train."""
    f = run.outer.fragments
    return ParameterMap(any_parameters(shapes), f.layers_per_fragment, f.chunk_elements, f.pieces, fixed)


def any_parameters(shapes: Mapping[str, tuple[int, ...]]) -> list[Parameter]:
    """Build the parameters of any model from name → shape. A name's first number is taken for its layer."""
    return [
        Parameter(name, shape, int(found[1]) if (found := _NUMBER.search(name)) else None, "zeros")
        for name, shape in shapes.items()
    ]


def numel(slices: Iterable[StridedSlice]) -> int:
    """Count the elements that the slices name together."""
    return sum(chunk.numel for chunk in slices)


def joined(slices: Iterable[StridedSlice]) -> tuple[StridedSlice, ...]:
    """Merge slices where one ends where the next begins; elements and order stay the same. `gather` and
    `scatter` make one copy for each slice, so fewer are faster."""
    result: list[StridedSlice] = []
    for chunk in slices:
        last = result[-1] if result else None
        if last and last.count == chunk.count == 1 and last.stop == chunk.start:
            result[-1] = StridedSlice(last.start, last.length + chunk.length)
        else:
            result.append(chunk)
    return tuple(result)


def gather(vector: Tensor, slices: Sequence[StridedSlice]) -> Tensor:
    """Return the elements that the slices name, in order: 1-D, contiguous. One slice of one row gives a view of the
    vector, which costs no copy; so the result must not be written unless the vector may be."""
    if len(slices) == 1 and slices[0].count == 1:
        return vector[slices[0].start : slices[0].stop]
    out = vector.new_empty(numel(slices))
    for part, chunk in zip(out.split([chunk.numel for chunk in slices]), slices, strict=True):
        part.view(chunk.count, chunk.length).copy_(_view(vector, chunk))
    return out


def scatter(values: Tensor, slices: Sequence[StridedSlice], vector: Tensor) -> None:
    """Write values (1-D, as `gather` orders them) to where the slices point."""
    for part, chunk in zip(values.split([chunk.numel for chunk in slices]), slices, strict=True):
        _view(vector, chunk).copy_(part.view(chunk.count, chunk.length))


def fragments_due(groups: Sequence[int], period: int, step: int) -> tuple[int, ...]:
    """Return the fragments whose delta leaves after inner step `step` (counted from 1) of a job of `period` steps.
    groups: of each fragment.

    Group p of P leaves when (step − offset) mod period = 0, with offset = ⌈(p + 1) · period / P⌉: evenly spread
    over the period, the last one at its end. Integers only, so that every rank computes the same schedule.
    """
    count = groups[-1] + 1
    return tuple(
        fragment
        for fragment, group in enumerate(groups)
        if (step - ((group + 1) * period + count - 1) // count) % period == 0
    )


def _fragments(parameters: tuple[Parameter, ...], layers_per_fragment: int | None, pieces: int) -> Iterator[Fragment]:
    groups: dict[str, list[Parameter]] = {"all": list(parameters)}
    if layers_per_fragment is not None:
        layers = 1 + max((p.layer for p in parameters if p.layer is not None), default=-1)
        if not layers:
            raise ConfigError(
                "outer.fragments.layers_per_fragment: no parameter of this model has a number in its name, so it has "
                "no layers; leave it out: the whole model is one fragment"
            )
        count = -(-layers // layers_per_fragment)  # rounded up
        groups = {f"layers-{i}": [] for i in range(count)}
        for p in parameters:
            if p.layer is not None:
                groups[f"layers-{p.layer % count}"].append(p)
        first = next(i for i, p in enumerate(parameters) if p.layer is not None)
        groups |= {"embedding": list(parameters[:first])}
        groups |= {"head": [p for p in parameters[first:] if p.layer is None]}
    index = 0
    for group, (name, whole) in enumerate((name, whole) for name, whole in groups.items() if whole):
        cut = _pieces(whole, pieces)
        for number, members in enumerate(cut):
            *offsets, total = accumulate((p.numel for p in members), initial=0)
            called = name if len(cut) == 1 else f"{name}.{number}"
            yield Fragment(index, group, called, tuple(members), tuple(offsets), total)
            index += 1


def _pieces(parameters: Sequence[Parameter], pieces: int) -> list[list[Parameter]]:
    """Deal parameters, which keep their order, into so many pieces of nearly equal size: the largest first."""
    dealt: list[list[int]] = [[] for _ in range(min(pieces, len(parameters)))]
    held = [0] * len(dealt)
    for i in sorted(range(len(parameters)), key=lambda i: (-parameters[i].numel, i)):
        least = held.index(min(held))
        dealt[least].append(i)
        held[least] += parameters[i].numel
    return [[parameters[i] for i in sorted(mine)] for mine in dealt]


def _check(chunk: StridedSlice, size: int, name: str) -> None:
    """Raise ParameterMapError unless the slice lies within the vector.

    Slices come over the wire, and a negative stride or a stop beyond the vector would make torch and NumPy raise, or
    read foreign memory, where nobody expects it.
    """
    rows_overlap = chunk.count > 1 and chunk.stride < chunk.length
    negative = chunk.start < 0 or chunk.length < 1 or chunk.count < 1 or chunk.stride < 0
    if negative or rows_overlap or chunk.stop > size:
        raise ParameterMapError(f"fragment {name!r}: {chunk} does not lie within its {size} elements")


def _view(vector: Tensor, chunk: StridedSlice) -> Tensor:
    return vector.as_strided((chunk.count, chunk.length), (chunk.stride, 1), vector.storage_offset() + chunk.start)
