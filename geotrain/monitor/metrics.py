"""Prometheus metrics of one process, fed by its events."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from geotrain.monitor import events
from geotrain.monitor.http import Query, Response

PARTS = ("compute", "communication", "waiting")
PREFIX = "geotrain_"
MAX_SAID = 64  # so many different names of numbers in heartbeats are shown


class Metrics:
    """The metrics of one process; `on` is a sink. All carry the labels `run` and `site` (global, a region or
    launcher).

    A worker's own numbers come to the servers with its updates, so JobTrained changes nothing here.
    target_tokens: of the whole run; 0 if not known. links: region → Gbit/s of its link, if the cluster file states
    it.
    """

    def __init__(self, run: str, site: str, target_tokens: int = 0, links: Mapping[str, float] | None = None) -> None:
        self.registry = CollectorRegistry()
        self._always = {"run": run, "site": site}
        self._said: set[str] = set()  # names of numbers in heartbeats
        self._counted: dict[tuple[Counter, tuple[str, ...]], float] = {}
        gauge, counter = self._gauge, self._counter
        self.up = gauge(
            "member_up", "1 while the member is heard of, 0 while it is lost; none once it left", "member"
        )
        self.heard = gauge("member_heard_timestamp_seconds", "Unix time of the member's last sign", "member")
        self.joins = counter("joins", "Lives of the member that joined", "member")
        self.losses = counter("member_losses", "Times that a member was lost", "member")
        self.loss = gauge("loss", "Training loss that came with the member's last update", "member")
        self.validation = gauge("validation_loss", "Of the global weights, when last evaluated")
        self.delta_norm = gauge("delta_norm", "2-norm of the last delta", "member", "fragment")
        self.staleness = gauge("staleness_versions", "Staleness of the last update", "member", "fragment")
        self.version = gauge("fragment_version", "Version of the server's weights", "fragment")
        self.tokens = gauge("committed_tokens", "Tokens that are part of the run's global weights")
        self.target = gauge("target_tokens", "Tokens after which the run is finished")
        self.of_update = {  # a name in the update's metrics → its gauge
            "lr": gauge("learning_rate", "Learning rate of the member's last step", "member"),
            "grad_norm": gauge("gradient_norm", "Gradient norm of the member's last step", "member"),
            "tokens_per_s": gauge("tokens_per_second", "Training speed that came with the last update", "member"),
            "mfu": gauge("mfu_ratio", "Model FLOPs utilization while computing", "member"),
        }
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
        self.of_server = {  # a field of ServerSampled → its gauge
            "rss_bytes": gauge("memory_bytes", "Resident memory of this process"),
            "disk_free_bytes": gauge("disk_free_bytes", "Where this server keeps its state"),
            "disk_total_bytes": gauge("disk_size_bytes", "Where this server keeps its state"),
            "queue": gauge("queue_length", "Messages waiting for the state machine"),
            "journal_bytes": gauge("journal_bytes", "Of the journal's open segment"),
            "in_flight": gauge("in_flight_updates", "Updates sent up without answer yet"),
            "pending": gauge("pending_updates", "Workers' updates not sent up yet"),
            "open_leases": gauge("open_leases", "Leases given out and not committed"),
            "connected": gauge("connected", "1 while the link upwards is there"),
        }
        self.of_shard = {  # a field of ShardSampled → its gauge
            "up": gauge("shard_up", "1 while the shard's process is connected to this server", "shard"),
            "commands": gauge("shard_commands", "Commands that the shard has on its disk", "shard"),
            "behind": gauge("shard_commands_behind", "Commands given that it has not", "shard"),
            "saved": gauge("shard_snapshot_commands", "Commands before its newest snapshot", "shard"),
            "journal_bytes": gauge("shard_journal_bytes", "Of its journal's open segment", "shard"),
            "rss_bytes": gauge("shard_memory_bytes", "Resident memory of its process", "shard"),
        }
        self.calls = counter("messages", "Messages taken by the state machine")
        self.flushes = counter("journal_flushes", "Flushes of the journal")
        self.flush_s = counter("journal_flush_seconds", "Seconds spent in them")
        self.snapshots = counter("snapshots", "Snapshots written")
        self.snapshot_s = gauge("snapshot_seconds", "Seconds that the last snapshot took")
        self.snapshot_at = gauge("snapshot_timestamp_seconds", "Unix time of the last snapshot")
        self.retries = counter("retries", "Attempts on the link upwards that failed")
        self.start = gauge("start_timestamp_seconds", "Unix time at which the server had recovered")
        self.process_up = gauge("process_up", "1 while the process that the launcher started runs", "process")
        self.exits = counter("process_exits", "Processes that ended", "process", "code")
        self.events = counter("events", "Events written, by type", "event")
        if target_tokens:
            self._set(self.target, target_tokens)
        for member, gbps in (links or {}).items():
            self._set(self.link_capacity, gbps * 1e9 / 8, member=member)

    def route(self, query: Query) -> Response:
        return Response(generate_latest(self.registry), CONTENT_TYPE_LATEST)

    def on(self, record: events.Record) -> None:
        event = record.event
        self._add(self.events, event=type(event).__name__)
        match event:
            case events.Joined(member=member) | events.Found(member=member):
                if isinstance(event, events.Joined):
                    self._add(self.joins, float(event.new), member=member)
                    self._add(self.updates, 0.0, member=member)  # so that the first one is seen as a rise
                self._set(self.up, 1, member=member)
                self._set(self.heard, record.time_s, member=member)
            case events.Lost(member=member):
                self._add(self.losses, member=member)
                self._set(self.up, 0, member=member)
            case events.Left(member=member):
                self.up.remove(*self._always.values(), member)
            case events.UpdateApplied():
                self._on_update(event)
            case events.SentUp():
                self._add(self.sent)
            case events.Merged():
                self._add(self.merged)
            case events.UpdatesLost(updates=updates):
                self._add(self.updates_lost, updates)
            case events.UpdateRefused(member=member):
                self._add(self.refusals, member=member)
            case events.Quarantined(member=member) | events.Unbanned(member=member):
                self._set(self.quarantined, isinstance(event, events.Quarantined), member=member)
            case events.ValidationDone(loss=loss):
                self._set(self.validation, loss)
            case events.SnapshotWritten(seconds=seconds):
                self._add(self.snapshots)
                self._set(self.snapshot_s, seconds)
                self._set(self.snapshot_at, record.time_s)
            case events.MemberSampled(member=member):
                self._set(self.heard, record.time_s - event.silent_s, member=member)
                self._count_to(self.link_bytes, event.sent_bytes, member=member, direction="to")
                self._count_to(self.link_bytes, event.received_bytes, member=member, direction="from")
                self._set(self.link_rate, event.sent_bytes_per_s, member=member, direction="to")
                self._set(self.link_rate, event.received_bytes_per_s, member=member, direction="from")
                for what, value in event.metrics.items():
                    # Another machine chose these names, and a series lives for as long as this process.
                    if what not in self._said and len(self._said) >= MAX_SAID:
                        continue
                    self._said.add(what)
                    self._set(self.said, value, member=member, what=what)
            case events.ServerSampled():
                self._on_server(event)
            case events.ShardSampled():
                for field, gauge in self.of_shard.items():
                    self._set(gauge, getattr(event, field), shard=str(event.shard))
            case events.Recovery():
                self._set(self.start, record.time_s)
            case events.ProcessStarted(process=process):
                self._set(self.process_up, 1, process=process)
            case events.ProcessEnded(process=process, code=code):
                self._set(self.process_up, 0, process=process)
                self._add(self.exits, process=process, code=str(code))

    def _on_update(self, event: events.UpdateApplied) -> None:
        said, member = event.metrics, event.member
        self._add(self.updates, member=member)
        if event.loss is not None:
            self._set(self.loss, event.loss, member=member)
        for name in self.of_update.keys() & said.keys():
            self._set(self.of_update[name], said[name], member=member)
        for part, share in time_shares(said).items():
            self._set(self.share, share, member=member, part=part)
        for fragment, stale in zip(event.fragments, event.fragment_staleness, strict=False):
            self._set(self.staleness, stale, member=member, fragment=str(fragment))
        for fragment, norm in zip(event.fragments, event.delta_norms, strict=False):
            self._set(self.delta_norm, norm, member=member, fragment=str(fragment))
        self._on_versions(event.versions)
        if event.tokens is not None:
            self._set(self.tokens, event.tokens)

    def _on_server(self, event: events.ServerSampled) -> None:
        for field, gauge in self.of_server.items():
            self._set(gauge, getattr(event, field))
        self._count_to(self.calls, event.calls)
        self._count_to(self.retries, event.retries)
        self._add(self.flushes, event.journal_flushes)
        self._add(self.flush_s, event.journal_flush_s)
        self._on_versions(event.versions)

    def _on_versions(self, versions: list[int]) -> None:
        for fragment, version in enumerate(versions):
            self._set(self.version, version, fragment=str(fragment))

    def _gauge(self, name: str, doc: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, doc, [*self._always, *labels], registry=self.registry)

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, doc, [*self._always, *labels], registry=self.registry)

    def _set(self, gauge: Gauge, value: float, **labels: str) -> None:
        gauge.labels(**self._always, **labels).set(value)

    def _count_to(self, counter: Counter, total: float, **labels: str) -> None:
        """Raise a counter to a total that something else counts. A counter takes only increments, hence the
        difference; a total that fell has begun anew with its process and adds nothing."""
        key = counter, tuple(labels.values())
        before, self._counted[key] = self._counted.get(key, 0.0), total
        self._add(counter, max(0.0, total - before), **labels)

    def _add(self, counter: Counter, value: float = 1.0, **labels: str) -> None:
        counter.labels(**self._always, **labels).inc(value)


def time_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """The shares of a worker's time that went to computing, exposed communication and waiting; empty if not known."""
    spent = {part: metrics.get(f"{part}_s", 0.0) for part in PARTS}
    total = sum(spent.values())
    return {part: seconds / total for part, seconds in spent.items()} if total > 0 else {}
