"""The virtual clock: events in order of time, and of their making where times are equal. Deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from itertools import count
from typing import Any, Generic, TypeVar

from geotrain.outer.exchange import Pending

T = TypeVar("T")


class Clock:
    """now: virtual seconds since the run began."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Have `call(*args)` happen at that time; raises ValueError for a time that has passed."""
        if time_s < self.now:
            raise ValueError(f"virtual time is {self.now:.6f} s: nothing can happen at {time_s:.6f} s any more")
        heapq.heappush(self._queue, (time_s, next(self._order), call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), call, args))

    def end(self) -> None:
        """Nothing that was still to come happens."""
        self._queue.clear()

    def run(self, until_s: float = float("inf")) -> None:
        """Until nothing is left to happen, or until that time."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until_s:
            self.now, _, call, args = pop(queue)
            self.events += 1
            call(*args)


class Promise(Generic[T]):
    """A future of the virtual world (`geotrain.outer.exchange.Pending`)."""

    __slots__ = ("_done", "_result", "_then")

    def __init__(self) -> None:
        self._done = False
        self._result: Any = None
        self._then: Callable[[T], None] | None = None

    def done(self) -> bool:
        return self._done

    def result(self) -> T:
        """Raises RuntimeError when it is not known yet: the virtual world cannot block."""
        if not self._done:
            raise RuntimeError("asked for a result that has not happened yet")
        return self._result

    def keep(self, result: T) -> None:
        """It has happened. Whoever waits for it goes on at once."""
        self._done, self._result = True, result
        if self._then is not None:
            then, self._then = self._then, None
            then(result)

    def then(self, call: Callable[[T], None]) -> None:
        """Call with the result once it is known; only one may wait."""
        if self._done:
            call(self._result)
        else:
            self._then = call


Script = Generator[Pending[Any] | float, Any, None]  # waits for what happens, or for seconds


class Process:
    """Runs a generator in virtual time: it yields promises to wait for, or seconds to sleep."""

    __slots__ = ("clock", "dead", "script")

    def __init__(self, clock: Clock, script: Script) -> None:
        self.clock, self.script, self.dead = clock, script, False
        clock.at(clock.now, self._resume, None)

    def kill(self) -> None:
        """It does nothing any more; what it had not said is lost."""
        self.dead = True
        self.script.close()

    def _resume(self, value: Any) -> None:
        while not self.dead:
            try:
                wish = self.script.send(value)
            except StopIteration:
                self.dead = True
                return
            if isinstance(wish, Promise):
                if not wish.done():
                    wish.then(self._resume)
                    return
                value = wish.result()
            else:
                assert isinstance(wish, float), "a script yields the clock's promises, or seconds"
                self.clock.after(wish, self._resume, None)
                return
