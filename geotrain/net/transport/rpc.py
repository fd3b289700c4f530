"""Defines the calls of a server's gRPC service, and their types besides the messages of `geotrain.outer.messages`.

method    request                    answer
join      Join                       Welcome
push      UpdatePart, streamed       Ack or Refusal, which may come before the whole update was sent
          Resume, UpdatePart …       Have, then as above; the update goes on with data frame number `Have.data_frames`
pull      Pull                       Answer, streamed, or NotYet
lease     AskLease                   Lease, Finished or NotYet
release   ReleaseLeases              Ack
takeback  AskBack                    TakenBack
trained   SayTrained                 Ack
weights   PullGlobal                 Answer, streamed; empty when the server has none
validated SayValidated               Ack
leave     SayLeave                   Ack
beat      Beat                       Ack
status    nothing                    JSON
control   Control                    ControlReply
enroll    (`geotrain.net.transport.enrollment`)
standing  ShardHello                 Standing, once it has changed
facts     Facts                      Ack; applied: how many facts of the shard the ledger has

A call that is refused ends with a gRPC status and a `Refusal` in its trailing metadata.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from geotrain.common.ports import why_not_bound
from geotrain.config import Address, host_port
from geotrain.net.transport import wire
from geotrain.outer.messages import LeaseRequest, NotJoined, Refused, Release, TakeBack, Validated

SERVICE = "geotrain.Outer"
REFUSAL_KEY = "geotrain-refusal-bin"
MAX_WAIT_S = 20.0  # a server that has no answer yet holds a call for at most so long, then answers NotYet
KEEPALIVE_S = 10.0
BEAT_S = 5.0  # time between heartbeats of a worker's rank
REGION_BEAT_S = 2.0  # time between heartbeats of a region
MAX_PROFILED_STEPS = 50  # a trace holds every operation; one step of a large model takes megabytes
MAX_METRICS = 32  # how many numbers a heartbeat may bring

OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a link may be idle for long and must stay watched
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
    # A server closes connections that ping more often than this; by default that would be these.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
    ("grpc.enable_http_proxy", 0),
)


class ListenError(OSError):
    """Raised when a server cannot listen on its address. Says why and what to do."""


@dataclass(frozen=True)
class Ack:
    """Says that the server has received and recorded the call.

    applied: of a push, the last update of the member's fragment that is part of the server's weights. over: all data
    of the run has been trained and is part of the global weights. recalled: the member, a region, is to give back its
    reserve of data. profile: inner steps that the rank which beats is to record (`geotrain profile`). silent: the
    member, a region, counts as dead until it joins again.
    """

    applied: int = 0
    over: bool = False
    recalled: bool = False
    profile: int = 0
    silent: bool = False


@dataclass(frozen=True)
class FromMember:
    """Begins every call of a member: its name, and which of its incarnations is calling."""

    member: str
    incarnation: str


@dataclass(frozen=True)
class Resume(FromMember):
    """Opens a stream that goes on with an update whose stream broke. header: checksum of the update's header."""

    part: int
    header: int


@dataclass(frozen=True)
class Have:
    """Answers Resume: how many data frames of the update the server has already."""

    data_frames: int


@dataclass(frozen=True)
class Same:
    """Says that the answer is what the member has made by itself. incarnation: as in `Answer`."""

    incarnation: str


@dataclass(frozen=True)
class NotYet:
    """Says that there is no answer yet: ask again."""


@dataclass(frozen=True)
class Pull(FromMember):
    """Asks for the answer to update `sequence` of a fragment (0: to the join); the server may wait for it for
    `wait_s`.

    header, data frames: of an answer that was broken off, the checksum of its header and how many data frames
    arrived. If the answer is still this one, those data frames are left out; otherwise it is sent whole.
    digest: of the answer that the member has made by itself (`made_weights.MadeWeights`); "": it has none. If the
    answer is that one, the reply is `Same`.
    """

    part: int
    fragment: int
    sequence: int
    wait_s: float
    header: int = 0
    data_frames: int = 0
    digest: str = ""


