"""Logs for people, at a server's terminal and in its log, how it goes: a line for each thing that happens, and one a
minute while there is progress."""

from __future__ import annotations

import logging

from geotrain.monitor import events
from geotrain.monitor.history import MARKS, STATE_MARKS
from geotrain.outer.server.liveness import Liveness

log = logging.getLogger(__name__)

EVERY_S = 60.0  # between two lines about progress
SAID_ALREADY = events.Trouble, events.UpdatesLost  # by who wrote these


class Narrator:
    """Logs what a server's events say; `on` is a sink."""

    def __init__(self) -> None:
        self._states: dict[str, Liveness] = {}
        self._waits: set[tuple[str, str]] = set()  # what and whom of those that were logged
        self._losses: list[float] = []  # of updates since the last line about progress
        self._speeds: dict[str, float] = {}  # member → tokens a second, by its last update
        self._updates = self._sent = 0
        self._since_s = 0.0

    def on(self, record: events.Record) -> None:
        event = record.event
        match event:
            case events.Joined() if event.new:
                log.info("%s: joined", event.member)
            case events.LivenessChanged():
                before, state = self._states.get(event.member), Liveness(event.state)
                self._states[event.member] = state
                if state in STATE_MARKS:
                    log.info("%s: %s", event.member, STATE_MARKS[state][1].format(event.silent_s))
                elif before is not None and before.missing:
                    log.info("%s: back after %.0f s", event.member, event.silent_s)
            case events.WaitsChanged():
                for wait in event.waits:
                    if (wait["what"], wait["whom"]) not in self._waits:
                        log.info("waits for %s%s", f"{wait['whom']}: " if wait["whom"] else "", wait["text"])
                self._waits = {(wait["what"], wait["whom"]) for wait in event.waits}
            case events.UpdateApplied():
                self._updates += 1
                self._losses += [] if event.loss is None else [event.loss]
                if event.metrics:
                    self._speeds[event.member] = event.metrics.get("tokens_per_s", 0.0)
            case events.SentUp():
                self._sent += 1
            case events.ServerSampled() if record.time_s - self._since_s >= EVERY_S:
                self._log_progress(event)
                self._since_s = record.time_s
            case _ if type(event) in MARKS and not isinstance(event, SAID_ALREADY):
                _, member, words = MARKS[type(event)]
                name = getattr(event, member, "") and f"{getattr(event, member)}: "
                log.info("%s%s", name, words(event))

    def _log_progress(self, sample: events.ServerSampled) -> None:
        if self._updates:
            up = [name for name, state in self._states.items() if state is Liveness.UP]
            loss = f", loss {sum(self._losses) / len(self._losses):.4f}" if self._losses else ""
            speed = sum(self._speeds.get(name, 0.0) for name in up)
            sent = f", {self._sent} sent up" if self._sent else ""
            where = f"version {max(sample.versions, default=0)}; {len(up)} training"
            log.info("%d updates%s%s, %.0f tokens/s, %s", self._updates, sent, loss, speed, where)
        self._updates, self._sent, self._losses = 0, 0, []
