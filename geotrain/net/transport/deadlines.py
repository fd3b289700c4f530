"""Limits waits on a link. No wait is endless; how long one may take is learned from the link itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")

FIRST_FRAME_S = 2.0  # the time assumed for a frame before any was measured
MARGIN = 30.0  # a frame may take so many times longer than the last ones did
LEAST_S, MOST_S = 10.0, 900.0  # bounds of the deadline
FORGET = 0.1  # the weight of a faster frame in the moving average


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Await `work` for at most so long. Raises TimeoutError.

    Python 3.11's `asyncio.wait_for` can lose a cancellation that arrives together with the result; this does not.
    """
    async with asyncio.timeout(seconds):
        return await work


async def first_of(*works: Awaitable[Any]) -> Any:
    """Await several things at once until the first has ended, cancel the others, and return its result.

    Of several that have ended, the first of the arguments counts. Raises what one of them has ended with.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        results = [task.result() for task in tasks if task in done]  # of all, since any may raise
        return results[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class FrameDeadline:
    """How long the next frame of a transfer may take, learned from those before it on the same link.

    A frame that took too long doubles the deadline. So a link that has become slow gets enough time at last, instead
    of failing at the same deadline in every attempt.
    """

    def __init__(self) -> None:
        self._frame_s = FIRST_FRAME_S

    @property
    def allowed_s(self) -> float:
        return min(max(MARGIN * self._frame_s, LEAST_S), MOST_S)

    async def frame(self, work: Awaitable[T]) -> T:
        """Await the sending or receiving of one frame. Raises TimeoutError."""
        began_s, allowed_s = time.monotonic(), self.allowed_s
        try:
            result = await within(allowed_s, work)
        except TimeoutError:
            self.note(2 * allowed_s / MARGIN)
            raise
        self.note(time.monotonic() - began_s)
        return result

    def note(self, took_s: float) -> None:
        """Learn from a frame's time: a slower one counts at once, faster ones lower the estimate gradually."""
        self._frame_s = max(took_s, self._frame_s + FORGET * (took_s - self._frame_s))
