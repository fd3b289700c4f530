"""The data of a region's workers: leases that its server asks for, hands on, gives back, and asks for again. The base
of `RegionServer`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from geotrain.common.names import GLOBAL
from geotrain.outer.events import StartedOver
from geotrain.outer.messages import (
    AnswerWanted,
    Fact,
    Facts,
    Finished,
    Lease,
    LeaseRequest,
    Leave,
    NotJoined,
    Refused,
    Release,
    Send,
    Standing,
    TakenBack,
    Trained,
    UpdatePart,
    UpdateRejected,
    WentBack,
)
from geotrain.outer.rules import AsyncRegion, RegionRule
from geotrain.outer.server.member import MOST_LEASES
from geotrain.outer.server.member_phase import MemberEvent
from geotrain.outer.server.membership import JOIN_RETRY_S
from geotrain.outer.server.region_leases import MOST_BACK, RegionLeases
from geotrain.outer.server.server import Server


class RegionData(Server):
    """Forwards workers' requests for data and remembers what came, until the update that contains its training is
    committed. The attributes are those of `RegionServer`."""

    rule: RegionRule
    leases: RegionLeases
    in_flight: dict[int, UpdatePart]
    contains: list[list[int]]
    sequences: list[int]
    global_versions: list[int]
    trained: set[int]
    gone_up: dict[int, set[int]]
    wanted: dict[str, set[int]]
    spent: dict[str, int]
    asking_back: set[str]
    final: set[int] | None
    every: int
    rests: int
    _due: bool

    def holds(self, name: str) -> dict[int, Lease]:
        return self.leases.of(name)

    def _answer_now(self, names: tuple[str, ...], fragment: int) -> None:
        self.fragments[fragment].counts["due"] = 1  # until an update leaves, also while one is in flight
        self._due = True

    def going_up(self, fragment: int) -> list[str]:
        """Return the workers whose answers come back with the fragment's update that is in flight."""
        state = self.fragments.get(fragment)
        return [name for name, sent in state.waiting.items() if sent] if state else []

    def uncommitted(self) -> tuple[int, ...]:
        """Numbers of the leases that are trained here and not known to be committed."""
        return tuple(sorted(self.trained))

    def waited_for_by(self, name: str) -> bool:
        # For a lease, while it has none; for the weights with which it ends, until they are here.
        asks = bool(self.wanted[name]) and not self.leases.of(name)
        ends = self.final is not None and len(self.final) < len(self.all) and self.ends(name)
        return asks or ends or super().waited_for_by(name)

    def waits_to_send(self) -> bool:
        """Whether there is training here that the global server is not known to have."""
        return bool(self.trained or self.leases.contained)

    def _check_own(self, name: str, leases: tuple[int, ...] = ()) -> None:
        if self.leases.given_back[name]:
            why = f"{name}: its data went back, as it counted as dead"
            if name in self.asking_back:
                raise Refused(f"{why}; the global server is asked whether others have it", JOIN_RETRY_S)
            raise NotJoined(f"{why}: join first", JOIN_RETRY_S)

    def _on_lease_request(self, request: LeaseRequest) -> Lease | Finished | None:
        """Return the lease if it is here already; otherwise None, and the request goes up to the global server.

        Leases of the following jobs are asked for too, as far as the reserve reaches, so that a region that is cut
        off can train on.
        """
        worker, job = request.worker, request.job
        last = self._check_request(request, self.wanted.get(worker, ()))
        self._check_own(worker)
        lease = self.leases.held[worker].get(job)
        if self.spent.get(worker) == job:
            # Known already, as a reserve was asked for. Above, this request might wait behind one for a later job,
            # and that one for what the worker sends only when it hears that there is no data.
            self.leases.asked[worker] = max(job, self.leases.asked.get(worker, 0))
            return Finished(worker, job)
        if lease is None:
            self.wanted[worker].add(job)
            self._sends.append(Send(GLOBAL, request))
        for ahead in self.leases.ask(worker, job, last, self.members[worker].step_s):
            self._sends.append(Send(GLOBAL, replace(request, job=ahead)))
        return lease

    def _on_lease(self, lease: Lease | Finished) -> Literal["again"] | None:
        """Take the reply to a request. A lease that nobody is there to train goes back at once: its worker has left,
        counts as dead, has done this job, or would not come to it. Returns whether the request is to be made anew,
        since the lease went back while it was under way."""
        worker, next_job = self._member(lease.worker), self.next_job(lease.worker)
        done = lease.job < next_job
        self.spent.pop(lease.worker, None)
        if isinstance(lease, Finished) and not done:
            self.spent[lease.worker] = lease.job
            self._due = True
            self._release(self.leases.give_back(lease.worker, self.leases.beyond(lease.worker, lease.job)))
        known = {*self.leases.of(lease.worker), *self.uncommitted()}
        if isinstance(lease, Lease) and lease.lease not in known:
            nobody = worker.away or done or not self.leases.follows(lease.worker, lease.job, next_job)
            if lease.lease in self.leases.back:
                return None if nobody else "again"
            if nobody:
                self._release((lease.lease,))
                return None
            self.leases.held[lease.worker][lease.job] = lease
            self.final = None
        if lease.job in self.wanted[lease.worker] and not done:
            self.wanted[lease.worker].discard(lease.job)
            self._sends.append(Send(lease.worker, lease))
        return None

    def _on_taken_back(self, told: TakenBack) -> None:
        """Hold a worker's leases again. Where others have some of them, what it has trained since would count twice:
        then this incarnation of it has to end."""
        self._member(told.worker)
        self.asking_back.discard(told.worker)
        if self.leases.given_back[told.worker].keys() & set(told.gone):
            self._shut_out(told.worker)
        self.leases.back = [number for number in self.leases.back if number not in told.leases]
        self._release(self.leases.have_again(told.worker, told.leases))

    def _on_leave(self, leave: Leave) -> None:
        if leave.member in self.spent:  # it ends as no data is left
            self._member(leave.member).meet(MemberEvent.ENDS)
        super()._on_leave(leave)

    def _shut_out(self, name: str) -> None:
        """Let this incarnation of the worker say no more; the next one begins from the region's weights."""
        member = self.members[name]
        member.banned, member.fault = member.incarnation, "others got its data while it counted as dead"
        self._forget(name)
        self._release_leases(name)
        self.leases.given_back[name].clear()
        self._forget_training()

    def _begin_incarnation(self, name: str, named: tuple[int, ...]) -> None:
        """Give back the leases of jobs that the former incarnation had begun. Those of others stay here: the link
        may be slow, or cut just now."""
        first = self.next_job(name)
        self.wanted[name].clear()
        self.leases.asked.pop(name, None)
        self._give_back(name, [number for number, lease in self.leases.of(name).items() if lease.job < first])
        self.leases.given_back[name].clear()  # its former incarnation trained them, if anyone
        self._forget_training()

    def _release_leases(self, name: str) -> None:
        """Give the worker's untrained leases back to the global server; in synchronous rounds they stay its own."""
        self._give_back(name, self.leases.of(name))
        self.leases.forget(name)

    def _give_back(self, name: str, leases: Collection[int]) -> None:
        self._release(() if self.rule.in_rounds else self.leases.give_back(name, leases))
        self._forget_training()

    def _give_up(self, name: str, leases: Collection[int]) -> None:
        self._release(self.leases.give_back(name, leases), failed=True)
        self._forget_training()

    def _forget_training(self) -> None:
        """Forget which fragments contain leases that no worker here has any more, as a restart would."""
        known = self.leases.known
        self.leases.contained = {n: within for n, within in self.leases.contained.items() if n in known}
        known = self.trained | self.leases.contained.keys()
        self.gone_up = {n: fragments for n, fragments in self.gone_up.items() if n in known}

    def _release(self, untrained: tuple[int, ...], failed: bool = False) -> None:
        if untrained:
            self._due = True
            if not self.rule.in_rounds:  # where it stays the worker's
                self.leases.back = [*self.leases.back, *untrained][-MOST_BACK:]
            self._sends.append(Send(GLOBAL, Release(untrained, failed)))

    def _say_again(self, fragment: int) -> None:
        """Say once more, with the next update of a fragment, which leases it contains, since updates that had said so
        are lost: leases of which other fragments have gone up could not be committed otherwise."""
        held = [number for number, fragments in self.leases.contained.items() if fragment in fragments]
        leases = tuple(sorted({*self.trained, *held}))
        for number in leases:
            self.gone_up.get(number, set()).discard(fragment)
        if fragment not in self.numbers:  # its shard knows of no lease
            self._sends.append(Send(GLOBAL, Trained(self.name, fragment, leases)))
            return
        in_flight = u.contains if (u := self.in_flight.get(fragment)) else ()
        self._take_up(fragment, [number for number in leases if number not in in_flight])

    def _note_up(self, fragment: int, sequence: int, leases: Collection[int]) -> None:
        """Note that the global server has taken a fragment's update, which contains these leases."""
        self.sequences[fragment] = max(self.sequences[fragment], sequence)
        for number in {*leases} & (self.trained | self.leases.contained.keys()):
            fragments = self.gone_up.setdefault(number, set())
            fragments.add(fragment)
            if len(fragments) == len(self.all):
                self.trained.discard(number)
                del self.gone_up[number]

    def _on_start_over(self, fact: Fact) -> None:
        """Give back all leases, as fragments begin again from the global weights."""
        # Of some a part of the training is dropped here: others train them anew, whatever their worker sends.
        gone = set(fact.contains)
        held = [number for worker in self.members for number in self.leases.of(worker)]
        self.leases.start_over(gone)
        for name in self.members:
            self.wanted[name].clear()
        if not self.rule.in_rounds:
            self._release((*held, *sorted(self.trained & gone)))
        self.trained -= gone
        self.gone_up = {number: up for number, up in self.gone_up.items() if number not in gone}
        self._events.append(StartedOver(fact.reason, fact.weight))

    def _on_fact(self, fact: Fact) -> None:
        match fact.what:
            case "applied":
                self._on_applied(fact)
            case "up":
                self._note_up(fact.fragment, fact.sequence, fact.contains)
                self.global_versions[fact.fragment] = fact.version or self.global_versions[fact.fragment]
            case "lost":
                self._say_again(fact.fragment)
            case "refused":
                about = fact.member, fact.incarnation, fact.reason, fact.fragment, fact.sequence, fact.job
                self._on_update_rejected(UpdateRejected(*about))
            case "over":
                self._on_start_over(fact)

    def _on_facts(self, said: Facts) -> int:
        known = super()._on_facts(said)
        if self.rule.in_rounds:
            for job in [fact.job for fact in said.facts if fact.what == "over"]:
                for own in (m.fragments[f] for m in self.members.values() for f in self.part.dealt[said.shard]):
                    own.came = min(own.came, job)
        self._due = True
        return known

    def _on_went_back(self, back: WentBack) -> None:
        super()._on_went_back(back)
        numbers, whole = set(self.part.dealt[back.shard]), set(self.all)
        within = {**self.leases.contained, **dict.fromkeys(self.trained, whole)}
        gone = [n for n, of in within.items() if numbers & of - self.gone_up.get(n, set())]
        reason = f"shard {back.shard} has lost its disk"
        self._on_start_over(Fact("over", contains=tuple(sorted(gone)), reason=reason))

    def _stands(self) -> dict[str, Any]:
        return {"every": self.every, "rest": self.rests if self._at_rest else 0}

    def ends(self, name: str) -> bool:
        if not self.ledger:
            return self.stands[name].ends if name in self.stands else False
        return name in self.spent and self.spent[name] == self.leases.asked.get(name) and not self.rule.in_rounds

    def _on_standing(self, standing: Standing) -> None:
        super()._on_standing(standing)
        if standing.every and isinstance(self.rule, AsyncRegion):
            self.every = self.rule.every = standing.every
        self._due = True

    @property
    def _at_rest(self) -> bool:
        """Whether no worker here has anything to add to what is pending: nobody is at work, or there was no data left
        for some, and nobody holds a lease."""
        if not self.ledger:
            return self.standing is not None and self.standing.rest > 0
        return self.idle or (bool(self.spent) and not any(self.leases.held.values()))

    @property
    def speaks_as(self) -> str:
        """The incarnation under which the region speaks to the global server: that of its ledger."""
        return self.incarnation if self.standing is None else self.standing.incarnation

    def _last_words(self) -> list[Send]:
        """Return, at the end, the leases that are trained and will be in no update: without the ledger, those whose
        training came while one travelled; and that the last weights are wanted."""
        if not self._at_rest or self.in_flight:
            return []
        said: list[Trained | AnswerWanted] = []
        for fragment, leases in enumerate(self.contains):
            if leases and fragment in self.fragments and not self.rule.pending(self.fragments[fragment]):
                parts = [tuple(leases[at : at + MOST_LEASES]) for at in range(0, len(leases), MOST_LEASES)]
                said += [Trained(self.name, fragment, part) for part in parts]
        if (final := self.final) is not None:
            said += [AnswerWanted(self.name, self.speaks_as, f, 0) for f in self.numbers if f not in final]
        return [Send(GLOBAL, message) for message in said]

    def _on_trained(self, said: Trained) -> None:
        """Note that the global server has heard of leases that no update of ours named."""
        left = self.contains[said.fragment]
        left[:] = [number for number in left if number not in said.leases]
        sequence = self.sequences[said.fragment]
        self._report(Fact("up", fragment=said.fragment, sequence=sequence, contains=said.leases))

    def quiet_since(self) -> int:
        at_work = self.in_flight or any(self.rule.pending(state) for state in self.fragments.values())
        return 0 if at_work or self.standing is None or self._last_words() else self.standing.rest

    @property
    def _quiet(self) -> bool:
        """Whether nothing of this region is left to go up, in no process of it."""
        return not self.in_flight and all(quiet == self.rests for quiet in self.quiet)

    def _report(self, fact: Fact) -> None:
        if not self.ledger and fact.what == "applied":
            self._take_up(fact.fragment, fact.contains)
        super()._report(fact)

    def _take_up(self, fragment: int, leases: Collection[int]) -> None:
        """Note which leases the fragment's weights contain now: the region's next update of it says so."""
        self.contains[fragment] += [number for number in leases if number not in self.contains[fragment]]

    def _count_trained(self, applied: Fact) -> tuple[int, None]:
        mine, trained = self.leases.contain(applied.member, applied.contains, applied.fragment, len(self.all))
        if applied.fragment in self.numbers:
            self._take_up(applied.fragment, mine)
        self.trained |= {lease.lease for lease in trained}
        return sum(lease.samples for lease in trained), None
