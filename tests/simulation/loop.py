"""Runs asyncio in virtual time: where nothing is ready, the clock jumps to the next timer. One thread, no sockets, so
that the order of all that happens follows from the program and its seed."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from typing import Any


class Deadlock(AssertionError):
    """Raised where everything waits and no timer is set: nothing could ever happen again."""


class _NumberedTask(asyncio.Task[Any]):
    """A task that sets keep in the order of its creation, not of its address in memory."""

    numbers = itertools.count()

    def __init__(self, *args: Any, **named: Any) -> None:
        self._number = next(self.numbers)
        super().__init__(*args, **named)

    def __hash__(self) -> int:
        return self._number


class _NumberedFuture(asyncio.Future[Any]):
    """A future that sets keep in the order of its creation."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._number = next(_NumberedTask.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _Selector(selectors.SelectSelector):
    """Never waits: the loop's clock goes on by what it would have waited."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"at {self.loop.now_s:.3f} s all tasks wait, and no timer is set")
        self.loop.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose seconds take no time. now_s: virtual seconds since it was made."""

    def __init__(self) -> None:
        self.now_s = 1.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        _NumberedTask.numbers = itertools.count()
        self.set_task_factory(lambda loop, coroutine, **named: _NumberedTask(coroutine, loop=loop, **named))

    def create_future(self) -> asyncio.Future[Any]:
        return _NumberedFuture(self)

    def time(self) -> float:
        return self.now_s

    def _write_to_self(self) -> None:
        """Nobody sleeps in `select`, so nobody is to be woken."""

    def add_signal_handler(self, *_: Any) -> None:
        """Processes of a simulation get no signals: they are killed by `World.kill`."""
