"""A server's answers to its members: which weights they are, and how long they wait. The base of `Server`.

With some rules a delta is applied on arrival, and its answer frozen when all who are at work have sent that
fragment's delta, or at the last moment at which it still comes in time: a worker adopts an answer τ inner steps after
its delta left, so an earlier one is worth nothing. In a region the way up waits, from which the answer comes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable

from geotrain.outer.events import UpdateStage
from geotrain.outer.messages import AnswerWanted, Refused, update_id
from geotrain.outer.server.member import MemberFragment
from geotrain.outer.server.membership import Membership


class Answers(Membership):
    """waits: whether answers may wait for others' deltas. Who waits is in `Counts.waiting`, so a state has it; until
    when, which only a clock can tell, says the server's process (`AnswersDue`)."""

    waits: bool
    reports_updates = True  # as events; a simulation without tensors has millions of updates and no reader

    def _exchange_of(self, name: str, fragment: int) -> MemberFragment:
        if fragment not in self.numbers:
            here = "this shard does not have it" if fragment in self.all else f"the run has {len(self.all)}"
            raise Refused(f"{name}: no fragment {fragment}; {here}")
        return self.members[name].fragments[fragment]

    def lacks_answer(self, name: str, incarnation: str, part: int, fragment: int, sequence: int) -> bool:
        """Whether the answer, as for `answer`, is due and only an `AnswerWanted` is missing. Raises Refused."""
        self.current(name, incarnation, part)
        own = self._exchange_of(name, fragment)
        if fragment not in self.fragments or sequence > own.sequence:
            return False
        if sequence not in (0, own.sequence):
            raise Refused(f"{name}: the answer to update {update_id(name, fragment, sequence)} was adopted before")
        return own.answer != sequence or (own.version is None and not own.owed)

    def _on_answer_wanted(self, wanted: AnswerWanted) -> None:
        name, fragment, sequence = wanted.member, wanted.fragment, wanted.sequence
        member = self.current(name, wanted.incarnation)
        if not self.lacks_answer(name, wanted.incarnation, min(member.joined), fragment, sequence):
            return  # another part has asked
        own = member.fragments[fragment]
        if sequence == 0:  # nobody trains meanwhile
            self.release((name,), fragment)
        if own.answer != sequence:
            if sequence == 0:  # it begins anew
                self.store.forget(name, mirrors=(fragment,))
            own.answer, own.version = sequence, None
        if not own.owed:
            self._freeze(name, fragment)

    def answer_members(self, names: tuple[str, ...], fragment: int) -> None:
        """Freeze the fragment's weights now, in each member's answer that waits for them."""
        for name in names:
            member = self.members[name]
            own = member.fragments[fragment]
            own.owed = False
            if (
                own.answer is not None and own.version is None and member.complete
            ):  # else it asks when it has joined this incarnation of the server
                self._freeze(name, fragment)

    def held(self, fragment: int) -> tuple[str, ...]:
        """Return the members that wait here for others' deltas of the fragment."""
        state = self.fragments.get(fragment)
        if not self.waits or state is None or not state.waiting or state.counts.get("due"):
            return ()
        return tuple(sorted(name for name, sent in state.waiting.items() if not sent))

    def awaited(self, fragment: int) -> list[str]:
        """Return those at work for whose deltas of the fragment others wait."""
        if not self.held(fragment):
            return []
        waiting = self.fragments[fragment].waiting
        return [name for name, member in self.members.items() if member.at_work and name not in waiting]

    def end_waits(self, fragments: Iterable[int]) -> None:
        """Answer those who wait, where all who are at work have sent the fragment's delta."""
        for fragment in fragments:
            if (held := self.held(fragment)) and not self.awaited(fragment):
                self._answer_now(held, fragment)

    def release(self, names: Collection[str], fragment: int) -> None:
        """Let those of these members that wait do so no more."""
        if found := tuple(name for name in self.held(fragment) if name in names):
            self._answer_now(found, fragment)

    @abstractmethod
    def _answer_now(self, names: tuple[str, ...], fragment: int) -> None:
        """Answer these members, or send up what they wait for."""

    def _freeze(self, name: str, fragment: int) -> None:
        """Encode the fragment's weights for all parts at once, as the member's answer."""
        own, version = self.members[name].fragments[fragment], self.fragments[fragment].version
        assert own.answer is not None
        self.store.freeze(name, fragment, own.answer, version)
        own.version, own.owed = version, False
        self._note_stage(name, fragment, own.answer, "answered")

    def _note_stage(self, name: str, fragment: int, sequence: int, stage: str) -> None:
        if self.reports_updates and sequence:  # 0 is no update, but a join
            self._events.append(UpdateStage(update_id(name, fragment, sequence), stage))
