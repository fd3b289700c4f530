"""Buckets: parameters whose gradients, and later whose new weights, travel between data-parallel ranks together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geotrain.inner.runtime import platform

with platform.quiet_imports():
    import deepspeed.comm as ds_comm  # torch's collectives, counted by DeepSpeed's comms_logger


class Bucket:
    """What one collective reduces, and another gathers. Each rank of the group owns a part of it.

    A reduction leaves the sum over the group in the owner's gradients; those of other owners are undefined from then
    on. A gathering brings each owner's weights to all. Both are begun and finished apart: in between they travel.
    changed: the parameters whose weights other ranks do not have; a gathering brings these, and no others.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        gradients: Sequence[Sequence[Tensor]],
        weights: Mapping[nn.Parameter, Sequence[tuple[int, Tensor]]],
        wire: torch.dtype,
        late: bool,
        position: int,
        flat: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """gradients: by owner, the 1-D views of its part. weights: by parameter, (owner, 1-D view) of its pieces, as
        `owned_pieces` gives them. wire: the type in which gradients travel.

        late: gradients are complete only after backward, when the ranks of a replica have summed theirs. position: of
        the first of its parameters in the order of forward. flat: gradients and weights, where each is one tensor of
        equal parts, which then need not be copied to be sent.
        """
        self.late, self.position = late, position
        self.waits_for = 0  # parameters whose gradients are not complete
        self.changed: set[nn.Parameter] = set()
        self._group, self._rank, self._ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self._gradients, self._weights, self._wire, self._flat = gradients, weights, wire, flat
        self._sizes = [sum(piece.numel() for piece in part) for part in gradients]
        self._reducing: tuple[Any, Tensor] | None = None  # the collective, and where it puts what arrives
        self._gathering: Any = None  # has `wait`

    def begin_reduction(self) -> None:
        if self._ranks == 1:
            return
        sizes, own = self._sizes, self._sizes[self._rank]
        sent = _joined([p for part in self._gradients for p in part], self._wire) if self._flat is None else None
        sent = self._flat[0].to(self._wire) if sent is None and self._flat is not None else sent
        assert sent is not None
        if self._flat is not None and platform.HAS_CUDA:
            arrived = sent.new_empty(own)
            work = ds_comm.reduce_scatter_fn(arrived, sent, group=self._group, async_op=True)
        else:
            # Parts of unequal size have no reduce-scatter, and gloo's is an all-reduce, which sends twice the bytes.
            # So each rank gets every other's summands of its part, and sums them itself.
            arrived = sent.new_empty(self._ranks * own)
            work = ds_comm.all_to_all_single(
                arrived, sent, [own] * self._ranks, sizes, group=self._group, async_op=True
            )
        self._reducing = work, arrived

    def finish_reduction(self) -> None:
        """Wait for the reduction, if one was begun."""
        if self._reducing is None:
            return
        (work, arrived), self._reducing = self._reducing, None
        work.wait()
        own = self._sizes[self._rank]
        if arrived.numel() != own:
            arrived = arrived.view(self._ranks, own).sum(0, dtype=torch.float32)
        _spread(arrived, self._gradients[self._rank])

    def begin_gathering(self) -> None:
        changed, self.changed = self.changed, set()
        if self._ranks == 1 or not changed:
            return
        if self._flat is not None and len(changed) == len(self._weights):
            own = self._flat[1].chunk(self._ranks)[self._rank]
            self._gathering = ds_comm.allgather_fn(self._flat[1], own, group=self._group, async_op=True)
            return
        pieces = (piece for parameter, pieces in self._weights.items() if parameter in changed for piece in pieces)
        self._gathering = PiecesGathering(pieces, self._group)

    def finish_gathering(self) -> None:
        """Wait for the gathering, if one was begun."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None


class PiecesGathering:
    """Brings pieces of flat tensors from their owners to all ranks of the group. They travel until `wait`, which puts
    them where they belong."""

    def __init__(self, pieces: Iterable[tuple[int, Tensor]], group: dist.ProcessGroup) -> None:
        """pieces: (owner, 1-D view); the same on all ranks, in the same order. There is one at least."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._parts: list[list[Tensor]] = [[] for _ in range(ranks)]
        for owner, piece in pieces:
            self._parts[owner].append(piece)
        own, some = self._parts[rank], next(part[0] for part in self._parts if part)
        sizes = [sum(piece.numel() for piece in part) for part in self._parts]
        # Parts of unequal size have no all-gather that all backends know.
        sent = _joined(own, some.dtype).repeat(ranks) if own else some.new_empty(0)
        self._arrived = some.new_empty(sum(sizes))
        self._work: Any = ds_comm.all_to_all_single(
            self._arrived, sent, sizes, [sizes[rank]] * ranks, group=group, async_op=True
        )

    def wait(self) -> None:
        self._work.wait()
        _spread(self._arrived, [piece for part in self._parts for piece in part])


def owned_pieces(flat: Tensor, begin: int, end: int, shard: int) -> Iterator[tuple[int, Tensor]]:
    """(owner, view) of the pieces of flat[begin:end]. shard: elements of each owner's part of the flat tensor."""
    while begin < end:
        owner = begin // shard
        stop = min(end, (owner + 1) * shard)
        yield owner, flat[begin:stop]
        begin = stop


def _joined(pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The pieces one after the other, in memory of their own."""
    out = pieces[0].new_empty(sum(piece.numel() for piece in pieces), dtype=dtype)
    _spread_into(out, pieces)
    return out


def _spread_into(flat: Tensor, pieces: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(flat.split([piece.numel() for piece in pieces])), list(pieces))


def _spread(flat: Tensor, pieces: Sequence[Tensor]) -> None:
    """Cut a flat tensor into the pieces, in their order."""
    if pieces:
        torch._foreach_copy_(list(pieces), list(flat.split([piece.numel() for piece in pieces])))
