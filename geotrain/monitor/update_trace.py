"""Follows one update through a run, from the events that worker, region server and global server have written: which
stages it has passed, when, and where it is held. Pure: the records are read by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.monitor.events import (
    Acknowledged,
    LeaseBegun,
    Merged,
    Record,
    SentUp,
    StartedOver,
    UpdateApplied,
    UpdateEncoded,
    UpdateRefused,
    UpdateStage,
)
from geotrain.outer.messages import update_id

Logs = Mapping[str, Sequence[Record]]  # worker or server → its records, in the order in which they were written
# Stages in their order, for those that are written in one moment.
ORDER = (
    *(LeaseBegun, UpdateEncoded, "sent", SentUp, "arrived", UpdateRefused, UpdateApplied, "waits", "answered"),
    Acknowledged,
)


@dataclass(frozen=True)
class TraceStep:
    """A stage that an update has passed. where: the process that says so. what: in words."""

    time_s: float
    where: str
    what: str


@dataclass
class UpdateTrace:
    """The way of an update. held: where it is held and what that waits for, in words; empty: it has arrived in the
    global weights, and its answers are adopted."""

    update: str
    steps: list[TraceStep] = field(default_factory=list)
    held: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RunFacts:
    """The settings of a run that decide when an update goes on.

    server_of: gives the server to which a worker or region sends. updates_per_send: K of the regions' rule; None: a
    region waits for all its workers. ledger: whether a region keeps what it applies while an update of its own
    travels.
    """

    server_of: Callable[[str], str]
    updates_per_send: int | None = None
    ledger: bool = True


def trace(update: str, logs: Logs, facts: RunFacts) -> UpdateTrace:
    """Follow the update `member/fragment.sequence`. Raises ValueError if it is no such id."""
    member, _, numbers = update.rpartition("/")
    fragment, _, sequence = numbers.partition(".")
    if not member or not fragment.isdecimal() or not sequence.isdecimal():
        raise ValueError(f"{update!r} is no update; write MEMBER/FRAGMENT.NUMBER, as in eu-0/2.17")
    found = _Tracer(logs, facts, int(fragment))
    held = found.follow(member, int(sequence))
    found.steps.sort(key=lambda each: (each[0].time_s, each[1]))
    return UpdateTrace(update, [step for step, _ in found.steps], list(dict.fromkeys(held)))


class _Tracer:
    """Collects the steps of an update of a fragment, and of the region's updates in which it goes on."""

    def __init__(self, logs: Logs, facts: RunFacts, fragment: int) -> None:
        self.logs, self.facts, self.fragment = logs, facts, fragment
        self.steps: list[tuple[TraceStep, tuple[int, int]]] = []  # with hop and stage
        self.hop = 0

    def _id(self, member: str, sequence: int) -> str:
        return update_id(member, self.fragment, sequence)

    def follow(self, member: str, sequence: int) -> list[str]:
        """Add the steps of the update, from its sender to the server above and onwards. Returns where it is held."""
        server = self.facts.server_of(member)
        known = self._below(member, sequence) | self._above(member, server, sequence)
        self.hop += 1
        if (applied := known.get("applied")) is None:
            return [self._held_below(member, server, sequence, known)]
        held = [] if server == GLOBAL else self._onwards(server, applied)
        return held + self._held_answer(member, server, sequence, known)

    # -- one hop: what its two ends have written

    def _below(self, member: str, sequence: int) -> dict[str, int]:
        """Add what the sender has written. Returns stage → index of its record in the sender's log."""
        update, found, begun = self._id(member, sequence), dict[str, int](), dict[int, Record]()
        wanted = self.fragment, sequence
        for at, record in enumerate(self.logs.get(member, ())):
            match record.event:
                case LeaseBegun(job=job):
                    begun[job] = record
                    continue
                case UpdateEncoded(update=name, job=job) as made if name == update:
                    if job in begun:
                        lease: Any = begun[job].event
                        samples = f"samples {lease.start:,} to {lease.start + lease.samples - 1:,}"
                        self._add(begun[job], member, f"begins lease {lease.lease} (job {job}, {samples})")
                    stage, words = "encoded", f"encoded: {made.payload_bytes:,} bytes of rank 0"
                case SentUp(fragment=f, sequence=number) as sent if (f, number) == wanted:
                    stage = "sent"
                    words = f"sent up as {update}: {sent.weight} updates, {sent.payload_bytes:,} bytes"
                case UpdateStage(update=name, stage="sent" | "adopted" as stage) if name == update:
                    words = {"sent": "sending begins", "adopted": "answer adopted"}[stage]
                case Acknowledged(member=name, fragment=f, sequence=number) if (name, f, number) == (member, *wanted):
                    stage = words = "acknowledged"
                case Merged(fragment=f, sequence=number, global_versions=versions) if (f, number) == wanted:
                    stage = "adopted"
                    words = f"merged the answer to {update}: global version {versions[f]}"
                case _:
                    continue
            self._add(record, member, words)
            found[stage] = at
        return found

    def _above(self, member: str, server: str, sequence: int) -> dict[str, int]:
        """Add what the receiver has written. Returns stage → index of its record in the receiver's log."""
        update, found = self._id(member, sequence), dict[str, int]()
        mine = member, self.fragment
        for at, record in enumerate(self.logs.get(server, ())):
            match record.event:
                case UpdateStage(update=name, stage="arrived" | "waits" | "answered" as stage) if name == update:
                    waits = "waits for the deltas of others, as long as its answer comes in time"
                    words = {"arrived": "first part arrived", "waits": waits, "answered": "answer frozen"}[stage]
                    self._add(record, server, f"{words} ({update})")
                    found[stage] = at
                case UpdateApplied(member=name, fragment=f, sequence=number) as applied if (name, f) == mine:
                    if number == sequence:
                        version = applied.versions[f] if applied.versions else 0
                        words = f"journaled and applied {update}: version {version}"
                        self._add(record, server, f"{words}, staleness {applied.staleness}")
                        found["applied"] = at
                    elif number < sequence:
                        found.pop("refused", None)  # it was of an earlier update
                case UpdateRefused(member=name) if name == member and "applied" not in found:
                    found["refused"] = at
        return found

    def _add(self, record: Record, where: str, what: str) -> None:
        event = record.event
        stage: object = event.stage if isinstance(event, UpdateStage) else type(event)
        order = ORDER.index(stage) if stage in ORDER else len(ORDER)
        self.steps.append((TraceStep(record.time_s, where, what), (self.hop, order)))

    # -- where it is held

    def _held_below(self, member: str, server: str, sequence: int, known: Mapping[str, int]) -> str:
        """Where an update that the server has not applied is held."""
        update, log = self._id(member, sequence), self.logs.get(server, ())
        if "refused" in known and ("sent" in known or member not in self.logs):
            refused: Any = log[known["refused"]].event
            return f"refused by {server}: {refused.reason}"
        if "arrived" in known:
            return f"at {server}: waits for the parts of the other ranks of {member}"
        if member not in self.logs:
            return f"not applied by {server}, and no events of {member} are here: they lie on its machine"
        if not known.keys() & {"encoded", "sent"}:
            newest = next((made for made in reversed(list(self._encoded(member)))), None)
            return f"{member} has not made {update}; {f'its newest is {newest}' if newest else 'it has made none'}"
        if "sent" not in known:
            return f"in {member}: waits until earlier updates are acknowledged by {server}"
        if "acknowledged" in known or not log:
            return f"taken by {server}, whose events are not here: they lie on its machine"
        # Later than the sending: the server lives, and the link is at fault. Earlier: the server is.
        later_s = log[-1].time_s - self.logs[member][known["sent"]].time_s
        last = f"{server} last wrote an event {abs(later_s):,.1f} s {'after' if later_s >= 0 else 'before'} that"
        return f"between {member} and {server}: sent and not acknowledged; {last}"

    def _encoded(self, member: str) -> Iterator[str]:
        """Yield the member's updates of the fragment that it has made."""
        for record in self.logs[member]:
            match record.event:
                case UpdateEncoded(update=name) if name.startswith(f"{member}/{self.fragment}."):
                    yield name
                case SentUp(fragment=f, sequence=number) if f == self.fragment:
                    yield self._id(member, number)

    def _onwards(self, region: str, at: int) -> list[str]:
        """Follow an update that the region has applied (record `at` of its log) to the global server."""
        sent = self._sent_with(region, at, self._travelling(self.logs[region][:at]))
        return [sent] if isinstance(sent, str) else self.follow(region, sent)

    def _travelling(self, log: Sequence[Record]) -> int | None:
        """Return the region's own update of the fragment that was sent up and not answered by the end of this log."""
        found: int | None = None
        for record in log:
            match record.event:
                case SentUp(fragment=f, sequence=sequence) if f == self.fragment:
                    found = sequence
                case Merged(fragment=f, sequence=sequence) if (f, sequence) == (self.fragment, found):
                    found = None
                case StartedOver():
                    found = None
        return found

    def _sent_with(self, region: str, at: int, travelling: int | None) -> int | str:
        """Return the sequence of the region's update that includes what record `at` has applied, or why there is
        none."""
        pending = 1
        for record in self.logs[region][at + 1 :]:
            match record.event:
                case SentUp(fragment=f, sequence=sequence) if f == self.fragment:
                    return sequence
                case UpdateApplied(fragment=f) if f == self.fragment:
                    pending += 1
                case Merged(fragment=f, sequence=sequence) if (f, sequence) == (self.fragment, travelling):
                    if not self.facts.ledger:
                        mine = self._id(region, sequence)
                        return f"in no update: {region} merged the answer to {mine} without the ledger"
                    travelling = None
                case StartedOver(reason=reason):
                    return f"dropped: {region} started over: {reason}"
        where = f"in {region}, fragment {self.fragment}: "
        if travelling is not None:
            mine = self._id(region, travelling)
            server = self.facts.server_of(region)
            known = self._quietly(region, server, travelling)
            why = "its answer" if "applied" in known else self._held_below(region, server, travelling, known)
            return f"{where}waits for {mine} before it ({why})"
        enough = self.facts.updates_per_send
        wanted = f"{enough} updates, and has {pending}" if enough else f"those of its other workers; has {pending}"
        return f"{where}waits for {wanted}"

    def _quietly(self, member: str, server: str, sequence: int) -> dict[str, int]:
        """Look at an update without adding its steps."""
        kept, self.steps = self.steps, []
        known = self._below(member, sequence) | self._above(member, server, sequence)
        self.steps = kept
        return known

    def _held_answer(self, member: str, server: str, sequence: int, known: Mapping[str, int]) -> list[str]:
        """Where the answer is held that an applied update has not brought back yet."""
        if "adopted" in known or member not in self.logs:
            return []
        what = f"the answer to {self._id(member, sequence)}"
        if "answered" not in known:
            members = "deltas of other members, or its deadline" if "waits" in known else "other members of the round"
            return [f"{what} is not made: {server} waits for the {members}"]
        return [f"{what} is made by {server}, and not adopted by {member}"]
