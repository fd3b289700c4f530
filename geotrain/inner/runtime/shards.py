"""A rank's own part of the fp32 masters and of the optimizer's state, by canonical address.

Deltas and checkpoints are made from these parts directly, so no rank ever gathers the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from geotrain.parallelism.local_parameters import LocalParameter
from geotrain.parallelism.mesh import RankMesh
from geotrain.parameters.parameter_map import StridedSlice, clip_runs, numel


@dataclass(frozen=True)
class OwnedShard:
    """The fp32 masters of a part of one local parameter.

    runs: the canonical addresses of master's elements, in the order in which they lie there.
    master: 1-D fp32 view of this rank's part of the optimizer's fp32 partition; of the parameter itself where
        there is no partition (fp32 without ZeRO). Writing to it changes the weights after `GeoEngine.refresh()`.
    pushes: whether this rank sends the deltas of these elements. Over all ranks of a worker, the runs of the shards
        that push cover every element of the model exactly once. The others are copies: they send nothing, but
        answers must be written to them too.
    owner: the tensor that the optimizer steps, under which it keeps its state. offset: where master begins in the
        flattened owner, in elements.
    """

    runs: tuple[StridedSlice, ...]
    master: Tensor
    pushes: bool
    owner: Tensor
    offset: int

    @property
    def numel(self) -> int:
        return self.master.numel()


def owned_shards(
    placed: Iterable[tuple[nn.Parameter, LocalParameter]], optimizer: Any, partitioned: bool, mesh: RankMesh
) -> tuple[OwnedShard, ...]:
    """Find the shards of this rank, in canonical order.

    optimizer: the engine's. partitioned: whether it split the masters over data-parallel ranks (ZeRO 1 and 2,
    BF16_Optimizer). If not, every data-parallel rank holds the same parameters whole; each then pushes one of as many
    equal parts as there are ranks that hold them, so that the upload is shared among them.
    """
    shards: list[OwnedShard] = []
    for parameter, place in placed:

        def add(start: int, master: Tensor, mine: bool, owner: Tensor, offset: int, place: Any = place) -> None:
            """Add a shard. start: where the master begins in the flattened local parameter, in elements."""
            runs = tuple(clip_runs(place.runs, start, start + master.numel()))
            if addressed := numel(runs):  # what is behind it is padding
                shards.append(OwnedShard(runs, master[:addressed], place.pushes and mine, owner, offset))

        if partitioned and not place.untrained:
            # DeepSpeed links a parameter to its part of this rank's fp32 partition. The link is None where the
            # parameter lies wholly in the partitions of other data-parallel ranks.
            link: Any = parameter._hp_mapping  # type: ignore[attr-defined]
            if link is not None:
                (owner,) = optimizer.param_groups[link.param_group_index]["params"]
                start, offset = link.lp_fragment_address.start, link.hp_fragment_address.start
                add(start, link.get_hp_fragment().detach(), True, owner, offset)
        else:
            flat = parameter.data.view(-1)
            assert flat.dtype == torch.float32, "without a partition the parameters are their own masters"
            copies, rank = mesh.dp_size, mesh.dp_rank
            if place.expert:
                copies, rank = copies // mesh.ep_size, rank // mesh.ep_size  # ep ranks are neighbours
            for begin, end, mine in replica_parts(flat.numel(), rank, copies):
                add(begin, flat[begin:end], mine, parameter, begin)
    return tuple(shards)


def replica_parts(numel: int, rank: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """Divide a tensor of which `size` ranks have a copy: what is before this rank's part, the part, what is after it.

    Yields (begin, end, whether this rank pushes it); empty ones are left out.
    """
    bounds = [numel * i // size for i in (0, rank, rank + 1, size)]
    for (begin, end), mine in zip(pairwise(bounds), (False, True, False), strict=True):
        if begin < end:
            yield begin, end, mine
