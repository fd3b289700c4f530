"""Buckets: parameters whose gradients, and later whose new weights, travel between data-parallel ranks together."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    Where the group's ranks are in several sites, a reduction goes on in two levels: inside each site a rank gets the
    sums of what those in its place own in any site, then these exchange sums; a gathering goes the other way.
    changed: the parameters whose weights other ranks do not have; a gathering brings these, and no others.
    by_codes: whether the next gathering brings coded changes of all weights, and not the changed ones themselves.
    """

    def __init__(
        self,
        levels: Sequence[dist.ProcessGroup],
        gradients: Sequence[Sequence[Tensor]],
        weights: Mapping[nn.Parameter, Sequence[tuple[int, Tensor]]],
        wire: torch.dtype,
        late: bool,
        position: int,
        flat: tuple[Tensor, Tensor] | None = None,
        codes: BucketCodes | None = None,
    ) -> None:
        """Describe a bucket.

        levels: the group; where its ranks are in several sites also the two that `RankMesh.levels` has of it.
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
        group, *self._levels = levels
        self._group, self._rank, self._ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self._each = dist.get_world_size(self._levels[0]) if self._levels else self._ranks
        self._gradients, self._weights, self._wire, self._flat = gradients, weights, wire, flat
        # What is left of collectives under way: to wait, and to put where it belongs what has arrived.
        self._reducing: list[Callable[[], object]] = []
        self._gathering: list[Callable[[], object]] = []

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

        self._reducing += [_exchanged(arrived, sent, own, sizes, self._group).wait, put]

    def move_residuals(self) -> None:
        """Move to the owners what codes lost of gradients on all ranks; it is then theirs to send."""
        if self.codes is not None:
            self._reduce_values(torch.float32)
            self.finish_reduction()
            for owner, views in enumerate(self._gradients):
                if owner != self._rank and views:
                    torch._foreach_zero_(list(views))

    def _reduce_values(self, wire: torch.dtype) -> None:
        alike = [self._gradients[place :: self._each] for place in range(self._each)]  # by place, then by site
        parts = [[view for views in of_place for view in views] for of_place in alike]
        inside, *across = self._levels or (self._group,)
        self._sum(inside, parts, wire)
        self._reducing += [partial(self._sum, group, alike[self._rank % self._each], wire) for group in across]

    def _sum(self, group: dist.ProcessGroup, parts: Sequence[Sequence[Tensor]], wire: torch.dtype) -> None:
        """Begin to sum over a group each rank's part."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        sizes = [sum(view.numel() for view in views) for views in parts]
        own, flat = sizes[rank], self._flat if group is self._group else None
        if not any(sizes):
            return
        sent = flat[0].to(wire) if flat else _joined([view for views in parts for view in views], wire)
        if flat and platform.backend() == "nccl":
            arrived = sent.new_empty(own)
            work = ds_comm.reduce_scatter_fn(arrived, sent, group=group, async_op=True)
        else:
            # Parts of unequal size have no reduce-scatter, and gloo's is an all-reduce, which sends twice the bytes.
            # So each rank gets every other's summands of its part, and sums them itself.
            arrived = sent.new_empty(ranks * own)
            work = _exchanged(arrived, sent, own, sizes, group)

        def put() -> None:
            work.wait()
            total = arrived
            if total.numel() != own:
                total = total.view(ranks, own).sum(0, dtype=torch.float32)
            _spread(total, parts[rank])

        self._reducing.append(put)

    def _new_codes(self, count: int) -> Tensor:
        return next(view for views in self._gradients for view in views).new_empty(count, dtype=torch.uint8)

    def reduce_across(self) -> None:
        """Go on between sites with a reduction that was begun, once it is done inside them."""
        if self._levels and len(self._reducing) == 2:
            _finish([self._reducing.pop(0), self._reducing.pop(0)])

    def finish_reduction(self) -> None:
        """Wait for the reduction, if one was begun."""
        _finish(self._reducing)

    def begin_gathering(self) -> None:
        (changed, self.changed), (by_codes, self.by_codes) = (self.changed, set()), (self.by_codes, False)
        if self._ranks == 1 or not changed:
            return
        parts = (part for parameter, parts in self._weights.items() if parameter in changed for part in parts)
        if by_codes:
            self._gather_changes()
        elif self._levels:
            (inside, across), each, held = self._levels, self._each, list(parts)
            alike = [(owner // each, view) for owner, view in held if owner % each == self._rank % each]
            self._gathering = [PartGathering(alike, across).wait] if alike else []
            # Begun once those of the other sites are here.
            self._gathering.append(lambda: PartGathering([(o % each, view) for o, view in held], inside).wait())
        elif self._flat is not None and len(changed) == len(self._weights):
            self._gathering = [self._gathered_flat(self._flat[1]).wait]
        else:
            self._gathering = [PartGathering(parts, self._group).wait]

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
        self._gathering = [work.wait, change]

    def _gathered_flat(self, flat: Tensor) -> Any:
        return ds_comm.allgather_fn(flat, flat.chunk(self._ranks)[self._rank], group=self._group, async_op=True)

    def finish_gathering(self) -> None:
        """Wait for the gathering, if one was begun."""
        _finish(self._gathering)


def _finish(left: list[Callable[[], object]]) -> None:
    """Do what is left, and forget it."""
    while left:
        left.pop(0)()


def _exchanged(arrived: Tensor, sent: Tensor, own: int, sizes: list[int], group: dist.ProcessGroup) -> Any:
    return ds_comm.all_to_all_single(arrived, sent, [own] * len(sizes), sizes, group=group, async_op=True)


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
