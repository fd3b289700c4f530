"""Notices when the loss of a run's updates leaves its usual range, whoever they come from."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from geotrain.outer.events import LossSpike

RECENT, LEAST = 64, 16  # updates that say what is usual: at most, and at least
DEVIATIONS, SHARE = 8.0, 0.05  # above the median: so many deviations, and at least that share of it
IN_A_ROW = 3  # updates above that are a spike


class LossWatch:
    """Compares each loss with the median of those before, and their median absolute deviation.

    What is far above is not counted among them, unless it stays so for RECENT updates: then it is the usual. spike:
    the present one, as plain data; None: the loss is as usual. usual: the losses that say so, which snapshots keep.
    """

    def __init__(self, usual: list[float] | tuple[()] = ()) -> None:
        self.usual: deque[float] = deque(usual, RECENT)
        self._high: list[tuple[float, int]] = []  # the last ones above what is usual, with tokens committed by then
        self.spike: dict[str, Any] | None = None

    def note(self, loss: float, tokens: int) -> LossSpike | None:
        """Take the next update's loss, in nats; returns the spike that it confirms. tokens: committed by then."""
        if len(self.usual) >= LEAST:
            middle = median(self.usual)
            spread = 1.4826 * median(abs(each - middle) for each in self.usual)
            if loss > middle + max(DEVIATIONS * spread, SHARE * abs(middle)):
                self._high.append((loss, tokens))
                if len(self._high) == RECENT:
                    self.usual, self._high, self.spike = deque([each for each, _ in self._high], RECENT), [], None
                if len(self._high) != IN_A_ROW:
                    return None
                self.spike = {"loss": loss, "usual": middle, "tokens": self._high[0][1]}
                return LossSpike(**self.spike)
        self._high, self.spike = [], None
        self.usual.append(loss)
        return None
