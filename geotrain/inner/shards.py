"""What a rank owns: its part of the fp32 masters, by canonical address, without gathering anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from geotrain.canonical import Run, clip_runs
from geotrain.sharing.mapping import LocalParameter


@dataclass(frozen=True)
class OwnedShard:
    """A part of one local parameter.

    runs: where master's elements lie, in order.
    master: 1-D fp32 view of this rank's part of the optimizer's fp32 partition; of the parameter itself where
        there is no partition (fp32 without ZeRO). Writing to it changes the weights after `GeoEngine.refresh()`.
    pushes: whether this rank speaks for these elements. Over all ranks of a worker, the pushed runs cover every
        element of the model exactly once. A shard that does not push must be kept up to date like the others.
    owner, offset: the tensor that the optimizer steps, under which it keeps its state, and where master begins in
        it, read flat.
    """

    runs: tuple[Run, ...]
    master: Tensor
    pushes: bool
    owner: Tensor
    offset: int

    @property
    def numel(self) -> int:
        return self.master.numel()


@dataclass(frozen=True)
class _Piece:
    start: int  # in the local parameter, read flat
    master: Tensor
    mine: bool
    owner: Tensor
    offset: int


def owned_shards(
    placed: Iterable[tuple[nn.Parameter, LocalParameter]],
    optimizer: Any,
    partitioned: bool,
    dp_rank: int,
    dp_size: int,
) -> tuple[OwnedShard, ...]:
    """The shards of this rank, in canonical order.

    optimizer: the engine's. partitioned: whether it split the masters over data-parallel ranks (ZeRO 1 and 2,
    BF16_Optimizer). If not, every rank holds all of its parameters and pushes one of dp_size parts.
    """
    shards: list[OwnedShard] = []
    for parameter, place in placed:
        if partitioned:
            pieces = _partitioned(parameter, optimizer)
        else:
            pieces = _replicated(parameter, dp_rank, dp_size)
        for piece in pieces:
            runs = tuple(clip_runs(place.runs, piece.start, piece.start + piece.master.numel()))
            shards.append(OwnedShard(runs, piece.master, place.pushes and piece.mine, piece.owner, piece.offset))
    return tuple(shards)


def _partitioned(parameter: Any, optimizer: Any) -> Iterator[_Piece]:
    """DeepSpeed links a parameter to its piece of this rank's fp32 partition, if it has one."""
    link = parameter._hp_mapping
    if link is not None:
        (owner,) = optimizer.param_groups[link.param_group_index]["params"]
        start, offset = link.lp_fragment_address.start, link.hp_fragment_address.start
        yield _Piece(start, link.get_hp_fragment().detach(), True, owner, offset)


def _replicated(parameter: nn.Parameter, dp_rank: int, dp_size: int) -> Iterator[_Piece]:
    flat = parameter.data.view(-1)
    assert flat.dtype == torch.float32, "without a partition the parameters are their own masters"
    bounds = [flat.numel() * i // dp_size for i in (0, dp_rank, dp_rank + 1, dp_size)]
    for (begin, end), mine in zip(pairwise(bounds), (False, True, False), strict=True):
        if begin < end:
            yield _Piece(begin, flat[begin:end], mine, parameter, begin)
