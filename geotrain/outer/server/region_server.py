"""The region server's state machine (HALoS's "local parameter server"): it applies its workers' deltas, and exchanges
the region's progress for global weights.

It is a server to its workers and a member of the global server at once. Its journal covers both sides, so a restart
loses neither an acknowledged worker's update nor the numbering of what it sent up.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import OuterConfig
from geotrain.outer.events import Left, Merged, SentUp, Steered, TrainedTwice
from geotrain.outer.messages import (
    Answer,
    AnswerWanted,
    ChunkDelta,
    Fact,
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
    TakeBack,
    TakenBack,
    Trained,
    UpdatePart,
    UpdateRejected,
    Validated,
    Welcome,
    update_id,
)
from geotrain.outer.rules import AsyncRegion, Counts, RegionRule
from geotrain.outer.server.limits import changed_number
from geotrain.outer.server.member import MOST_LEASES, attributes, mean_metrics, set_attributes
from geotrain.outer.server.membership import WHOLE, ServerPart
from geotrain.outer.server.region_data import RegionData
from geotrain.outer.server.region_leases import RegionLeases
from geotrain.outer.server.server import Handled
from geotrain.parameters.parameter_map import ParameterMap

# Attributes that a snapshot keeps as they are.
SAVED = (
    *("sequences", "first_versions", "over", "gone", "done", "global_versions", "spent", "every", "dropped"),
    *("rests", "at_rest"),
)


class RegionServer(RegionData):
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
        super().__init__(
            name, "worker", identity, parameter_map, rule, workers, config.local, config.local, config.limits, part,
            (config.up, config.down), validates, config.server_state == "bf16",
        )  # fmt: skip
        self.global_versions = [0] * len(parameter_map.fragments)
        self.sequences = [0] * len(parameter_map.fragments)  # of the last update of each that was sent up
        # Fragment → update whose answer has not come yet, without its payloads, which are in the store; in the order
        # in which they were sent.
        self.in_flight: dict[int, UpdatePart] = {}
        self.leases = RegionLeases(workers, config, rule.in_rounds)
        self.reserve = 0 if config.lease_reserve == "auto" else config.lease_reserve
        self.wanted: dict[str, set[int]] = {name: set() for name in workers}  # jobs whose lease the worker waits for
        # Fragment → leases whose training the region's weights contain, and that go up with its next update.
        self.contains: list[list[int]] = [[] for _ in parameter_map.fragments]
        self.trained: set[int] = set()  # leases trained here, of which not all fragments have gone up with them
        self.gone_up: dict[int, set[int]] = {}  # lease → fragments that have
        # Fragments whose newest global weights the store has kept for validation, since this process began.
        self.newest: set[int] | None = set() if validates else None
        # Versions that the first weights get here: 0, or after `_start_over` those before, as versions never fall.
        self.first_versions = [0] * len(parameter_map.fragments)
        self.spent: dict[str, int] = {}  # worker → its last job, if there was no data for that
        self.gone = False  # this server's Leave is on its way to the global server
        self.done = False  # the global server has taken the Leave: this region has nothing left to do
        self.every = 0  # K, where an operator has set it
        self.dropped = 0  # updates, counted by fragment, that it had and did not send up when it started over
        # The global weights with which workers end that ask for the server's once more: the fragments of which they
        # have taken the place of the region's. None: nobody has asked.
        self.final: set[int] | None = None
        self.at_rest, self.rests = False, 0  # for shards: whether it is (`_at_rest`), and how often it came to be so
        self._due = False  # `go_on` is to look for what must be sent up
        # Workers whose leases are asked for again. Lasts as long as the process: one request of each is under way.
        self.asking_back: set[str] = set()

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
                return self._on_lease_request(message)
            case Welcome():
                return self._on_welcome(message)
            case Answer():
                return self._on_global_weights(message)
            case AnswerWanted() if self._waits_for_final(message.member, message.fragment, message.sequence):
                self.current(message.member, message.incarnation)
                self.final, self._due = self.final or set(), True
                return None
            case Lease() | Finished():
                return self._on_lease(message)
            case TakenBack():
                return self._on_taken_back(message)
            case Trained():
                return self._on_trained(message)
            case Validated():
                self.copy_weights(None)
                self._sends.append(Send(GLOBAL, message))
                return None
            case Recall():
                for name in self.members:
                    self._release(self.leases.recall(name))
                return None
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
        reply = super()._route(message)
        # The K-th update makes a send due. So may the leaving or silence of the last worker at work, or that there
        # is no data for it, or that its leases go back: what is pending then leaves without waiting for more.
        self._due |= reply is True or isinstance(message, Leave | MemberSilent | OperatorCommand)
        return reply

    def go_on(self) -> Handled:
        if self.ledger and self.part.dealt and self.at_rest != (rests := self._at_rest):
            self.at_rest, self.rests = rests, self.rests + rests
        if self._due:
            self._due = False
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
        return Join(*names, 0, 1, whole, whole, self._answered_for(), self.data, mirrors, self.origin)

    def _answered_for(self) -> tuple[int, ...]:
        """Numbers of the leases that were granted to this region and may be neither given to others nor lost."""
        held = [number for worker in self.members for number in self.leases.of(worker)]
        return (*held, *self.uncommitted())

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
        known, self.origin = [sequence - 1 for sequence in welcome.sequences], welcome.origin
        self.leases.back.clear()
        ahead = [f for f in self.numbers if known[f] > self.sequences[f] and f in self.fragments]
        if ahead:
            told, own = known[ahead[0]], self.sequences[ahead[0]]
            self._start_over(f"the global server knows {told} updates of fragment {ahead[0]}, its own state {own}")
        lost = 0
        for f in self.numbers:
            # The one before that in flight was answered, so the global server should expect that or a later one.
            missing = max(0, self.sequences[f] + (f not in self.in_flight) - welcome.sequences[f])
            if missing and f in self.in_flight:
                self.in_flight[f] = replace(self.in_flight[f], sequence=welcome.sequences[f])
            self.sequences[f] = max(known[f], self.sequences[f] - missing)
            # It has lost versions as well, and refuses an update that starts from a version that it never gave.
            if missing and welcome.versions:
                self.global_versions[f] = min(self.global_versions[f], welcome.versions[f])
                if update := self.in_flight.get(f):
                    least = min(update.deltas[0].anchor_version, self.global_versions[f])
                    deltas = tuple(replace(d, anchor_version=least) for d in update.deltas)
                    self.in_flight[f] = replace(update, deltas=deltas)
            if missing:
                self._report(Fact("lost", fragment=f))
            lost += missing
        self._drop_gone(welcome.gone)
        return lost

    def _drop_gone(self, gone: Collection[int]) -> None:
        """Drop leases that went to others while this region counted as dead: a worker that trains such begins anew.
        What was trained with them is one sum with what nobody else has trained, and goes up; the samples count once.
        """
        for name in self.members:
            begun = [lease.job <= self.leases.asked.get(name, 0) for lease in self.leases.drop(name, gone)]
            if any(begun):
                self._shut_out(name)
        if repeated := sorted(set(self.trained) & set(gone)):
            self.trained.difference_update(repeated)
            self.contains = [[n for n in numbers if n not in gone] for numbers in self.contains]
            for f, u in self.in_flight.items():
                self.in_flight[f] = replace(u, contains=tuple(n for n in u.contains if n not in gone))
            self._events.append(TrainedTwice(repeated))
        self._forget_training()

    def _on_own_update_rejected(self, rejected: UpdateRejected) -> None:
        """Give up an update of ours that the global server refuses for good.

        Sent again, it would be refused again, after every restart. What it holds is given up, and its data goes back
        to be trained again: in synchronous rounds by the same workers, for whose deltas the round waits.
        """
        refused = self.in_flight.get(rejected.fragment)
        if refused is None or refused.sequence != rejected.sequence:
            return  # it was said twice
        if self.rule.in_rounds:
            order = list(self.in_flight)  # those after it were not sent
            self._begin_round_again(set(order[order.index(rejected.fragment) :]))
        self._start_over(rejected.reason)

    def _begin_round_again(self, untaken: set[int]) -> None:
        """Forget the workers' deltas that are in no update that the global server has taken: those of the fragments
        `untaken`, and those that wait here for other workers'. A worker that is concerned finds its acknowledged
        update unknown when it joins: so it begins a new incarnation, with the first job that is not trained. The
        global server gives it the lease of that again.
        """
        for fragment in self.numbers:
            of_all = [member.fragments[fragment] for member in self.members.values()]
            # A round ends before the next begins: all have sent this round's, or some have and the others the last.
            taken = min(own.came for own in of_all) - (fragment in untaken)
            for own in of_all:
                if own.came > taken:
                    own.came = taken
                    own.sequence -= 1

    def _start_over(self, reason: str) -> None:
        """Begin again from the global weights: give back all leases, forget all weights, make the workers join again.

        Versions are kept, since a worker may still send a delta that names one of them as its anchor's. So are the
        numbers of the last updates that were answered: those in flight count as never sent.
        """
        in_flight = [update.contains for update in self.in_flight.values()]
        gone = {number for numbers in (*self.contains, *in_flight) for number in numbers}
        dropped = self.pending + sum(update.weight for update in self.in_flight.values())
        self.dropped = self.lost_updates + dropped  # beside what was lost without the ledger
        for fragment in self.in_flight:
            self.sequences[fragment] -= 1
        for fragment in self.numbers:
            if fragment in self.fragments:
                self.first_versions[fragment] = self.fragments[fragment].version
        self.fragments.clear()
        self.in_flight.clear()
        self.contains = [[] for _ in self.all]
        self.store.start_over()
        for name, member in self.members.items():
            self._forget(name)
            for own in member.fragments.values():
                own.owed = False
        of_all = [member.fragments[fragment].came for member in self.members.values() for fragment in self.numbers]
        job, contains = min(of_all, default=0), tuple(sorted(gone))
        self._report(Fact("over", weight=dropped, job=job, contains=contains, reason=reason))

    def lacks_answer(self, name: str, incarnation: str, part: int, fragment: int, sequence: int) -> bool:
        lacks = super().lacks_answer(name, incarnation, part, fragment, sequence)
        return lacks and not (self.final is not None and self._waits_for_final(name, fragment, sequence))

    def _waits_for_final(self, name: str, fragment: int, sequence: int) -> bool:
        """Whether this worker asks for the weights with which it ends, and they are not here: there was no data for
        the job that it has asked for last. In rounds the region's weights are the global ones."""
        return sequence == 0 and self.ends(name) and fragment not in (self.final or ())

    def _on_global_weights(self, answer: Answer) -> None:
        """Merge the answer to an update of ours, or begin with that to our join (sequence 0) or the last weights.

        Raises Refused; then nothing has changed.
        """
        fragment, sent = answer.fragment, self.in_flight.get(answer.fragment)
        final = self.final is not None and answer.sequence == 0 and fragment not in self.final
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
        (self.global_versions[fragment],) = versions
        inputs, answered = ({}, ()) if first else self.rule.on_global_weights(self.fragments[fragment])
        self.store.merge(fragment, first, inputs)
        if not first:
            contains = self.in_flight.pop(fragment).contains
            about = fragment, answer.sequence, 0, 1, contains, self.global_versions[fragment]
            self._report(Fact("up", "", "", *about))
            self.answer_members(answered, fragment)
        else:
            if self.final is not None:
                self.final.add(fragment)
            state = self.fragments.setdefault(fragment, Counts(self.first_versions[fragment]))
            self.rule.start(state)
        size = sum(len(weights.payload) for weights in answer.weights)
        self._events.append(Merged(fragment, answer.sequence, list(self.global_versions), size))
        self._send_what_is_due()  # a fragment has one update in flight at most; the next one may have waited for this

    def versions_to_validate(self) -> list[int]:
        return self.global_versions if len(self.newest or ()) == len(self.numbers) else []

    # -- members

    def _on_join(self, join: Join) -> Welcome:
        known = self.data
        welcome = super()._on_join(join)
        # The global server must know its data before any lease is asked for: regions with other data are refused.
        if self.data != known:
            self._sends.append(Send(GLOBAL, self.join_message()))
        name, back = join.member, tuple(self.leases.given_back[join.member])
        if back and name not in self.asking_back:
            self.asking_back.add(name)
            self._sends.append(Send(GLOBAL, TakeBack(name, back)))
        return welcome

    def begin_again(self) -> None:
        super().begin_again()
        self.over = self.gone = self.done = False
        self.final = None
        self.spent.clear()  # there may be more data now

    @property
    def lost_updates(self) -> int:
        return self.dropped + sum(state.counts.get("lost", 0) for state in self.fragments.values())

    @property
    def pending(self) -> int:
        """How many updates, counted by fragment, are applied here and not sent up yet."""
        return sum(state.counts.get("pending", 0) for state in self.fragments.values())

    def status(self) -> dict[str, Any]:
        return {
            **super().status(),
            "region": self.name,
            "wanted": [name for name, jobs in self.wanted.items() if jobs],
            "gone": self.gone,
            "sent": sum(self.sequences),
            "in_flight": len(self.in_flight) + self._due,
            "pending": self.pending,
            "global_versions": list(self.global_versions),
            "lost_updates": self.lost_updates,
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, meta = super().state()
        meta["region"] = {
            **attributes(self, SAVED),
            "fingerprints": {str(chunk): known for chunk, known in self.store.own_fingerprints().items()},
            **self.leases.state(),
            "contains": [list(leases) for leases in self.contains],
            "trained": sorted(self.trained),
            "up": [[number, sorted(up)] for number, up in sorted(self.gone_up.items())],
            "final": None if self.final is None else sorted(self.final),
            "in_flight": [
                [f, u.sequence, u.weight, list(u.contains), u.metrics, u.deltas[0].anchor_version]
                for f, u in self.in_flight.items()
            ],
        }
        return tensors, meta

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        super().load(tensors, meta)
        saved = meta["region"]
        set_attributes(self, SAVED, saved)
        if self.every and isinstance(self.rule, AsyncRegion):
            self.rule.every = self.every
        self.leases.load(saved)
        self.contains = [list(leases) for leases in saved["contains"]]
        self.trained = set(saved["trained"])
        self.gone_up = {number: set(fragments) for number, fragments in saved["up"]}
        self.final = None if saved["final"] is None else set(saved["final"])
        for fragment, sequence, weight, contains, metrics, anchor in saved["in_flight"]:
            update = self._update(fragment, sequence, anchor, weight, tuple(contains), metrics)
            self.in_flight[fragment] = update

    def resend(self) -> list[Send]:
        """Return the updates in flight, under this incarnation's name, to be sent again after a join. The global
        server knows by their numbers which of them it has applied already."""
        self.in_flight = {f: replace(u, incarnation=self.speaks_as) for f, u in self.in_flight.items()}
        return [
            *(Send(GLOBAL, self.store.going_up(update)) for update in self.in_flight.values()),
            *self._last_words(),
        ]

    # -- inside

    def _send_what_is_due(self) -> None:
        """Queue an update for each fragment whose rule says so, and this server's Leave when all is done."""
        at_rest = self._at_rest
        for fragment, state in sorted((f, self.fragments[f]) for f in self.numbers if f in self.fragments):
            if not self.rule.may_send(state, flush=at_rest):
                continue
            inputs, weight = self.rule.on_send(state)
            self.sequences[fragment] += 1
            sequence = self.sequences[fragment]
            self.store.send_up(fragment, sequence, inputs)
            contains, self.contains[fragment] = self.contains[fragment], self.contains[fragment][MOST_LEASES:]
            # Metrics of those who are at work; at the end, when all have left, of everybody.
            here = [m for m in self.members.values() if not m.left] or list(self.members.values())
            metrics = mean_metrics([member.metrics for member in here])
            anchor = self.global_versions[fragment]
            update = self._update(fragment, sequence, anchor, weight, tuple(contains[:MOST_LEASES]), metrics)
            self.in_flight[fragment] = update
            update = self.store.going_up(update)
            self._sends.append(Send(GLOBAL, update))
            size = sum(len(delta.payload) for delta in update.deltas)
            self._events.append(SentUp(fragment, sequence, weight, size))
        self._sends += self._last_words()
        if self.ledger and (self.empty or (self.over and self.idle)) and not self.gone and self._quiet:
            self.gone = True
            self._sends.append(Send(GLOBAL, Leave(self.name)))

    def _update(
        self, fragment: int, sequence: int, anchor: int, weight: int, contains: tuple[int, ...],
        metrics: dict[str, float],
    ) -> UpdatePart:  # fmt: skip
        """Build an update of ours, without its payloads. anchor: version of the global weights it starts from."""
        deltas = tuple(ChunkDelta(chunk, anchor, b"") for chunk in self.parameter_map.chunk_numbers[fragment])
        return UpdatePart(
            self.name, self.speaks_as, fragment, sequence, 0, deltas, weight=weight, contains=contains,
            metrics=metrics,
        )  # fmt: skip
