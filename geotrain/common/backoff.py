"""Pauses between attempts that fail one after the other."""

from __future__ import annotations

import random


class RetryBackoff:
    """Gives pauses in seconds that double with each failure in a row, from `first_s` to `longest_s`.

    Each is drawn from its upper half at random, so that all who lost the same server do not come back at once.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self.first_s, self.longest_s = first_s, longest_s
        self._next_s = first_s

    def pause_s(self) -> float:
        """Count a failure, and give the pause after it."""
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self.longest_s)
        return pause_s

    def reset(self) -> None:
        """Begin with the shortest pause again, after a success."""
        self._next_s = self.first_s
