"""Where a loop's time goes: what lies between two calls is counted to the name that the second one says."""

from __future__ import annotations

from collections.abc import Callable


class Laps:
    """clock: seconds, as good for differences as `time.perf_counter`. Costs one reading of it a call."""

    def __init__(self, clock: Callable[[], float], *names: str) -> None:
        self._clock, self._names = clock, names
        self.restart()

    def restart(self) -> None:
        self.seconds = dict.fromkeys(self._names, 0.0)
        self._last = self._clock()

    def lap(self, name: str) -> None:
        now = self._clock()
        self.seconds[name] += now - self._last
        self._last = now
