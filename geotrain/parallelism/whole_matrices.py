"""Matrices for Muon: which of them a local parameter holds, and shards that cut none.

An orthogonalized update is a function of a whole matrix, so that each matrix has one owner among the data-parallel
ranks. Plain data; no tensor, no process group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import Literal

from geotrain.config import Architecture, ParallelConfig
from geotrain.parallelism.local_parameters import LocalParameter, any_of_stage

ALIGNED = 128  # where Muon's matrices begin: ACCO's blocks of codes then mix no two, and vector loads are aligned


@dataclass(frozen=True)
class LocalMatrix:
    """A canonical matrix, or a tensor rank's part of it, inside a local parameter.

    segments: [begin, end) of its rows in the local parameter, read flat, in canonical order. Several where
    Megatron-core interleaves matrices, as it does q, k and v. rows, columns: of the part. split: the dimension that
    tensor parallelism cuts.
    """

    segments: tuple[tuple[int, int], ...]
    rows: int
    columns: int
    split: Literal["rows", "columns"] | None

    @property
    def numel(self) -> int:
        return self.rows * self.columns


def local_matrices(place: LocalParameter, columns_of: Mapping[str, int]) -> tuple[LocalMatrix, ...]:
    """Find the matrices of a local parameter, ordered by their first element. columns_of: canonical name →
    columns."""
    segments: dict[str, list[tuple[int, int]]] = {}
    cut_by_columns, position = False, 0
    for run in place.runs:
        mine = segments.setdefault(run.parameter, [])
        if mine and mine[-1][1] == position:  # the rows go on: one segment, which needs no copy to be read
            mine[-1] = (mine[-1][0], position + run.numel)
        else:
            mine.append((position, position + run.numel))
        position += run.numel
        cut_by_columns |= run.count > 1
    found = []
    for name, parts in segments.items():
        columns = place.runs[0].length if cut_by_columns else columns_of[name]
        rows = sum(end - begin for begin, end in parts) // columns
        split: Literal["rows", "columns"] | None = None
        if place.sharded:
            split = "columns" if cut_by_columns else "rows"
        found.append(LocalMatrix(tuple(parts), rows, columns, split))
    return tuple(found)


@dataclass(frozen=True)
class Packing:
    """Items laid out so that no boundary between equal shards cuts one.

    sequence: what lies one after the other: the index of an item, or −n for a gap of n elements. shard_numel:
    elements of each shard. filled: of each, those of items.
    """

    sequence: tuple[int, ...]
    shard_numel: int
    filled: tuple[int, ...]


def pack(sizes: Sequence[int], ranks: int, head: int = 0, multiple: int = 1) -> Packing:
    """Distribute items over `ranks` shards, the largest first, each to the rank with most room left.

    head: elements that come before the items and may be cut anywhere, a multiple of `multiple`. Items begin, and
    shards are cut, at multiples of `multiple`. The shard is the smallest for which this succeeds; it holds at least
    the largest item, and what remains of each is a gap.
    """
    room = [-(-size // multiple) * multiple for size in sizes]
    least = max([-(-(head + sum(room)) // ranks), *room])
    low, high = -(-least // multiple), (head + sum(room)) // multiple
    largest_first = sorted(range(len(room)), key=lambda i: -room[i])
    owners = _owners(room, largest_first, ranks, head, high * multiple)
    assert owners is not None, "one shard that holds everything"
    if not head:  # what is left of equal rooms has the same order in any shard: it is as large as the fullest
        filled = [0] * ranks
        for item, owner in enumerate(owners):
            filled[owner] += room[item]
        low = high = max(low, max(filled) // multiple)
    while low < high:
        middle = (low + high) // 2
        tried = _owners(room, largest_first, ranks, head, middle * multiple)
        if tried is None:
            low = middle + 1
        else:
            high, owners = middle, tried
    shard, sequence, filled = high * multiple, list[int](), [0] * ranks
    for rank in range(ranks):
        used = _part_of_head(head, rank, shard)
        mine = [item for item, owner in enumerate(owners) if owner == rank]
        for item in mine:
            used += room[item]
            filled[rank] += sizes[item]
            gap = room[item] - sizes[item] + (shard - used if item == mine[-1] else 0)
            sequence += [item, -gap] if gap else [item]
        if not mine and used < shard:
            sequence.append(used - shard)
    return Packing(tuple(sequence), shard, tuple(filled))


def _owners(sizes: Sequence[int], order: Sequence[int], ranks: int, head: int, shard: int) -> list[int] | None:
    """Choose a rank for each item; None if they do not fit into shards of that size."""
    # A heap of (−room, rank): the first has most room and, of those, the lowest number. Experts are many.
    room = [(_part_of_head(head, rank, shard) - shard, rank) for rank in range(ranks)]
    heapify(room)
    owners = [0] * len(sizes)
    for item in order:
        taken, rank = room[0]
        if -taken < sizes[item]:
            return None
        owners[item] = rank
        heapreplace(room, (taken + sizes[item], rank))
    return owners


def _part_of_head(head: int, rank: int, shard: int) -> int:
    return min(max(head - rank * shard, 0), shard)


@dataclass(frozen=True)
class ShardSize:
    """Sizes of the fullest data-parallel rank's shard, in elements.

    adamw: that AdamW steps. matrices: of Muon's matrices, with the gaps between them. total: of all shards of one
    replica's parameters. divided: of both, what other ranks hold the rest of; experts may be whole. addressed: of
    adamw, of matrices and of what is divided, what has an address in the model, as padding of the vocabulary and gaps
    have none.
    """

    adamw: int
    matrices: int
    total: int
    divided: int
    addressed: tuple[int, int, int] = (0, 0, 0)


@lru_cache(maxsize=1024)  # the planner asks for the same stages again and again
def shard_size(
    a: Architecture, parallel: ParallelConfig, stage: int, dp: int, muon: bool, together: bool
) -> ShardSize:
    """Compute the size of a shard on a pipeline stage.

    together: all groups are one sequence, as ACCO has them; DeepSpeed shards each by itself.
    """
    if together:
        sizes, others, padding = _matrices_and_others(a, parallel, stage, muon, None)
        head = -(-others // ALIGNED) * ALIGNED
        packed = pack(sizes, dp, head, ALIGNED)
        shard = packed.shard_numel
        adamw = min(head, shard)  # of the first rank, which has most of them, and they need most memory
        own = min(others - padding, shard), min(max(packed.filled), shard - adamw)
        divided, saved = (shard, sum(own)) if dp > 1 else (0, 0)
        return ShardSize(adamw, shard - adamw, dp * shard, divided, (*own, saved))
    adamw = matrices = total = divided = vectors = filled = saved = 0
    for kind in ((False, False), (False, True), (True, False), (True, True)):
        sizes, others, padding = _matrices_and_others(a, parallel, stage, muon, kind)
        ranks = max(1, dp // parallel.expert) if kind[0] else dp  # that hold the same ones, and divide them
        packed, rest = pack(sizes, ranks, 0, ALIGNED), -(-others // ranks)
        shard = packed.shard_numel
        adamw, matrices, total = adamw + rest, matrices + shard, total + others + ranks * shard
        own = min(rest, others - padding), max(packed.filled)
        vectors, filled = vectors + own[0], filled + own[1]
        if ranks > 1:
            divided, saved = divided + rest + shard, saved + sum(own)
    return ShardSize(adamw, matrices, total, divided, (vectors, filled, saved))


@lru_cache(maxsize=256)
def _matrices_and_others(
    a: Architecture, parallel: ParallelConfig, stage: int, muon: bool, kind: tuple[bool, bool] | None
) -> tuple[list[int], int, int]:
    """Count the elements of each parameter that Muon steps, of all others together, and of their padding.

    kind: whether divided experts, and whether tensor ranks sum their gradients: the optimizer shards each kind by
    itself. None: all.
    """
    of_stage = any_of_stage(a, parallel, stage)
    places = [p for p in of_stage if not p.untrained and kind in (None, (p.expert, p.sums_over_tp))]
    sizes = [p.numel for p in places if muon and p.is_hidden_matrix]
    return sizes, sum(p.numel for p in places) - sum(sizes), sum(p.padding for p in places)
