"""How many calls a connection may make: a bucket of tokens for each, filled at a steady rate."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

CALLS_PER_S, BURST = 500.0, 2000.0
MAX_PEERS = 16384  # remembered; whoever was quiet for longest is forgotten first


class Rates:
    def __init__(
        self, per_s: float = CALLS_PER_S, burst: float = BURST, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.per_s, self.burst, self._clock = per_s, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # peer → tokens, when that was

    def wait_s(self, peer: str) -> float | None:
        """Take a token. None: go on; else after how many seconds there is one."""
        now_s = self._clock()
        tokens, then_s = self._buckets.pop(peer, (self.burst, now_s))
        tokens = min(self.burst, tokens + (now_s - then_s) * self.per_s)
        allowed = tokens >= 1
        self._buckets[peer] = (tokens - 1 if allowed else tokens), now_s
        if len(self._buckets) > MAX_PEERS:
            self._buckets.popitem(last=False)
        return None if allowed else (1 - tokens) / self.per_s
