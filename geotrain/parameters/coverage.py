"""Whether the slices of all ranks together are the model. Takes memory by the number of slices: a vector of counts
would take some hundred gigabytes for a large model in one fragment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import pairwise
from math import lcm
from operator import attrgetter

from geotrain.parameters.layout import Layout, LayoutError, StridedSlice

MOST_STEPS = 1 << 20  # of `not_once`: a second or two; the ranks of a model of 70 B parameters need some thousands


def check_cover(layout: Layout, piece: int, slices: Iterable[StridedSlice]) -> None:
    """Raises LayoutError unless the slices cover every element of the piece exactly once."""
    f, size, every = layout.fragments[layout.pieces[piece].fragment], layout.pieces[piece].numel, list(slices)
    for each in every:
        layout.check_slices(piece, [each])
    try:
        at = not_once(every, size)
    except LayoutError as error:
        raise LayoutError(f"fragment {f.name!r}: {error}") from None
    if at is not None:
        times = sum(_names(each, at) for each in every)
        what = f"covered {times} times" if times else "covered by no rank"
        raise LayoutError(f"fragment {f.name!r}: element {layout.pieces[piece].start + at} of {f.numel} is {what}")


def not_once(slices: Iterable[StridedSlice], size: int) -> int | None:
    """The first element below `size` that is not named by exactly one of the slices; None: every one is.

    Between two neighbouring ends of slices, those that reach across repeat themselves with their strides, so one
    period shows all of it. slices: within [0, size), their rows apart. Raises LayoutError when they are entangled as
    no ranks' are, so that to follow them would take long.
    """
    pieces = sorted(_side_by_side(slices), key=lambda piece: piece.start, reverse=True)
    edges = sorted({0, size, *(piece.start for piece in pieces), *(piece.stop for piece in pieces)})
    across, steps = list[StridedSlice](), 0
    for begin, end in pairwise(edges):
        across = [piece for piece in across if piece.stop > begin]
        while pieces and pieces[-1].start == begin:
            across.append(pieces.pop())
        at, end = begin, min(end, begin + lcm(*(piece.stride for piece in across if piece.count > 1)))
        steps += len(across)
        for first, stop in merge(*(_rows(piece, begin, end) for piece in across)):
            if first != at:
                return min(first, at)
            at, steps = stop, steps + 1
            if steps > MOST_STEPS:
                raise LayoutError(f"slices with {len(edges)} ends lie within each other as those of no ranks do")
        if at < end:
            return at
    return None


def _names(piece: StridedSlice, element: int) -> bool:
    """Whether the slice names this element."""
    inside = piece.start <= element < piece.stop
    return inside and (piece.count == 1 or (element - piece.start) % piece.stride < piece.length)


def _side_by_side(slices: Iterable[StridedSlice]) -> Iterator[StridedSlice]:
    """The same elements as often, with slices merged whose rows continue each other: the columns that the ranks of
    tensor parallelism split a matrix into become whole rows again."""
    key = attrgetter("stride", "count", "start")
    before: StridedSlice | None = None
    for piece in sorted(slices, key=key):
        if before and key(before)[:2] == key(piece)[:2] and piece.start == before.start + before.length:
            length = before.length + piece.length
            if piece.count == 1 or length <= piece.stride:
                before = StridedSlice(before.start, length, piece.stride, piece.count)
                continue
        if before:
            yield before
        before = piece
    if before:
        yield before


def _rows(piece: StridedSlice, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """[first, stop) of the slice's rows, cut to [begin, end), which lies between its start and its stop."""
    if piece.count == 1 or piece.length == piece.stride:
        yield begin, end
        return
    first = begin - (begin - piece.start) % piece.stride
    while first < end:
        if first + piece.length > begin:
            yield max(first, begin), min(first + piece.length, end)
        first += piece.stride
