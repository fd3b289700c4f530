"""A server's notes of when updates came and when their answers are needed, by its process's clock: the state machine
has none. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from geotrain.outer.messages import Answer
from geotrain.outer.server.server import Server
from geotrain.outer.travel import Travel


class AnswerTimes:
    """Notes of one server's process, made between two messages.

    above: of a region, the travel of its own updates.
    """

    def __init__(self, server: Server, clock: Callable[[], float], above: Travel | None = None) -> None:
        self.server, self.clock, self.above = server, clock, above
        # Member and fragment → its last update that was not answered at once, when it came, until when it needs that.
        self._came: dict[tuple[str, int], tuple[int, float, float]] = {}
        self._held_s: dict[tuple[str, int], tuple[int, float]] = {}  # the same → how long it was here
        self._new: list[tuple[str, int, float]] = []

    def news(self) -> list[tuple[str, int, float]]:
        """Return, once each, the updates whose answers wait for others' deltas: member, fragment, and the seconds for
        which they may."""
        self._look()
        found, self._new = self._new, []
        return found

    def left_s(self, names: Collection[str], fragment: int) -> float:
        """Return the seconds until the first of these members needs its answer."""
        self._look()
        needed_s = [self._came[name, fragment][2] for name in names if (name, fragment) in self._came]
        return min(needed_s) - self.clock() if needed_s else 0.0

    def held(self, name: str, answer: Answer) -> Answer:
        """Return an answer that leaves, with its `held_s`, the same each time."""
        key = name, answer.fragment
        sequence, came_s, _ = self._came.get(key, (0, 0.0, 0.0))
        if not sequence or sequence != answer.sequence:
            return answer
        if self._held_s.get(key, (0, 0.0))[0] != sequence:
            self._held_s[key] = sequence, self.clock() - came_s
        return replace(answer, held_s=self._held_s[key][1])

    def _look(self) -> None:
        server, now_s = self.server, self.clock()
        for fragment, state in server.fragments.items() if server.answers.waits else ():
            for name in state.waiting:
                own, key = server.members[name].fragments[fragment], (name, fragment)
                if key in self._came and self._came[key][0] == own.sequence:
                    continue
                self._came[key] = own.sequence, now_s, now_s + own.need_s
                if name in server.answers.held(fragment):
                    self._new.append((name, fragment, self._wait_s(fragment, own.need_s)))

    def _wait_s(self, fragment: int, need_s: float) -> float:
        # A region waits for half of what the way to the global server leaves, which waits for the rest.
        return need_s if self.above is None else self.above.off(need_s, fragment) / 2
