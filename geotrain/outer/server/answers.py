"""A server's answers to its members: which weights they are, and how long they wait.

With some rules a delta is applied on arrival, and its answer frozen when all who are at work have sent that
fragment's delta, or at the last moment at which it still comes in time: a worker adopts an answer τ inner steps after
its delta left, so an earlier one is worth nothing. In a region the way up waits, from which the answer comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from geotrain.outer.events import UpdateStage
from geotrain.outer.messages import update_id
from geotrain.outer.server.core import Core
from geotrain.outer.server.member import Member


class Answers:
    """Freezes answers, or lets them wait for others' deltas.

    waits: whether answers may wait. Who waits is in `Counts.waiting`, so a state has it; until when, which only a
    clock decides, says the server's process (`AnswersDue`). due: answers members that wait no more, or sends up what
    they wait for.
    """

    reports_updates = True  # as events; a simulation without tensors has millions of updates and no reader

    def __init__(
        self, core: Core, members: Mapping[str, Member], waits: bool, due: Callable[[tuple[str, ...], int], None]
    ) -> None:
        self.core, self.members, self.waits, self._due = core, members, waits, due

    def answer(self, names: tuple[str, ...], fragment: int) -> None:
        """Freeze the fragment's weights now, in each member's answer that waits for them."""
        for name in names:
            member = self.members[name]
            own = member.fragments[fragment]
            own.owed = False
            # Else it asks when it has joined this incarnation of the server.
            if own.answer is not None and own.version is None and member.complete:
                self.freeze(name, fragment)

    def held(self, fragment: int) -> tuple[str, ...]:
        """Return the members that wait here for others' deltas of the fragment."""
        state = self.core.fragments.get(fragment)
        # Once due, they wait for the way up and no more for others here.
        if not self.waits or state is None or not state.waiting or state.counts.get("due"):
            return ()
        return tuple(sorted(name for name, sent in state.waiting.items() if not sent))

    def awaited(self, fragment: int) -> list[str]:
        """Return those at work for whose deltas of the fragment others wait."""
        if not self.held(fragment):
            return []
        waiting = self.core.fragments[fragment].waiting
        return [name for name, member in self.members.items() if member.at_work and name not in waiting]

    def end_waits(self, fragments: Iterable[int]) -> None:
        """Answer those who wait, where all who are at work have sent the fragment's delta."""
        for fragment in fragments:
            if (held := self.held(fragment)) and not self.awaited(fragment):
                self._due(held, fragment)

    def release(self, names: Collection[str], fragment: int) -> None:
        """Let those of these members that wait do so no more."""
        if found := tuple(name for name in self.held(fragment) if name in names):
            self._due(found, fragment)

    def freeze(self, name: str, fragment: int) -> None:
        """Encode the fragment's weights for all parts at once, as the member's answer."""
        own, version = self.members[name].fragments[fragment], self.core.fragments[fragment].version
        assert own.answer is not None
        self.core.store.freeze(name, fragment, own.answer, version)
        own.version, own.owed = version, False
        self.note_stage(name, fragment, own.answer, "answered")

    def note_stage(self, name: str, fragment: int, sequence: int, stage: str) -> None:
        """Report how far an update has come."""
        if self.reports_updates and sequence:  # 0 is no update, but a join
            self.core.events.append(UpdateStage(update_id(name, fragment, sequence), stage))
