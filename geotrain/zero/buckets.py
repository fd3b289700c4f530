"""Buckets: parameters whose gradients, and later whose new weights, travel between data-parallel ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from geotrain.inner import platform

with platform.quiet_imports():
    import deepspeed.comm as ds_comm  # torch's collectives, counted by DeepSpeed's comms_logger


class Bucket:
    """What one collective reduces, and another gathers. Each rank of the group owns a part of it.

    A reduction leaves the sum over the group in the owner's gradients; those of other owners are undefined from then
    on. A gathering brings each owner's weights to all. Both are begun and finished apart: in between they travel.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        gradients: Sequence[Sequence[Tensor]],
        weights: Sequence[Sequence[Tensor]],
        wire: torch.dtype,
        late: bool,
        position: int,
        flat: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """gradients, weights: by owner, the 1-D views of its part. wire: the type in which gradients travel.

        late: gradients are complete only after backward, when the ranks of a replica have summed theirs. position: of
        the first of its parameters in the order of forward. flat: gradients and weights, where each is one tensor of
        equal parts, which then need not be copied to be sent.
        """
        self.late, self.position = late, position
        self.waits_for = 0  # parameters whose gradients are not complete
        self._group, self._rank, self._ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self._gradients, self._weights, self._wire, self._flat = gradients, weights, wire, flat
        self._sizes = [sum(piece.numel() for piece in part) for part in weights]
        self._reducing: tuple[Any, Tensor] | None = None  # the collective, and where it puts what arrives
        self._gathering: tuple[Any, Tensor | None] | None = None

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
        if self._ranks == 1:
            return
        own = self._weights[self._rank]
        if self._flat is not None:
            work = ds_comm.allgather_fn(self._flat[1], own[0], group=self._group, async_op=True)
            self._gathering = work, None
            return
        sent = _joined(own, own[0].dtype).repeat(self._ranks) if own else self._weights_of_any().new_empty(0)
        arrived = sent.new_empty(sum(self._sizes))
        equal = [self._sizes[self._rank]] * self._ranks
        work = ds_comm.all_to_all_single(arrived, sent, self._sizes, equal, group=self._group, async_op=True)
        self._gathering = work, arrived

    def finish_gathering(self) -> None:
        """Wait for the gathering, if one was begun."""
        if self._gathering is None:
            return
        (work, arrived), self._gathering = self._gathering, None
        work.wait()
        if arrived is not None:
            _spread(arrived, [piece for part in self._weights for piece in part])

    def _weights_of_any(self) -> Tensor:
        return next(piece for part in self._weights for piece in part)


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
