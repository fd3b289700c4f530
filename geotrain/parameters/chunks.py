"""Cuts a rank's slices at chunks, and deals fragments to the shards of a server.

A fragment's vector is cut at fixed places (`ParameterMap.chunks`), which are those of the model and of no rank, so
that all that is kept by chunk (residuals, mirrors, the state's files) stays as it is when ranks are laid out
otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from geotrain.parameters.parameter_map import Fragment, ParameterMap, StridedSlice, clip_runs


@dataclass(frozen=True)
class Cut:
    """The part of a local tensor that lies in one chunk.

    chunk: its index. slices: the places in the chunk's vector, in order. begin, end: the elements of the tensor, read
    flat. parameter: the first one in it, where parameters were cut.
    """

    chunk: int
    slices: tuple[StridedSlice, ...]
    begin: int
    end: int
    parameter: str = ""


def cut(parameter_map: ParameterMap, runs: Iterable[StridedSlice]) -> Iterator[Cut]:
    """Cut a local tensor, which these runs of one fragment's parameters describe, at the fragment's chunks."""
    last: Cut | None = None
    position = 0
    for run in runs:
        fragment = parameter_map.fragment_of(run.parameter)
        for each in cut_slice(parameter_map, fragment, *parameter_map.slices([run], fragment)):
            here = replace(each, begin=each.begin + position, end=each.end + position, parameter=run.parameter)
            if last is not None and last.chunk == here.chunk:
                last = replace(last, slices=last.slices + here.slices, end=here.end)
            else:
                if last is not None:
                    yield last
                last = here
        position += run.numel
    if last is not None:
        yield last


def cut_slice(parameter_map: ParameterMap, fragment: int, here: StridedSlice) -> Iterator[Cut]:
    """Cut a slice of a fragment's vector, which describes a local tensor of as many elements."""
    for chunk in parameter_map.chunks_of[fragment]:
        low, high = _before(here, chunk.start), _before(here, chunk.start + chunk.numel)
        if low < high:
            slices = tuple(replace(s, start=s.start - chunk.start) for s in clip_runs([here], low, high))
            yield Cut(chunk.index, slices, low, high)


def deal(fragments: Sequence[Fragment], shards: int) -> tuple[tuple[int, ...], ...]:
    """Deal fragments to so many shards: the largest first, each to one of those that have least, give or take half
    of it; of them to one with fewest of its group, so that an update's pieces are worked at side by side."""
    dealt: list[list[int]] = [[] for _ in range(shards)]
    held, beside = [0] * shards, Counter[tuple[int, int]]()
    for fragment in sorted(fragments, key=lambda fragment: (-fragment.numel, fragment.index)):
        most = min(held) + fragment.numel / 2
        near = [shard for shard in range(shards) if held[shard] <= most]
        least = min(near, key=lambda shard: (beside[shard, fragment.group], held[shard]))
        dealt[least].append(fragment.index)
        beside[least, fragment.group] += 1
        held[least] += fragment.numel
    return tuple(tuple(sorted(own)) for own in dealt)


def _before(here: StridedSlice, address: int) -> int:
    """Count the elements of the slice that lie before this address; they are its first ones."""
    if address <= here.start:
        return 0
    if here.count == 1:
        return min(address - here.start, here.length)
    row, column = divmod(address - here.start, here.stride)
    return here.numel if row >= here.count else row * here.length + min(column, here.length)
