"""Buckets: parameters whose gradients, and later whose new weights, travel between data-parallel ranks together."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from geotrain.inner.runtime import platform
from geotrain.inner.zero.codes import Codes

with platform.quiet_imports():
    import deepspeed.comm as ds_comm  # torch's collectives, counted by DeepSpeed's comms_logger


@dataclass(frozen=True)
class BucketCodes:
    """What a bucket needs to send codes.

    gradients, weights: the codes. reduced: 1-D fp32 views of this rank's part, where the sums over the ranks go: the
    gradients keep what their codes lost. held: by owner, 1-D views of the weights. wanted: masters of this rank's.
    """

    gradients: Codes
    weights: Codes
    reduced: Sequence[Tensor]
    held: Sequence[Sequence[Tensor]]
    wanted: Sequence[Tensor]


class Bucket:
    """Parameters whose gradients one collective reduces, and whose weights another gathers.

    Each rank of the group owns a part of it.

    A reduction leaves the sum over the group in the owner's gradients; those of other owners are undefined from then
    on. A gathering brings each owner's weights to all. Both are begun and finished apart: in between they travel.
    changed: the parameters whose weights other ranks do not have; a gathering brings these, and no others.
    by_codes: whether the next gathering brings coded changes of all weights, and not the changed ones themselves.
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
        codes: BucketCodes | None = None,
    ) -> None:
        """Describe a bucket of the ranks in `group`.

        gradients: by owner, the 1-D views of its part. weights: by parameter, (owner, 1-D view) of its parts, as
        `owned_parts` gives them. wire: the type in which gradients travel.

        late: gradients are complete only after backward, when the ranks of a replica have summed theirs. position: of
        the first of its parameters in the order of forward. flat: gradients and weights, where each is one tensor of
        equal parts, which then need not be copied to be sent. codes: None: values are sent, not codes.
        """
        self.late, self.position = late, position
        self.waits_for = 0  # parameters whose gradients are not complete
        self.changed: set[nn.Parameter] = set()
        self.codes, self.by_codes = codes, False
        self._group, self._rank, self._ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self._gradients, self._weights, self._wire, self._flat = gradients, weights, wire, flat
        self._sizes = [sum(view.numel() for view in views) for views in gradients]
        # Collectives under way, each with what then puts where it belongs what has arrived.
        self._reducing: tuple[Any, Callable[[], None]] | None = None
        self._gathering: tuple[Any, Callable[[], None]] | None = None

    def parts(self, parameter: nn.Parameter) -> Sequence[tuple[int, Tensor]]:
        """(owner, 1-D view) of the parts of one of its parameters' weights."""
        return self._weights[parameter]

    def begin_reduction(self) -> None:
        if self._ranks == 1:
            return
        if self.codes is None:
            self._reduce_values(self._wire)
            return
        codes, reduced = self.codes.gradients, self.codes.reduced
        sizes = [codes.bytes(views) for views in self._gradients]
        sent, own = self._new_codes(sum(sizes)), sizes[self._rank]
        for views, part in zip(self._gradients, sent.split(sizes), strict=True):
            codes.encode_sums(views, part)
        arrived = self._new_codes(self._ranks * own)

        def put() -> None:
            for rank, part in enumerate(arrived.view(self._ranks, own)):
                codes.decode(part, reduced, first=rank == 0)

        self._reducing = self._exchanged(arrived, sent, own, sizes), put

    def move_residuals(self) -> None:
        """Move to the owners what codes lost of gradients on all ranks; it is then theirs to send."""
        if self.codes is not None:
            self._reduce_values(torch.float32)
            self.finish_reduction()
            for owner, views in enumerate(self._gradients):
                if owner != self._rank and views:
                    torch._foreach_zero_(list(views))

    def _reduce_values(self, wire: torch.dtype) -> None:
        sizes, own = self._sizes, self._sizes[self._rank]
        if self._flat is None:
            sent = _joined([view for views in self._gradients for view in views], wire)
        else:
            sent = self._flat[0].to(wire)
        if self._flat is not None and platform.backend() == "nccl":
            arrived = sent.new_empty(own)
            work = ds_comm.reduce_scatter_fn(arrived, sent, group=self._group, async_op=True)
        else:
            # Parts of unequal size have no reduce-scatter, and gloo's is an all-reduce, which sends twice the bytes.
            # So each rank gets every other's summands of its part, and sums them itself.
            arrived = sent.new_empty(self._ranks * own)
            work = self._exchanged(arrived, sent, own, sizes)

        def put() -> None:
            total = arrived
            if total.numel() != own:
                total = total.view(self._ranks, own).sum(0, dtype=torch.float32)
            _spread(total, self._gradients[self._rank])

        self._reducing = work, put

    def _exchanged(self, arrived: Tensor, sent: Tensor, own: int, sizes: list[int]) -> Any:
        return ds_comm.all_to_all_single(arrived, sent, [own] * self._ranks, sizes, group=self._group, async_op=True)

    def _new_codes(self, count: int) -> Tensor:
        return next(view for views in self._gradients for view in views).new_empty(count, dtype=torch.uint8)

    def finish_reduction(self) -> None:
        """Wait for the reduction, if one was begun."""
        if self._reducing is not None:
            (work, put), self._reducing = self._reducing, None
            work.wait()
            put()

    def begin_gathering(self) -> None:
        (changed, self.changed), (by_codes, self.by_codes) = (self.changed, set()), (self.by_codes, False)
        if self._ranks == 1 or not changed:
            return
        if by_codes:
            self._gather_changes()
        elif self._flat is not None and len(changed) == len(self._weights):
            self._gathering = self._gathered_flat(self._flat[1]), _nothing
        else:
            parts = (part for parameter, parts in self._weights.items() if parameter in changed for part in parts)
            self._gathering = PartGathering(parts, self._group), _nothing

    def _gather_changes(self) -> None:
        assert self.codes is not None
        codes, held = self.codes.weights, self.codes.held
        sizes = [codes.bytes(views) for views in held]
        whole = self._new_codes(sum(sizes))
        parts = whole.split(sizes)
        codes.encode_changes(held[self._rank], self.codes.wanted, parts[self._rank])

        def change() -> None:
            for part, views in zip(parts, held, strict=True):
                codes.change(part, views)

        work = PartGathering(enumerate(parts), self._group) if self._flat is None else self._gathered_flat(whole)
        self._gathering = work, change

    def _gathered_flat(self, flat: Tensor) -> Any:
        return ds_comm.allgather_fn(flat, flat.chunk(self._ranks)[self._rank], group=self._group, async_op=True)

    def finish_gathering(self) -> None:
        """Wait for the gathering, if one was begun."""
        if self._gathering is not None:
            (work, put), self._gathering = self._gathering, None
            work.wait()
            put()


