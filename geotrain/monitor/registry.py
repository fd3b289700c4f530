"""The registry of metrics: which there are, and how each is read from events. Every view is made from it.

A number that a worker, a server or a shard measures of itself is declared at the field of the event that carries it
(`geotrain.outer.metrics`), which is all: it is found here. What follows from several events, or is only their count,
is declared in `DERIVED`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from geotrain.monitor import events
from geotrain.monitor.events import ServerSampled, ShardSampled
from geotrain.outer.events import Event, UpdateApplied
from geotrain.outer.metrics import MEMBER, WORKER_METRICS, Metric, declared
from geotrain.outer.server.liveness import Liveness

# Takes an event and its time (Unix time in seconds). A mapping gives a value for each value of the last label; None
# gives none.
Reader = Callable[[Any, float], float | Mapping[Any, float] | None]

PARTS = ("compute", "communication", "waiting")  # what a worker's time goes to
FRAGMENT = ("member", "fragment")
LINK = ("member", "direction")
SERVER_METRICS = declared(ServerSampled)


def time_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """The shares of a worker's time that went to computing, exposed communication and waiting; empty if not known."""
    spent = {part: metrics.get(f"{part}_s", 0.0) for part in PARTS}
    total = sum(spent.values())
    return {part: seconds / total for part, seconds in spent.items()} if total > 0 else {}


def _one(event: Event, time_s: float) -> float:
    return 1.0


def _zero(event: Event, time_s: float) -> float:
    return 0.0


def _now(event: Event, time_s: float) -> float:
    return time_s


def _versions(event: Any, time_s: float) -> Mapping[int, int]:
    return dict(enumerate(event.versions))


def _is_up(event: events.LivenessChanged, time_s: float) -> float | None:
    state = Liveness(event.state)
    return float(state.reachable) if state.reachable or state.missing else None


MEMBER_UP = Metric("member_up", "1 while the member sends, 0 while it is silent; none while it need not send", MEMBER)
MEMBER_SAYS = Metric("member_says", "Numbers in the member's heartbeat", ("member", "what"))
EVENTS = Metric("events", "Events written, by type", ("event",), kind="counter")
# These two are set once, from the run's files.
TARGET_TOKENS = Metric("target", "Tokens after which the run is finished", unit="tokens")
LINK_CAPACITY = Metric("link_capacity", "As the cluster file states it", MEMBER, unit="bytes_per_second")

