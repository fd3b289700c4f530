"""What a server knows of each of its members: their lives, their updates, and how they behave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from geotrain.outer.downlink import WeightsSender
from geotrain.outer.messages import FragmentWeights, Join, UpdatePart

FORMER_LIVES = 32  # incarnations remembered for each member
SAVED = (  # fields that outlive the server; the rest is said again by the members
    "incarnation",
    "former",
    "restarts",
    "barred",
    "sequence",
    "job",
    "updates",
    "left",
    "silent",
    "quarantined",
    "refused",
    "offences",
    "fault",
)


@dataclass
class Member:
    """A worker or a region server, as the server above it knows it."""

    incarnation: str = ""
    former: list[str] = field(default_factory=list)  # incarnations of earlier lives: they may not come back
    restarts: int = 0
    barred: str = ""  # the incarnation that was quarantined last: it may not come back either
    parts: int = 0
    joined: dict[int, Join] = field(default_factory=dict)
    sequence: int = 0  # of the last update applied
    job: int = 0  # of the last update applied
    arriving: dict[int, dict[int, UpdatePart]] = field(default_factory=dict)  # sequence → part → its part
    owed: set[int] = field(default_factory=set)  # fragments whose delta was taken and whose answer is not due yet
    awaiting: dict[int, set[int]] = field(default_factory=dict)  # sequence → owed fragments of its answer
    answers: dict[int, dict[int, list[FragmentWeights]]] = field(default_factory=dict)  # sequence → part → weights
    senders: dict[int, WeightsSender] = field(default_factory=dict)  # part → its downlink
    metrics: dict[str, float] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)  # fragment → of its last update, in versions
    norms: dict[int, float] = field(default_factory=dict)  # fragment → 2-norm of its last delta
    updates: int = 0
    left: bool = False
    silent: bool = False  # not heard of for too long
    quarantined: bool = False
    refused: int = 0  # updates
    offences: list[int] = field(default_factory=list)  # of the last updates, those that were refused, by `_tried`
    fault: str = ""  # why the last of them was

    @property
    def complete(self) -> bool:
        return 0 < self.parts == len(self.joined)

    @property
    def away(self) -> bool:
        """Nothing is to be expected of it: it left, is taken for dead, or is refused."""
        return self.left or self.silent or self.quarantined

    def begin_life(self, incarnation: str) -> None:
        if self.incarnation:
            self.former = [*self.former, self.incarnation][-FORMER_LIVES:]
            self.restarts += 1
        self.incarnation, self.left = incarnation, False
        self.forget()

    def forget(self) -> None:
        """Whatever it said that is not part of the weights; it has to join again."""
        for table in (self.joined, self.arriving, self.awaiting, self.answers, self.senders):
            table.clear()

    def offend(self, fault: str, window: int) -> int:
        """One of its updates was refused. Returns how many of its last `window` were."""
        self.refused, self.fault = self.refused + 1, fault
        tried = self.updates + self.refused
        self.offences = [number for number in self.offences if number > tried - window] + [tried]
        return len(self.offences)

    def state(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in SAVED}, "owed": sorted(self.owed)}

    def load(self, state: dict[str, Any]) -> None:
        state = {"restarts": len(state["former"]), **state}  # older snapshots have no count
        for name in SAVED:
            saved = state[name]
            setattr(self, name, list(saved) if isinstance(saved, list) else saved)
        self.owed = set(state["owed"])

    def status(self) -> dict[str, Any]:
        """Plain data for people and tests."""
        return {
            "joined": self.complete,
            "left": self.left,
            "restarts": self.restarts,
            "updates": self.updates,
            "sequence": self.sequence,
            "job": self.job,
            "refused": self.refused,
            "quarantined": self.quarantined,
            "fault": self.fault,
            **self.metrics,
        }
