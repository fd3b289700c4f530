"""How a server applies a delta, when a region sends up, and how it merges what comes back.

A rule works on one fragment's state at a time. `Region…` rules run on region servers, `Global…` rules on the
global server (or on the only server of a flat run). All tensors are fp32 vectors of the fragment's length.
Sources: HALoS (arXiv 2506.04531), DiLoCo (2311.08105); the ledger and the region-momentum rule are GeoTrain's own,
see docs/algorithms.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import Any, Protocol

import torch
from torch import Tensor

from geotrain.config import OuterConfig
from geotrain.outer import optimizer

MOMENTUM_SPAN = 0.1  # of a run's updates; docs/evidence.md


@dataclass
class FragmentState:
    """A fragment on a server. x: its weights. version: updates applied since the run began.
    aux: further vectors that the rule keeps (momentum, base, …). Counters are plain numbers in `counts`."""

    x: Tensor
    version: int = 0
    aux: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # synchronous rules: member → Δ, weight

    def vector(self, name: str) -> Tensor:
        """The auxiliary vector of that name; zeros when it is new."""
        if name not in self.aux:
            self.aux[name] = torch.zeros_like(self.x)
        return self.aux[name]


class Rule(Protocol):
    """Applies deltas. Returns the members to answer now."""

    def on_delta(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> tuple[str, ...]: ...


class RegionRule(Rule, Protocol):
    """Applies deltas and talks to the global server."""

    def start(self, state: FragmentState) -> None:
        """The fragment's x has just been set to the global weights: nothing is pending."""

    def pending(self, state: FragmentState) -> bool:
        """Whether something was applied that has not been sent up."""

    def may_send(self, state: FragmentState, flush: bool) -> bool:
        """Whether an update should leave for the global server now. flush: whatever is pending, however little."""

    def take_progress(self, state: FragmentState) -> tuple[Tensor, int]:
        """The delta to send up and the number of workers it stands for; from now on it is in flight."""

    def on_global_weights(self, state: FragmentState, x_global: Tensor) -> tuple[str, ...]:
        """The answer to what was in flight. Returns the members to answer now."""


def region_rule(config: OuterConfig, members: tuple[str, ...]) -> RegionRule:
    """members: names of the region's workers."""
    if config.rule == "sync":
        return SyncRegion(members)
    if config.rule == "region_momentum":
        return MomentumRegion(config, len(members))
    return HalosRegion(config)


def global_rule(config: OuterConfig, members: tuple[str, ...]) -> Rule:
    """members: names of the regions; of all workers, when the run is flat."""
    if config.rule == "sync":
        return SyncGlobal(config, members)
    if config.rule == "region_momentum":
        return AveragingGlobal(len(members))
    return HalosGlobal(config)


# ------------------------------------------------------------------------------------------- asynchronous


