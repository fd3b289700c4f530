"""Decides when a process that died is started again. Pure."""

from __future__ import annotations

from geotrain.config import EXIT_FOR_GOOD, RestartConfig


class RestartBackoff:
    """Decides when a restart group is started again after a death.

    One that has run for long is started again at once; otherwise pauses double with each death in a row. The number
    of restarts within a time window is limited. It reads no clock: the caller passes the time.
    """

    def __init__(self, config: RestartConfig) -> None:
        self.config = config
        self.restarts = 0  # granted so far
        self._granted_s: list[float] = []
        self._in_a_row = 0

    def pause_s(self, code: int, now_s: float, lived_s: float) -> float | None:
        """Note a death; returns the seconds until the group may be started again, None for never.

        code: the exit code. now_s: the time. lived_s: how long the process has run.
        """
        if code == EXIT_FOR_GOOD:
            return None
        self._granted_s = [t for t in self._granted_s if now_s - t < self.config.window_s]
        if len(self._granted_s) >= self.config.limit:
            return None
        self._granted_s.append(now_s)
        self.restarts += 1
        return self.next_pause_s(lived_s)

    def next_pause_s(self, lived_s: float) -> float:
        """The pause after the loss of a connection, which is no death: it grows alike, but counts as no restart."""
        if lived_s > self.config.longest_s:
            self._in_a_row = 0
            return 0.0
        pause_s = min(self.config.first_s * 2.0 ** min(self._in_a_row, 30), self.config.longest_s)
        self._in_a_row += 1
        return pause_s
