"""Says to a server when answers that wait for others' deltas would come too late, by this machine's clock."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from geotrain.net.server.server_thread import ServerThread
from geotrain.outer.messages import Answer, AnswersDue, Refused
from geotrain.outer.server.answer_times import AnswerTimes


class AnswerTimer:
    """Holds a deadline for each update whose answer waits: the server gets an `AnswersDue` if it waits still then.

    took_s: what it took last to say so, and to freeze the answer; deadlines are so much earlier.
    """

    def __init__(self, server_thread: ServerThread) -> None:
        self.server_thread, self.server = server_thread, server_thread.server
        self.times = AnswerTimes(self.server, asyncio.get_running_loop().time)
        self.took_s = 0.0
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._due_s: dict[tuple[str, int], float] = {}

    def start(self) -> None:
        if self.server.answers.waits:
            self._tasks["", 0] = asyncio.create_task(self._watch())

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _watch(self) -> None:
        # Those who wait since before a restart are answered at once: when they need it is in no state.
        for name, fragment, _ in await self.server_thread.read(self.times.news):
            self._begin(name, fragment, 0.0)
        while True:  # what the thread itself sees: a call that brings an update may break before its reply
            found = await self.server_thread.until(lambda: self.times.news() or None, float("inf"))
            for name, fragment, wait_s in found or ():
                self._begin(name, fragment, wait_s)

    def held(self, name: str, answer: Answer) -> Answer:
        """Return an answer as it is to leave (`Answer.held_s`)."""
        return self.times.held(name, answer)

    def status(self) -> dict[str, Any]:
        """Return the seconds until the next answer that waits is due, as `waits` takes it."""
        due_s = [self._due_s[key] for key, task in self._tasks.items() if key in self._due_s and not task.done()]
        return {"due_s": max(0.0, min(due_s, default=0.0) - self.times.clock())}

    def _begin(self, name: str, fragment: int, wait_s: float) -> None:
        if before := self._tasks.get((name, fragment)):
            before.cancel()
        self._due_s[name, fragment] = self.times.clock() + wait_s
        self._tasks[name, fragment] = asyncio.create_task(self._say_due(name, fragment, wait_s))

    async def _say_due(self, name: str, fragment: int, wait_s: float) -> None:
        await asyncio.sleep(max(0.0, wait_s - self.took_s))
        began_s = self.times.clock()
        # It may be answered by now, and a message costs a flush of the journal.
        if await self.server_thread.read(partial(self._waits, name, fragment)):
            with suppress(Refused):  # of no member any more
                await self.server_thread.persist(AnswersDue((name,), fragment))
            self.took_s = self.times.clock() - began_s

    def _waits(self, name: str, fragment: int) -> bool:
        return name in self.server.answers.held(fragment)
