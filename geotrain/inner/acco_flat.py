"""The flat space of one rank's parameters: where each lies, which part the rank owns, and tensors that view it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from geotrain.sharing.acco_forms import CODE_BLOCK


@dataclass(frozen=True)
class FlatPlan:
    """Groups of parameters (as weight decay asks for) laid out one after the other, and equal shards of the whole.

    offsets: of each parameter, by group. sections: [begin, end) of each group. shard: elements a rank owns.
    Groups begin, and shards are cut, at multiples of CODE_BLOCK, so that no block of codes mixes two of them.
    """

    offsets: tuple[tuple[int, ...], ...]
    sections: tuple[tuple[int, int], ...]
    shard: int
    ranks: int

    @property
    def total(self) -> int:
        return self.shard * self.ranks

    def owned(self, rank: int) -> list[tuple[int, int]]:
        """[begin, end) of each group's part in the shard of a rank, counted from the shard's beginning."""
        start = rank * self.shard
        clipped = [(min(max(x - start, 0), self.shard) for x in section) for section in self.sections]
        return [(begin, end) for begin, end in clipped]


def flat_plan(numels: Sequence[Sequence[int]], ranks: int) -> FlatPlan:
    """numels: elements of each parameter, by group."""
    offsets, sections, begin = [], [], 0
    for group in numels:
        *starts, end = accumulate(group, initial=begin)
        offsets.append(tuple(starts))
        sections.append((begin, end))
        begin = _aligned(end)
    return FlatPlan(tuple(offsets), tuple(sections), _aligned(-(-begin // ranks)), ranks)


def _aligned(n: int) -> int:
    return -(-n // CODE_BLOCK) * CODE_BLOCK


class Buffers:
    """Three flat tensors that change roles: the weights, their gradients, and one for what travels.

    Parameters are views of the first two. Allocated once; nothing is ever copied between them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], offsets: Sequence[int], total: int) -> None:
        first = parameters[0]
        self._parameters = parameters
        self._flat = [torch.zeros(total, dtype=first.dtype, device=first.device) for _ in range(3)]
        self._views = {
            id(flat): [flat[o : o + p.numel()].view(p.shape) for p, o in zip(parameters, offsets, strict=True)]
            for flat in self._flat
        }
        for parameter, view in zip(parameters, self._views[id(self.weights)], strict=True):
            view.copy_(parameter.data)
        self._point()

    @property
    def weights(self) -> Tensor:
        return self._flat[0]

    @property
    def gradients(self) -> Tensor:
        return self._flat[1]

    @property
    def travelling(self) -> Tensor:
        return self._flat[2]

    def adopt(self) -> None:
        """Compute at the weights that arrived; the old ones may be overwritten."""
        self._flat[0], self._flat[2] = self._flat[2], self._flat[0]
        self._point()

    def send_off(self) -> None:
        """The gradients travel; new ones accumulate in their place, from zero."""
        self._flat[1], self._flat[2] = self._flat[2], self._flat[1]
        self.gradients.zero_()
        self._point()

    def compute_at(self, flat: Tensor) -> None:
        """Make the parameters views of one of the three for a while; `adopt` or `send_off` end it."""
        for parameter, view in zip(self._parameters, self._views[id(flat)], strict=True):
            parameter.data = view

    def _point(self) -> None:
        weights, gradients = self._views[id(self.weights)], self._views[id(self.gradients)]
        for parameter, weight, gradient in zip(self._parameters, weights, gradients, strict=True):
            parameter.data, parameter.grad = weight, gradient
