"""Waiting with an end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Raises TimeoutError. Unlike Python 3.11's `asyncio.wait_for`, it never loses a cancellation that arrives
    together with the result."""
    async with asyncio.timeout(seconds):
        return await work
