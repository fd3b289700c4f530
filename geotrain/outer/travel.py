"""How long updates and their answers travel, by clocks of which no two need agree: what is said is seconds, and each
end counts them by its own.

A sender says with its update in how many seconds the server above has to answer (`UpdatePart.need_s`), having taken
off what updates and answers of that fragment travelled lately; the server says for how long it had an update
(`Answer.held_s`), from which the sender knows that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from geotrain.outer.messages import Answer, UpdatePart

LAST = 4  # the longest of the last travels is taken off


class Travel:
    """A sender's measure of the time that its updates and their answers travel."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._left: dict[int, tuple[int, float]] = {}  # fragment → its last update, when that left
        self._took: dict[int, deque[float]] = {}  # fragment → seconds of its last travels

    def leaves(self, part: UpdatePart, left_s: float) -> UpdatePart:
        """Note that an update is sent now. left_s: until its answer must be here. Returns it, with its `need_s`."""
        self._left[part.fragment] = part.sequence, self.clock()
        return replace(part, need_s=self.off(left_s, part.fragment))

    def came(self, answer: Answer) -> None:
        """Note that an answer is here."""
        sequence, left_s = self._left.get(answer.fragment, (0, 0.0))
        if sequence and sequence == answer.sequence:
            took = self._took.setdefault(answer.fragment, deque(maxlen=LAST))
            took.append(max(0.0, self.clock() - left_s - answer.held_s))

    def off(self, need_s: float, fragment: int) -> float:
        """Take off what the fragment is to travel, at most; half, where nothing has come back yet."""
        took = self._took.get(fragment) or [s for took in self._took.values() for s in took]
        return max(0.0, need_s - max(took, default=need_s / 2))
