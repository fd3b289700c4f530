"""The calls of a server's service: what is said on sockets around the messages of `geotrain.outer.messages`.

method    request                    answer
join      Join                       Welcome
push      UpdatePart, streamed       Ack or Refusal, which may come before the whole update was sent
          Resume, UpdatePart …       Have, then as above: the update goes on with its chunk number `chunks`
pull      Pull                       Answer, streamed, or NotYet
lease     AskLease                   Lease, Finished or NotYet
release   ReleaseLeases              Ack
weights   PullGlobal                 Answer, streamed; empty when the server has none
validated SayValidated               Ack
leave     SayLeave                   Ack
beat      Beat                       Ack
status    nothing                    JSON
control   Control                    Told
A call that is refused ends with a gRPC status and a `Refusal` in its trailing metadata.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from geotrain.net import wire
from geotrain.outer.messages import LeaseRequest, NotJoined, Refused, Release, Validated

SERVICE = "geotrain.Outer"
REFUSAL_KEY = "geotrain-refusal-bin"
MAX_WAIT_S = 20.0  # a server holds a call that has no answer yet at most so long
KEEPALIVE_S = 10.0
BEAT_S = 5.0  # how often a worker's rank says that it lives
REGION_BEAT_S = 2.0  # and a region
MAX_METRICS = 32  # numbers in a beat

OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", wire.MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True)
class Ack:
    """The server has it. applied: the last update of this member that is part of the weights. over: all data of the
    run is trained for good."""

    applied: int
    over: bool = False


@dataclass(frozen=True)
class Resume:
    """The stream that carried this rank's update broke: it goes on here. header: checksum of the update's header."""

    member: str
    incarnation: str
    part: int
    header: int


@dataclass(frozen=True)
class Have:
    """So many chunks of the update are here."""

    chunks: int


@dataclass(frozen=True)
class NotYet:
    """Ask again."""


@dataclass(frozen=True)
class Pull:
    """The answer to update `sequence` (0: to the join), please, within `wait_s`.

    Of the answer whose header has the checksum `header`, the first `chunks` chunks are here already: only the header
    and what follows them is wanted. Any other answer is wanted whole.
    """

    member: str
    incarnation: str
    part: int
    sequence: int
    fragments: tuple[int, ...]
    wait_s: float
    header: int = 0
    chunks: int = 0


@dataclass(frozen=True)
class AskLease:
    member: str
    incarnation: str
    request: LeaseRequest
    wait_s: float


@dataclass(frozen=True)
class ReleaseLeases:
    member: str
    incarnation: str
    release: Release


@dataclass(frozen=True)
class PullGlobal:
    """The global weights that validation `number` speaks of, please."""

    member: str
    incarnation: str
    part: int
    number: int


@dataclass(frozen=True)
class SayValidated:
    member: str
    incarnation: str
    result: Validated


@dataclass(frozen=True)
class SayLeave:
    """One rank is done. sequence: the last update that it has sent; the server has to know it whole. The member has
    left, and all ranks are told so, when each of them has said it."""

    member: str
    incarnation: str
    part: int
    sequence: int


@dataclass(frozen=True)
class Beat:
    """This rank lives. metrics: plain numbers for people."""

    member: str
    incarnation: str
    part: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Control:
    """From the operator. what: "snapshot", of any server; "pardon", of the server whose member `name` is quarantined;
    of the global server also what `Steer` may say (`name`: the region to drain)."""

    what: str
    name: str = ""


@dataclass(frozen=True)
class Told:
    """It is done. text: for the operator; of a snapshot, where it lies."""

    text: str


@dataclass(frozen=True)
class Refusal:
    reason: str
    retry_s: float | None
    join_first: bool

    @classmethod
    def of(cls, refused: Refused) -> Refusal:
        return cls(refused.reason[: wire.MAX_TEXT], refused.retry_s, isinstance(refused, NotJoined))

    def error(self) -> Refused:
        return (NotJoined if self.join_first else Refused)(self.reason, self.retry_s)


def refusal_of(error: Any) -> Refused | None:
    """What the server said, by the gRPC error; None when the call failed for another reason."""
    for key, value in error.trailing_metadata() or ():
        if key == REFUSAL_KEY:
            refusal: Refusal = wire.unpack(value, Refusal)
            return refusal.error()
    return None
