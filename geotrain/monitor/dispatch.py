"""Hands a process's events to the sinks that show them (page, metrics, curves), on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from geotrain.monitor.events import EventLog, Follower, Record

log = logging.getLogger(__name__)

Sink = Callable[[Record], None]
MAX_WAITING = 10_000  # events
STOP_S = 10.0  # how long the last events may take


def end_within(seconds: float, *ends: Callable[[], object]) -> None:
    """Call what ends sinks, all at once, and wait for so long at most. What is sent over a network may hang for ever:
    then the last events are lost, and the process goes on to its end."""
    threads = [threading.Thread(target=end, name="monitor-end", daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        log.warning("monitoring: not everything was taken within %g s; the last events are lost there", seconds)


class EventDispatcher:
    """Dispatches the events of one log.

    with_past: sinks that first get the events that the log's files hold already. live: sinks that get new events
    only. Whoever writes an event never waits: if MAX_WAITING events wait for slow sinks, newer ones are dropped and
    counted. A sink that fails on an event is reported in the process's log, once until it takes one, and still
    gets the next event.
    """

    def __init__(self, events: EventLog, with_past: Sequence[Sink] = (), live: Sequence[Sink] = ()) -> None:
        self.events, self.with_past, self.live = events, tuple(with_past), tuple(live)
        self.dropped, self._failing = 0, set[Sink]()
        self._waiting: queue.Queue[Record | None] = queue.Queue(MAX_WAITING)
        self._past = Follower(events.path, past_only=True)
        self._thread = threading.Thread(target=self._run, name="monitor-dispatch", daemon=True)
        events.subscribers.append(self._take)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Hand on everything written so far, then end, within STOP_S."""
        self.events.subscribers.remove(self._take)
        end_within(STOP_S, lambda: self._waiting.put(None), self._thread.join)

    def _take(self, record: Record) -> None:
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        if self.with_past:
            for record in self._past.read():  # later events are in the queue
                self._give(record, self.with_past)
            self._past.close()
        while (record_or_end := self._waiting.get()) is not None:
            self._give(record_or_end, (*self.with_past, *self.live))

    def _give(self, record: Record, sinks: Sequence[Sink]) -> None:
        for sink in sinks:
            try:
                sink(record)
                self._failing.discard(sink)
            except Exception:
                if sink not in self._failing:
                    log.exception("monitoring: %s failed on %s", sink, type(record.event).__name__)
                self._failing.add(sink)
