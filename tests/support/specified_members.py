"""What the members of a `tests.support.specified_world` remember."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from geotrain.outer.messages import Finished, Join, Lease, LeaseRequest, Leave, Release, TakeBack, Trained, UpdatePart
from tests.support.outer_world import FakeWorker


@dataclass
class Worker:
    """One worker's own memory, which dies with it."""

    fake: FakeWorker
    region: str
    joins: int = 0
    alive: bool = False
    left: bool = False
    job: int = 1
    lease: Lease | Finished | None = None  # in hand
    waits_for: int | None = None  # the update whose answer it waits for, in synchronous rounds; 0: its join
    spoke_of: tuple[int, ...] = ()  # its fragments
    step_s: float = 1000.0  # of an inner step
    told: bool = False  # that there was no data for the job before this
    sent: set[int] = field(default_factory=set)  # fragments of the job in hand whose deltas have left

    @property
    def incarnation(self) -> str:
        return f"{self.fake.name}-{self.joins}"


@dataclass
class Uplink:
    """What a region's process has to say to the global server; it dies with the process."""

    updates: deque[UpdatePart | Trained | Leave] = field(default_factory=deque)
    leases: deque[Join | LeaseRequest | Release | TakeBack] = field(default_factory=deque)
    acknowledged: list[UpdatePart] = field(default_factory=list)  # whose answers are to be pulled
