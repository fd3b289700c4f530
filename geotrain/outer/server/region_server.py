"""The region server's state machine (HALoS's "local parameter server"): it applies its workers' deltas, and exchanges
the region's progress for global weights.

It is a server to its workers and a member of the global server at once. Its journal covers both sides, so a restart
loses neither an acknowledged worker's update nor the numbering of what it sent up.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import OuterConfig
from geotrain.outer.events import Left, Merged, SentUp, StartedOver, Steered, TrainedTwice
from geotrain.outer.messages import (
    Answer,
    AnswerWanted,
    Fact,
    Facts,
    Finished,
    Identity,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    MemberSilent,
    Message,
    OperatorCommand,
    Recall,
    Refused,
    RunComplete,
    Send,
    Standing,
    TakeBack,
    TakenBack,
    Trained,
    UpdateRejected,
    Validated,
    Welcome,
    WentBack,
    update_id,
)
from geotrain.outer.rules import AsyncRegion, Counts, RegionRule
from geotrain.outer.server.limits import changed_number
from geotrain.outer.server.member import attributes, mean_metrics, set_attributes
from geotrain.outer.server.member_phase import MemberEvent
from geotrain.outer.server.parts import WHOLE, ServerPart
from geotrain.outer.server.region_data import RegionData
from geotrain.outer.server.server import Handled, Server
from geotrain.outer.server.uplink import Uplink
from geotrain.parameters.parameter_map import ParameterMap

SAVED = "over", "gone", "done", "every", "rests", "at_rest"  # attributes that a snapshot keeps as they are


class RegionServer(Server):
    """Applies its workers' deltas as its rule says and sends the region's own progress to the global server: with the
    asynchronous rules each delta at once, and progress after every K of them.

    workers: its members. validates: whether workers evaluate the global weights, of which it keeps a copy then.
    """

    rule: RegionRule
    over = False  # whether the global server has said that all data of the run is committed

    def __init__(
        self, name: str, identity: Identity, parameter_map: ParameterMap, config: OuterConfig, rule: RegionRule,
        workers: tuple[str, ...], validates: bool = False, part: ServerPart = WHOLE,
    ) -> None:  # fmt: skip
        self.worker_data = RegionData(workers, config, rule.in_rounds, len(parameter_map.fragments))
        super().__init__(
            name, "worker", identity, parameter_map, rule, workers, self.worker_data, config.local, config.local,
            config.limits, part, (config.up, config.down), validates, config.server_state == "bf16",
        )  # fmt: skip
        # The base class takes it before there is a membership.
        self.worker_data.membership, self.worker_data.sends = self.membership, self._sends
        self.membership.reserve = 0 if config.lease_reserve == "auto" else config.lease_reserve
        self.uplink = Uplink(self.core, rule)
        # Fragments whose newest global weights the store has kept for validation, since this process began.
        self.newest: set[int] | None = set() if validates else None
        self.gone = False  # this server's Leave is on its way to the global server
        self.done = False  # the global server has taken the Leave: this region has nothing left to do
        self.every = 0  # K, where an operator has set it
        self.at_rest, self.rests = False, 0  # for shards: whether it is (`_at_rest`), and how often it came to be so
        self._due = False  # `go_on` is to look for what must be sent up

    @property
    def finished(self) -> bool:
        return self.done

    @property
    def ending(self) -> bool:
        return self.gone

    def workers_of(self, member: str) -> tuple[str, ...]:
        return (member,)

    def _route(self, message: Message) -> Any:
        match message:
            case LeaseRequest():
                return self.worker_data.request(message)
            case Welcome():
                return self._on_welcome(message)
            case Answer():
                return self._on_global_weights(message)
            case AnswerWanted() if self._waits_for_final(message.member, message.fragment, message.sequence):
                self.membership.current(message.member, message.incarnation)
                self.worker_data.final, self._due = self.worker_data.final or set(), True
                return None
            case Lease() | Finished():
                return self.worker_data.receive(message)
            case TakenBack():
                return self.worker_data.reclaim(message)
            case Trained():
                return self._on_trained(message)
            case Validated():
                self.copy_weights(None)
                self._sends.append(Send(GLOBAL, message))
                return None
            case Recall():
                return self.worker_data.recall()
            case RunComplete():  # workers that died are not waited for any more, since nothing is left to train
                self.over = True
                self._send_what_is_due()
                return None
            case Leave() if message.member == self.name:  # our own, said to us once the global server has taken it
                self.done = True
                self._events.append(Left(self.name))
                return None
            case UpdateRejected() if message.member == self.name:
                return self._on_own_update_rejected(message)
            case OperatorCommand() if message.what.startswith("set "):
                return self._set(*message.what.removeprefix("set ").partition("=")[::2])
            case OperatorCommand() if message.what != "expel":
                raise Refused(f"a region's server can snapshot, unban, expel and set, not {message.what}")
        # It ends as no data is left.
        if isinstance(message, Leave) and message.member in self.worker_data.no_data_job:
            self.membership.member(message.member).transition(MemberEvent.ENDS)
        reply = super()._route(message)
        # The K-th update makes a send due. So may the leaving or silence of the last worker at work, or that there
        # is no data for it, or that its leases go back: what is pending then leaves without waiting for more.
        self._due |= reply is True or isinstance(message, Leave | MemberSilent | OperatorCommand)
        return reply

    def go_on(self) -> Handled:
        if self.ledger and self.part.dealt and self.at_rest != (rests := self._at_rest):
            # Counted, so that a shard that was quiet in an earlier rest does not pass for quiet in this one.
            self.at_rest, self.rests = rests, self.rests + rests
        if self._due or self.worker_data.due:
            self._due = self.worker_data.due = False
            self._send_what_is_due()
        return super().go_on()

    def _set(self, key: str, value: str) -> str:
        """Change K for the updates to come. Returns what was done, in words. Raises Refused."""
        if key != "outer.rule.updates_per_send" or not isinstance(self.rule, AsyncRegion) or self.rule.merged:
            only = "only outer.rule.updates_per_send, and neither in rounds nor where answers are merged"
            raise Refused(f"{key!r} cannot be set at a region: {only}")
        self.every = self.rule.every = changed_number(key, value, self.rule.every)
        self._due = True
        self._events.append(Steered(f"set {key}={value}", self.name))
        return f"{self.name}: {key} = {value}"

    # -- upwards

    def join_message(self) -> Join:
        """Build the Join to the global server. It names all leases for which this region answers, be they not
        trained, trained and not sent, or in flight; the global server gives every other lease of the region to
        others."""
        whole = tuple(self.parameter_map.whole(chunk.index) for chunk in self.parameter_map.chunks)
        i, known = self.identity, self.store.own_fingerprints()
        mirrors = tuple(known.get(chunk.index, 0) for chunk in self.parameter_map.chunks) if known else ()
        names = i.run, i.config_digest, i.parameter_map_digest, i.model, self.name, self.speaks_as
        return Join(
            *names, part=0, parts=1, pushes=whole, holds=whole, leases=self.worker_data.answered_for(),
            data=self.data, mirrors=mirrors, origin=self.origin,
        )  # fmt: skip

    def _on_welcome(self, welcome: Welcome) -> int:
        """Compare the global server's count of our updates with our own. Returns how many it acknowledged and lost.

        It knows fewer of a fragment than it has acknowledged when it was restored from an older state: its
        acknowledged updates are gone, and the one in flight is numbered anew to follow what it does know.

        It knows more than we have sent when this region's own folder was lost or restored from an older state. What
        that state holds as pending went up later, so sending it would count it twice: the region begins again from
        the global weights.
        """
        every = len(self.all)
        wrong_versions = len(welcome.versions) not in (0, every)
        if len(welcome.sequences) != every or min(welcome.sequences) < 1 or wrong_versions:
            wrong = f"sequences {welcome.sequences}, versions {welcome.versions}"
            raise Refused(f"{self.name}: a welcome with {wrong} is none")
        self.origin = welcome.origin
        # The lanes ask anew in each session: no reply from before can come any more.
        self.worker_data.leases.back.clear()
        # Before numbers are compared: a region that starts over has nothing in flight.
        if why := self.uplink.ahead(welcome):
            self._start_over(why)
        lost = self.uplink.renumber(welcome)
        for fragment in lost:
            self._report(Fact("lost", fragment=fragment))
        if repeated := self.worker_data.drop_gone(welcome.gone):
            self.uplink.drop(welcome.gone)
            self._events.append(TrainedTwice(repeated))
        return sum(lost.values())

    def _on_own_update_rejected(self, rejected: UpdateRejected) -> None:
        """Give up an update of ours that the global server refuses for good.

        Sent again, it would be refused again, after every restart. What it holds is given up, and its data goes back
        to be trained again: in synchronous rounds by the same workers, for whose deltas the round waits.
        """
        refused = self.uplink.in_flight.get(rejected.fragment)
        if refused is None or refused.sequence != rejected.sequence:
            return  # it was said twice
        # Before `_start_over`, which forgets what is in flight, and in which order.
        if self.rule.in_rounds:
            order = list(self.uplink.in_flight)  # those after it were not sent
            self.worker_data.begin_round_again(set(order[order.index(rejected.fragment) :]))
        self._start_over(rejected.reason)

    def _start_over(self, reason: str) -> None:
        """Begin again from the global weights: give back all leases, forget all weights, make the workers join again.

        Versions are kept, since a worker may still send a delta that names one of them as its anchor's.
        """
        dropped, gone = self.uplink.start_over()
        for name, member in self.members.items():
            self.membership.forget(name)
            for own in member.fragments.values():
                own.owed = False
        of_all = [member.fragments[fragment].came for member in self.members.values() for fragment in self.numbers]
        job, contains = min(of_all, default=0), tuple(sorted(gone))
        # Leases are the ledger's: it gives them back as it learns of this.
        self._report(Fact("over", weight=dropped, job=job, contains=contains, reason=reason))

    def lacks_answer(self, name: str, incarnation: str, part: int, fragment: int, sequence: int) -> bool:
        lacks = super().lacks_answer(name, incarnation, part, fragment, sequence)
        return lacks and not (self.worker_data.final is not None and self._waits_for_final(name, fragment, sequence))

    def _waits_for_final(self, name: str, fragment: int, sequence: int) -> bool:
        """Whether this worker asks for the weights with which it ends, and they are not here: there was no data for
        the job that it has asked for last. In rounds the region's weights are the global ones."""
        return sequence == 0 and self.ends(name) and fragment not in (self.worker_data.final or ())

    def _on_global_weights(self, answer: Answer) -> None:
        """Merge the answer to an update of ours, or begin with that to our join (sequence 0) or the last weights.

        Raises Refused; then nothing has changed.
        """
        fragment, sent, ends = answer.fragment, self.uplink.in_flight.get(answer.fragment), self.worker_data.final
        final = ends is not None and answer.sequence == 0 and fragment not in ends
        first = not answer.sequence and (fragment not in self.fragments or final)
        if not first and (sent is None or sent.sequence != answer.sequence):
            return  # again, or since it starts over: changes of what the mirror was, or is already
        wanted = self.parameter_map.chunk_numbers[fragment] if fragment in self.numbers else []
        versions = {weights.version for weights in answer.weights}
        if [w.chunk for w in answer.weights] != wanted or len(versions) != 1 or min(versions) < 0:
            update = update_id(self.name, fragment, answer.sequence)
            raise Refused(f"{self.name}: the answer to update {update} is not of fragment {fragment}")
        # All are checked before any is decoded, since decoding changes the mirror.
        for fault in self.store.receive_weights(answer):
            where = self.parameter_map.called(fault.chunk)
            raise Refused(f"{self.name}: {where} of the global server: {fault.fault}")
        if self.newest is not None:
            self.newest.add(fragment)
        (self.uplink.global_versions[fragment],) = versions
        if final and sent is not None:  # what is on its way is not in these: they are wanted again, behind its answer
            self.store.pass_over(fragment)
            return
        inputs, answered = ({}, ()) if first else self.rule.on_global_weights(self.fragments[fragment])
        self.store.merge(fragment, first, inputs)
        if not first:
            contains = self.uplink.in_flight.pop(fragment).contains
            version = self.uplink.global_versions[fragment]
            self._report(Fact("up", fragment=fragment, sequence=answer.sequence, contains=contains, version=version))
            self.answers.answer(answered, fragment)
        else:
            if ends is not None:
                ends.add(fragment)
            state = self.fragments.setdefault(fragment, Counts(self.uplink.first_versions[fragment]))
            self.rule.start(state)
        size = sum(len(weights.payload) for weights in answer.weights)
        self._events.append(Merged(fragment, answer.sequence, list(self.uplink.global_versions), size))
        self._send_what_is_due()  # a fragment has one update in flight at most; the next one may have waited for this

    def versions_to_validate(self) -> list[int]:
        return self.uplink.global_versions if len(self.newest or ()) == len(self.numbers) else []

    # -- members

    def _on_join(self, join: Join) -> Welcome:
        known = self.data
        welcome = super()._on_join(join)
        # The global server must know its data before any lease is asked for: regions with other data are refused.
        if self.data != known:
            self._sends.append(Send(GLOBAL, self.join_message()))
        name, back = join.member, tuple(self.worker_data.leases.given_back[join.member])
        # It may have trained what went back while it counted as dead; only the global server knows who has it.
        if back and name not in self.worker_data.asking_back:
            self.worker_data.asking_back.add(name)
            self._sends.append(Send(GLOBAL, TakeBack(name, back)))
        return welcome

    def begin_again(self) -> None:
        super().begin_again()
        self.over = self.gone = self.done = False
        self.worker_data.final = None
        self.worker_data.no_data_job.clear()  # there may be more data now

    def status(self) -> dict[str, Any]:
        return {
            **super().status(),
            "region": self.name,
            "wanted": [name for name, jobs in self.worker_data.wanted.items() if jobs],
            "gone": self.gone,
            "sent": sum(self.uplink.sequences),
            "in_flight": len(self.uplink.in_flight) + (self._due or self.worker_data.due),
            "pending": self.uplink.pending,
            "global_versions": list(self.uplink.global_versions),
            "lost_updates": self.uplink.lost_updates,
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = super().state()
        meta["region"] = {
            **attributes(self, SAVED),
            "fingerprints": {str(chunk): known for chunk, known in self.store.own_fingerprints().items()},
            **self.worker_data.state(),
            **self.uplink.state(),
        }
        return tensors, meta

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        super().load(tensors, meta)
        saved = meta["region"]
        set_attributes(self, SAVED, saved)
        if self.every and isinstance(self.rule, AsyncRegion):
            self.rule.every = self.every
        self.worker_data.load(saved)
        self.uplink.load(saved, self.speaks_as)

    def resend(self) -> list[Send]:
        """Return the updates in flight, under this incarnation's name, to be sent again after a join. The global
        server knows by their numbers which of them it has applied already."""
        return [*self.uplink.resend(self.speaks_as), *self._last_words()]

    def _send_what_is_due(self) -> None:
        """Queue an update for each fragment whose rule says so, and this server's Leave when all is done."""
        at_rest = self._at_rest
        # Sorted: a replay sends in the same order, by which `_on_own_update_rejected` goes.
        for fragment, state in sorted((f, self.fragments[f]) for f in self.numbers if f in self.fragments):
            if not self.rule.may_send(state, flush=at_rest):
                continue
            # Metrics of those who are at work; at the end, when all have left, of everybody.
            here = [m for m in self.members.values() if not m.left] or list(self.members.values())
            update, send = self.uplink.send(fragment, self.speaks_as, mean_metrics([m.metrics for m in here]))
            self._sends.append(send)
            size = sum(len(delta.payload) for delta in update.deltas)
            self._events.append(SentUp(fragment, update.sequence, update.weight, size))
        self._sends += self._last_words()
        whole = self.membership.empty or (self.over and self.membership.idle)
        # On the lane of updates, behind the last of them (`RegionClient`).
        if self.ledger and whole and not self.gone and self._quiet:
            self.gone = True
            self._sends.append(Send(GLOBAL, Leave(self.name)))

    def _answer_now(self, names: tuple[str, ...], fragment: int) -> None:
        self.fragments[fragment].counts["due"] = 1  # until an update leaves, also while one is in flight
        self._due = True

    def going_up(self, fragment: int) -> list[str]:
        """Return the workers whose answers come back with the fragment's update that is in flight."""
        state = self.fragments.get(fragment)
        return [name for name, sent in state.waiting.items() if sent] if state else []

    def waited_for_by(self, name: str) -> bool:
        # For a lease, while it has none; for the weights with which it ends, until they are here.
        asks, final = bool(self.worker_data.wanted[name]) and not self.worker_data.holds(name), self.worker_data.final
        ends = final is not None and len(final) < len(self.all) and self.ends(name)
        return asks or ends or super().waited_for_by(name)

    def needs_to_join(self) -> bool:
        """Whether the global server, which takes this region for dead, must know that it lives: there is training
        here that it is not known to have, or there are workers, whose weights shards get once they have joined."""
        trained = self.worker_data.trained or self.worker_data.leases.contained
        return bool(trained or (self.part.dealt and not self.membership.idle))

    # -- what is said by facts

    def _report(self, fact: Fact) -> None:
        # A shard names them in its own next update; in a ledger with fragments `_count_trained` does.
        if not self.ledger and fact.what == "applied":
            self.uplink.take_up(fact.fragment, fact.contains)
        super()._report(fact)

    def _on_fact(self, fact: Fact) -> None:
        match fact.what:
            case "applied":
                self._on_applied(fact)
            case "up":
                self.uplink.sequences[fact.fragment] = max(self.uplink.sequences[fact.fragment], fact.sequence)
                self.worker_data.note_up(fact.fragment, fact.contains)
                known = self.uplink.global_versions
                known[fact.fragment] = fact.version or known[fact.fragment]
            case "lost":
                self._name_again(fact.fragment)
            case "refused":
                about = fact.member, fact.incarnation, fact.reason, fact.fragment, fact.sequence, fact.job
                self.membership.count_strike(UpdateRejected(*about))
            case "over":
                self.worker_data.start_over(fact.contains)
                self._events.append(StartedOver(fact.reason, fact.weight))

    def _count_trained(self, applied: Fact) -> tuple[int, None]:
        mine, samples = self.worker_data.contain(applied.member, applied.contains, applied.fragment)
        if applied.fragment in self.numbers:
            self.uplink.take_up(applied.fragment, mine)
        return samples, None

    def _name_again(self, fragment: int) -> None:
        """Name once more, with the next update of a fragment, the leases that it contains, since updates are lost."""
        leases = self.worker_data.note_lost(fragment)
        if fragment not in self.numbers:  # its shard knows of no lease
            self._sends.append(Send(GLOBAL, Trained(self.name, fragment, leases)))
            return
        self.uplink.take_up(fragment, leases)

    def _on_trained(self, said: Trained) -> None:
        """Note that the global server knows of leases that no update of ours named."""
        self.uplink.note_said(said)
        sequence = self.uplink.sequences[said.fragment]
        self._report(Fact("up", fragment=said.fragment, sequence=sequence, contains=said.leases))

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
        gone = self.worker_data.not_up(self.part.dealt[back.shard])
        self._on_fact(Fact("over", contains=gone, reason=f"shard {back.shard} has lost its disk"))

    # -- between the ledger and shards

    def _stands(self) -> dict[str, Any]:
        return {"every": self.every, "rest": self.rests if self._at_rest else 0}

    def ends(self, name: str) -> bool:
        if self.ledger:
            return self.worker_data.ends(name)
        stands = self.as_shard.stands
        return name in stands and stands[name].ends

    def _on_standing(self, standing: Standing) -> None:
        super()._on_standing(standing)
        if standing.every and isinstance(self.rule, AsyncRegion):
            self.every = self.rule.every = standing.every
        self._due = True

    @property
    def _at_rest(self) -> bool:
        """Whether no worker here has anything to add to what is pending; a shard's ledger says so."""
        standing = self.as_shard.standing
        return self.worker_data.at_rest if self.ledger else standing is not None and standing.rest > 0

    @property
    def speaks_as(self) -> str:
        """The incarnation under which the region speaks to the global server: that of its ledger."""
        standing = self.as_shard.standing
        return self.incarnation if standing is None else standing.incarnation

    def _last_words(self) -> list[Send]:
        """Return, at the end, the leases that are trained and will be in no update: without the ledger, those whose
        training came while one travelled; and that the last weights are wanted."""
        if not self._at_rest or self.uplink.in_flight:
            return []
        said: list[Trained | AnswerWanted] = [*self.uplink.unnamed()]
        if (final := self.worker_data.final) is not None:
            said += [AnswerWanted(self.name, self.speaks_as, f, 0) for f in self.numbers if f not in final]
        return [Send(GLOBAL, message) for message in said]

    def quiet_since(self) -> int:
        standing = self.as_shard.standing
        return 0 if standing is None or not self.uplink.idle or self._last_words() else standing.rest

    @property
    def _quiet(self) -> bool:
        """Whether nothing of this region is left to go up, in no process of it."""
        quiet = self.as_ledger.quiet
        # In this rest: a shard that was quiet in an earlier one may have got more since.
        return not self.uplink.in_flight and all(each == self.rests for each in quiet)
