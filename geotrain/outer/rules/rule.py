"""The interface of rules (`Rule`, `RegionRule`), their state (`Counts`, `Vectors`), and the base of the asynchronous
rules of regions (`AsyncRegion`).

A rule has two halves. One counts, in the server's coordinator: it decides who is answered and what is sent when, and
knows no tensor. The other computes, in the shards: its inputs are plain numbers that say what was decided, and it
works element by element, so it does not matter how a fragment is divided among shards.

Outer steps work in place on fp32 vectors of equal length. Δ (delta) is anchor − current, so weights move by −Δ. Each
rule's file states its coefficients and their sources, with symbols and order as in the papers. The arithmetic is in
`geotrain.kernels`: one pass over memory, and the same bits on every machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from geotrain import kernels
from geotrain.kernels import OuterStep

Inputs = dict[str, float]  # from the counting half to the computing one: plain numbers by name
NOTHING: Inputs = {}
# (values, anchor=None, moves_anchor=False): sends anchor − values, or the values, and keeps neither; the anchor then
# becomes the values, if it moves.
Encode = Callable[..., None]


@dataclass
class Counts:
    """Counts of a rule for one fragment. Like `Vectors` it is saved and restored whole, so rules themselves have no
    state."""

    version: int = 0  # updates applied since the run began
    counts: dict[str, int] = field(default_factory=dict)  # plain numbers: updates pending, in flight, …
    # Synchronous rules: member whose Δ waits → its weight. Others: member whose answer waits, in a region for the
    # global weights → 1 once its Δ is on its way to them, else 0.
    waiting: dict[str, int] = field(default_factory=dict)


@dataclass
class Vectors:
    """The vectors that a rule keeps of one chunk of a fragment."""

    x: Tensor  # weights: fp32, 1-D
    aux: dict[str, Tensor] = field(default_factory=dict)  # further vectors like x: momentum, base, …
    waiting: dict[str, Tensor] = field(default_factory=dict)  # synchronous rules: member → Δ
    in_bf16: Sequence[str] = ()  # names of the auxiliary vectors that are kept in bf16
    seed: int = 0  # chooses the random bits with which the update at hand rounds these

    def vector(self, name: str) -> Tensor:
        """Return the auxiliary vector of that name, created with zeros at first use."""
        if name not in self.aux:
            self.aux[name] = torch.zeros_like(self.x, dtype=torch.bfloat16 if name in self.in_bf16 else None)
        return self.aux[name]

    def move(self, delta: Tensor, step: OuterStep, momentum: str, accumulator: str | None = None) -> None:
        """Apply a step, with the auxiliary vectors of these names, which may be kept in bf16."""
        summed = None if accumulator is None else self.vector(accumulator)
        kernels.outer_update(self.x, delta, self.vector(momentum), step, summed, self.seed)

    def all(self) -> tuple[Tensor, ...]:
        """Return the vectors that an outer step may change in place."""
        return (self.x, *self.aux.values())

    def state(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors, which are not copied, by names that begin with the prefix."""
        tensors = {f"{prefix}x": self.x}
        tensors.update({f"{prefix}aux.{name}": vector for name, vector in self.aux.items()})
        tensors.update({f"{prefix}waiting.{name}": delta for name, delta in self.waiting.items()})
        return tensors

    @staticmethod
    def of(prefix: str, tensors: dict[str, Tensor]) -> Vectors:
        """Restore what `state` returned for this prefix, from the tensors of the whole server."""
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        aux, waiting = (
            {name.removeprefix(head): tensor for name, tensor in own.items() if name.startswith(head)}
            for head in ("aux.", "waiting.")
        )
        return Vectors(own["x"], aux, waiting)