def _nothing() -> None:
    """Do nothing: what has arrived is where it belongs."""


class PartGathering:
    """Brings parts of flat tensors from their owners to all ranks of a group: they travel until `wait`."""

    def __init__(self, parts: Iterable[tuple[int, Tensor]], group: dist.ProcessGroup) -> None:
        """Send this rank's parts. parts: (owner, 1-D view), at least one; the same on all ranks, in the same
        order."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self._views: list[list[Tensor]] = [[] for _ in range(ranks)]  # by owner
        for owner, view in parts:
            self._views[owner].append(view)
        own, some = self._views[rank], next(views[0] for views in self._views if views)
        sizes = [sum(view.numel() for view in views) for views in self._views]
        # Parts of unequal size have no all-gather that all backends know.
        sent = _joined(own, some.dtype).repeat(ranks) if own else some.new_empty(0)
        self._arrived = some.new_empty(sum(sizes))
        self._work: Any = ds_comm.all_to_all_single(
            self._arrived, sent, sizes, [sizes[rank]] * ranks, group=group, async_op=True
        )

    def wait(self) -> None:
        """Wait for the parts, and put them where they belong."""
        self._work.wait()
        _spread(self._arrived, [view for views in self._views for view in views])


def owned_parts(flat: Tensor, begin: int, end: int, shard: int) -> Iterator[tuple[int, Tensor]]:
    """Cut flat[begin:end] at the shards' bounds; yields (owner, view). shard: elements of each owner's shard."""
    while begin < end:
        owner = begin // shard
        stop = min(end, (owner + 1) * shard)
        yield owner, flat[begin:stop]
        begin = stop


def counted_spans(
    begins: Iterable[tuple[nn.Parameter, int]], pushed: Container[nn.Parameter], first: int, numel: int
) -> list[tuple[int, int]]:
    """List [begin, end) of the parts of a shard whose squares this rank adds to the global gradient norm: over all
    ranks, every element of the model once.

    begins: where each parameter begins in the flat tensor, in order. pushed: those that this rank pushes; gaps of
    Muon are none. first, numel: of the shard in the flat tensor; spans count from its beginning. Those that touch are
    one.
    """
    joined: list[tuple[int, int]] = []
    for parameter, place in begins:
        begin, end = max(place - first, 0), min(place - first + parameter.numel(), numel)
        if begin < end and parameter in pushed:
            if joined and joined[-1][1] == begin:
                begin, _ = joined.pop()
            joined.append((begin, end))
    return joined


def _joined(views: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Copy the views one after the other into a new tensor."""
    sizes = [view.numel() for view in views]
    out = views[0].new_empty(sum(sizes), dtype=dtype)
    torch._foreach_copy_(list(out.split(sizes)), list(views))
    return out


def _spread(flat: Tensor, views: Sequence[Tensor]) -> None:
    """Copy a flat tensor into the views, in their order."""
    if views:
        torch._foreach_copy_(list(views), list(flat.split([view.numel() for view in views])))
