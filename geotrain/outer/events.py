"""Events: what happened in a server, for people and tools.

`Server.handle` returns them beside its reply, and `geotrain.net` writes them to the event log. That log also has the
events of `geotrain.monitor.events`, where its format is defined. Nothing in the run depends on an event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, dataclass_transform

MemberName = Annotated[str, "a worker or a region"]
Fragment = Annotated[int, "number of the fragment that it is about"]
Sequence = Annotated[int, "number of the update, among the member's of this fragment"]
UpdateId = Annotated[str, "its id, member/fragment.sequence"]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Event:
    """Base of all events. A subclass becomes a frozen dataclass by itself; its fields are the event's schema, and
    their `Annotated` descriptions its documentation."""

    __dataclass_fields__: ClassVar[dict[str, Any]]  # declared for the type checker: `dataclass` sets it

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Joined(Event):
    """A member's rank has joined the server that writes this."""

    member: MemberName
    part: Annotated[int, "its rank"]
    incarnation: Annotated[str, "names this incarnation of the member"]
    new: Annotated[bool, "the incarnation is; else another rank of it, or the same one again"] = True


class SentWhole(Event):
    """A member does not hold what this server remembers having sent to it, as after the loss of a disk or of a
    mirror's file: its next answers go whole instead of as coded changes."""

    member: MemberName


class Left(Event):
    """A member has left in good order."""

    member: MemberName


class UpdateApplied(Event):
    """A server has applied a member's update. At the global server, this is a merge of a region's progress."""

    member: MemberName
    fragment: Fragment
    sequence: Sequence
    job: Annotated[int, "the worker's job that it belongs to"]
    versions: Annotated[list[int], "of every fragment of the model, after it"]
    staleness: Annotated[int, "versions that passed since its anchor"]
    samples: Annotated[int, "committed (global server) or trained (region server) with it"]
    payload_bytes: Annotated[int, "its coded deltas"]
    loss: Annotated[float | None, "training loss, mean over the member's workers"]
    metrics: Annotated[dict[str, float], "what else the member says of itself, as in JobTrained"]
    delta_norm: Annotated[float | None, "2-norm of its delta"] = None
    tokens: Annotated[int | None, "committed in the run so far (global server only)"] = None


class SentUp(Event):
    """A region's progress has left for the global server."""

    fragment: Fragment
    sequence: Sequence
    weight: Annotated[int, "workers' deltas that it stands for"]
    payload_bytes: Annotated[int, "its coded deltas"]


class ShardWentBack(Event):
    """A shard's disk was lost, and came back from a copy: what it had acknowledged since is gone."""

    shard: Annotated[int, "its number"]
    versions: Annotated[list[int], "of every fragment of the model, now"]
    samples: Annotated[int, "that were committed, and are handed out again"]


class FactsLost(Event):
    """A server's ledger came back from an older state than its shards: it does not know what they contain of what was
    said meanwhile, and hands that out again."""

    shard: Annotated[int, "its number"]
    facts: Annotated[int, "how many are lost"]


class StartedOver(Event):
    """A region begins again from the global weights: an update of it was refused for good, or its own state is older
    than what it sent. Its leases went back, its workers train on."""

    reason: Annotated[str, "why"]
    dropped: Annotated[int, "acknowledged updates, counted by fragment, that never go up"] = 0


class TrainedTwice(Event):
    """Data that a region's workers have trained went to others while it counted as dead. What they made of it goes up
    with what is pending; its samples count once."""

    leases: Annotated[list[int], "the leases"]


class Merged(Event):
    """A region took in the global weights that came in answer to its update."""

    fragment: Fragment
    sequence: Sequence
    global_versions: Annotated[list[int], "of every fragment, as the region now has them"]
    payload_bytes: Annotated[int, "the coded weights"]


class UpdateRefused(Event):
    """A member sent what this server will not take."""

    member: MemberName
    reason: Annotated[str, "why"]
    strikes: Annotated[int, "of its last updates, how many were refused"]


class Quarantined(Event):
    """A member sent too much that was refused: it is refused itself, and its leases go to others."""

    member: MemberName
    reason: Annotated[str, "why"]


class Unbanned(Event):
    """A quarantined member may come back, in a new incarnation."""

    member: MemberName


class ValidationDone(Event):
    """A worker has evaluated the global weights."""

    worker: Annotated[str, "its name"]
    number: Annotated[int, "of the validation, from 1"]
    version: Annotated[int, "the newest of the fragments' global versions"]
    loss: Annotated[float, "nats a token"]
    seconds: Annotated[float, "that it took"]
    tokens: Annotated[int, "committed by then"]


class Steered(Event):
    """An operator had the run pause, resume, drain a region, stop, or set a key."""

    what: Annotated[str, "what was asked for"]
    region: Annotated[str, "to drain, or whose server was asked; else empty"]


class SetAside(Event):
    """Samples of the run that nobody shall train any more: two updates with them were not finite, or outliers."""

    first: Annotated[int, "the first of them"]
    last: Annotated[int, "the last"]


class LossSpike(Event):
    """The training loss of several updates in a row is far above what is usual in the run."""

    loss: Annotated[float, "of the last of them, nats a token"]
    usual: Annotated[float, "median of those before"]
    tokens: Annotated[int, "committed when the first of them came"]


class LeaseBegun(Event):
    """A worker begins to train a lease."""

    worker: Annotated[str, "its name"]
    job: Annotated[int, "number of the lease, by worker"]
    lease: Annotated[int, "number of the lease, in the run"]
    start: Annotated[int, "the lease's first sample"]
    samples: Annotated[int, "how many"]


class UpdateEncoded(Event):
    """Rank 0 of a worker has encoded its part of an update and given it to its link."""

    update: UpdateId
    job: Annotated[int, "the job in which it was made"]
    contains: Annotated[list[int], "the leases all of whose training the fragment's updates contain with it"]
    payload_bytes: Annotated[int, "coded deltas of this rank"]


class Acknowledged(Event):
    """A member got the acknowledgement that its update is durable."""

    member: MemberName
    incarnation: Annotated[str, "names this incarnation of the member"]
    fragment: Fragment
    sequence: Sequence


class UpdateStage(Event):
    """An update has come to a stage of its way that no other event reports.

    sent: rank 0 of the worker begins to send its part. arrived: the first part of a worker of several ranks is in the
    server's journal. waits: it is applied, and its answer, or in a region its way up, waits for the deltas of others.
    answered: the answer's weights are frozen by the server. adopted: rank 0 of the worker has adopted the answer.
    """

    update: UpdateId
    stage: Annotated[str, "sent, arrived, waits, answered or adopted"]


class Profiled(Event):
    """A rank has recorded inner steps, as `geotrain profile` asked."""

    worker: MemberName
    rank: Annotated[int, "of the worker"]
    steps: Annotated[int, "recorded"]
    path: Annotated[str, "of the trace, on the rank's machine"]
