"""The way of a member's update through a server: it is checked, decoded, judged, applied, answered. Whoever keeps a
journal writes it down between the check (`Intake.admit`) and the rest (`Intake.take`), which a replay does again."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from geotrain.outer.downlink import sends_changes
from geotrain.outer.messages import BadDelta, Fact, Refused, UpdatePart, update_id
from geotrain.outer.server.answers import Answers
from geotrain.outer.server.core import Core
from geotrain.outer.server.limits import NormLimits, norm
from geotrain.outer.server.member import Member, MemberFragment, check_part, check_round, outline
from geotrain.outer.server.membership import Membership
from geotrain.outer.server.parts import MOST_UNSAID
from geotrain.parameters.parameter_map import numel


class Intake:
    """Takes updates of fragments, each whole (all its parts) and once (by its sequence number) or not at all.

    report: takes the fact that an update was applied.
    """

    def __init__(self, core: Core, membership: Membership, answers: Answers, report: Callable[[Fact], None]) -> None:
        self.core, self.membership = core, membership
        self.members, self.leases = membership.members, membership.leases
        self.answers, self._report = answers, report
        judged = core.limits.norm_deviations is not None
        self.norms = NormLimits(core.limits, len(core.all), len(self.members)) if judged else None

    def take(self, part: UpdatePart) -> bool:
        """Take one part of an update; apply the update when all parts are here. Returns whether it was applied now. A
        part of one that was applied before changes nothing: its sender missed the acknowledgement."""
        member = self._expecting(part)
        if member is None:
            return False
        # Over a socket, `admit` has checked this part before its payload came; in replays and simulations, nobody.
        if member.admitted.pop((part.fragment, part.part), None) != outline(part):
            self._check(part, member)
        parts = member.fragments[part.fragment].arriving
        if part.part in parts:
            return False
        # Payloads stay in the store: what is kept here is what the part says.
        parts[part.part] = self.core.store.receive_part(part)
        if len(parts) < member.parts:
            if len(parts) == 1:
                self.answers.note_stage(part.member, part.fragment, part.sequence, "arrived")
            self.membership.note_alive(part.member)
            return False
        self._apply(part.member, member, [parts[i] for i in range(member.parts)])
        return True

    def admit(self, part: UpdatePart) -> bool:
        """Whether this part is wanted; False: it is here already. Raises Refused where `handle` would.

        Reads the payloads' sizes only, so that a part can be refused before memory is given to its payload and before
        it is journaled. What is admitted here is not checked again in `handle`.
        """
        member = self._expecting(part)
        if member is None:
            return False
        # Not in `handle`: no journal has what the ledger knows.
        if len(self.membership.as_shard.unsaid) >= MOST_UNSAID:
            raise Refused(
                f"{self.core.name}: this shard's ledger has not answered for {MOST_UNSAID} updates", retry_s=5.0
            )
        self._check(part, member)
        if part.part in member.fragments[part.fragment].arriving:
            return False
        member.admitted[part.fragment, part.part] = outline(part)
        return True

    def _check(self, part: UpdatePart, member: Member) -> None:
        version, most = self.core.fragments[part.fragment].version, self.leases.most_weight(part.member)
        check_part(part, member, self.core.parameter_map, self.core.up, version, most)
        if self.core.rule.in_rounds:
            check_round(part, member.fragments[part.fragment])

    def _expecting(self, part: UpdatePart) -> Member | None:
        """Return the sender if the part belongs to its next update; None if that update was applied before."""
        member = self.membership.current(part.member, part.incarnation, part.part)
        own = self.exchange_of(part.member, part.fragment)
        # Before what may be refused: an update that was applied is acknowledged again, come what may.
        if part.sequence <= own.sequence:
            return None
        if part.fragment not in self.core.fragments:
            raise Refused("this server has no weights yet", retry_s=1.0)
        if own.refused is not None and own.refused[0] == part.sequence:
            raise own.refused[1].with_traceback(None)
        if part.sequence != own.sequence + 1:
            came = update_id(part.member, part.fragment, part.sequence)
            raise Refused(f"{part.member}: update {came} came, but {own.sequence + 1} is next", retry_s=0.2)
        self.leases.check_own(part.member, part.contains)
        return member

    def exchange_of(self, name: str, fragment: int) -> MemberFragment:
        """Return what is known of a member's updates of a fragment. Raises Refused where this process has it not."""
        own, every = self.core.numbers, self.core.all
        if fragment not in own:
            here = "this shard does not have it" if fragment in every else f"the run has {len(every)}"
            raise Refused(f"{name}: no fragment {fragment}; {here}")
        return self.members[name].fragments[fragment]

    def left_out(self, name: str) -> list[UpdatePart]:
        """Return the parts of the member's updates that are not whole yet, as they came."""
        arriving = [part for own in self.members[name].fragments.values() for part in own.arriving.values()]
        return [self.core.store.as_received(part) for part in arriving]

    def _apply(self, name: str, member: Member, parts: list[UpdatePart]) -> None:
        first, fragment = parts[0], parts[0].fragment
        own, state, update = member.fragments[fragment], self.core.fragments[fragment], (fragment, first.sequence)
        own.arriving = {}  # also when it is refused below, so that it can be sent anew
        spoken = [(p.contains, p.job, p.weight) for p in parts]
        try:
            if any(each != spoken[0] for each in spoken):
                raise Refused(f"{name}: the parts of update {update_id(name, *update)} speak of different leases")
            self._judge(name, own, first)
        except Refused as refused:
            self.core.store.forget(name, updates=(update,))
            if len(parts) > 1:
                own.refused = first.sequence, refused
            raise
        self.membership.note_alive(name)  # not before: what is refused is no sign of life
        # From here on nothing is refused. Who sends an update wants its answer, without another word.
        own.sequence, own.answer, own.version = first.sequence, first.sequence, None
        own.staleness = state.version - first.deltas[0].anchor_version
        # The earliest: all ranks adopt the answer at one step.
        own.need_s = min(part.need_s for part in parts)
        if not (self.core.rule.in_rounds and 0 < first.job <= own.came):
            own.owed = True  # until the rule says that it is to be answered, perhaps at once
            own.came = first.job
            inputs, answered = self.core.rule.on_delta(state, name, first.weight, len(self.membership.sharing))
            self.core.store.apply(name, *update, state.version, inputs)
        else:
            # A former incarnation sent this round's delta. This one is only answered, now or when it is complete.
            answered = () if own.owed else (name,)
        # Before answers take memory. Every part has adopted the answer before, or would not have sent this update.
        said = [p.adopted for p in parts]
        # Changes are counted from what a join was answered: who asks for that once more must get the same.
        least = int(sends_changes(self.core.down))
        frozen = member.fragments.items() if all(said) else ()
        let_go = [number for number, each in frozen if each.let_go(min(to[number] for to in said), least)]
        self.core.store.forget(name, answers=(fragment, *let_go), updates=(update,))
        if self.answers.waits:
            # Its delta is in no update upwards yet (`Counts.waiting`).
            state.waiting[name] = 0
            self.answers.end_waits((fragment,))
            if own.need_s <= 0:
                self.answers.release((name,), fragment)
        else:
            self.answers.answer(answered, fragment)
        size_bytes = 0
        if self.answers.reports_updates:
            pushes = [join.pushes[delta.chunk] for join in member.joined.values() for delta in first.deltas]
            size_bytes = sum(self.core.up.encoded_bytes(numel(slices)) for slices in pushes)
        fact = Fact(
            "applied", name, member.incarnation, fragment, first.sequence, first.job, first.weight, first.contains,
            state.version, staleness=own.staleness, size_bytes=size_bytes, norm=own.norm, metrics=first.metrics,
        )  # fmt: skip
        if not self.core.ledger:  # which notes them, too
            self.membership.note_metrics(fact)
        self._report(fact)
        if name in self.answers.held(fragment):
            self.answers.note_stage(name, fragment, first.sequence, "waits")

    def _judge(self, name: str, own: MemberFragment, first: UpdatePart) -> None:
        """Raise Refused when the update is not finite, or its norm not to be believed."""
        decoded = self.core.store.decode(name, first.fragment, first.sequence)
        for each in decoded:
            if each.fault:
                raise BadDelta(
                    f"{name}, part {each.part}: {self.core.parameter_map.called(each.chunk)}: {each.fault}"
                )
        own.norm = norm([each.squares for each in decoded])
        if own.norm == inf:  # some few of these, and the weights were infinite
            raise BadDelta(f"{name}: fragment {first.fragment}: the update's norm is beyond all numbers")
        if self.norms is not None:
            weight = min(first.weight, self.leases.max_credible_weight(name))
            known = self.norms.senders(first.fragment) & self.members.keys()
            at_work = {m for m in known if not self.members[m].away}
            self.norms.check(name, first.fragment, own.norm, weight, at_work)
            self.norms.note(name, first.fragment, own.norm, weight)
