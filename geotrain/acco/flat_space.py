"""All parameters of a rank in one flat vector: where each lies, which part the rank owns, and the tensors behind
it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from geotrain.parallelism.acco_forms import CODE_BLOCK
from geotrain.parallelism.whole_matrices import merged_spans


class FlatLayout:
    """The parameter groups of the optimizer laid out one after the other; each data-parallel rank owns an equal
    shard.

    offsets: where each parameter begins, by group. groups: [begin, end) of each group. shard_numel: how many elements
    a rank owns. numel: the elements of all shards, padding included.

    Groups begin, and shards are cut, at multiples of CODE_BLOCK. So no block of codes, whose elements share a scale,
    mixes two groups or two shards.
    """

    def __init__(self, numels: Sequence[Sequence[int]], ranks: int, whole: Sequence[bool] = ()) -> None:
        """numels: the number of elements of each parameter, by group. ranks: data-parallel ranks. whole: for each
        group, whether `pieces` cuts none of its parameters; by default it cuts all."""
        self._whole = tuple(whole) or (False,) * len(numels)
        self.offsets: list[list[int]] = []
        self.groups: list[tuple[int, int]] = []
        begin = 0
        for group in numels:
            *starts, end = accumulate(group, initial=begin)
            self.offsets.append(starts)
            self.groups.append((begin, end))
            begin = -(-end // CODE_BLOCK) * CODE_BLOCK  # rounded up
        self.shard_numel = -(-begin // (ranks * CODE_BLOCK)) * CODE_BLOCK
        self.numel = self.shard_numel * ranks

    def owned(self, rank: int, begin: int, end: int) -> tuple[int, int]:
        """The part of [begin, end) that lies in a rank's shard, counted from the shard's beginning; may be empty."""
        start = rank * self.shard_numel
        low, high = (min(max(x - start, 0), self.shard_numel) for x in (begin, end))
        return low, high

    def pieces(self, rank: int, numel: int) -> list[slice]:
        """The shard of a rank in pieces of about `numel` elements, counted from the shard's beginning."""
        bounds = {0, self.shard_numel}
        for (begin, end), offsets, whole in zip(self.groups, self.offsets, self._whole, strict=True):
            low, high = self.owned(rank, begin, end)
            if whole:
                bounds.update(low for low, _ in (self.owned(rank, o, o) for o in (*offsets, end)))
            else:
                bounds.update(range(-(-low // numel) * numel, high, numel))
        return [slice(*span) for span in merged_spans(sorted(bounds), numel)]


class RotatingBuffers:
    """Three flat tensors that exchange roles: the weights, their gradients, and what is being communicated.

    The parameters and their gradients are views of the first two. The tensors are allocated once and nothing is
    copied between them; a rotation only lets the parameters view other tensors.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], offsets: Sequence[int], total: int) -> None:
        first = parameters[0]
        flats = [torch.zeros(total, dtype=first.dtype, device=first.device) for _ in range(3)]
        self.weights, self.gradients, self.in_flight = flats
        self._parameters = parameters
        self._views = {
            id(flat): [flat[o : o + p.numel()].view(p.shape) for p, o in zip(parameters, offsets, strict=True)]
            for flat in flats
        }
        for parameter, view in zip(parameters, self._views[id(self.weights)], strict=True):
            view.copy_(parameter.data)
        self._point()

    def use_arrived_weights(self) -> None:
        """Compute at the weights that arrived in `in_flight`, and free the buffer of the old ones."""
        self.weights, self.in_flight = self.in_flight, self.weights
        self._point()

    def send_gradients(self) -> None:
        """Hand the gradients to communication; new ones accumulate from zero in the buffer that was free."""
        self.gradients, self.in_flight = self.in_flight, self.gradients
        self.gradients.zero_()
        self._point()

    def compute_at(self, flat: Tensor) -> None:
        """Let the parameters view another of the three tensors, until the next rotation or call."""
        for parameter, view in zip(self._parameters, self._views[id(flat)], strict=True):
            parameter.data = view

    def _point(self) -> None:
        self.compute_at(self.weights)
        for parameter, view in zip(self._parameters, self._views[id(self.gradients)], strict=True):
            parameter.grad = view
