"""Runs asyncio in virtual time: where nothing is ready, the clock jumps to the next timer. One thread, no sockets, so
that the order of all that happens follows from the program and its seed."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from tests.simulation.network import PROCESS


class Deadlock(AssertionError):
    """Raised where everything waits and no timer is set: nothing could ever happen again."""


class _NumberedTask(asyncio.Task[Any]):
    """A task that sets keep in the order of its creation, not of its address in memory."""

    def __init__(self, coroutine: Any, *, loop: VirtualLoop, **named: Any) -> None:
        self._number = next(loop.numbers)
        super().__init__(coroutine, loop=loop, **named)

    def __hash__(self) -> int:
        return self._number


class _NumberedFuture(asyncio.Future[Any]):
    """A future that sets keep in the order of its creation."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._number = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _Callback:
    """What the loop calls: asyncio's `Handle`, without what nobody asks here."""

    __slots__ = "args", "call", "cancelled", "context"

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], context: contextvars.Context | None) -> None:
        self.call, self.args, self.cancelled = call, args, False
        self.context = context or contextvars.copy_context()

    def cancel(self) -> None:
        self.cancelled = True


class VirtualLoop(asyncio.AbstractEventLoop):
    """An event loop whose seconds take no time. now_s: virtual seconds since it was made.

    stopped: process → until when it stands still, as by SIGSTOP: what is due for it waits, while its clock goes on.
    An exception in a callback is raised by `run_until_complete`; timers of one moment are called in their order.
    """

    def __init__(self) -> None:
        self.now_s = 1.0
        self._ready = deque[_Callback]()
        self._timers: list[tuple[float, int, _Callback]] = []
        self.numbers = itertools.count()
        self.stopped: dict[str | None, float] = {}

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = _Callback(callback, args, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = _Callback(callback, args, context)
        heappush(self._timers, (when, next(self.numbers), handle))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        ready, timers = self._ready, self._timers
        asyncio._set_running_loop(self)
        try:
            while not task.done():
                if not ready:
                    if not timers:
                        raise Deadlock(f"at {self.now_s:.3f} s all tasks wait, and no timer is set")
                    when, _, handle = heappop(timers)
                    if handle.cancelled:
                        continue
                    self.now_s = max(self.now_s, when)
                else:
                    handle = ready.popleft()
                if self.stopped and (until_s := self.stopped.get(handle.context.get(PROCESS), 0.0)) > self.now_s:
                    heappush(timers, (until_s, next(self.numbers), handle))
                elif not handle.cancelled:
                    handle.context.run(handle.call, *handle.args)
        finally:
            asyncio._set_running_loop(None)
        return task.result()

    def create_future(self) -> asyncio.Future[Any]:
        return _NumberedFuture(self)

    def create_task(self, coroutine: Any, **named: Any) -> Any:
        return _NumberedTask(coroutine, loop=self, **named)

    def time(self) -> float:
        return self.now_s

    def get_debug(self) -> bool:
        return False

    is_closed = get_debug

    def add_signal_handler(self, *_: Any) -> None:
        """Processes of a simulation get no signals: they are killed by `World.kill`."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Nobody asked for the exception of a task that was killed with its process."""

    def close(self) -> None:
        self._ready.clear()
        self._timers.clear()
