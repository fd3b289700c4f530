"""DiLoCo (arXiv 2311.08105): the server waits for every member's delta, then takes one Nesterov step on their mean.

With regions, each region server means its workers' deltas first; weighted by the workers they stand for, the mean of
the regions' means is that of all workers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geotrain import kernels
from geotrain.config import SyncConfig
from geotrain.kernels import OuterStep
from geotrain.outer.rules.rule import FragmentState, average


def nesterov(x: Tensor, delta: Tensor, m: Tensor, *, lr: float, momentum: float) -> None:
    """DiLoCo's outer step (arXiv 2311.08105): m = μ·m + Δ;  x −= lr·(Δ + μ·m)."""
    step = OuterStep(keep=momentum, gain=1.0, from_momentum=lr * momentum, from_delta=lr, moves_momentum=True)
    kernels.outer_update(x, delta, m, step)


class _Sync:
    """Collects one delta of every member, then means them, weighted by the number of workers each stands for."""

    in_rounds = True

    def __init__(self, members: tuple[str, ...]) -> None:
        # Deltas are summed in the order of their senders' names: floating-point sums depend on the order, and a run
        # must give the same bits whatever the order of arrival.
        self.members = tuple(sorted(members))

    def collect(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> None:
        state.waiting[member] = (delta.clone(), weight)  # the server decodes its next update into delta's memory

    def complete(self, state: FragmentState) -> bool:
        return len(state.waiting) == len(self.members)

    def take_mean(self, state: FragmentState) -> tuple[Tensor, int]:
        deltas = [state.waiting[member] for member in self.members]
        state.waiting.clear()
        total = sum(weight for _, weight in deltas)
        mean = torch.zeros_like(state.x)
        for delta, weight in deltas:
            average(mean, delta, -weight / total)  # `average` subtracts
        return mean, total


class SyncRegion(_Sync):
    """Sends the mean of its workers' deltas up and answers them with the global weights that come back."""

    def start(self, state: FragmentState) -> None:
        state.counts.update(in_flight=0)

    def on_delta(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> tuple[str, ...]:
        state.version += 1
        self.collect(state, member, delta, weight)
        return ()

    def pending(self, state: FragmentState) -> bool:
        return bool(state.waiting)

    def may_send(self, state: FragmentState, flush: bool) -> bool:
        # `flush` changes nothing: what is sent is the mean of all workers, or nothing.
        return not state.counts["in_flight"] and self.complete(state)

    def take_progress(self, state: FragmentState) -> tuple[Tensor, int]:
        state.counts["in_flight"] = 1
        return self.take_mean(state)

    def on_global_weights(self, state: FragmentState, x_global: Tensor) -> tuple[str, ...]:
        state.x.copy_(x_global)
        state.counts["in_flight"] = 0
        return self.members


class SyncGlobal(_Sync):
    """DiLoCo's outer step once all members have sent."""

    def __init__(self, config: SyncConfig, members: tuple[str, ...]) -> None:
        super().__init__(members)
        self.lr, self.momentum = config.lr, config.momentum

    def on_delta(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> tuple[str, ...]:
        self.collect(state, member, delta, weight)
        if not self.complete(state):
            return ()
        mean, _ = self.take_mean(state)
        state.version += 1
        nesterov(state.x, mean, state.vector("momentum"), lr=self.lr, momentum=self.momentum)
        return self.members
