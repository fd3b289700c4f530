"""What a server asks of a rule (`Rule`, `RegionRule`), what a rule works on (`FragmentState`), and what the
asynchronous rules of regions share (`AsyncRegion`).

Outer steps work in place on fp32 vectors of equal length. Δ (delta) is anchor − current, so weights move by −Δ. Each
rule's file states its coefficients and their sources, with symbols and order as in the papers. The arithmetic is in
`geotrain.kernels`: one pass over memory, and the same bits on every machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from geotrain import kernels
from geotrain.kernels import OuterStep


@dataclass
class FragmentState:
    """One fragment on a server: all that a rule may keep between two calls. It is journaled, saved and restored
    whole, so rules themselves have no state."""

    x: Tensor  # weights: fp32, 1-D
    version: int = 0  # updates applied since the run began
    aux: dict[str, Tensor] = field(default_factory=dict)  # further vectors like x: momentum, base, …
    counts: dict[str, int] = field(default_factory=dict)  # plain numbers: updates pending, in flight, …
    waiting: dict[str, tuple[Tensor, int]] = field(default_factory=dict)  # synchronous rules: member → Δ, weight

    def vector(self, name: str) -> Tensor:
        """The auxiliary vector of that name, created with zeros at first use."""
        if name not in self.aux:
            self.aux[name] = torch.zeros_like(self.x)
        return self.aux[name]

    def vectors(self) -> tuple[Tensor, ...]:
        """What an outer step may change in place."""
        return (self.x, *self.aux.values())

    def state(self, prefix: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, whose names begin with the prefix; JSON data). The tensors are not copied."""
        tensors = {f"{prefix}x": self.x}
        tensors.update({f"{prefix}aux.{name}": vector for name, vector in self.aux.items()})
        tensors.update({f"{prefix}waiting.{name}": delta for name, (delta, _) in self.waiting.items()})
        weights = {name: weight for name, (_, weight) in self.waiting.items()}
        return tensors, {"version": self.version, "counts": dict(self.counts), "waiting": weights}

    @staticmethod
    def of(prefix: str, tensors: dict[str, Tensor], saved: dict[str, Any]) -> FragmentState:
        """The counterpart of `state`. prefix: as there. tensors: those of the whole server."""
        head = f"{prefix}aux."
        aux = {name.removeprefix(head): vector for name, vector in tensors.items() if name.startswith(head)}
        waiting = {name: (tensors[f"{prefix}waiting.{name}"], weight) for name, weight in saved["waiting"].items()}
        return FragmentState(tensors[f"{prefix}x"], saved["version"], aux, dict(saved["counts"]), waiting)


class Rule(Protocol):
    """What any server asks of its rule.

    in_rounds: whether all members are waited for. Each then sends one delta of each fragment a round.
    """

    @property
    def in_rounds(self) -> bool: ...

    def on_delta(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> tuple[str, ...]:
        """Take a member's delta, which stands for `weight` workers'. Returns the members to answer now.

        The delta's memory is used again for the next one: a rule that keeps it must copy it.
        """


class RegionRule(Rule, Protocol):
    """What a region server asks besides."""

    def start(self, state: FragmentState) -> None:
        """The fragment's x has just been set to the global weights: nothing is pending."""

    def pending(self, state: FragmentState) -> bool:
        """Whether a delta was taken that has not been sent up."""

    def may_send(self, state: FragmentState, flush: bool) -> bool:
        """Whether an update should leave for the global server now. flush: send also what is too little otherwise,
        since nobody is at work who could add to it."""

    def take_progress(self, state: FragmentState) -> tuple[Tensor, int]:
        """(delta to send up, number of workers' deltas it stands for). From now on it is in flight."""

    def on_global_weights(self, state: FragmentState, x_global: Tensor) -> tuple[str, ...]:
        """Merge the answer to what was in flight. Returns the members to answer now. x_global must not be written."""


def average(x: Tensor, delta: Tensor, weight: float) -> None:
    """x −= w·Δ, in place: plain averaging when w is one over the number of those who send."""
    kernels.outer_update(x, delta, None, OuterStep(from_delta=weight))


def merge(x: Tensor, base: Tensor, x_global: Tensor, alpha: float, sent: Tensor | None = None) -> None:
    """base = (1−α)·sent + α·x_global;  x = base − (sent − x): what was committed since the send stays (the ledger).

    Without `sent`, x = base = (1−α)·x + α·x_global. Changes x and base in place. α weighs the global weights, as in
    HALoS's code; its help text says the opposite.
    """
    kernels.merge(x, base, x_global, alpha, sent)


class AsyncRegion(ABC):
    """Applies each worker's delta at once, sends up after K of them, and merges with or without the ledger.

    A send carries base − x, where base is x as it was after the last merge.

    Without the ledger (HALoS as published), the answer x_g gives x = (1−α)·x + α·x_g and base = x. What workers
    committed while the update travelled is then in no update that is ever sent: it is lost but for its share of x.
    With the ledger, sent = x is remembered at the send. On x_g, pending = sent − x, base = (1−α)·sent + α·x_g and
    x = base − pending, so that what is pending is part of base − x, the next update.
    """

    in_rounds = False

    def __init__(self, updates_per_send: int, merge_alpha: float, ledger: bool) -> None:
        self.every, self.alpha, self.ledger = updates_per_send, merge_alpha, ledger  # every: K

    def start(self, state: FragmentState) -> None:
        state.vector("base").copy_(state.x)
        # pending: updates applied since the last send. in_flight: 1 while a send is unanswered. lost: updates that
        # were pending at a merge without the ledger.
        state.counts.update(pending=0, in_flight=0, lost=state.counts.get("lost", 0))

    def on_delta(self, state: FragmentState, member: str, delta: Tensor, weight: int) -> tuple[str, ...]:
        state.version += 1
        state.counts["pending"] += 1
        self.apply(state, delta)
        return (member,)

    @abstractmethod
    def apply(self, state: FragmentState, delta: Tensor) -> None:
        """Move x by a worker's delta."""

    def pending(self, state: FragmentState) -> bool:
        return state.counts["pending"] > 0

    def may_send(self, state: FragmentState, flush: bool) -> bool:
        # At most one send in flight: its answer decides the base from which the next one is counted. Updates that are
        # applied meanwhile wait and leave together.
        pending = state.counts["pending"]
        return not state.counts["in_flight"] and (pending >= self.every or (flush and pending > 0))

    def take_progress(self, state: FragmentState) -> tuple[Tensor, int]:
        weight = state.counts["pending"]
        state.counts.update(pending=0, in_flight=1)
        if self.ledger:
            state.vector("sent").copy_(state.x)
        return state.vector("base") - state.x, weight

    def on_global_weights(self, state: FragmentState, x_global: Tensor) -> tuple[str, ...]:
        sent = state.vector("sent") if self.ledger else None
        merge(state.x, state.vector("base"), x_global, self.alpha, sent)
        if not self.ledger:
            # Now base = x: the pending updates are in x and can never be in a difference from base.
            state.counts["lost"] += state.counts["pending"]
            state.counts["pending"] = 0
        state.counts["in_flight"] = 0
        return ()  # workers were answered when their deltas were applied
