"""What the status page shows, kept from the global server's events: bounded, in plain data for JSON."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from geotrain.config import ClusterConfig, RunConfig
from geotrain.monitor.events import (
    Found,
    Joined,
    Left,
    Lost,
    MemberSampled,
    Pardoned,
    Quarantined,
    Record,
    Recovery,
    ServerSampled,
    SnapshotWritten,
    Steered,
    Trouble,
    UpdateApplied,
    UpdateRefused,
    UpdatesLost,
    ValidationDone,
)
from geotrain.monitor.metrics import time_shares

MAX_RECENT = 1024  # losses kept one by one; the older half of them then goes into the past
MAX_PAST = 2048  # means of equally many losses each; merged in pairs when there are more
MAX_MARKS = 1000
MAX_VALIDATIONS = 500  # the oldest are forgotten
TICKS = 200  # merges remembered for each member, and their staleness
RATE_S = 120.0  # speeds are means over the last so many seconds


@dataclass(frozen=True)
class Facts:
    """What does not change. regions: name → what the cluster file says of it and its link."""

    run: str
    parameters: int
    sample_tokens: int
    target_tokens: int
    fragments: tuple[str, ...]
    members: Mapping[str, Mapping[str, Any]]


def facts(run: RunConfig, cluster: ClusterConfig, parameters: int, fragments: tuple[str, ...]) -> Facts:
    """The members are regions, or in a flat run the workers."""
    links = {end: link for link in cluster.links if "global" in link.regions for end in link.regions}
    members: dict[str, dict[str, Any]] = {}
    for region in cluster.regions:
        link = links.get(region.name)
        of_link = {"gbps": link.gbps if link else None, "rtt_ms": link.rtt_ms if link else None}
        names = [region.name] if run.outer.levels == 2 else [worker.name for worker in region.workers]
        for name in names:
            workers = len(region.workers) if run.outer.levels == 2 else 1
            members[name] = {"region": region.name, "workers": workers, **of_link}
    length = run.data.sequence_length
    return Facts(run.name, parameters, length, length * run.data.train_samples, fragments, members)


@dataclass
class _Member:
    state: str = "away"  # away: not joined yet, or again; up; lost; left
    since_s: float = 0.0
    updates: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    sample: MemberSampled | None = None
    sampled_s: float = 0.0
    updated_s: float | None = None
    refused: int = 0
    ticks: deque[list[float]] = field(default_factory=lambda: deque(maxlen=TICKS))  # number, time_s, staleness


class History:
    """A sink; `state` may be called from any thread.

    Whatever can grow is numbered, so that a page that knows everything up to a number gets only what is newer.
    `epoch` changes when numbers that were given out are not valid any more.
    """

    def __init__(self, facts: Facts, life: str) -> None:
        self.facts, self._life = facts, life
        self._lock = threading.Lock()
        self._compactions = 0
        self._number = 0
        self._members = {name: _Member() for name in facts.members}
        self._order = list(facts.members)
        self._recent: list[list[float]] = []  # number, time_s, tokens, loss, member
        self._past: list[list[float]] = []  # the same, of `_stride` each; member −1
        self._stride = 1
        self._open: list[list[float]] = []  # fewer than a stride
        self._marks: deque[list[Any]] = deque(maxlen=MAX_MARKS)  # number, time_s, kind, member, text
        self._validations: deque[list[float]] = deque(maxlen=MAX_VALIDATIONS)  # number, time_s, tokens, loss
        self._speeds: deque[tuple[float, int]] = deque()  # time_s, tokens
        self._versions: list[int] = []
        self._tokens = 0
        self._first_s: float | None = None
        self._server: ServerSampled | None = None

    def on(self, record: Record) -> None:
        with self._lock:
            self._number += 1
            self._first_s = record.time_s if self._first_s is None else self._first_s
            self._take(record)

    def state(self, now_s: float, since: int = 0, epoch: str = "") -> dict[str, Any]:
        """since, epoch: what the last answer said; 0 asks for everything."""
        with self._lock:
            ours = f"{self._life}-{self._compactions}"
            since = since if epoch == ours else 0
            return {
                "facts": asdict(self.facts),
                "epoch": ours,
                "number": self._number,
                "full": since == 0,
                "now_s": now_s,
                "first_s": self._first_s,
                "tokens": self._tokens,
                "tokens_per_s": self._speed(now_s),
                "versions": self._versions,
                "server": asdict(self._server) if self._server else None,
                "members": [self._said(name, now_s) for name in self._order],
                "points": [p for p in self._recent if p[0] > since] if since else [*self._past, *self._recent],
                "validations": [v for v in self._validations if v[0] > since],
                "marks": [m for m in self._marks if m[0] > since],
                "ticks": {
                    name: new for name, m in self._members.items() if (new := [t for t in m.ticks if t[0] > since])
                },
            }

    # -- inside

    def _take(self, record: Record) -> None:
        event, now_s = record.event, record.time_s
        match event:
            case UpdateApplied() if event.member in self._members:
                self._on_update(event, now_s)
            case MemberSampled() if event.member in self._members:
                member = self._members[event.member]
                member.sample, member.sampled_s, member.refused = event, now_s, event.refused
            case ServerSampled():
                self._server, self._versions = event, event.versions
            case Joined():
                self._becomes(event.member, "up", now_s, "joined")
            case Found():
                self._becomes(event.member, "up", now_s, f"heard of again after {event.silent_s:.0f} s")
            case Lost():
                self._becomes(event.member, "lost", now_s, f"not heard of for {event.silent_s:.0f} s")
            case Left():
                self._becomes(event.member, "left", now_s, "left in good order")
            case Recovery():
                for name in self._order:
                    if self._members[name].state != "left":
                        self._members[name].state = "away"
                self._mark(now_s, "start", "", f"the global server started; {event.replayed} messages replayed")
            case UpdateRefused():
                self._mark(now_s, "refused", event.member, event.reason[:200])
            case Quarantined():
                self._mark(now_s, "quarantined", event.member, f"quarantined: {event.reason[:200]}")
            case Pardoned():
                self._mark(now_s, "pardoned", event.member, "may come back")
            case ValidationDone():
                self._validations.append([self._number, now_s, event.tokens, round(event.loss, 5)])
            case Steered():
                self._mark(now_s, "steered", event.region, f"a person said: {event.what}")
            case SnapshotWritten():
                self._mark(now_s, "snapshot", "", f"snapshot {event.number} in {event.seconds:.1f} s")
            case UpdatesLost():
                self._mark(now_s, "trouble", "", f"{event.updates} acknowledged updates were lost")
            case Trouble():
                self._mark(now_s, "trouble", "", event.what[:200])

    def _on_update(self, event: UpdateApplied, now_s: float) -> None:
        member = self._members[event.member]
        member.updates += 1
        member.updated_s, member.metrics = now_s, event.metrics
        member.staleness.update(zip(event.fragments, event.fragment_staleness, strict=False))
        member.norms.update(zip(event.fragments, event.delta_norms, strict=False))
        member.ticks.append([self._number, now_s, event.staleness])
        self._versions = event.versions
        if event.tokens is not None:
            self._tokens = event.tokens
            self._speeds.append((now_s, event.tokens))
            while len(self._speeds) > 2 and self._speeds[1][0] < now_s - RATE_S:
                self._speeds.popleft()
        if event.loss is not None:
            at = float(self._order.index(event.member))
            self._recent.append([self._number, now_s, self._tokens, round(event.loss, 5), at])
            if len(self._recent) > MAX_RECENT:
                self._compact()

    def _compact(self) -> None:
        """All of the past at one resolution, so that a curve of three weeks keeps its beginning."""
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

    def _becomes(self, name: str, state: str, now_s: float, text: str) -> None:
        member = self._members.get(name)
        if member is None or member.state == state:
            return
        back = state == "up" and member.state == "lost"
        member.state, member.since_s = state, now_s
        kind = {"up": "found" if back else "joined"}.get(state, state)
        self._mark(now_s, kind, name, text)

    def _mark(self, now_s: float, kind: str, member: str, text: str) -> None:
        self._marks.append([self._number, now_s, kind, member, text])

    def _speed(self, now_s: float) -> float | None:
        """Tokens committed a second, lately."""
        if len(self._speeds) < 2:
            return None
        (first_s, first), (last_s, last) = self._speeds[0], self._speeds[-1]
        elapsed_s = max(now_s, last_s) - first_s
        return (last - first) / elapsed_s if elapsed_s > 0 else None

    def _said(self, name: str, now_s: float) -> dict[str, Any]:
        m = self._members[name]
        sample, metrics = m.sample, dict(m.metrics)
        if sample is not None and m.sampled_s > (m.updated_s or 0):
            metrics |= sample.metrics  # its heartbeat is newer than its last update
        fresh = sample is not None and now_s - m.sampled_s < 60 and m.state == "up"
        return {
            "name": name,
            "state": m.state,
            "since_s": m.since_s,
            "silent_s": sample.silent_s + now_s - m.sampled_s if sample else None,
            "updates": m.updates,
            "updated_s": m.updated_s,
            "loss": metrics.get("loss"),
            "lr": metrics.get("lr"),
            "grad_norm": metrics.get("grad_norm"),
            "tokens_per_s": metrics.get("tokens_per_s"),
            "mfu": metrics.get("mfu"),
            "shares": time_shares(metrics),
            "staleness": [m.staleness.get(f) for f in range(len(self.facts.fragments))],
            "delta_norm": sum(norm**2 for norm in m.norms.values()) ** 0.5 if m.norms else None,
            "sent_bytes": sample.sent_bytes if sample else 0,
            "received_bytes": sample.received_bytes if sample else 0,
            "sent_bytes_per_s": sample.sent_bytes_per_s if fresh and sample else 0.0,
            "received_bytes_per_s": sample.received_bytes_per_s if fresh and sample else 0.0,
            "refused": m.refused,
            "says": sample.metrics if sample else {},
        }


def _mean(points: Sequence[list[float]]) -> list[float]:
    """One point for several: where the last one is, with their mean loss."""
    number, time_s, tokens, _, _ = points[-1]
    return [number, time_s, tokens, round(sum(p[3] for p in points) / len(points), 5), -1.0]
