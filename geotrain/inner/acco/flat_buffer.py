"""All parameters of a rank in one flat buffer: where each lies, which shard the rank owns, and the tensors behind
it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from geotrain.parallelism.acco_forms import CODE_BLOCK


class FlatBuffer:
    """Places of the optimizer's parameter groups, one after the other; each data-parallel rank owns an equal shard.

    offsets: where each parameter begins, by group. groups: [begin, end) of each group. shard_numel: elements that a
    rank owns. numel: elements of all shards, padding included.

    Groups begin, and shards are cut, at multiples of CODE_BLOCK. So no block of codes, whose elements share a scale,
    mixes two groups or two shards.
    """

    def __init__(self, numels: Sequence[Sequence[int]], ranks: int) -> None:
        """Lay out parameters of these sizes. numels: elements of each parameter, by group. ranks: data-parallel
        ranks."""
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
        """Intersect [begin, end) with a rank's shard; counted from the shard's beginning, and may be empty."""
        start = rank * self.shard_numel
        low, high = (min(max(x - start, 0), self.shard_numel) for x in (begin, end))
        return low, high


class RotatingBuffers:
    """Flat tensors of weights, of their gradients and, unless codes travel, of what is being communicated.

    The parameters are views of the weights, and what accumulates their gradients are views of the second. Where
    gradients are accumulated in the type of the weights, the tensors exchange roles and nothing is copied between
    them; where in a wider one, gradients have a tensor of their own, and are rounded where they are sent. The tensors
    are allocated once.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        offsets: Sequence[int],
        total: int,
        accumulated: torch.dtype,
        coded: bool,
    ) -> None:
        """Allocate the tensors and let the parameters view them. accumulated: the type in which gradients are. coded:
        whether codes travel, for which there is no tensor here."""
        first = parameters[0]
        self._wide = accumulated != first.dtype
        self.weights = torch.zeros(total, dtype=first.dtype, device=first.device)
        self.in_flight = self.weights.new_zeros(0 if coded else total)
        self.gradients = torch.zeros(total, dtype=accumulated, device=first.device)
        self._parameters, self._offsets = parameters, offsets
        self._hooks: list[RemovableHandle] = []
        for parameter, view in zip(parameters, _views(self.weights, parameters, offsets), strict=True):
            view.copy_(parameter.data)
        if self._wide:
            for parameter, view in zip(parameters, _views(self.gradients, parameters, offsets), strict=True):
                parameter._hp_grad = view  # type: ignore[attr-defined]  # DeepSpeed's name for it
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_add, view)))
        self._point()

    def use_arrived_weights(self) -> None:
        """Compute at the weights that arrived in `in_flight`, and free the buffer of the old ones."""
        self.weights, self.in_flight = self.in_flight, self.weights
        self._point()

    def send_gradients(self) -> None:
        """Hand the gradients to communication; new ones accumulate from zero."""
        if self._wide:
            self.in_flight.copy_(self.gradients)
        else:
            self.gradients, self.in_flight = self.in_flight, self.gradients
        self.gradients.zero_()
        self._point()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _point(self) -> None:
        for parameter, view in zip(
            self._parameters, _views(self.weights, self._parameters, self._offsets), strict=True
        ):
            parameter.data = view
        if not self._wide:
            for parameter, view in zip(
                self._parameters, _views(self.gradients, self._parameters, self._offsets), strict=True
            ):
                parameter.grad = view


def _views(flat: Tensor, parameters: Sequence[nn.Parameter], offsets: Sequence[int]) -> list[Tensor]:
    return [flat[o : o + p.numel()].view(p.shape) for p, o in zip(parameters, offsets, strict=True)]


def _add(total: Tensor, parameter: Tensor) -> None:
    """Add a parameter's gradient of one micro-batch to the window's; a hook of autograd."""
    assert parameter.grad is not None
    total.add_(parameter.grad)
    parameter.grad = None
