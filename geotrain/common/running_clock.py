"""A clock that stands still while its process is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RunningClock:
    """Counts the seconds for which this process could run: no more than `limit_s` pass between two readings.

    A process that was stopped (SIGSTOP, a debugger) or whose machine was (a paused VM) wakes with all its deadlines
    passed at once, though it, and who stood still with it, had no chance to keep them. Whoever keeps a deadline by
    this clock reads it more often than every `limit_s`, and so begins it anew. Any thread may read it.

    clock: gives seconds, monotonic; for tests.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self._clock, self._lock = limit_s, clock, threading.Lock()
        self._read_s = self._now_s = clock()

    def __call__(self) -> float:
        with self._lock:
            read_s = self._clock()
            self._now_s += min(read_s - self._read_s, self.limit_s)
            self._read_s = read_s
            return self._now_s
