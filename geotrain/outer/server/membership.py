"""Members of a server: joining, leaving, being taken for dead, strikes, quarantine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from math import inf
from statistics import median_low
from typing import Any, Protocol

from geotrain.outer.downlink import sends_changes
from geotrain.outer.events import Joined, Left, Quarantined, SentWhole, Unbanned, UpdateRefused
from geotrain.outer.messages import (
    Fact,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    LiftQuarantine,
    MemberSilent,
    MemberStanding,
    NotJoined,
    Refused,
    Standing,
    UpdateRejected,
)
from geotrain.outer.metrics import credible
from geotrain.outer.server.core import Core
from geotrain.outer.server.lease_requests import MOST_HELD, MOST_HELD_IN_ROUNDS, check_request, patience_s
from geotrain.outer.server.member import (
    Member,
    check_coverage,
    check_incarnation,
    check_parts,
    check_quarantine,
    check_slices,
)
from geotrain.outer.server.member_phase import MemberEvent, MemberPhase
from geotrain.outer.server.parts import JOIN_RETRY_S, LedgerSide, ShardSide


class Leases(Protocol):
    """Who keeps the leases of a server's members, and what becomes of them as members come and go."""

    def holds(self, name: str) -> dict[int, Lease]:
        """Return the leases that this member's workers hold, by their numbers."""

    def said_step_s(self) -> Iterable[float]:
        """Return the seconds of an inner step that each worker has last said; 0: none."""

    def release_leases(self, name: str) -> None:
        """Return to the pool the leases that this member holds and has not trained. Those of synchronous rounds stay
        with their worker, whichever of its incarnations: a round has a place for each."""

    def give_up(self, name: str, leases: Collection[int]) -> None:
        """Return leases of this member whose training gave nothing of use."""

    def facts_lost(self) -> None:
        """Let nothing wait for facts that shards had said, and that this ledger, of an older state, never hears."""

    def begin_incarnation(self, name: str, named: tuple[int, ...]) -> None:
        """Clear what a member's former incarnation had begun, as a new one joins, after a death or at first."""

    def check_own(self, name: str, leases: tuple[int, ...]) -> None:
        """Raise Refused where others have data that this member, which counted as dead, has trained or some of its
        ranks train, or may have it: all of its ranks go on with it or none. leases: that it names."""

    def most_weight(self, member: str) -> int:
        """Return the most workers' deltas that an update of this member may stand for; more is refused."""

    def max_credible_weight(self, member: str) -> int:
        """Return the most workers' deltas that its leases make credible: more does not widen the norm limit."""


