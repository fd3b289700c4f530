"""The calls of a server's gRPC service, and the types they use besides the messages of `geotrain.outer.messages`.

method    request                    answer
join      Join                       Welcome
push      UpdatePart, streamed       Ack or Refusal, which may come before the whole update was sent
          Resume, UpdatePart …       Have, then as above; the update goes on with data frame number `Have.data_frames`
commit    the header of an UpdatePart whose payloads go to shards
                                     Ack, or NotYet: not all is held
pull      Pull                       Answer, streamed, or NotYet
lease     AskLease                   Lease, Finished or NotYet
release   ReleaseLeases              Ack
trained   SayTrained                 Ack
weights   PullGlobal                 Answer, streamed; empty when the server has none
validated SayValidated               Ack
leave     SayLeave                   Ack
beat      Beat                       Ack
status    nothing                    JSON
control   Control                    Told
shard     ShardHello, then what it holds, streamed
                                     orders, and Belong, Bring, Fetch, Save, Upload, Farewell, streamed, several in a
                                     bundle; or GoBack alone

A call that is refused ends with a gRPC status and a `Refusal` in its trailing metadata.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from geotrain.net.transport import wire
from geotrain.outer.messages import Answer, LeaseRequest, NotJoined, Refused, Release, UpdatePart, Validated

SERVICE = "geotrain.Outer"
REFUSAL_KEY = "geotrain-refusal-bin"
MAX_WAIT_S = 20.0  # a server that has no answer yet holds a call for at most so long, then answers NotYet
KEEPALIVE_S = 10.0
BEAT_S = 5.0  # time between heartbeats of a worker's rank
REGION_BEAT_S = 2.0  # time between heartbeats of a region
MAX_METRICS = 32  # how many numbers a heartbeat may bring

OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_BUNDLE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_BUNDLE_BYTES),
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
    """The server cannot listen on its address. Says why and what to do."""


@dataclass(frozen=True)
class Ack:
    """The server has received and recorded the call.

    applied: the last update of this member that is part of the server's weights. over: all data of the run has been
    trained and is part of the global weights. recalled: the member, a region, is to give back its reserve of data.
    """

    applied: int
    over: bool = False
    recalled: bool = False


@dataclass(frozen=True)
class FromMember:
    """The first fields of every call of a member: its name and which of its lives is calling."""

    member: str
    incarnation: str


@dataclass(frozen=True)
class Resume(FromMember):
    """Opens a stream that goes on with an update whose stream broke. header: checksum of the update's header."""

    part: int
    header: int


@dataclass(frozen=True)
class Have:
    """The answer to Resume: how many data frames of the update the server has already."""

    data_frames: int


@dataclass(frozen=True)
class NotYet:
    """There is no answer yet: ask again."""


@dataclass(frozen=True)
class Pull(FromMember):
    """Asks for the answer to update `sequence` (0: to the join); the server may wait for it for `wait_s`.

    header, data frames: of an answer that was broken off, the checksum of its header and how many data frames
    arrived. If the answer is still this one, those data frames are left out; otherwise it is sent whole.
    """

    part: int
    sequence: int
    fragments: tuple[int, ...]
    wait_s: float
    header: int = 0
    data_frames: int = 0


@dataclass(frozen=True)
class AskLease(FromMember):
    request: LeaseRequest
    wait_s: float


@dataclass(frozen=True)
class ReleaseLeases(FromMember):
    release: Release


@dataclass(frozen=True)
class SayTrained(FromMember):
    """These leases are trained; no update will bring them."""

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
    """One rank is done and says goodbye. The member has left once all of its ranks have; then all get their answer.

    sequence: the last update that the rank has sent, which the server must have received whole.
    """

    part: int
    sequence: int


@dataclass(frozen=True)
class Beat(FromMember):
    """A heartbeat: this rank is alive. metrics: numbers to be shown to people."""

    part: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Control:
    """A command of the operator.

    what: "snapshot", for any server; "unban", for the server whose member `name` is quarantined; for the global
    server also any command of `OperatorCommand`, with `name` the region to drain.
    """

    what: str
    name: str = ""


@dataclass(frozen=True)
class Told:
    """The command was carried out. text: shown to the operator; for a snapshot, where it is."""

    text: str


@dataclass(frozen=True)
class ShardHello:
    """A shard calls its coordinator. orders: how many it has obeyed that count, and has on disk. past: the name of
    the past (`geotrain.net.storage.timeline`) that its state belongs to."""

    server: str
    shard: int
    shards: int
    commands: int
    timeline: str


@dataclass(frozen=True)
class ShardState:
    """A shard tells how far it is on disk. saved: after how many orders its newest snapshot was taken. rss_bytes: its
    process's memory. moment: of that snapshot."""

    commands: int
    saved: int
    journal_bytes: int
    rss_bytes: int
    checkpoint_id: str = ""


@dataclass(frozen=True)
class Bring:
    """A region's shard shall push its chunks of an update to the shard of the same chunks above."""

    update: UpdatePart


@dataclass(frozen=True)
class Fetch:
    """A region's shard shall pull its chunks of an answer from there. answer: without payloads."""

    incarnation: str
    fragments: tuple[int, ...]
    answer: Answer


@dataclass(frozen=True)
class Belong:
    """The shard's state belongs to this past of its server from here on. The shard says the same when that is on its
    disk."""

    timeline: str


@dataclass(frozen=True)
class GoBack:
    """A shard that does not fit its coordinator shall take its copy of this moment, from which that past began."""

    checkpoint_id: str
    timeline: str


@dataclass(frozen=True)
class Save:
    """A shard shall write a snapshot of its state, as it is after the orders before this. moment: the snapshot's."""

    checkpoint_id: str


@dataclass(frozen=True)
class Upload:
    """A shard shall copy its snapshot of this moment to object storage. It answers with Uploaded."""

    checkpoint_id: str


@dataclass(frozen=True)
class Uploaded:
    """trouble: why there is no whole copy; "": there is."""

    checkpoint_id: str
    trouble: str = ""


@dataclass(frozen=True)
class Farewell:
    """The server has ended in good order, and so shall its shards. Each says the same before it goes."""


@dataclass(frozen=True)
class Refusal:
    """A refused call. retry_s: when it may be repeated; None: never. join_first: it was refused with NotJoined."""

    reason: str
    retry_s: float | None
    join_first: bool

    @classmethod
    def of(cls, refused: Refused) -> Refusal:
        return cls(refused.reason[: wire.MAX_TEXT], refused.retry_s, isinstance(refused, NotJoined))

    def error(self) -> Refused:
        return (NotJoined if self.join_first else Refused)(self.reason, self.retry_s)


async def next_frame(arriving: Awaitable[Any]) -> bytes:
    """The frame that a stream's `read` gives. Raises wire.DamagedError at the stream's end, which the sender may
    answer by sending the message again."""
    frame = await arriving
    if frame is aio.EOF:
        raise wire.DamagedError("the stream ended before its message did")
    return bytes(frame)


def refusal_of(error: Any) -> Refused | None:
    """The server's refusal that a gRPC error carries; None if the call failed for another reason."""
    for key, value in error.trailing_metadata() or ():
        if key == REFUSAL_KEY:
            refusal: Refusal = wire.unpack(value, Refusal)
            return refusal.error()
    return None
