"""Checks that the slices of all ranks together are the model. Takes memory by the number of rows: a vector of
counts would take some hundred gigabytes for a large model in one fragment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

import numpy as np

from geotrain.parameters.parameter_map import ParameterMap, ParameterMapError, StridedSlice

MOST_ROWS = 1 << 21  # a second and 100 MB; the ranks of a model of 70 B parameters have some thousands


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

    slices: within [0, size), their rows apart. Raises ParameterMapError where they have more rows than those of ranks
    have once their columns are joined.
    """
    joined = [StridedSlice(s.start, s.numel) if s.length == s.stride else s for s in _side_by_side(slices)]
    if (rows := sum(s.count for s in joined)) > MOST_ROWS:
        raise ParameterMapError(f"slices with {rows} rows lie within each other as those of no ranks do")
    begins = np.concatenate([*(s.start + s.stride * np.arange(s.count) for s in joined), [size]])
    lengths = np.repeat([*(s.length for s in joined), 0], [*(s.count for s in joined), 1])
    order = np.argsort(begins)
    begins, ends = begins[order], np.concatenate([[0], (begins + lengths)[order][:-1]])
    wrong = np.flatnonzero(begins != ends)  # each row begins where the one before ends, and the last ends at `size`
    return int(min(begins[wrong[0]], ends[wrong[0]])) if wrong.size else None


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