class Membership:
    """The members of a server, and what the messages do that change their phases.

    names: of those who may join. leases: who keeps theirs.
    """

    def __init__(self, core: Core, names: tuple[str, ...], leases: Leases) -> None:
        self.core, self.leases, self.members = core, leases, {name: Member() for name in names}
        self.as_ledger, self.as_shard = LedgerSide(core.part), ShardSide(core.part)
        # Names of those that take part (`Member.takes_part`), by whose number a rule that averages divides deltas.
        self.sharing: set[str] = set()
        self.reserve = 0  # jobs of each worker whose data a region keeps in reserve
        self.validation_steps = 0  # inner steps that cost as much as a validation, or more
        self.begun = 0  # how often the run has begun again
        self.rounds: dict[str, int] = {}  # member → its last whole round before that

    @property
    def empty(self) -> bool:
        """Whether every member has joined and left in good order, and all that shards took from it is known."""
        return all(member.left for member in self.members.values()) and not self.as_ledger.unsettled

    @property
    def idle(self) -> bool:
        """Whether nobody is at work: every member has left, counts as dead, is quarantined, or never joined."""
        return all(member.away or not member.incarnation for member in self.members.values())

    def current(self, name: str, incarnation: str, part: int | None = None) -> Member:
        """Return the member if this incarnation of it has joined with every part.

        part: of the caller, where it is known. Raises Refused while others of its ranks have not joined, NotJoined
        where the caller itself has not.
        """
        member = self.member(name)
        check_quarantine(name, member, incarnation, self.core.limits)
        self.as_shard.check_known(name, incarnation)
        if member.incarnation == incarnation:
            if member.complete and part not in (None, *member.joined):
                raise Refused(f"{name}: part {part} has not joined")
            if member.complete:
                return member
            if part in member.joined:
                raise Refused(f"{name}: its other ranks have not joined yet", JOIN_RETRY_S)
        raise NotJoined(f"{name}: join first, with every part", JOIN_RETRY_S)

    def work(self) -> dict[str, tuple[float, tuple[Lease, ...]]]:
        """Return by member the seconds for which it may hold its leases and send nothing, by what members say of
        their speed, and these leases.

        A multiple of what its job takes by the usual measure, since its own may be a lie. inf: without bound, as in
        synchronous rounds, where nobody else may train its data.
        """
        step_s = median_low([*filter(None, self.leases.said_step_s())] or [0.0])
        held = {name: tuple(self.leases.holds(name).values()) for name in self.members}
        return {
            name: (inf if self.core.rule.in_rounds else patience_s(leases, step_s, self.validation_steps), leases)
            for name, leases in held.items()
        }

    # -- messages

    def join(self, join: Join, ending: bool) -> None:
        """Let a rank join. Raises Refused when its member does not belong here; then nothing has changed.

        ending: whether this server is about to end, and would answer nobody who joins now.
        """
        member = self.member(join.member)
        check_quarantine(join.member, member, join.incarnation, self.core.limits)
        self.as_shard.check_known(join.member, join.incarnation)
        check_incarnation(join, member)
        new = join.incarnation != member.incarnation
        if self.as_ledger.begins(join.member) and not new and join.part in member.joined:
            raise Refused(f"{join.member}: what shards took from its former life is not known yet", JOIN_RETRY_S)
        if new and ending:
            raise Refused(
                f"{join.member}: too late, the run has ended here; `geotrain launch … --resume` goes on with it"
            )
        parts = join.parts if new or not member.joined else member.parts
        # With those of ranks that joined before: the bound is a member's.
        slices = {**({} if new else member.slices), join.part: sum(map(len, (*join.pushes, *join.holds)))}
        check_parts(join, parts, self.core.role, slices)
        check_slices(join, self.core.parameter_map, self.core.down, self.core.store.chunks)
        joined = {**({} if new else member.joined), join.part: join}
        if len(joined) == parts:
            check_coverage(join.member, joined, self.core.parameter_map, self.core.store.chunks)
        known = self._holds_what_was_sent(join) if sends_changes(self.core.down) else not new
        if not known and any(join.mirrors):
            self.core.events.append(SentWhole(join.member))
        # Whatever may be refused is above: from here on the join counts.
        if new:
            member.begin_incarnation(join.incarnation)
        # Where it has what it was sent in its former incarnation, it is owed the answers that are frozen.
        self.forget(
            join.member, joins=new, sent=not known and (new or bool(self.core.store.fingerprints_of(join.member)))
        )
        if not new:
            self.note_alive(join.member)
        self.note_share(join.member)
        self.note_joined(join)
        if new:
            self.once_settled(join.member, join.leases)
        self.core.events.append(Joined(join.member, join.part, join.incarnation, new))

    def note_joined(self, join: Join) -> None:
        """Note that a rank has joined. Nothing of what its member was sent changes by that. Raises Refused where
        nobody is called so."""
        member = self.member(join.member)
        self.core.store.receive_join(join)
        for update in [update for update in member.admitted if update[1] == join.part]:
            del member.admitted[update]  # that check was made with the slices of an earlier join
        member.parts, member.joined[join.part] = join.parts, join
        member.slices[join.part] = sum(map(len, (*join.pushes, *join.holds)))

    def next_job(self, name: str) -> int:
        """Return the job that a new incarnation of this worker begins with.

        In synchronous rounds it is the first one whose data is not trained: others wait for all of its deltas.
        Elsewhere its data has gone to others, and any job that was not begun will do.
        """
        member = self.members[name]
        if not self.core.rule.in_rounds:
            return member.job + 1
        held = [lease.job for lease in self.leases.holds(name).values()]
        return min([*held, 1 + member.last_round(len(self.core.all))])

    def leave(self, leave: Leave) -> None:
        """Let the member leave, and release leases that were reserved for it and that it did not come to."""
        member = self.member(leave.member)
        member.transition(MemberEvent.LEAVES)
        self.note_share(leave.member)
        self.once_settled(leave.member)
        self.core.events.append(Left(leave.member))

    def silence(self, silence: MemberSilent) -> None:
        """Count the member as dead, or as one who trains no more; others train what it had been given."""
        member = self.member(silence.member)
        # A newer incarnation may have joined after the silence of the old one was noticed. Journals say it again.
        if member.incarnation == silence.incarnation and not member.silent:
            member.transition(MemberEvent.SILENCE)
            self.note_share(silence.member)
            self.once_settled(silence.member)

    def count_strike(self, strike: UpdateRejected) -> bool:
        """Count the strike. Returns whether the member is quarantined for it now; then others get its leases."""
        member = self.member(strike.member)
        # A shard bars the incarnation, and reports: strikes are counted in the ledger.
        if not self.core.ledger:
            if strike.sequence and self.core.role == "worker" and member.incarnation == strike.incarnation:
                member.banned = strike.incarnation
            about = strike.member, strike.incarnation, strike.fragment, strike.sequence, strike.job
            self.as_shard.unsaid.append(Fact("refused", *about, reason=strike.reason))
            return False
        ours = not member.quarantined and member.incarnation == strike.incarnation != member.banned
        if ours and strike.job:
            begun = [number for number, lease in self.leases.holds(strike.member).items() if lease.job <= strike.job]
            self.leases.give_up(strike.member, begun)
        if ours and strike.sequence and self.core.role == "worker":
            # Ranks whose part was taken never send it again. The last, whose reply was lost, would wait for them.
            member.banned = strike.incarnation
        quarantined = (
            ours and member.strike(strike.reason, self.core.limits.strike_window) >= self.core.limits.strikes
        )
        self.core.events.append(UpdateRefused(strike.member, strike.reason, len(member.strikes)))
        if quarantined:
            self._quarantine(strike.member, strike.incarnation, strike.reason)
        return quarantined

    def expel(self, name: str) -> str:
        """Quarantine the member until the operator unbans it. Returns what was done, in words."""
        member = self.member(name)
        if self.core.rule.in_rounds:
            raise Refused("each round of a synchronous run needs every worker: stop the run instead")
        member.expelled, member.fault = True, "the operator expelled it"
        self._quarantine(name, member.incarnation, member.fault)
        return f"{name}: expelled; its leases go to others"

    def _quarantine(self, name: str, incarnation: str, reason: str) -> None:
        member = self.members[name]
        member.quarantined, member.banned = True, incarnation
        self.note_share(name)
        self.forget(name)
        self.once_settled(name)
        self.core.events.append(Quarantined(name, reason))

    def once_settled(self, name: str, named: tuple[int, ...] | None = None) -> None:
        """Let leases of a member go, as it is gone or begins anew, once all that shards took from it is known here
        (`LedgerSide.once_settled`). At once where there is no shard."""
        self.as_ledger.once_settled(name, named)
        self.settle()

    def settle(self) -> None:
        """Let leases go for which nothing has to be waited for any more."""
        for name, named in self.as_ledger.settled():
            if name in self.members:
                self._let_go(name, named)

    def _let_go(self, name: str, named: tuple[int, ...] | None) -> None:
        if named is not None:
            self.leases.begin_incarnation(name, named)
        if self.members[name].away:  # else it gave a sign of life again meanwhile
            self.leases.release_leases(name)

    def standing(self, ends: Callable[[str], bool]) -> tuple[MemberStanding, ...]:
        """Return how the members stand, for shards. ends: whether a worker ends, as no data is left for it."""
        return tuple(
            MemberStanding(
                name, m.incarnation, m.phase.value,
                m.fault or "an update of it was refused" if m.quarantined or m.banned == m.incarnation != "" else "",
                ends(name), self.rounds.get(name, 0), m.quarantined,
            )
            for name, m in self.members.items()
        )  # fmt: skip

    def follow(self, standing: Standing) -> None:
        """Take over, in a shard, how the ledger says that members stand."""
        for each in standing.members:
            if (member := self.members.get(each.name)) is None:
                continue
            # No `transition`: the ledger has made it, and may have made several.
            member.phase, member.quarantined = MemberPhase(each.phase), each.quarantined
            if each.barred:
                member.banned, member.fault = each.incarnation, each.barred
            self.note_share(each.name)
            # What the former one sent in part will not be whole. What it was sent stays: its successor may hold it.
            if each.incarnation != member.incarnation and member.joined:
                self.forget(each.name, sent=False)
            if standing.begun > self.begun:
                self._begin_rounds(each.name, each.round)
        self.begun = standing.begun

    def lift_quarantine(self, unban: LiftQuarantine) -> None:
        """Let a new incarnation of the member join; the one that was quarantined stays banned."""
        member = self.member(unban.member)
        member.quarantined = member.expelled = False
        member.strikes.clear()
        self.note_share(unban.member)
        self.core.events.append(Unbanned(unban.member))

    def check_request_of(self, request: LeaseRequest, waiting: Collection[int] = ()) -> int:
        """Raise Refused unless this member, a worker, asks for a job that it may come to. Returns the last such job.

        waiting: jobs whose leases it waits for.
        """
        member = self.present(request.worker)
        jobs = {lease.job for lease in self.leases.holds(request.worker).values()} | set(waiting)
        most = MOST_HELD_IN_ROUNDS if self.core.rule.in_rounds else MOST_HELD + self.reserve
        check_request(request, jobs, member.job, most)
        member.step_s = request.step_s or member.step_s
        return min([request.job, *jobs]) + most - 1

    def _holds_what_was_sent(self, join: Join) -> bool:
        """Whether the next weights may be changes of what the member was sent.

        So they may when its fingerprints are those of the store, or will be once it was given the last weights of
        fragments that are still frozen in an answer.
        """
        fingerprints = self.core.store.fingerprints_of(join.member)
        own = self.members[join.member].fragments
        for chunk, (now, before) in fingerprints.items():
            waits = own[self.core.parameter_map.chunks[chunk].fragment].version is not None
            if chunk >= len(join.mirrors) or join.mirrors[chunk] not in ((now, before) if waits else (now,)):
                return False
        return bool(fingerprints) and any(join.mirrors)

    def forget(self, name: str, joins: bool = True, sent: bool = True) -> None:
        """Forget a member's joins and half-arrived updates, so that it has to join again, or what it was sent.

        sent: what it holds is not known any more: its answers are frozen anew, with whole weights.
        """
        member = self.members[name]
        all_sent = self.core.numbers if sent else ()
        self.core.store.forget(name, joins, all_sent, all_sent)
        if joins:
            for table in (member.joined, member.slices, member.admitted):
                table.clear()
        for own in member.fragments.values():
            if joins:
                own.arriving, own.refused = {}, None
            if sent:
                own.answer = own.version = None

    def note_metrics(self, fact: Fact) -> dict[str, float]:
        """Keep what a member's update says of its work, which a region's next update sends up; returns it."""
        metrics = {key: value for key, value in credible(fact.metrics).items() if key != "staleness"}
        if fact.metrics:
            self.members[fact.member].metrics = {**metrics, "staleness": float(fact.staleness)}
        return metrics

    def begin_again(self) -> None:
        """Resume a saved run that had ended, perhaps with more data: members that left may come back."""
        self.begun += self.core.ledger
        for name, member in self.members.items() if self.core.ledger else ():
            member.transition(MemberEvent.RESUMES)
            self.note_share(name)
            self._begin_rounds(name, member.last_round(len(self.core.all)))

    def _begin_rounds(self, name: str, whole: int) -> None:
        """Synchronous workers sent some fragments once more after their last job. The next job is a whole one."""
        self.rounds[name] = whole
        for own in self.members[name].fragments.values():
            own.came = min(own.came, whole)

    def part_state(self) -> dict[str, Any]:
        """Return what is between a ledger and its shards, as plain JSON data, from which `load_part` restores it."""
        said = {**self.as_ledger.state(), **self.as_shard.state()}
        return {**said, "begun": self.begun, "rounds": dict(self.rounds)}

    def load_part(self, saved: dict[str, Any]) -> None:
        """Load what `part_state` returned. Raises ParameterMapError where the state is of another part."""
        self.as_ledger.load(saved)
        self.as_shard.load(saved)
        self.begun, self.rounds = saved["begun"], dict(saved["rounds"])

    def note_alive(self, name: str) -> None:
        """Note a sign of life. A shard's members are in the phase that its ledger says."""
        if self.core.ledger:
            self.members[name].transition(MemberEvent.ALIVE)
            self.note_share(name)

    def note_share(self, name: str) -> None:
        """Note whether the member takes part now; by name, since an update must not look at all members."""
        (self.sharing.add if self.members[name].takes_part else self.sharing.discard)(name)

    def member(self, name: str) -> Member:
        if name not in self.members:
            raise Refused(f"no member is called {name!r} here; known: {', '.join(self.members)}")
        return self.members[name]

    def present(self, name: str) -> Member:
        """Return the member, unless it left or counts as dead: what it is given now would come back from nobody.

        Raises NotJoined: should it live, it joins, which moves it to another phase, and sends its message again.
        """
        member = self.member(name)
        if member.away:
            raise NotJoined(f"{name} has left, or was silent for too long: join first", JOIN_RETRY_S)
        if self.as_ledger.begins(name):
            raise Refused(f"{name}: what shards took from its former life is not known yet", JOIN_RETRY_S)
        return member
