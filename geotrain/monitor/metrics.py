"""Prometheus metrics of one process, fed by its events."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from geotrain.monitor.events import (
    Found,
    JobTrained,
    Joined,
    Left,
    Lost,
    MemberSampled,
    Merged,
    Pardoned,
    ProcessEnded,
    ProcessStarted,
    Quarantined,
    Record,
    Recovery,
    SentUp,
    ServerSampled,
    SnapshotWritten,
    UpdateApplied,
    UpdateRefused,
    UpdatesLost,
    ValidationDone,
)
from geotrain.monitor.http import Query, Response

PARTS = ("compute", "communication", "waiting")
PREFIX = "geotrain_"


class Metrics:
    """A sink for events. All metrics carry the labels `run` and `site` (global, a region, or launcher).

    target_tokens: of the whole run; 0 where it is not known. links: region → Gbit/s of its link, where stated.
    """

    def __init__(self, run: str, site: str, target_tokens: int = 0, links: Mapping[str, float] | None = None) -> None:
        self.registry = CollectorRegistry()
        self._always = {"run": run, "site": site}
        self._counted: dict[tuple[Counter, tuple[str, ...]], float] = {}
        gauge, counter = self._gauge, self._counter
        self.up = gauge(
            "member_up", "1 while the member is heard of, 0 while it is lost; none once it left", "member"
        )
        self.heard = gauge("member_heard_timestamp_seconds", "Unix time of the member's last sign", "member")
        self.joins = counter("joins", "Ranks that joined", "member")
        self.losses = counter("member_losses", "Times that a member was lost", "member")
        self.loss = gauge("loss", "Training loss that came with the member's last update", "member")
        self.validation = gauge("validation_loss", "Of the global weights, when last evaluated")
        self.lr = gauge("learning_rate", "Learning rate of the member's last step", "member")
        self.grad_norm = gauge("gradient_norm", "Gradient norm of the member's last step", "member")
        self.delta_norm = gauge("delta_norm", "2-norm of the last delta", "member", "fragment")
        self.staleness = gauge("staleness_versions", "Staleness of the last update", "member", "fragment")
        self.version = gauge("fragment_version", "Version of the server's weights", "fragment")
        self.tokens = gauge("committed_tokens", "Tokens that are part of the run's global weights")
        self.target = gauge("target_tokens", "Tokens after which the run is finished")
        self.rate = gauge("tokens_per_second", "Training speed that came with the last update", "member")
        self.mfu = gauge("mfu_ratio", "Model FLOPs utilization while computing", "member")
        self.share = gauge("time_share_ratio", "Share of the workers' time, by what it went to", "member", "part")
        self.updates = counter("updates", "Updates applied", "member")
        self.sent = counter("updates_sent", "Updates sent up by a region server")
        self.merged = counter("merges", "Global weights merged by a region server")
        self.updates_lost = counter("updates_lost", "Acknowledged updates lost by restoring an older state")
        self.link_bytes = counter(
            "link_bytes", "Bytes with the member, as the kernel counts them", "member", "direction"
        )
        self.link_rate = gauge("link_bytes_per_second", "Rate over the last sample", "member", "direction")
        self.link_capacity = gauge("link_capacity_bytes_per_second", "As the cluster file states it", "member")
        self.refusals = counter("refusals", "Updates refused for good", "member")
        self.quarantined = gauge("quarantined", "1 while the member is refused itself", "member")
        self.said = gauge("member_says", "Numbers in the member's heartbeat", "member", "what")
        self.memory = gauge("memory_bytes", "Resident memory of this process")
        self.disk_free = gauge("disk_free_bytes", "Where this server keeps its state")
        self.disk_size = gauge("disk_size_bytes", "Where this server keeps its state")
        self.queue = gauge("queue_length", "Messages waiting for the state machine")
        self.calls = counter("messages", "Messages taken by the state machine")
        self.journal = gauge("journal_bytes", "Of the journal's open segment")
        self.flushes = counter("journal_flushes", "Flushes of the journal")
        self.flush_s = counter("journal_flush_seconds", "Seconds spent in them")
        self.snapshots = counter("snapshots", "Snapshots written")
        self.snapshot_s = gauge("snapshot_seconds", "Seconds that the last snapshot took")
        self.snapshot_at = gauge("snapshot_timestamp_seconds", "Unix time of the last snapshot")
        self.in_flight = gauge("in_flight_updates", "Updates sent up without answer yet")
        self.pending = gauge("pending_updates", "Workers' updates not sent up yet")
        self.leases = gauge("open_leases", "Leases given out and not committed")
        self.retries = counter("retries", "Attempts on the link upwards that failed")
        self.connected = gauge("connected", "1 while the link upwards is there")
        self.start = gauge("start_timestamp_seconds", "Unix time at which the server had recovered")
        self.process_up = gauge("process_up", "1 while the process that the launcher started runs", "process")
        self.exits = counter("process_exits", "Processes that ended", "process", "code")
        self.events = counter("events", "Events written, by type", "event")
        if target_tokens:
            self.target.labels(**self._always).set(target_tokens)
        for member, gbps in (links or {}).items():
            self._set(self.link_capacity, gbps * 1e9 / 8, member=member)

    def route(self, query: Query) -> Response:
        return Response(generate_latest(self.registry), CONTENT_TYPE_LATEST)

    def on(self, record: Record) -> None:
        event = record.event
        self._add(self.events, event=type(event).__name__)
        match event:
            case Joined(member=member):
                self._add(self.joins, member=member)
                self._alive(member, 1, record.time_s)
            case Found(member=member):
                self._alive(member, 1, record.time_s)
            case Lost(member=member):
                self._add(self.losses, member=member)
                self._alive(member, 0)
            case Left(member=member):
                self.up.remove(*self._always.values(), member)
            case UpdateApplied():
                self._on_update(event)
            case JobTrained():
                pass  # a worker's own numbers come to the servers with its updates
            case SentUp():
                self._add(self.sent)
            case Merged():
                self._add(self.merged)
            case UpdatesLost(updates=updates):
                self._add(self.updates_lost, updates)
            case UpdateRefused(member=member):
                self._add(self.refusals, member=member)
            case Quarantined(member=member):
                self._set(self.quarantined, 1, member=member)
            case ValidationDone(loss=loss):
                self._set(self.validation, loss)
            case Pardoned(member=member):
                self._set(self.quarantined, 0, member=member)
            case SnapshotWritten(seconds=seconds):
                self._add(self.snapshots)
                self._set(self.snapshot_s, seconds)
                self._set(self.snapshot_at, record.time_s)
            case MemberSampled():
                self._on_member(event, record.time_s)
            case ServerSampled():
                self._on_server(event)
            case Recovery():
                self._set(self.start, record.time_s)
            case ProcessStarted(process=process):
                self._set(self.process_up, 1, process=process)
            case ProcessEnded(process=process, code=code):
                self._set(self.process_up, 0, process=process)
                self._add(self.exits, process=process, code=str(code))

    def _on_update(self, event: UpdateApplied) -> None:
        said, member = event.metrics, event.member
        self._add(self.updates, member=member)
        if event.loss is not None:
            self._set(self.loss, event.loss, member=member)
        for gauge, name in (
            (self.lr, "lr"),
            (self.grad_norm, "grad_norm"),
            (self.rate, "tokens_per_s"),
            (self.mfu, "mfu"),
        ):
            if name in said:
                self._set(gauge, said[name], member=member)
        for part, share in time_shares(said).items():
            self._set(self.share, share, member=member, part=part)
        for fragment, stale in zip(event.fragments, event.fragment_staleness, strict=False):
            self._set(self.staleness, stale, member=member, fragment=str(fragment))
        for fragment, norm in zip(event.fragments, event.delta_norms, strict=False):
            self._set(self.delta_norm, norm, member=member, fragment=str(fragment))
        self._on_versions(event.versions)
        if event.tokens is not None:
            self._set(self.tokens, event.tokens)

    def _on_member(self, event: MemberSampled, time_s: float) -> None:
        member = event.member
        self._set(self.heard, time_s - event.silent_s, member=member)
        for direction, count, rate in (
            ("to", event.sent_bytes, event.sent_bytes_per_s),
            ("from", event.received_bytes, event.received_bytes_per_s),
        ):
            self._count_to(self.link_bytes, count, member=member, direction=direction)
            self._set(self.link_rate, rate, member=member, direction=direction)
        for what, value in event.metrics.items():
            self._set(self.said, value, member=member, what=what)

    def _on_server(self, event: ServerSampled) -> None:
        for gauge, value in (
            (self.memory, event.rss_bytes),
            (self.disk_free, event.disk_free_bytes),
            (self.disk_size, event.disk_total_bytes),
            (self.queue, event.queue),
            (self.journal, event.journal_bytes),
            (self.in_flight, event.in_flight),
            (self.pending, event.pending),
            (self.leases, event.open_leases),
            (self.connected, event.connected),
        ):
            self._set(gauge, float(value))
        self._count_to(self.calls, event.calls)
        self._count_to(self.retries, event.retries)
        self._add(self.flushes, event.journal_flushes)
        self._add(self.flush_s, event.journal_flush_s)
        self._on_versions(event.versions)

    def _on_versions(self, versions: list[int]) -> None:
        for fragment, version in enumerate(versions):
            self._set(self.version, version, fragment=str(fragment))

    def _alive(self, member: str, up: int, heard_s: float = 0.0) -> None:
        self._set(self.up, up, member=member)
        if heard_s:
            self._set(self.heard, heard_s, member=member)

    def _gauge(self, name: str, doc: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, doc, [*self._always, *labels], registry=self.registry)

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, doc, [*self._always, *labels], registry=self.registry)

    def _set(self, gauge: Gauge, value: float, **labels: str) -> None:
        gauge.labels(**self._always, **labels).set(value)

    def _count_to(self, counter: Counter, total: float, **labels: str) -> None:
        """For totals that someone else counts; they begin again with the process."""
        key = counter, tuple(labels.values())
        before, self._counted[key] = self._counted.get(key, 0.0), total
        self._add(counter, max(0.0, total - before), **labels)

    def _add(self, counter: Counter, value: float = 1.0, **labels: str) -> None:
        counter.labels(**self._always, **labels).inc(value)


def time_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """What share of a worker's time went to computing, exposed communication and waiting; empty when unknown."""
    spent = {part: metrics.get(f"{part}_s", 0.0) for part in PARTS}
    total = sum(spent.values())
    return {part: seconds / total for part, seconds in spent.items()} if total > 0 else {}
