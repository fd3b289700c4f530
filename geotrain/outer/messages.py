"""What is said on the wire: frozen dataclasses, the same for sockets, journal and simulator.

Members of a server are workers (each of several ranks, its *parts*) or region servers (one part). A member's
updates are numbered; a server applies each number once. Payloads are encoded by the codec of the link.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geotrain.outer.layout import Slice


class Refused(Exception):
    """The receiver will not take this message. `retry_s`: seconds to wait before trying again; None: never."""

    def __init__(self, reason: str, retry_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_s = retry_s


class NotJoined(Refused):
    """The server does not know this life of the member (it may have been restarted): join, then say it again."""


@dataclass(frozen=True)
class Join:
    """A member's rank introduces itself, once for each of its lives (`incarnation`).

    pushes, holds: for each fragment, the slices whose deltas this part sends, and whose weights it wants back.
    leases: leases a region server still answers for (granted or trained, not yet committed).
    data: sha256 of the training data; "" when it is not known here.
    """

    run: str
    config_digest: str
    layout_digest: str
    model: str
    member: str
    incarnation: str
    part: int
    parts: int
    pushes: tuple[tuple[Slice, ...], ...]
    holds: tuple[tuple[Slice, ...], ...]
    leases: tuple[int, ...] = ()
    data: str = ""


@dataclass(frozen=True)
class Welcome:
    """The server knows the member: its next update is `sequence`, its next job is `job`.

    life: names the server's present life. versions: of its fragments, now.
    """

    sequence: int
    job: int
    life: str = ""
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class FragmentDelta:
    """One rank's encoded delta of one fragment. anchor_version: the server's version it started from."""

    fragment: int
    anchor_version: int
    payload: bytes


@dataclass(frozen=True)
class UpdatePart:
    """One rank's part of its member's update `sequence`. The server applies an update when all parts are there.

    job: the worker's job that it belongs to. weight: how many workers' deltas it stands for (their mean).
    leases: the data leases whose training is complete with this update.
    metrics: plain numbers for people: loss, tokens, seconds.
    """

    member: str
    incarnation: str
    sequence: int
    part: int
    deltas: tuple[FragmentDelta, ...]
    job: int = 0
    weight: int = 1
    leases: tuple[int, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FragmentWeights:
    """One fragment's weights for one part, at `version`. increment: the payload is a change of what the receiver
    was last sent, not the weights themselves."""

    fragment: int
    version: int
    payload: bytes
    increment: bool = False


@dataclass(frozen=True)
class Answer:
    """Weights for one part of a member, in answer to its update `sequence` (0: to its join).

    life: of the server that froze it. One life gives all parts the same versions; after a restart the server freezes
    answers anew, so ranks must not mix those of two lives.
    """

    sequence: int
    weights: tuple[FragmentWeights, ...]
    life: str = ""


@dataclass(frozen=True)
class LeaseRequest:
    """A worker asks for the data of its job number `job`. Asking again for the same job gives the same lease.

    step_s: measured seconds of one inner step (0: not known yet).
    """

    worker: str
    job: int
    step_s: float = 0.0


@dataclass(frozen=True)
class Lease:
    """Samples [start, start + samples) of the run, to be trained in `steps` inner steps.

    validate: number of a validation of the global weights, to be done first; 0: none.
    """

    worker: str
    job: int
    lease: int
    start: int
    samples: int
    steps: int
    validate: int = 0


@dataclass(frozen=True)
class Finished:
    """No data is left for this worker: flush and leave."""

    worker: str
    job: int


@dataclass(frozen=True)
class Release:
    """Leases that will not be trained by their worker: they return to the pool."""

    leases: tuple[int, ...]


@dataclass(frozen=True)
class Leave:
    """The member is done; what it sent is all it had."""

    member: str


@dataclass(frozen=True)
class Silence:
    """This life of the member has not been heard of for too long: it is taken for dead, until it speaks again."""

    member: str
    incarnation: str


@dataclass(frozen=True)
class Validated:
    """A worker has evaluated the global weights. version: the newest of its fragments' global versions.
    loss: nats a token. seconds: that it took."""

    worker: str
    number: int
    version: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Steer:
    """What a person wants of the run. what: "pause" (no new leases), "resume", "drain" (the workers of `region`
    finish what they have, flush and leave) or "stop" (all workers do)."""

    what: str
    region: str = ""


@dataclass(frozen=True)
class Offence:
    """An update of this life of the member was refused for good."""

    member: str
    incarnation: str
    reason: str


@dataclass(frozen=True)
class Pardon:
    """The member is no longer quarantined: its time is over, or the operator says so."""

    member: str


@dataclass(frozen=True)
class Over:
    """All data of the run is trained for good: said by the global server to a region that still waits for workers."""


Message = (
    Join
    | Welcome
    | UpdatePart
    | Answer
    | LeaseRequest
    | Lease
    | Finished
    | Release
    | Leave
    | Silence
    | Validated
    | Steer
    | Offence
    | Pardon
    | Over
)


@dataclass(frozen=True)
class Send:
    """A state machine's wish: deliver `message` to `part` of member `to` ("global" is the global server)."""

    to: str
    message: Message
    part: int = 0


GLOBAL = "global"
