"""Waiting with an end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

FIRST_FRAME_S = 2.0  # what a frame is taken to need before any was measured
MARGIN = 30.0  # a frame may take so many times what the last ones took
LEAST_S, MOST_S = 10.0, 900.0
FORGET = 0.1  # how fast slow frames of the past are forgotten


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Raises TimeoutError. Unlike Python 3.11's `asyncio.wait_for`, it never loses a cancellation that arrives
    together with the result."""
    async with asyncio.timeout(seconds):
        return await work


class Pace:
    """How long the next frame of a transfer may take: learned from those before it on the same link. A frame that
    took too long doubles it, so that a link that has become slow is not given up for ever."""

    def __init__(self) -> None:
        self._frame_s = FIRST_FRAME_S

    @property
    def allowed_s(self) -> float:
        return min(max(MARGIN * self._frame_s, LEAST_S), MOST_S)

    async def frame(self, work: Awaitable[T]) -> T:
        """Await the frame's way in or out. Raises TimeoutError."""
        began_s, allowed_s = time.monotonic(), self.allowed_s
        try:
            result = await within(allowed_s, work)
        except TimeoutError:
            self.note(2 * allowed_s / MARGIN)
            raise
        self.note(time.monotonic() - began_s)
        return result

    def note(self, took_s: float) -> None:
        self._frame_s = max(took_s, self._frame_s + FORGET * (took_s - self._frame_s))
