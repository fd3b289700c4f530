"""Writes down what a server does, as events."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from geotrain.monitor.events import (
    EventLog,
    Joined,
    Left,
    Merged,
    Pardoned,
    Quarantined,
    SentUp,
    Steered,
    UpdateApplied,
    UpdateRefused,
    ValidationDone,
)
from geotrain.outer.global_server import GlobalServer
from geotrain.outer.layout import numel
from geotrain.outer.messages import (
    Answer,
    Join,
    Lease,
    Leave,
    Message,
    Offence,
    Pardon,
    Send,
    Steer,
    UpdatePart,
    Validated,
)
from geotrain.outer.region_server import RegionServer


class Diary:
    """`watch` is called on the machine's thread after each message, `sent` with what a region sends up.

    sample_tokens: tokens in one sample.
    """

    def __init__(self, server: GlobalServer | RegionServer, events: EventLog, sample_tokens: int) -> None:
        self.server, self.events, self.sample_tokens = server, events, sample_tokens
        self._leased: dict[int, int] = {}  # region server: lease → samples
        self._committed = server.book.committed_samples if isinstance(server, GlobalServer) else 0

    def watch(self, message: Message, reply: Any) -> None:
        match message:
            case Join():
                self.events.write(Joined(message.member, message.part, message.incarnation))
            case Leave():
                self.events.write(Left(message.member))
            case Validated() if reply:
                self.events.write(ValidationDone(**asdict(message), tokens=self._committed * self.sample_tokens))
            case Steer():
                self.events.write(Steered(message.what, message.region))
            case Offence():
                self._refused(message, quarantined=reply)
            case Pardon():
                self.events.write(Pardoned(message.member))
            case Lease():
                self._leased[message.lease] = message.samples
            case UpdatePart() if reply:
                self.events.write(self._applied(message))
            case Answer() if isinstance(self.server, RegionServer):
                size = sum(len(w.payload) for w in message.weights)
                self.events.write(Merged(message.sequence, list(self.server.global_versions), size))

    def sent(self, send: Send) -> None:
        update = send.message
        if isinstance(update, UpdatePart):
            size = sum(len(d.payload) for d in update.deltas)
            self.events.write(SentUp(update.sequence, [d.fragment for d in update.deltas], update.weight, size))

    def _refused(self, offence: Offence, quarantined: bool) -> None:
        offences = len(self.server.members[offence.member].offences)
        self.events.write(UpdateRefused(offence.member, offence.reason, offences))
        if quarantined:
            self.events.write(Quarantined(offence.member, offence.reason))

    def _applied(self, part: UpdatePart) -> UpdateApplied:
        member, codec = self.server.members[part.member], self.server.up
        fragments = [d.fragment for d in part.deltas]
        size = sum(codec.encoded_bytes(numel(join.pushes[f])) for join in member.joined.values() for f in fragments)
        metrics = {name: value for name, value in member.metrics.items() if isfinite(value)}
        samples = self._samples(part.leases)
        top = isinstance(self.server, GlobalServer)
        return UpdateApplied(
            part.member,
            part.sequence,
            part.job,
            fragments,
            [state.version for state in self.server.fragments],
            int(metrics.pop("staleness", 0)),
            samples,
            size,
            metrics.get("loss"),
            metrics,
            [member.staleness[f] for f in fragments],
            [member.norms[f] for f in fragments],
            self._committed * self.sample_tokens if top else None,
        )

    def _samples(self, leases: tuple[int, ...]) -> int:
        if isinstance(self.server, GlobalServer):
            before, self._committed = self._committed, self.server.book.committed_samples
            return self._committed - before
        return sum(self._leased.pop(number, 0) for number in leases)
