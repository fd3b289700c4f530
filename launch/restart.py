"""When to start again what died: growing pauses, and an end to trying. Pure: the caller's clock."""

from __future__ import annotations

from geotrain.config import EXIT_FOR_GOOD, RestartConfig


class Backoff:
    """Deaths of one process. Its pauses double with each death in a row; a long life makes the next one short."""

    def __init__(self, config: RestartConfig) -> None:
        self.config = config
        self.restarts = 0  # granted so far
        self._granted_s: list[float] = []
        self._in_a_row = 0

    def pause_s(self, code: int, now_s: float, lived_s: float) -> float | None:
        """It died with this exit code: seconds until it may be started again; None: never."""
        if code == EXIT_FOR_GOOD:
            return None
        self._granted_s = [t for t in self._granted_s if now_s - t < self.config.window_s]
        if len(self._granted_s) >= self.config.limit:
            return None
        self._in_a_row = 0 if lived_s > self.config.longest_s else self._in_a_row
        pause_s = min(self.config.first_s * 2.0 ** min(self._in_a_row, 30), self.config.longest_s)
        self._in_a_row += 1
        self._granted_s.append(now_s)
        self.restarts += 1
        return pause_s
