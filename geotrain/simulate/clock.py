"""The virtual clock: events happen in the order of their times and, at equal times, in the order in which they were
scheduled. So a simulation is deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from geotrain.staging.interface import Pending

T = TypeVar("T")


class Clock:
    """The clock of a virtual world. now: virtual seconds since the run began. What is to happen is data: a function
    or method by its name, and its arguments, so that a clock can be pickled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Have `call(*args)` happen at that time; raises ValueError for a time that has passed."""
        if time_s < self.now:
            raise ValueError(f"virtual time is {self.now:.6f} s: nothing can happen at {time_s:.6f} s any more")
        self._scheduled += 1
        heapq.heappush(self._queue, (time_s, self._scheduled, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, call, *args)

    def read(self) -> float:
        return self.now

    def end(self) -> None:
        """Drop all events that have not happened yet."""
        self._queue.clear()

    def run(self, until_s: float = float("inf"), after_event: Callable[[], None] | None = None) -> None:
        """Run events until none is left, or until that time. after_event: called after each of them."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until_s:
            self.now, _, call, args = pop(queue)
            self.events += 1
            call(*args)
            if after_event is not None:
                after_event()


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
        """Return the result. Raises RuntimeError when it is not known yet: the virtual world cannot block."""
        if not self._done:
            raise RuntimeError("asked for a result that has not happened yet")
        return self._result

    def keep(self, result: T) -> None:
        """Keep the result, which is known now. The process that waits for it goes on at once, within this call."""
        self._done, self._result = True, result
        if self._then is not None:
            then, self._then = self._then, None
            then(result)

    def then(self, call: Callable[[T], None]) -> None:
        """Call with the result as soon as it is known. Only one may wait: a second call replaces the first."""
        if self._done:
            call(self._result)
        else:
            self._then = call


Script = Generator[Pending[Any] | float, Any, None]  # waits for what happens, or for seconds


class VirtualProcess:
    """Runs a generator in virtual time: it yields promises to wait for, or seconds to sleep.

    So the simulated worker is written as a plain sequence of steps, as the real one is. A generator cannot be
    pickled: a process that was has an empty one, and needs another that goes on from the same place (`go_on`)."""

    __slots__ = ("clock", "dead", "script")

    def __init__(self, clock: Clock, script: Script) -> None:
        self.clock, self.script, self.dead = clock, script, False
        clock.at(clock.now, self._resume, None)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {"clock": self.clock, "dead": self.dead, "script": None}

    def go_on(self, script: Script) -> None:
        """Go on after unpickling. script: waits first for what is among the clock's events already."""
        self.script = script
        next(script)

    def kill(self) -> None:
        """End the process where it waits: what it has not sent yet is lost, as when a real one is killed."""
        self.dead = True
        self.script.close()

    def _resume(self, value: Any) -> None:
        while not self.dead:
            try:
                awaited = self.script.send(value)
            except StopIteration:
                self.dead = True
                return
            if isinstance(awaited, Promise):
                if not awaited.done():
                    awaited.then(self._resume)
                    return
                value = awaited.result()  # already known: go on without a detour through the event queue
            else:
                assert isinstance(awaited, float), "a script yields the clock's promises, or seconds"
                self.clock.after(awaited, self._resume, None)
                return
