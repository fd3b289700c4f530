"""What a rank owns: its part of the fp32 masters, by canonical address, without gathering anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from geotrain.canonical import Run, clip_runs
from geotrain.inner.mapping import LocalParameter


@dataclass(frozen=True)
class OwnedShard:
    """A part of one local parameter.

    runs: where master's elements lie, in order.
    master: 1-D fp32 view of this rank's part of the optimizer's fp32 partition; of the parameter itself where
        there is no partition (fp32 without ZeRO). Writing to it changes the weights after `GeoEngine.refresh()`.
    pushes: whether this rank speaks for these elements. Over all ranks of a worker, the pushed runs cover every
        element of the model exactly once. A shard that does not push must be kept up to date like the others.
    parameter, start: the local parameter that master is a part of, and where it begins in it, read flat.
    """

    runs: tuple[Run, ...]
    master: Tensor
    pushes: bool
    parameter: nn.Parameter
    start: int

    @property
    def numel(self) -> int:
        return self.master.numel()


def owned_shards(
    placed: Iterable[tuple[nn.Parameter, LocalParameter]], partitioned: bool, dp_rank: int, dp_size: int
) -> tuple[OwnedShard, ...]:
    """The shards of this rank, in canonical order.

    partitioned: whether DeepSpeed split the masters over data-parallel ranks (ZeRO 1, 2, BF16_Optimizer). If not,
    every rank holds all of its parameters and pushes one of dp_size parts.
    """
    shards: list[OwnedShard] = []
    for parameter, place in placed:
        pieces = _partitioned(parameter) if partitioned else _replicated(parameter, dp_rank, dp_size)
        for start, master, mine in pieces:
            runs = tuple(clip_runs(place.runs, start, start + master.numel()))
            shards.append(OwnedShard(runs, master, place.pushes and mine, parameter, start))
    return tuple(shards)


def _partitioned(parameter: nn.Parameter) -> Iterator[tuple[int, Tensor, bool]]:
    """DeepSpeed links a parameter to its piece of this rank's fp32 partition, if it has one."""
    link = parameter._hp_mapping
    if link is not None:
        yield link.lp_fragment_address.start, link.get_hp_fragment().detach(), True


def _replicated(parameter: nn.Parameter, dp_rank: int, dp_size: int) -> Iterator[tuple[int, Tensor, bool]]:
    flat = parameter.data.view(-1)
    assert flat.dtype == torch.float32, "without a partition the parameters are their own masters"
    bounds = [flat.numel() * i // dp_size for i in (0, dp_rank, dp_rank + 1, dp_size)]
    for (begin, end), mine in zip(pairwise(bounds), (False, True, False), strict=True):
        if begin < end:
            yield begin, flat[begin:end], mine