@dataclass(frozen=True)
class AskLease(FromMember):
    request: LeaseRequest
    wait_s: float


@dataclass(frozen=True)
class ReleaseLeases(FromMember):
    release: Release


@dataclass(frozen=True)
class AskBack(FromMember):
    asked: TakeBack


@dataclass(frozen=True)
class SayTrained(FromMember):
    """Says that these leases are trained as far as the fragment goes, and that no update will bring them."""

    fragment: int
    leases: tuple[int, ...]


@dataclass(frozen=True)
class PullGlobal(FromMember):
    """Asks for the global weights that validation `number` is to evaluate."""

    part: int
    number: int


@dataclass(frozen=True)
class SayValidated(FromMember):
    result: Validated


@dataclass(frozen=True)
class SayLeave(FromMember):
    """Says goodbye for one rank. The member has left once all of its ranks have; then all get their answer.

    sequences: by fragment, the last update that the rank has sent, which the server must have received whole.
    """

    part: int
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class Beat(FromMember):
    """Says that this rank is alive. metrics: numbers to be shown to people."""

    part: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Control:
    """Carries a command of the operator.

    what: "snapshot", for any server; "unban", "expel" and "profile", for the server whose member `name` is; for the
    global server also any command of `OperatorCommand`, with `name` the region to drain. steps: that are to be
    recorded.
    """

    what: str
    name: str = ""
    steps: int = 0


@dataclass(frozen=True)
class ControlReply:
    """Says that the command was carried out. text: shown to the operator; for a snapshot, where it is."""

    text: str


@dataclass(frozen=True)
class MemberBytes:
    """Counts the bytes that a shard has exchanged with a member in the run so far."""

    member: str
    sent: int
    received: int


@dataclass(frozen=True)
class ShardHello:
    """A shard asks its ledger how the run stands.

    facts: how many it has to say since the run began, said or not. versions: of its fragments. job: of synchronous
    rounds, the last that is whole in them. origin: of the run that its state is of; "": of none yet. new: it began
    without a state. seen: checksum of the `Standing` that it has; 0: of none in this incarnation. wait_s: how long
    the ledger may wait until there is another. ended: it knows that the server has, and ends. journal_bytes,
    rss_bytes: of its process. incarnation: names the process. links: `Traffic.counts` of its links between regions.
    peers: its bytes with each member. late: members for whose deltas others wait.
    """

    shard: int
    facts: int
    versions: tuple[int, ...]
    job: int
    origin: str
    new: bool
    seen: int
    wait_s: float
    ended: bool
    journal_bytes: int
    rss_bytes: int
    incarnation: str
    links: tuple[int, ...] = ()
    peers: tuple[MemberBytes, ...] = ()
    late: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Says why a call is refused. retry_s: when it may be repeated; None: never. join_first: it was refused with
    NotJoined."""

    reason: str
    retry_s: float | None
    join_first: bool

    @classmethod
    def of(cls, refused: Refused) -> Refusal:
        return cls(refused.reason[: wire.MAX_TEXT], refused.retry_s, isinstance(refused, NotJoined))

    def error(self) -> Refused:
        return (NotJoined if self.join_first else Refused)(self.reason, self.retry_s)


async def next_frame(arriving: Awaitable[Any]) -> bytes:
    """Await the frame that a stream's `read` gives. Raises wire.DamagedError at the stream's end, which the sender
    may answer by sending the message again."""
    frame = await arriving
    if frame is aio.EOF:
        raise wire.DamagedError("the stream ended before its message did")
    return bytes(frame)


def check_free(address: Address) -> None:
    """Raise ListenError if nobody can listen on the address. gRPC would not say why it cannot."""
    if why := why_not_bound(*address.listening):
        raise ListenError(f"cannot listen on {host_port(*address.listening)}: {why}")


def refusal_of(error: Any) -> Refused | None:
    """Read the server's refusal from a gRPC error; None: the call failed for another reason."""
    for key, value in error.trailing_metadata() or ():
        if key == REFUSAL_KEY:
            refusal: Refusal = wire.unpack(value, Refusal)
            return refusal.error()
    return None