DERIVED: dict[Metric, dict[type[Event], Reader]] = {
    MEMBER_UP: {events.LivenessChanged: _is_up},
    Metric("waits", "Things that the server has waited for, for more than some seconds"): {
        events.WaitsChanged: lambda event, _: len(event.waits)
    },
    Metric("member_last_seen_timestamp", "Unix time of the member's last message", MEMBER, unit="seconds"): {
        events.Joined: _now,
        events.MemberSampled: lambda event, time_s: time_s - event.silent_s,
    },
    Metric("joins", "Incarnations of the member that joined", MEMBER, kind="counter"): {
        events.Joined: lambda event, _: event.new
    },
    Metric("member_losses", "Times that the member was cut off", MEMBER, kind="counter"): {
        events.LivenessChanged: lambda event, _: event.state == Liveness.CUT_OFF
    },
    Metric("loss", "Training loss that came with the member's last update", MEMBER): {
        UpdateApplied: lambda event, _: event.loss
    },
    Metric("validation_loss", "Loss of the global weights, when last evaluated"): {
        events.ValidationDone: lambda event, _: event.loss
    },
    Metric("delta_norm", "2-norm of the last delta", FRAGMENT): {
        UpdateApplied: lambda event, _: None if event.delta_norm is None else {event.fragment: event.delta_norm}
    },
    Metric("staleness", "Staleness of the last update", FRAGMENT, unit="versions"): {
        UpdateApplied: lambda event, _: {event.fragment: event.staleness}
    },
    Metric("fragment_version", "Version of the server's weights", ("fragment",)): {
        UpdateApplied: _versions,
        ServerSampled: _versions,
    },
    Metric("committed", "Tokens that are part of the run's global weights", unit="tokens"): {
        UpdateApplied: lambda event, _: event.tokens
    },
    TARGET_TOKENS: {},
    Metric("time_share", "Share of the workers' time, by what it went to", ("member", "part"), unit="ratio"): {
        UpdateApplied: lambda event, _: time_shares(event.metrics)
    },
    # Zero with the join, so that the first update is seen as a rise.
    Metric("updates", "Updates applied", MEMBER, kind="counter"): {UpdateApplied: _one, events.Joined: _zero},
    Metric("updates_sent", "Updates sent up by a region server", kind="counter"): {events.SentUp: _one},
    Metric("merges", "Global weights merged by a region server", kind="counter"): {events.Merged: _one},
    Metric("updates_lost", "Acknowledged updates lost by restoring an older state", kind="counter"): {
        events.UpdatesLost: lambda event, _: event.updates
    },
    Metric("link", "Bytes with the member, as the kernel counts them", LINK, unit="bytes", kind="total"): {
        events.MemberSampled: lambda event, _: {"to": event.sent_bytes, "from": event.received_bytes}
    },
    Metric("link", "Rate over the last sample", LINK, unit="bytes_per_second"): {
        events.MemberSampled: lambda event, _: {"to": event.sent_bytes_per_s, "from": event.received_bytes_per_s}
    },
    LINK_CAPACITY: {},
    Metric("loss_spikes", "Times that the loss was far above the usual (global server)", kind="counter"): {
        events.LossSpike: _one,
        events.Joined: _zero,
    },
    Metric("refusals", "Updates refused for good", MEMBER, kind="counter"): {events.UpdateRefused: _one},
    Metric("quarantined", "1 while the member is refused itself", MEMBER): {
        events.Quarantined: _one,
        events.Unbanned: _zero,
    },
    MEMBER_SAYS: {events.MemberSampled: lambda event, _: event.metrics},
    Metric("device_says", "Numbers of the device of a worker's rank (by OTLP)", ("worker", "rank", "what")): {
        events.DeviceSampled: lambda event, _: event.numbers
    },
    Metric("snapshots", "Snapshots written", kind="counter"): {events.SnapshotWritten: _one},
    Metric("snapshot", "Seconds that the last snapshot took", unit="seconds"): {
        events.SnapshotWritten: lambda event, _: event.seconds
    },
    Metric("snapshot_timestamp", "Unix time of the last snapshot", unit="seconds"): {events.SnapshotWritten: _now},
    Metric("start_timestamp", "Unix time at which the server had recovered", unit="seconds"): {events.Recovery: _now},
    Metric("process_up", "1 while the process that the launcher started runs", ("process",)): {
        events.ProcessStarted: _one,
        events.ProcessEnded: _zero,
    },
    Metric("process_exits", "Processes that ended", ("process", "code"), kind="counter"): {events.ProcessEnded: _one},
    EVENTS: {},
}


def _field(name: str) -> Reader:
    return lambda event, _: getattr(event, name)


def _of_worker(name: str) -> Reader:
    return lambda event, _: event.metrics.get(name)


# All metrics of all processes, and the events from which each is read. A worker's numbers come with its updates.
METRICS: dict[Metric, Mapping[type[Event], Reader]] = {
    **DERIVED,
    **{metric: {UpdateApplied: _of_worker(name)} for name, metric in WORKER_METRICS.items()},
    **{
        metric: {kind: _field(name)}
        for kind in (ServerSampled, ShardSampled)
        for name, metric in declared(kind).items()
    },
}
READERS: Mapping[type[Event], list[tuple[Metric, Reader]]] = {
    kind: [(metric, reads[kind]) for metric, reads in METRICS.items() if kind in reads]
    for kind in {kind for reads in METRICS.values() for kind in reads}
}
