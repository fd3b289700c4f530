"""Limits how many calls a connection may make, by a token bucket for each: a call takes a token, and the bucket is
filled at a steady rate."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

CALLS_PER_S, BURST = 500.0, 2000.0
MAX_PEERS = 16384  # so many buckets are kept; that of the connection quiet for longest is dropped first


class RateLimits:
    def __init__(
        self, per_s: float = CALLS_PER_S, burst: float = BURST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.per_s, self.burst, self._clock = per_s, burst, clock
        # peer → (tokens, time at which there were so many), the most recently used last.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, peer: str) -> float | None:
        """Take a token for a call. Returns None if there was one, else after how many seconds there will be."""
        now_s = self._clock()
        tokens, then_s = self._buckets.pop(peer, (self.burst, now_s))
        tokens = min(self.burst, tokens + (now_s - then_s) * self.per_s)
        allowed = tokens >= 1
        self._buckets[peer] = (tokens - 1 if allowed else tokens), now_s
        if len(self._buckets) > MAX_PEERS:
            self._buckets.popitem(last=False)
        return None if allowed else (1 - tokens) / self.per_s
