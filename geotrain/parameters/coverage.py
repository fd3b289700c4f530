"""Checks that the slices of all ranks together are the model. Takes memory by the number of slices: a vector of
counts would take some hundred gigabytes for a large model in one fragment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import pairwise
from math import lcm
from operator import attrgetter

from geotrain.parameters.parameter_map import ParameterMap, ParameterMapError, StridedSlice

MOST_STEPS = 1 << 20  # of `not_once`: a second or two; the ranks of a model of 70 B parameters need some thousands


def check_coverage(parameter_map: ParameterMap, chunk: int, slices: Iterable[StridedSlice]) -> None:
    """Raise ParameterMapError unless the slices cover every element of the chunk exactly once."""
    here, every = parameter_map.chunks[chunk], list(slices)
    f = parameter_map.fragments[here.fragment]
    for each in every:  # one by one: those that overlap are found below, with the element
        parameter_map.check_slices(chunk, [each])
    try:
        at = not_once(every, here.numel)
    except ParameterMapError as error:
        raise ParameterMapError(f"fragment {f.name!r}: {error}") from None
    if at is not None:
        times = sum(_names(each, at) for each in every)
        what = f"covered {times} times" if times else "covered by no rank"
        raise ParameterMapError(f"fragment {f.name!r}: element {here.start + at} of {f.numel} is {what}")


def not_once(slices: Iterable[StridedSlice], size: int) -> int | None:
    """Find the first element below `size` that is not named by exactly one of the slices; None: every one is.

    Between two neighbouring ends of slices, those that reach across repeat themselves with their strides, so one
    period shows all of it. slices: within [0, size), their rows apart. Raises ParameterMapError when they are
    entangled as no ranks' are, so that to follow them would take long.
    """
    chunks = sorted(_side_by_side(slices), key=lambda chunk: chunk.start, reverse=True)
    edges = sorted({0, size, *(chunk.start for chunk in chunks), *(chunk.stop for chunk in chunks)})
    across, steps = list[StridedSlice](), 0
    for begin, end in pairwise(edges):
        across = [chunk for chunk in across if chunk.stop > begin]
        while chunks and chunks[-1].start == begin:
            across.append(chunks.pop())
        at, end = begin, min(end, begin + lcm(*(chunk.stride for chunk in across if chunk.count > 1)))
        steps += len(across)
        for first, stop in merge(*(_rows(chunk, begin, end) for chunk in across)):
            if first != at:
                return min(first, at)
            at, steps = stop, steps + 1
            if steps > MOST_STEPS:
                raise ParameterMapError(
                    f"slices with {len(edges)} ends lie within each other as those of no ranks do"
                )
        if at < end:
            return at
    return None


def _names(chunk: StridedSlice, element: int) -> bool:
    """Whether the slice names this element."""
    inside = chunk.start <= element < chunk.stop
    return inside and (chunk.count == 1 or (element - chunk.start) % chunk.stride < chunk.length)


def _side_by_side(slices: Iterable[StridedSlice]) -> Iterator[StridedSlice]:
    """Merge slices whose rows continue each other; each element stays named as often. The columns into which the
    ranks of tensor parallelism split a matrix become whole rows again."""
    key = attrgetter("stride", "count", "start")
    before: StridedSlice | None = None
    for chunk in sorted(slices, key=key):
        if before and key(before)[:2] == key(chunk)[:2] and chunk.start == before.start + before.length:
            length = before.length + chunk.length
            if chunk.count == 1 or length <= chunk.stride:
                before = StridedSlice(before.start, length, chunk.stride, chunk.count)
                continue
        if before:
            yield before
        before = chunk
    if before:
        yield before


def _rows(chunk: StridedSlice, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Return [first, stop) of the slice's rows, cut to [begin, end), which lies between its start and its stop."""
    if chunk.count == 1 or chunk.length == chunk.stride:
        yield begin, end
        return
    first = begin - (begin - chunk.start) % chunk.stride
    while first < end:
        if first + chunk.length > begin:
            yield max(first, begin), min(first + chunk.length, end)
        first += chunk.stride
