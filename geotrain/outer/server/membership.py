"""Members of a server: joining, leaving, being taken for dead, strikes, quarantine. The base of `Server`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable
from math import inf
from statistics import median_low
from typing import Any, Literal

from geotrain.config import CodecConfig, LimitsConfig
from geotrain.outer.downlink import sends_changes
from geotrain.outer.events import Event, Joined, Left, Quarantined, SentWhole, Unbanned, UpdateRefused
from geotrain.outer.messages import (
    Fact,
    Identity,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    LiftQuarantine,
    MemberSilent,
    NotJoined,
    Refused,
    UpdateRejected,
    Welcome,
)
from geotrain.outer.metrics import credible
from geotrain.outer.rules import Rule
from geotrain.outer.server.leases import MOST_HELD, MOST_HELD_IN_ROUNDS, check_numbers, patience_s
from geotrain.outer.server.member import (
    Member,
    check_coverage,
    check_identity,
    check_incarnation,
    check_parts,
    check_quarantine,
    check_slices,
)
from geotrain.outer.server.member_phase import MemberEvent
from geotrain.outer.server.parts import JOIN_RETRY_S, WHOLE, ServerPart, ServerParts
from geotrain.outer.server.store import Store
from geotrain.parameters.parameter_map import ParameterMap


class Membership(ServerParts):
    """The members of a server, and the messages that change their phases.

    members: names of those who may join. down: codec of the link to them. rule: of the server.
    """

    store: Store
    member_role: Literal["region", "worker"]

    def __init__(
        self, identity: Identity, parameter_map: ParameterMap, rule: Rule, members: tuple[str, ...],
        down: CodecConfig, limits: LimitsConfig, part: ServerPart = WHOLE,
    ) -> None:  # fmt: skip
        super().__init__(part, len(parameter_map.fragments))
        self.identity, self.parameter_map, self.rule, self.down = identity, parameter_map, rule, down
        # incarnation: names the server's present one; its process sets it, since drawing it is not pure.
        # settings: all that it takes from configuration, as text. remade: makes it, without state, from another text.
        self.limits, self.incarnation, self.settings = limits, "", ""
        self.remade: Any = None
        # Of the run: its global server's process draws it where the run begins, regions are told it when they join.
        self.origin = ""
        self.members = {name: Member() for name in members}
        # Names of those that take part (`Member.takes_part`), by whose number a rule that averages divides deltas.
        self.sharing: set[str] = set()
        self.data = identity.data  # sha256 of the run's training data, once a member's join has named it
        self.reserve = 0  # jobs of each worker whose data a region keeps in reserve
        self.validation_steps = 0  # inner steps that cost as much as a validation, or more
        self._events: list[Event] = []  # what `Server.handle` is about to return

    @property
    def empty(self) -> bool:
        """Whether every member has joined and left in good order."""
        return all(member.left for member in self.members.values())

    @property
    def idle(self) -> bool:
        """Whether nobody is at work: every member has left, counts as dead, is quarantined, or never joined."""
        return all(member.away or not member.incarnation for member in self.members.values())

    def current(self, name: str, incarnation: str, part: int | None = None) -> Member:
        """Return the member if this incarnation of it has joined with every part.

        part: of the caller, where it is known. Raises Refused while others of its ranks have not joined, NotJoined
        where the caller itself has not.
        """
        member = self._member(name)
        check_quarantine(name, member, incarnation, self.limits)
        self._check_known(name, incarnation)
        if member.incarnation == incarnation:
            if member.complete and part not in (None, *member.joined):
                raise Refused(f"{name}: part {part} has not joined")
            if member.complete:
                return member
            if part in member.joined:
                raise Refused(f"{name}: its other ranks have not joined yet", JOIN_RETRY_S)
        raise NotJoined(f"{name}: join first, with every part", JOIN_RETRY_S)

    @property
    @abstractmethod
    def ending(self) -> bool:
        """Whether this server is about to end, and would answer nobody who joins now."""

    @abstractmethod
    def holds(self, name: str) -> dict[int, Lease]:
        """Return the leases that this member's workers hold, by their numbers."""

    def work(self) -> dict[str, tuple[float, tuple[Lease, ...]]]:
        """Return by member the seconds for which it may hold its leases and send nothing, by what members say of
        their speed, and these leases.

        A multiple of what its job takes by the usual measure, since its own may be a lie. inf: without bound, as in
        synchronous rounds, where nobody else may train its data.
        """
        step_s = median_low([*filter(None, self.said_step_s())] or [0.0])
        held = {name: tuple(self.holds(name).values()) for name in self.members}
        return {
            name: (inf if self.rule.in_rounds else patience_s(leases, step_s, self.validation_steps), leases)
            for name, leases in held.items()
        }

    def waited_for_by(self, name: str) -> bool:
        """Whether the member waits for something of this server, as far as this process knows."""
        return bool(self.members[name].owed)

    def said_step_s(self) -> Iterable[float]:
        """Return the seconds of an inner step that each worker has last said; 0: none."""
        return [member.step_s for member in self.members.values()]

    # -- messages

    def _on_join(self, join: Join) -> Welcome:
        """Let a rank join. Raises Refused when its member, or its model, does not belong here; then nothing has
        changed."""
        check_identity(join, self.identity, self.data, self.origin)
        member = self._member(join.member)
        check_quarantine(join.member, member, join.incarnation, self.limits)
        self._check_known(join.member, join.incarnation)
        check_incarnation(join, member)
        new = join.incarnation != member.incarnation
        if self.begins(join.member) and not new and join.part in member.joined:
            raise Refused(f"{join.member}: what shards took from its former life is not known yet", JOIN_RETRY_S)
        if new and self.ending:
            raise Refused(
                f"{join.member}: too late, the run has ended here; `geotrain launch … --resume` goes on with it"
            )
        parts = join.parts if new or not member.joined else member.parts
        slices = {**({} if new else member.slices), join.part: sum(map(len, (*join.pushes, *join.holds)))}
        check_parts(join, parts, self.member_role, slices)
        check_slices(join, self.parameter_map, self.down, self.store.chunks)
        joined = {**({} if new else member.joined), join.part: join}
        if len(joined) == parts:
            check_coverage(join.member, joined, self.parameter_map, self.store.chunks)
        known = self._holds_what_was_sent(join) if sends_changes(self.down) else not new
        if not known and any(join.mirrors):
            self._events.append(SentWhole(join.member))
        if new:
            member.begin_incarnation(join.incarnation)
        # Where it has what it was sent in its former incarnation, it is owed the answers that are frozen.
        self._forget(
            join.member, joins=new, sent=not known and (new or bool(self.store.fingerprints_of(join.member)))
        )
        if not new:
            self._heard(join.member)
        self._note_share(join.member)
        self.note_joined(join)
        if new:
            self._once_settled(join.member, join.leases)
        self.data = self.data or join.data
        self._events.append(Joined(join.member, join.part, join.incarnation, new))
        sequences = tuple(member.fragments[number].sequence + 1 for number in self.all)
        here = tuple(self.incarnation if number in self.numbers else "" for number in self.all)
        return Welcome(sequences, self.next_job(join.member), here, tuple(self.versions), self.origin)

    def note_joined(self, join: Join) -> None:
        """Note that a rank has joined. Nothing of what its member was sent changes by that. Raises Refused where
        nobody is called so."""
        member = self._member(join.member)
        self.store.receive_join(join)
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
        if not self.rule.in_rounds:
            return member.job + 1
        held = [lease.job for lease in self.holds(name).values()]
        return min([*held, 1 + member.last_round(len(self.all))])

    def _on_leave(self, leave: Leave) -> None:
        """Let the member leave, and release leases that were reserved for it and that it did not come to."""
        member = self._member(leave.member)
        member.meet(MemberEvent.LEAVES)
        self._note_share(leave.member)
        self._once_settled(leave.member)
        self._events.append(Left(leave.member))

    def _on_member_silent(self, silence: MemberSilent) -> None:
        """Count the member as dead, or as one who trains no more; others train what it had been given."""
        member = self._member(silence.member)
        # A newer incarnation may have joined after the silence of the old one was noticed. Journals say it again.
        if member.incarnation == silence.incarnation and not member.silent:
            member.meet(MemberEvent.SILENCE)
            self._note_share(silence.member)
            self._once_settled(silence.member)

    def _on_update_rejected(self, strike: UpdateRejected) -> bool:
        """Count the strike. Returns whether the member is quarantined for it now; then others get its leases."""
        member = self._member(strike.member)
        if not self.ledger:
            if strike.sequence and self.member_role == "worker" and member.incarnation == strike.incarnation:
                member.banned = strike.incarnation
            about = strike.member, strike.incarnation, strike.fragment, strike.sequence, strike.job
            self.unsaid.append(Fact("refused", *about, reason=strike.reason))
            return False
        ours = not member.quarantined and member.incarnation == strike.incarnation != member.banned
        if ours and strike.job:
            begun = [number for number, lease in self.holds(strike.member).items() if lease.job <= strike.job]
            self._give_up(strike.member, begun)
        if ours and strike.sequence and self.member_role == "worker":
            # Ranks whose part was taken never send it again. The last, whose reply was lost, would wait for them.
            member.banned = strike.incarnation
        quarantined = ours and member.strike(strike.reason, self.limits.strike_window) >= self.limits.strikes
        self._events.append(UpdateRefused(strike.member, strike.reason, len(member.strikes)))
        if quarantined:
            self._quarantine(strike.member, strike.incarnation, strike.reason)
        return quarantined

    def _on_expel(self, name: str) -> str:
        """Quarantine the member until the operator unbans it. Returns what was done, in words."""
        member = self._member(name)
        if self.rule.in_rounds:
            raise Refused("each round of a synchronous run needs every worker: stop the run instead")
        member.expelled, member.fault = True, "the operator expelled it"
        self._quarantine(name, member.incarnation, member.fault)
        return f"{name}: expelled; its leases go to others"

    def _quarantine(self, name: str, incarnation: str, reason: str) -> None:
        member = self.members[name]
        member.quarantined, member.banned = True, incarnation
        self._note_share(name)
        self._forget(name)
        self._once_settled(name)
        self._events.append(Quarantined(name, reason))

    def _let_go(self, name: str, named: tuple[int, ...] | None) -> None:
        if named is not None:
            self._begin_incarnation(name, named)
        if self.members[name].away:  # else it was heard of again meanwhile
            self._release_leases(name)

    def _on_lift_quarantine(self, unban: LiftQuarantine) -> None:
        """Let a new incarnation of the member join; the one that was quarantined stays banned."""
        member = self._member(unban.member)
        member.quarantined = member.expelled = False
        member.strikes.clear()
        self._note_share(unban.member)
        self._events.append(Unbanned(unban.member))

    def _check_request(self, request: LeaseRequest, waiting: Collection[int] = ()) -> int:
        """Raise Refused unless this member, a worker, asks for a job that it may come to. Returns the last such job.

        waiting: jobs whose leases it waits for.
        """
        member = self._present(request.worker)
        jobs = {lease.job for lease in self.holds(request.worker).values()} | set(waiting)
        most = MOST_HELD_IN_ROUNDS if self.rule.in_rounds else MOST_HELD + self.reserve
        check_request(request, jobs, member.job, most)
        member.step_s = request.step_s or member.step_s
        return min([request.job, *jobs]) + most - 1

    def _holds_what_was_sent(self, join: Join) -> bool:
        """Whether the next weights may be changes of what the member was sent.

        So they may when its fingerprints are those of the store, or will be once it was given the last weights of
        fragments that are still frozen in an answer.
        """
        fingerprints = self.store.fingerprints_of(join.member)
        own = self.members[join.member].fragments
        for chunk, (now, before) in fingerprints.items():
            waits = own[self.parameter_map.chunks[chunk].fragment].version is not None
            if chunk >= len(join.mirrors) or join.mirrors[chunk] not in ((now, before) if waits else (now,)):
                return False
        return bool(fingerprints) and any(join.mirrors)

    def _forget(self, name: str, joins: bool = True, sent: bool = True) -> None:
        """Forget a member's joins and half-arrived updates, so that it has to join again, or what it was sent.

        sent: what it holds is not known any more: its answers are frozen anew, with whole weights.
        """
        member = self.members[name]
        all_sent = self.numbers if sent else ()
        self.store.forget(name, joins, all_sent, all_sent)
        if joins:
            for table in (member.joined, member.slices, member.admitted):
                table.clear()
        for own in member.fragments.values():
            if joins:
                own.arriving, own.refused = {}, None
            if sent:
                own.answer = own.version = None

    # -- for subclasses

    def _note_metrics(self, fact: Fact) -> dict[str, float]:
        """Keep what a member's update says of its work, which a region's next update sends up; returns it."""
        metrics = {key: value for key, value in credible(fact.metrics).items() if key != "staleness"}
        if fact.metrics:
            self.members[fact.member].metrics = {**metrics, "staleness": float(fact.staleness)}
        return metrics

    def begin_again(self) -> None:
        """Resume a saved run that had ended, perhaps with more data: members that left may come back."""
        self.begun += self.ledger
        for name, member in self.members.items() if self.ledger else ():
            member.meet(MemberEvent.RESUMES)
            self._note_share(name)
            self._begin_rounds(name, member.last_round(len(self.all)))

    def _begin_rounds(self, name: str, whole: int) -> None:
        """Synchronous workers sent some fragments once more after their last job. The next job is a whole one."""
        self.rounds[name] = whole
        for own in self.members[name].fragments.values():
            own.came = min(own.came, whole)

    @abstractmethod
    def _release_leases(self, name: str) -> None:
        """Return to the pool the leases that this member holds and has not trained. Those of synchronous rounds stay
        with their worker, whichever of its incarnations: a round has a place for each."""

    @abstractmethod
    def _give_up(self, name: str, leases: Collection[int]) -> None:
        """Return leases of this member whose training gave nothing of use."""

    @abstractmethod
    def _check_own(self, name: str, leases: tuple[int, ...]) -> None:
        """Raise Refused where others have data that this member, which counted as dead, has trained or some of its
        ranks train, or may have it: all of its ranks go on with it or none. leases: that it names."""

    @abstractmethod
    def _begin_incarnation(self, name: str, named: tuple[int, ...]) -> None:
        """Clear what a member's former incarnation had begun, as a new one joins, after a death or at first."""

    def _heard(self, name: str) -> None:
        """Note a sign of life. A shard's members are in the phase that its ledger says."""
        if self.ledger:
            self.members[name].meet(MemberEvent.HEARD)
            self._note_share(name)

    def _note_share(self, name: str) -> None:
        """Note whether the member takes part now; by name, since an update must not look at all members."""
        (self.sharing.add if self.members[name].takes_part else self.sharing.discard)(name)

    def _member(self, name: str) -> Member:
        if name not in self.members:
            raise Refused(f"no member is called {name!r} here; known: {', '.join(self.members)}")
        return self.members[name]

    def _present(self, name: str) -> Member:
        """Return the member, unless it left or counts as dead: what it is given now would come back from nobody.

        Raises NotJoined: should it live, it joins, which moves it to another phase, and sends its message again.
        """
        member = self._member(name)
        if member.away:
            raise NotJoined(f"{name} has left, or was not heard from for too long: join first", JOIN_RETRY_S)
        if self.begins(name):
            raise Refused(f"{name}: what shards took from its former life is not known yet", JOIN_RETRY_S)
        return member


def check_request(request: LeaseRequest, jobs: Collection[int], last_job: int, most: int) -> None:
    """Raise Refused unless this is what a worker asks for: a job soon after those that it has not trained.

    jobs: for which it holds leases or waits for them. last_job: of its last update; 0: that is not known. most: jobs
    that it may have at once.
    """
    check_numbers(request)
    first = min(jobs, default=last_job + 1)
    if (jobs or last_job) and request.job >= first + most:
        raise Refused(
            f"{request.worker} asks for job {request.job}, but has not trained job {first}: it gets no more than "
            f"{most} ahead. Send their updates first",
            retry_s=5.0,
        )