class _AsyncRegion:
    """What asynchronous region rules share: K updates a send, one send in flight, merging with or without ledger.

    Without the ledger (HALoS as published): on x_g, x = (1−α)·x + α·x_g and base = x. What was committed while the
    update travelled is then never sent. With it: sent = x at send; on x_g, pending = sent − x,
    base = (1−α)·sent + α·x_g, x = base − pending; so pending goes up with the next update.
    """

    def __init__(self, config: OuterConfig, ledger: bool) -> None:
        self.every, self.alpha, self.ledger = config.updates_per_send, config.merge_alpha, ledger

    def start(self, state: FragmentState) -> None:
        state.vector("base").copy_(state.x)
        state.counts.update(pending=0, in_flight=0, lost=state.counts.get("lost", 0))

    def on_delta(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> tuple[str, ...]:
        state.version += 1
        state.counts["pending"] += 1
        self.apply(state, delta)
        return (member,)

    def apply(self, state: FragmentState, delta: Tensor) -> None:
        raise TypeError("a rule applies deltas in its own way")

    def pending(self, state: FragmentState) -> bool:
        return state.counts["pending"] > 0

    def may_send(self, state: FragmentState, flush: bool) -> bool:
        pending = state.counts["pending"]
        return not state.counts["in_flight"] and (pending >= self.every or (flush and pending > 0))

    def take_progress(self, state: FragmentState) -> tuple[Tensor, int]:
        weight = state.counts["pending"]
        state.counts.update(pending=0, in_flight=1)
        if self.ledger:
            state.vector("sent").copy_(state.x)
        return state.vector("base") - state.x, weight

    def on_global_weights(self, state: FragmentState, x_global: Tensor) -> tuple[str, ...]:
        base = state.vector("base")
        if self.ledger:
            sent = state.vector("sent")
            pending = sent - state.x
            base.copy_(sent)
            optimizer.merge(base, x_global, self.alpha)
            torch.sub(base, pending, out=state.x)
        else:
            optimizer.merge(state.x, x_global, self.alpha)
            base.copy_(state.x)
            state.counts["lost"] += state.counts["pending"]
            state.counts["pending"] = 0
        state.counts["in_flight"] = 0
        return ()


class HalosRegion(_AsyncRegion):
    """HALoS's local parameter server: delayed Nesterov on every worker's delta."""

    def __init__(self, config: OuterConfig) -> None:
        super().__init__(config, ledger=config.ledger)
        self.settings = config.region

    def apply(self, state: FragmentState, delta: Tensor) -> None:
        _delayed_nesterov(state, delta, self.settings)


def momentum_decay(updates: float, span: float = MOMENTUM_SPAN) -> float:
    """k = exp(−1 / (span · updates)): a region's momentum then averages over that share of its updates in the run,
    whatever H and the number of workers are. updates: those that a region will apply from begin to end."""
    return exp(-1 / max(1.0, span * updates))


class MomentumRegion(_AsyncRegion):
    """The region-momentum rule: momentum in the region, where no wide-area delay is in its loop. Always a ledger."""

    def __init__(self, config: OuterConfig, workers: int) -> None:
        super().__init__(config, ledger=True)
        self.decay, self.gain, self.weight = config.momentum_decay, config.momentum_gain, 1 / workers

    def apply(self, state: FragmentState, delta: Tensor) -> None:
        m = state.vector("momentum")
        optimizer.momentum_average(state.x, delta, m, decay=self.decay, gain=self.gain, weight=self.weight)


class HalosGlobal:
    """HALoS's global server; with workers as its members, Async Local-SGD's."""

    def __init__(self, config: OuterConfig) -> None:
        self.settings = config.global_

    def on_delta(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> tuple[str, ...]:
        state.version += 1
        _delayed_nesterov(state, delta, self.settings)
        return (member,)


class AveragingGlobal:
    """The region-momentum rule's global server: x −= Δ/regions."""

    def __init__(self, regions: int) -> None:
        self.weight = 1 / regions

    def on_delta(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> tuple[str, ...]:
        state.version += 1
        state.x.add_(delta, alpha=-self.weight)
        return (member,)


# -------------------------------------------------------------------------------------------- synchronous


class _Sync:
    """Waits for every member, then means their deltas by weight, in the order of their names: the same bits
    whatever the order of arrival."""

    def __init__(self, members: tuple[str, ...]) -> None:
        self.members = tuple(sorted(members))

    def collect(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> None:
        state.waiting[member] = (delta.clone(), weight)

    def complete(self, state: FragmentState) -> bool:
        return len(state.waiting) == len(self.members)

    def take_mean(self, state: FragmentState) -> tuple[Tensor, int]:
        deltas = [state.waiting[member] for member in self.members]
        state.waiting.clear()
        total = sum(weight for _, weight in deltas)
        mean = torch.zeros_like(state.x)
        for delta, weight in deltas:
            mean.add_(delta, alpha=weight / total)
        return mean, total


class SyncRegion(_Sync):
    """Sends the mean of its workers' deltas up, and answers them with what comes back."""

    def start(self, state: FragmentState) -> None:
        state.counts.update(in_flight=0)

    def on_delta(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> tuple[str, ...]:
        state.version += 1
        self.collect(state, member, delta, weight)
        return ()

    def pending(self, state: FragmentState) -> bool:
        return bool(state.waiting)

    def may_send(self, state: FragmentState, flush: bool) -> bool:
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

    def __init__(self, config: OuterConfig, members: tuple[str, ...]) -> None:
        super().__init__(members)
        self.lr, self.momentum = config.sync_lr, config.sync_momentum

    def on_delta(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> tuple[str, ...]:
        self.collect(state, member, delta, weight)
        if not self.complete(state):
            return ()
        mean, _ = self.take_mean(state)
        state.version += 1
        optimizer.nesterov(state.x, mean, state.vector("momentum"), lr=self.lr, momentum=self.momentum)
        return self.members


def _delayed_nesterov(state: FragmentState, delta: Tensor, settings: Any) -> None:
    state.counts["arrivals"] = arrival = state.counts.get("arrivals", 0) + 1
    optimizer.delayed_nesterov(
        state.x,
        delta,
        state.vector("momentum"),
        state.vector("accumulated"),
        arrival,
        lr_per_update=settings.lr_per_update,
        beta=settings.beta,
        buffer=settings.buffer,
    )
