"""Messages between workers, region servers and the global server: the same objects on the wire, in the journal and in
the simulator. Their fields and type hints are the only schema of wire and journal.

Members of a server are workers (each of several ranks, its *parts*) or region servers (one part). An update is of one
fragment. A member numbers its updates of each fragment, and a server applies each number once, so that a sender in
doubt may send again. Payloads are encoded with the codec of the link that they cross.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from geotrain.parameters.parameter_map import StridedSlice


def update_id(member: str, fragment: int, sequence: int) -> str:
    """The id of a member's update in logs, errors and events: of "eu-0/2.17", 2 is the fragment."""
    return f"{member}/{fragment}.{sequence}"


class Refused(Exception):
    """The receiver does not accept this message, and has changed nothing because of it.

    reason: in words, for the operator of the sender. retry_s: seconds after which to send it again; None: never.
    """

    def __init__(self, reason: str, retry_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.retry_s = reason, retry_s


class BadDelta(Refused):
    """Raised for an update that is not finite or whose norm is an outlier. The data may be to blame."""


class DataGone(Refused):
    """What the sender trained has gone to others while it counted as dead, and would count twice. It is to blame for
    nothing, and starts anew."""


class NotJoined(Refused):
    """The server does not know this incarnation of the member: it has not joined with every part, or the server was
    restarted and has forgotten all joins. The sender joins, then sends the message again."""


@dataclass(frozen=True)
class Identity:
    """Facts that both ends of a link must have in common before they exchange weights.

    config_digest, parameter_map_digest: of the run's configuration, and of the parameters' names, shapes and
    fragments.
    """

    run: str
    config_digest: str
    parameter_map_digest: str
    model: str  # in words, for error messages
    data: str = ""  # sha256 of the training data, where it is known


@dataclass(frozen=True)
class Join:
    """A rank of a member introduces itself. It does so in every incarnation of the member and of the server.

    incarnation: names this incarnation of the member; a restarted member has a new one. part, parts: its rank and
    world size. pushes, holds: for each chunk, the slices whose deltas this part sends, and the slices whose weights
    it needs. They differ where several ranks hold copies of a parameter: one of them sends, all receive. leases:
    leases that a region server still answers for (granted or trained, not yet committed). data: sha256 of the
    training data; "" when it is not known here. mirrors: fingerprints of what it was last sent of each chunk, where
    weights travel as changes (see `outer.downlink`). origin: of the run that a region's state belongs to; "": of none
    yet. applied: where a rank joins once more in its incarnation, by fragment, the last update
    of which it knows that it was applied.
    """

    run: str
    config_digest: str
    parameter_map_digest: str
    model: str
    member: str
    incarnation: str
    part: int
    parts: int
    pushes: tuple[tuple[StridedSlice, ...], ...]
    holds: tuple[tuple[StridedSlice, ...], ...]
    leases: tuple[int, ...] = ()
    data: str = ""
    mirrors: tuple[int, ...] = ()
    origin: str = ""
    applied: tuple[int, ...] = ()


@dataclass(frozen=True)
class AnswerWanted:
    """A member asks for the answer to its update `sequence` of this fragment (0: to its join), and none is frozen.
    It is a message, because what is sent to a member must follow from the journal."""

    member: str
    incarnation: str
    fragment: int
    sequence: int


@dataclass(frozen=True)
class Welcome:
    """Reply to a Join. The member goes on with these updates, by fragment, and with job `job`: each is one after the
    last applied.

    incarnations: of the server that has each fragment, now; "": it is elsewhere. versions: of its fragments, now;
    empty before it has weights.
    origin: of the run. gone: of the leases that a region named, those that went to others while it counted as dead.
    """

    sequences: tuple[int, ...]
    job: int
    incarnations: tuple[str, ...] = ()
    versions: tuple[int, ...] = ()
    origin: str = ""
    gone: tuple[int, ...] = ()


class PayloadSize(bytes):
    """Stands for a payload that is not here, or not yet. Its length is known."""

    def __new__(cls, length: int) -> PayloadSize:
        return super().__new__(cls)

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


@dataclass(frozen=True)
class ChunkDelta:
    """One rank's encoded delta of one chunk.

    anchor_version: the version of the server's fragment from which the delta is counted; staleness follows from it.
    """

    chunk: int
    anchor_version: int
    payload: bytes


@dataclass(frozen=True)
class UpdatePart:
    """One rank's part of its member's update `sequence` of a fragment. The server applies an update when all parts
    have arrived. A member sends it when it has adopted the answer to its update of the fragment before.

    deltas: of all the fragment's chunks, in their order.
    job: the worker's job in which the update was made. weight: how many workers' deltas it stands for.
    contains: the leases all of whose training the member's updates of this fragment contain with this one. A lease is
    trained when those of every fragment contain it.
    metrics: plain numbers for people: loss, tokens, seconds. No decision is based on them. Of the fragments that
    leave together, one brings them.
    need_s: seconds from its arrival on in which the server has to answer for the answer to come in time; a server may
    wait so long for the deltas of others. Not more than 0: as soon as it can.
    adopted: by fragment, the last update whose answer this part has adopted, so the server keeps it no longer.
    """

    member: str
    incarnation: str
    fragment: int
    sequence: int
    part: int
    deltas: tuple[ChunkDelta, ...]
    job: int = 0
    weight: int = 1
    contains: tuple[int, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    need_s: float = 0.0
    adopted: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChunkWeights:
    """One chunk's weights for one part, at `version` of its fragment.

    increment: the payload is a change, to be added to what the receiver was last sent, and not the weights
    themselves. payload: on a server also a view of memory that nobody changes.
    """

    chunk: int
    version: int
    payload: bytes
    increment: bool = False


@dataclass(frozen=True)
class Answer:
    """A fragment's weights for one part of a member, in answer to its update `sequence` (0: to its join).

    An answer is frozen: encoded once, for all parts at the same moment, and kept until all have surely adopted it,
    which the member's next update of the fragment says, or one of another fragment (`UpdatePart.adopted`).
    incarnation: of the server that gives it. One incarnation gives all parts the same version. A restarted server has
    lost the answers with whole weights and makes new ones of newer weights, so the ranks of a worker must not mix
    those of two incarnations. held_s: seconds for which the update was at the server before it was answered: the rest
    of the time was travel.
    """

    fragment: int
    sequence: int
    weights: tuple[ChunkWeights, ...]
    incarnation: str = ""
    held_s: float = 0.0


@dataclass(frozen=True)
class LeaseRequest:
    """A worker asks for the data of its job number `job`. Asking again for the same job gives the same lease, so that
    a request whose reply was lost can be repeated, and all ranks of a worker can ask.

    step_s: seconds of one inner step of a whole batch, from its last job (0: not known yet). at_s: when it came to
    the global server, which notes that by its own clock.
    """

    worker: str
    job: int
    step_s: float = 0.0
    at_s: float = 0.0


@dataclass(frozen=True)
class Lease:
    """Samples [start, start + samples) of the run, handed to a worker to be trained in `steps` inner steps.

    lease: its number, unique in the run. validate: number of a validation of the global weights that the worker has
    to do before it trains; 0: none.
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
    """No data is left for this worker now: it sends the progress that it has not sent yet, and asks for the next job,
    since what others hold may come back. When it is answered the same again, it leaves."""

    worker: str
    job: int


@dataclass(frozen=True)
class Release:
    """Leases that will not be trained by their worker: they return to the pool.

    failed: their training gave an update that was refused as `BadDelta`. What fails twice is set aside.
    """

    leases: tuple[int, ...]
    failed: bool = False


@dataclass(frozen=True)
class TakeBack:
    """A region asks for leases again that it has given back, since this incarnation of their worker lives after all
    and may have trained them. The reply is a `TakenBack`."""

    worker: str
    leases: tuple[int, ...]


@dataclass(frozen=True)
class TakenBack:
    """The worker has those of the leases that a region asked for again; `gone` have gone to others: what the worker
    has trained since must not count."""

    worker: str
    leases: tuple[int, ...]
    gone: tuple[int, ...] = ()


@dataclass(frozen=True)
class SkipSamples:
    """Nobody shall train the samples from each of `firsts` to that of `lasts`, as the run file says now. The global
    server's process says so before it listens, so that a replay hands out what was handed out then."""

    firsts: tuple[int, ...]
    lasts: tuple[int, ...]


@dataclass(frozen=True)
class Trained:
    """These leases of the member are trained as far as this fragment goes, though no update of it will bring them:
    without the ledger, what its workers trained while an update travelled is in none."""

    member: str
    fragment: int
    leases: tuple[int, ...]


@dataclass(frozen=True)
class Leave:
    """The member has nothing left to send and ends."""

    member: str


@dataclass(frozen=True)
class MemberSilent:
    """This incarnation of the member was silent for too long, or has held its leases for too long and sent
    nothing: it counts as dead until it joins again, or sends an update to the server that gave it its data.

    A message, because the state machine has no clock and a replay must see the same silence at the same place.
    """

    member: str
    incarnation: str


@dataclass(frozen=True)
class AnswersDue:
    """The answers of this fragment for which these members wait would come too late if they waited for more deltas.

    The server's process says so, by its clock. A message, as `MemberSilent` is: a replay freezes the same weights.
    """

    members: tuple[str, ...]
    fragment: int


@dataclass(frozen=True)
class Validated:
    """A worker, or at the run's end the global server, has evaluated the global weights. version: the newest of its
    fragments' global versions. loss: nats a token. seconds: that it took."""

    worker: str
    number: int
    version: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class OperatorCommand:
    """A person steers the run. what: "pause" (no new leases), "resume", "drain" (the workers of `region` finish the
    leases they hold, send their progress and leave), "stop" (all workers do), "set outer.local_steps=…", at a region
    "set outer.rule.updates_per_send=…", or "expel" (the member `region` is quarantined until it is unbanned,
    and others get its leases)."""

    what: str
    region: str = ""


@dataclass(frozen=True)
class UpdateRejected:
    """An update of this incarnation of the member was refused for good. Refusals may precede the journal, so they are
    recorded by this message: a replay then quarantines the same members.

    fragment, sequence: of the update; sequence 0: it was something else. An incarnation of a worker says no more
    after it, on any rank; a region begins a new one when it gets this message about itself. job: in which a worker
    made it, where it was refused as `BadDelta`: the leases that it held then may be to blame; else 0.
    """

    member: str
    incarnation: str
    reason: str
    fragment: int = 0
    sequence: int = 0
    job: int = 0


@dataclass(frozen=True)
class LiftQuarantine:
    """The member is no longer quarantined: its time is over, or the operator says so."""

    member: str


@dataclass(frozen=True)
class RunComplete:
    """All data of the run is committed. The global server says so to a region, which may still be waiting for workers
    that will not come back. At the very end the global server's process says so to it, too: nobody joins any more."""


@dataclass(frozen=True)
class Recall:
    """The run is paused, or this region is to leave: the data that none of its workers has asked for goes back to the
    global server, which says so by its answers to heartbeats."""


@dataclass(frozen=True)
class Fact:
    """Something that a server has done with its fragments, which its ledger must know once, whichever process has it.

    what: "applied" (an update of a member: `contains` are the leases that the fragment's weights contain now),
    "contained" (a region says so without an update), "up" (the global server has taken a region's update of the
    fragment, which contained these), "lost" (it has lost some that it had taken), "refused" (an update, for good: why
    is in `reason`), "over" (a region's fragments start over from the global weights, and parts of the training of
    these are dropped; weight: how many updates, job: of synchronous rounds, the last that is whole in them).
    version, staleness, size_bytes, norm: of the fragment with the update, and of its delta ("up": the global one).
    """

    what: str
    member: str = ""
    incarnation: str = ""
    fragment: int = 0
    sequence: int = 0
    job: int = 0
    weight: int = 1
    contains: tuple[int, ...] = ()
    version: int = 0
    staleness: int = 0
    size_bytes: int = 0
    norm: float = 0.0
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """A shard reports to its server's ledger what it has done, in order; fact `since` + 1 is the first of these.

    versions: of its fragments, in their order. safe: those that a copy has, from which a lost disk comes back.
    quiet: number of the rest (`Standing.rest`) in which it has nothing left to send up; 0: of none. seen: number of
    the standing that it has, if these are all the facts from before that; else 0. incarnation: names the process, of
    whose former ones nothing is taken any more.
    """

    shard: int
    since: int
    facts: tuple[Fact, ...]
    versions: tuple[int, ...]
    safe: tuple[int, ...]
    quiet: int = 0
    seen: int = 0
    incarnation: str = ""


@dataclass(frozen=True)
class WentBack:
    """A shard's state is older than what its ledger knows: its disk was lost, and came back from a copy.

    facts: how many it has said. versions: of its fragments. job: of synchronous rounds, the last that is whole there.
    """

    shard: int
    facts: int
    versions: tuple[int, ...]
    job: int = 0


@dataclass(frozen=True)
class MemberStanding:
    """How a member stands: its incarnation, and its phase (`MemberPhase`). barred: why it is quarantined, or this
    incarnation may say no more. quarantined: the former. ends: a region's worker for whose last job there was no
    data. round: of synchronous rounds, the last whole one before the run began again."""

    name: str
    incarnation: str
    phase: str
    barred: str = ""
    ends: bool = False
    round: int = 0
    quarantined: bool = False


@dataclass(frozen=True)
class Standing:
    """How the run stands, as a server's ledger says to its shards: whole each time, so that none can be missed.

    incarnation: of the server. origin, data: of the run. begun: how often the run has begun again. every: K, where an
    operator has set it. rest: number of the time in which no worker of a region adds anything, so that shards send
    up what is pending; 0: some do. validated: number of the last validation that is done. ended: so has the server,
    in good order. number: of the last change of a member that shards have to confirm (`Facts.seen`).
    """

    incarnation: str
    origin: str
    data: str
    members: tuple[MemberStanding, ...]
    begun: int = 0
    every: int = 0
    rest: int = 0
    validated: int = 0
    ended: bool = False
    number: int = 0


Message = (
    Join | AnswerWanted | Welcome | UpdatePart | Answer | LeaseRequest | Lease | Finished | Release | Trained
    | Leave | MemberSilent | AnswersDue | Validated | OperatorCommand | UpdateRejected | LiftQuarantine | RunComplete
    | Recall | SkipSamples | TakeBack | TakenBack | Facts | WentBack | Standing
)  # fmt: skip


@dataclass(frozen=True)
class Send:
    """A message for somebody else, which a state machine returns because it has no socket: deliver `message` to
    member `to` (`GLOBAL` is the global server)."""

    to: str
    message: Message