class Rule(Protocol):
    """A rule of any server.

    in_rounds: whether all members are waited for. Each then sends one delta of each fragment a round.
    bf16_vectors, if there are any: auxiliary vectors that may be kept in bf16 (`outer.server_state`). `Vectors.move`
    alone changes them: a momentum moves by a thousandth of itself at each update, less than bf16 resolves, so it must
    be rounded by chance; a replay and any number of shards give the same bits.
    unmoved, if there are any: auxiliary vectors that `apply` leaves as they are, so no snapshot copies them.
    averages, if there is such: whether a delta weighs one over the number of members that take part.
    waits, if there is such: whether answers may wait for the deltas of others (`Server.held`).
    """

    @property
    def in_rounds(self) -> bool: ...

    def on_delta(self, c: Counts, member: str, weight: int, members: int) -> tuple[Inputs, tuple[str, ...]]:
        """Count a member's delta, which stands for `weight` workers'. members: how many take part now, it among them.
        Returns the inputs of `apply`, with all that may change in a run, and the members to answer now."""

    def apply(self, v: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        """Apply the delta that was counted. Its memory is used again for the next one: a rule that keeps it must
        copy it."""


class RegionRule(Rule, Protocol):
    """A rule of a region server."""

    def start(self, c: Counts) -> None:
        """Begin, as the fragment's x has just been set to the global weights: nothing is pending."""

    def begin(self, v: Vectors) -> None:
        """Begin with a chunk whose x has just been set to the global weights."""

    def pending(self, c: Counts) -> bool:
        """Whether a delta was taken that has not been sent up."""

    def may_send(self, c: Counts, flush: bool) -> bool:
        """Whether an update should leave for the global server now; not while one is in flight. flush: send also what
        is too little otherwise, since nobody is at work who could add to it."""

    def on_send(self, c: Counts) -> tuple[Inputs, int]:
        """Count an update as in flight from now on. Returns the inputs of `progress`, and the number of workers'
        deltas that it stands for."""

    def progress(self, v: Vectors, inputs: Inputs, encode: Encode) -> None:
        """Send the delta up, by one call of `encode`."""

    def on_global_weights(self, c: Counts) -> tuple[Inputs, tuple[str, ...]]:
        """Count the answer to what was in flight, which is merged now. Returns the inputs of `merge`, and the members
        to answer then."""

    def merge(self, v: Vectors, x_global: Tensor, inputs: Inputs) -> None:
        """Merge the global weights, which must not be written, into the chunk."""


def average(x: Tensor, delta: Tensor, weight: float) -> None:
    """x −= w·Δ, in place: plain averaging when w is one over the number of those who send."""
    kernels.outer_update(x, delta, None, OuterStep(from_delta=weight))


class AsyncRegion(ABC):
    """Applies each worker's delta at once, sends up after K of them, and merges with or without the ledger.

    A send carries base − x, where base is x as it was after the last merge.

    Without the ledger (HALoS as published), the answer x_g gives x = (1−α)·x + α·x_g and base = x. What workers
    committed while the update travelled is then in no update that is ever sent: it is lost but for its share of x.
    With the ledger, sent = x is remembered at the send, in base's memory. On x_g, pending = sent − x,
    base = (1−α)·sent + α·x_g and x = base − pending, so that what is pending is part of base − x, the next update.
    α weighs the global weights, as in HALoS's code; its help text says the opposite.

    merged: whether workers are answered with what their deltas were merged into, and not at once; then each delta is
    sent up as soon as nothing is in flight, whatever K says: it is waited for. waits: it leaves when those of all
    workers at work are there, or when it is due ("due" is 1 from then on, also while an update is in flight).
    """

    in_rounds = False
    unmoved = ("base",)

    def __init__(
        self, updates_per_send: int, merge_alpha: float, ledger: bool, merged: bool = False, waits: bool = False
    ) -> None:
        self.every, self.alpha, self.ledger = updates_per_send, merge_alpha, ledger  # every: K
        self.merged, self.waits = merged, waits

    def start(self, c: Counts) -> None:
        # pending: updates applied since the last send. in_flight: 1 while a send is unanswered. lost: updates that
        # were pending at a merge without the ledger.
        c.counts.update(pending=0, in_flight=0, lost=c.counts.get("lost", 0))

    def begin(self, v: Vectors) -> None:
        v.vector("base").copy_(v.x)

    def on_delta(self, c: Counts, member: str, weight: int, members: int) -> tuple[Inputs, tuple[str, ...]]:
        c.version += 1
        c.counts["pending"] += 1
        if self.merged:
            c.waiting[member] = 0
            return NOTHING, ()
        return NOTHING, (member,)

    @abstractmethod
    def apply(self, v: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        """Move x by a worker's delta."""

    def pending(self, c: Counts) -> bool:
        return c.counts["pending"] > 0

    def may_send(self, c: Counts, flush: bool) -> bool:
        # At most one send in flight: its answer decides the base from which the next one is counted. Updates that are
        # applied meanwhile wait and leave together.
        pending = c.counts["pending"]
        if c.counts["in_flight"] or not pending:
            return False
        if self.waits:
            return flush or bool(c.counts.get("due"))
        return pending >= self.every or flush or bool(c.waiting)

    def on_send(self, c: Counts) -> tuple[Inputs, int]:
        weight = c.counts["pending"]
        c.counts.update(pending=0, in_flight=1)
        c.counts.pop("due", None)
        c.waiting.update(dict.fromkeys(c.waiting, 1))
        return NOTHING, weight

    def progress(self, v: Vectors, inputs: Inputs, encode: Encode) -> None:
        encode(v.x, anchor=v.vector("base"), moves_anchor=self.ledger)

    def on_global_weights(self, c: Counts) -> tuple[Inputs, tuple[str, ...]]:
        if not self.ledger:
            # Now base = x: the pending updates are in x and can never be in a difference from base.
            c.counts["lost"] += c.counts["pending"]
            c.counts["pending"] = 0
        c.counts["in_flight"] = 0
        # The others were answered when their deltas were applied.
        answered = tuple(sorted(member for member, sent in c.waiting.items() if sent))
        for member in answered:
            del c.waiting[member]
        return {"alpha": self.alpha}, answered

    def merge(self, v: Vectors, x_global: Tensor, inputs: Inputs) -> None:
        kernels.merge(v.x, v.vector("base"), x_global, inputs["alpha"], self.ledger)
