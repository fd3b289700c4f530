"""DiLoCo (arXiv 2311.08105): the server waits for every member's delta, then takes one Nesterov step on their mean.

With regions, each region server means its workers' deltas first; weighted by the workers they stand for, the mean of
the regions' means is that of all workers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geotrain.config import SyncConfig
from geotrain.kernels import OuterStep
from geotrain.outer.rules.rule import NOTHING, Counts, Encode, Inputs, Vectors, average


def nesterov(lr: float, momentum: float) -> OuterStep:
    """DiLoCo's outer step (arXiv 2311.08105): m = μ·m + Δ;  x −= lr·(Δ + μ·m)."""
    return OuterStep(lr, momentum, 1.0, lr * momentum, moves_momentum=True)


class _Sync:
    """Collects one delta of every member, then means them, weighted by the number of workers each stands for."""

    in_rounds = True

    def __init__(self, members: tuple[str, ...]) -> None:
        # Deltas are summed in the order of their senders' names: floating-point sums depend on the order, and a run
        # must give the same bits whatever the order of arrival.
        self.members = tuple(sorted(members))

    def complete(self, c: Counts) -> bool:
        return len(c.waiting) == len(self.members)

    def take_weights(self, c: Counts) -> Inputs:
        """Return the weight of each member's delta, all of which wait, and let none wait any more."""
        weights: Inputs = {member: c.waiting[member] for member in self.members}
        c.waiting.clear()
        return weights

    def apply(self, v: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        v.waiting[member] = delta.clone()  # the shard decodes its next update into delta's memory

    def take_mean(self, v: Vectors, weights: Inputs) -> Tensor:
        total = sum(weights.values())
        mean = torch.zeros_like(v.x)
        for member, weight in weights.items():
            average(mean, v.waiting.pop(member), -weight / total)  # `average` subtracts
        return mean


class SyncRegion(_Sync):
    """Sends the mean of its workers' deltas up and answers them with the global weights that come back."""

    def start(self, c: Counts) -> None:
        c.counts.update(in_flight=0)

    def begin(self, v: Vectors) -> None:
        """Do nothing: the rule keeps no other vector."""

    def on_delta(self, c: Counts, member: str, weight: int, members: int) -> tuple[Inputs, tuple[str, ...]]:
        c.version += 1
        c.waiting[member] = weight
        return NOTHING, ()

    def pending(self, c: Counts) -> bool:
        return bool(c.waiting)

    def may_send(self, c: Counts, flush: bool) -> bool:
        # `flush` changes nothing: what is sent is the mean of all workers, or nothing.
        return not c.counts["in_flight"] and self.complete(c)

    def on_send(self, c: Counts) -> tuple[Inputs, int]:
        c.counts["in_flight"] = 1
        weight = sum(c.waiting.values())
        return self.take_weights(c), weight

    def progress(self, v: Vectors, inputs: Inputs, encode: Encode) -> None:
        encode(self.take_mean(v, inputs))

    def on_global_weights(self, c: Counts) -> tuple[Inputs, tuple[str, ...]]:
        c.counts["in_flight"] = 0
        return NOTHING, self.members

    def merge(self, v: Vectors, x_global: Tensor, inputs: Inputs) -> None:
        v.x.copy_(x_global)


class SyncGlobal(_Sync):
    """DiLoCo's outer step once all members have sent."""

    bf16_vectors = ("momentum",)

    def __init__(self, config: SyncConfig, members: tuple[str, ...]) -> None:
        super().__init__(members)
        self.step = nesterov(config.lr, config.momentum)

    def on_delta(self, c: Counts, member: str, weight: int, members: int) -> tuple[Inputs, tuple[str, ...]]:
        c.waiting[member] = weight
        if not self.complete(c):
            return NOTHING, ()
        c.version += 1
        return self.take_weights(c), self.members

    def apply(self, v: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        super().apply(v, member, delta, inputs)
        if inputs:
            v.move(self.take_mean(v, inputs), self.step, "momentum")
