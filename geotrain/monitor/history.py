"""Keeps what the status page shows, from the global server's events, in bounded memory and as plain data for JSON."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from geotrain.common.names import ENDLESS_SAMPLES
from geotrain.config import ClusterConfig, RunConfig, Topology
from geotrain.monitor import events
from geotrain.monitor.registry import SERVER_METRICS, time_shares
from geotrain.outer.metrics import WORKER_METRICS, Metric
from geotrain.outer.server.liveness import Liveness

MAX_RECENT = 1024  # losses kept one by one; beyond that, the older half goes into the past
MAX_PAST = 2048  # means of equally many losses each; merged in pairs when there are more
MAX_MARKS = 1000  # of these and the next two, the oldest are forgotten
MAX_VALIDATIONS = 500
TICKS = 200  # merges of each member, with their staleness
_PHASES = {"pause": "paused", "resume": "running", "stop": "stopping"}  # what a person says → what follows
RATES = "sent_bytes_per_s", "received_bytes_per_s"  # fields of MemberSampled
RATE_S = 120.0  # speeds are means over the last so many seconds


# Event → kind of the mark that it leaves, the field that names the member, and the text.
MARKS: dict[type[events.Event], tuple[str, str, Callable[[Any], str]]] = {
    events.Recovery: ("start", "", lambda e: f"started; {e.replayed} messages of its journal replayed"),
    events.UpdateRefused: ("refused", "member", lambda e: e.reason[:200]),
    events.Quarantined: ("quarantined", "member", lambda e: f"quarantined: {e.reason[:200]}"),
    events.Unbanned: ("unbanned", "member", lambda e: "may come back"),
    events.SetAside: ("trouble", "", lambda e: f"samples {e.first} to {e.last} are set aside"),
    events.StartedOver: (
        "trouble",
        "",
        lambda e: f"starts over, without {e.dropped} acknowledged updates: {e.reason[:150]}",
    ),
    events.TrainedTwice: ("trouble", "", lambda e: f"others, too, have trained leases {e.leases}: they count once"),
    events.LossSpike: ("trouble", "", lambda e: f"loss {e.loss:.4f}, where {e.usual:.4f} was usual"),
    events.Steered: ("steered", "region", lambda e: f"a person said: {e.what}"),
    events.SnapshotWritten: ("snapshot", "", lambda e: f"snapshot {e.number} in {e.seconds:.1f} s"),
    events.UpdatesLost: ("trouble", "", lambda e: f"{e.updates} acknowledged updates were lost"),
    events.Trouble: ("trouble", "", lambda e: e.what[:200]),
}


# State that a member takes → kind and text of the mark that it leaves.
STATE_MARKS = {
    Liveness.CUT_OFF: ("lost", "silent for {:.0f} s"),
    Liveness.LOST: ("lost", "silent for {:.0f} s: its data goes to others"),
    Liveness.STALLED: ("trouble", "lives, but sent nothing for too long: its data goes to others"),
    Liveness.LEFT: ("left", "left in good order"),
}


@dataclass(frozen=True)
class PageFacts:
    """The facts of a run, which do not change while it goes on. target_tokens: 0 of a run without an end. members:
    name → its region, its workers, and its link to the global server. flat: whether members are workers."""

    run: str
    parameters: int
    sample_tokens: int
    target_tokens: int
    fragments: tuple[str, ...]
    members: Mapping[str, Mapping[str, Any]]
    flat: bool = True


def facts(run: RunConfig, cluster: ClusterConfig, parameters: int, fragments: tuple[str, ...]) -> PageFacts:
    """The facts of a run, for the global server: its members are regions or, in a flat run, workers."""
    links = {
        end: {"gbps": link.gbps, "rtt_ms": link.rtt_ms}
        for link in cluster.links if "global" in link.regions
        for end in link.regions
    }  # fmt: skip
    members: dict[str, dict[str, Any]] = {}
    topology = Topology(run, cluster)
    for name, workers in topology.members.items():
        region = topology.region_of(name)
        of_link = links.get(region, {"gbps": None, "rtt_ms": None})
        members[name] = {"region": region, "workers": len(workers), **of_link}
    length, samples = run.data.sequence_length, run.data.train_samples
    target = length * samples if samples < ENDLESS_SAMPLES else 0
    return PageFacts(run.name, parameters, length, target, fragments, members, run.outer.flat)


def titles(metrics: Mapping[str, Metric]) -> dict[str, list[str]]:
    """Titles and units by which the page shows these numbers: field → [title, unit]."""
    return {field: [metric.title, metric.unit] for field, metric in metrics.items() if metric.kind == "gauge"}


METRICS = {"worker": titles(WORKER_METRICS), "server": titles(SERVER_METRICS)}


@dataclass
class _Member:
    state: Liveness = Liveness.AWAY
    since_s: float = 0.0
    updates: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    sample: events.MemberSampled | None = None
    sampled_s: float = 0.0
    updated_s: float | None = None
    ticks: deque[list[float]] = field(default_factory=lambda: deque(maxlen=TICKS))  # number, time_s, staleness


class History:
    """Keeps the page's data; `on` is a sink, and `state` may be called from any thread.

    Everything that grows is numbered, so that a page that knows all up to a number gets only what is newer. When
    points that were given out are merged, their numbers are not valid any more: then `epoch` changes, and pages begin
    anew.
    """

    def __init__(self, facts: PageFacts, incarnation: str) -> None:
        self.facts, self._incarnation = facts, incarnation
        self._lock = threading.Lock()
        self._compactions = 0
        self._number = 0
        self._members = {name: _Member() for name in facts.members}
        self._order = list(facts.members)
        self._recent: list[list[float]] = []  # number, time_s, tokens, loss, member
        self._past: list[list[float]] = []  # the same, each the mean of `_stride` losses; member −1
        self._stride = 1
        self._open: list[list[float]] = []  # losses that are not enough for a mean yet
        self._marks: deque[list[Any]] = deque(maxlen=MAX_MARKS)  # number, time_s, kind, member, text
        self._validations: deque[list[float]] = deque(maxlen=MAX_VALIDATIONS)  # number, time_s, tokens, loss
        self._speeds: deque[tuple[float, int]] = deque()  # time_s, tokens
        self._versions: list[int] = []
        self._tokens = 0
        self._first_s: float | None = None
        self._phase = "running"  # or "paused", "stopping": as a person last said
        self._server: events.ServerSampled | None = None
        self._shards: dict[int, events.ShardSampled] = {}
        self._waits: list[dict[str, Any]] = []

    def on(self, record: events.Record) -> None:
        with self._lock:
            self._number += 1
            self._first_s = record.time_s if self._first_s is None else self._first_s
            self._take(record)

    def state(self, now_s: float, since: int = 0, epoch: str = "") -> dict[str, Any]:
        """The answer to a page. since, epoch: `number` and `epoch` of the last answer that it got; 0: it needs
        all."""
        with self._lock:
            ours = f"{self._incarnation}-{self._compactions}"
            since = since if epoch == ours else 0
            return {
                "facts": {**asdict(self.facts), "metrics": METRICS},
                "epoch": ours,
                "number": self._number,
                "full": since == 0,
                "now_s": now_s,
                "first_s": self._first_s,
                "phase": self._phase,
                "waits": self._waits,
                "tokens": self._tokens,
                "tokens_per_s": self._speed(now_s),
                "versions": self._versions,
                "server": asdict(self._server) if self._server else None,
                "shards": [asdict(self._shards[i]) for i in sorted(self._shards)],
                "members": [self._member_state(name, now_s) for name in self._order],
                "points": [p for p in self._recent if p[0] > since] if since else [*self._past, *self._recent],
                "validations": [v for v in self._validations if v[0] > since],
                "marks": [m for m in self._marks if m[0] > since],
                "ticks": {
                    name: new for name, m in self._members.items() if (new := [t for t in m.ticks if t[0] > since])
                },
            }

    def _take(self, record: events.Record) -> None:
        event, now_s = record.event, record.time_s
        match event:
            case events.UpdateApplied() if event.member in self._members:
                self._apply_update(event, now_s)
            case events.MemberSampled() if event.member in self._members:
                self._take_sample(self._members[event.member], event, now_s)
            case events.ServerSampled():
                self._server, self._versions = event, event.versions
            case events.ShardSampled():
                self._shards[event.shard] = event
            case events.Joined() if event.new and event.member in self._members:
                self._mark(now_s, "joined", event.member, "joined")
            case events.LivenessChanged() if event.member in self._members:
                self._becomes(self._members[event.member], event, now_s)
            case events.WaitsChanged():
                self._waits = event.waits
            case events.Recovery():
                for each in self._members.values():
                    each.state = each.state if each.state is Liveness.LEFT else Liveness.AWAY
                self._waits = []
                if self._phase == "stopping":  # it has stopped, and is resumed
                    self._phase = "running"
            case events.ValidationDone():
                self._validations.append([self._number, now_s, event.tokens, round(event.loss, 5)])
            case events.Steered():
                self._phase = _PHASES.get(event.what, self._phase)
        if type(event) in MARKS:
            kind, member, words = MARKS[type(event)]
            self._mark(now_s, kind, getattr(event, member, ""), words(event))

    def _apply_update(self, event: events.UpdateApplied, now_s: float) -> None:
        member = self._members[event.member]
        member.updates += 1
        member.updated_s, member.metrics = now_s, event.metrics or member.metrics
        member.staleness[event.fragment] = event.staleness
        if event.delta_norm is not None:
            member.norms[event.fragment] = event.delta_norm
        member.ticks.append([self._number, now_s, event.staleness])
        self._versions = event.versions
        if event.tokens is not None:
            self._tokens = event.tokens
            if self._speeds and now_s < self._speeds[-1][0]:  # the clock was set back: the time between is not known
                self._speeds.clear()
            self._speeds.append((now_s, event.tokens))
            while len(self._speeds) > 2 and self._speeds[1][0] < now_s - RATE_S:
                self._speeds.popleft()
        if event.loss is not None:
            at = float(self._order.index(event.member))
            self._recent.append([self._number, now_s, self._tokens, round(event.loss, 5), at])
            if len(self._recent) > MAX_RECENT:
                self._compact()

    def _take_sample(self, member: _Member, sample: events.MemberSampled, now_s: float) -> None:
        """Keep the sample, and mark that a region's workers have died, or come back."""
        before, lost = (each.metrics.get("lost_workers", 0) if each else 0 for each in (member.sample, sample))
        if lost > before:
            self._mark(now_s, "lost", sample.member, f"{lost:g} of its workers cut off")
        elif lost < before:
            self._mark(now_s, "found", sample.member, "its workers are back")
        member.sample, member.sampled_s = sample, now_s

    def _compact(self) -> None:
        """Move the older half of the recent losses into the past.

        All of the past has the same resolution, which is halved when there are too many points. So the curve of a run
        of weeks keeps its beginning, in bounded memory.
        """
        old, self._recent = self._recent[: MAX_RECENT // 2], self._recent[MAX_RECENT // 2 :]
        for point in old:
            self._open.append(point)
            if len(self._open) == self._stride:
                self._past.append(_mean(self._open))
                self._open = []
        if len(self._past) > MAX_PAST:
            even = len(self._past) // 2 * 2
            pairs = zip(self._past[:even:2], self._past[1:even:2], strict=True)
            self._past = [_mean(pair) for pair in pairs] + self._past[even:]
            self._stride *= 2
        self._compactions += 1

    def _becomes(self, member: _Member, event: events.LivenessChanged, now_s: float) -> None:
        before, member.state = member.state, Liveness(event.state)
        if member.state is before:  # as a server reports that was started again
            return
        if not (before.missing and member.state.missing):
            member.since_s = now_s
        if member.state in STATE_MARKS:
            kind, text = STATE_MARKS[member.state]
            self._mark(now_s, kind, event.member, text.format(event.silent_s))
        elif before.missing:
            self._mark(now_s, "found", event.member, f"back after {event.silent_s:.0f} s")

    def _mark(self, now_s: float, kind: str, member: str, text: str) -> None:
        self._marks.append([self._number, now_s, kind, member, text])

    def _speed(self, now_s: float) -> float | None:
        """Tokens committed a second, over about the last RATE_S seconds; None if not known yet."""
        if len(self._speeds) < 2:
            return None
        (first_s, first), (last_s, last) = self._speeds[0], self._speeds[-1]
        elapsed_s = max(now_s, last_s) - first_s
        return (last - first) / elapsed_s if elapsed_s > 0 else None

    def _member_state(self, name: str, now_s: float) -> dict[str, Any]:
        m = self._members[name]
        sample = m.sample or events.MemberSampled(name, 0.0, 0, 0, 0.0, 0.0, 0, {})
        bare = m.state is Liveness.UP and not (self.facts.flat or sample.metrics.get("workers"))
        still = {} if now_s - m.sampled_s < 60 and m.state.reachable else dict.fromkeys(RATES, 0.0)
        return {
            **vars(sample),
            **still,
            "name": name,
            "state": "no worker" if bare else m.state,  # its server is here before its workers, and after their death
            "since_s": m.since_s,
            "silent_s": sample.silent_s + now_s - m.sampled_s if m.sample else None,
            "updates": m.updates,
            "updated_s": m.updated_s,
            **{key: m.metrics.get(key) for key in ("loss", *WORKER_METRICS)},
            "shares": time_shares(m.metrics),
            "staleness": [m.staleness.get(f) for f in range(len(self.facts.fragments))],
            "delta_norm": sum(norm**2 for norm in m.norms.values()) ** 0.5 if m.norms else None,
        }


def _mean(points: Sequence[list[float]]) -> list[float]:
    """One point in place of several, at the last one's place and with their mean loss."""
    number, time_s, tokens, _, _ = points[-1]
    return [number, time_s, tokens, round(sum(p[3] for p in points) / len(points), 5), -1.0]
