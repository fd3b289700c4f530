"""The base of region and global servers: a state machine that takes members' updates and answers them.

`Server.handle` is the only way to change its durable state: it takes a message and returns the reply, the messages to
send, and what happened. `geotrain.net` calls it, in two parts, behind a journal and sockets, `geotrain.simulate`
under a virtual clock, tests as a plain function. The journal holds messages, not states: recovery handles them again,
so what `handle` does, and what it refuses, must follow from the durable state and the message alone. Its vectors are
in its store (`geotrain.outer.server.store`); it may be several processes (`geotrain.outer.server.parts`).

Every update of a fragment is applied whole (all its parts) and once (by its sequence number) or not at all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal

from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import CodecConfig, LimitsConfig, RunConfig
from geotrain.config.agreement import config_digest
from geotrain.outer.codec import Codec, make_codec
from geotrain.outer.events import Event, UpdateApplied
from geotrain.outer.messages import (
    Answer,
    AnswersDue,
    AnswerWanted,
    BadDelta,
    Fact,
    Facts,
    Identity,
    Join,
    LeaseRequest,
    Leave,
    LiftQuarantine,
    MemberSilent,
    Message,
    OperatorCommand,
    Refused,
    Send,
    Standing,
    UpdatePart,
    UpdateRejected,
    WentBack,
    update_id,
)
from geotrain.outer.rules import Counts, Rule
from geotrain.outer.server.answers import Answers
from geotrain.outer.server.limits import NormLimits, norm
from geotrain.outer.server.member import Member, MemberFragment, check_part, check_round, outline
from geotrain.outer.server.membership import WHOLE, ServerPart
from geotrain.outer.server.parts import MOST_UNSAID
from geotrain.outer.server.store import Store
from geotrain.parameters.parameter_map import ParameterMap, numel


def identity_of(run: RunConfig, parameter_map: ParameterMap, data: str = "") -> Identity:
    """Build the identity on which all processes of this run must agree. data: sha256 of the training data that is
    here; a server, which has none, knows what the run file says."""
    model = f"{run.model.config.get('model_type', 'a model')} of {parameter_map.numel:,} parameters"
    return Identity(run.name, config_digest(run), parameter_map.digest, model, data or run.data.sha256 or "")


@dataclass(frozen=True)
class Handled:
    """The outcome of one message.

    reply: for the sender. Its type follows from the message: a Join gets a Welcome; an UpdatePart whether the update
    was applied now; a LeaseRequest a Lease, a Finished or None ("not yet"); a Welcome how many updates were lost; an
    OperatorCommand what is now; an UpdateRejected whether the member is quarantined; all others None. sends: messages
    for others. events: for the event log.
    """

    reply: Any
    sends: tuple[Send, ...] = ()
    events: tuple[Event, ...] = ()


class Server(Answers):
    """State of a region server or a global server, and what it does with each message.

    Beside `handle` there are reads, which leave the durable state as it is; both kinds of server have all of them, so
    that callers need not ask which kind it is.

    name: as others address it. members: names of those who may join. member_role: what they are. up, down: codecs of
    the links to them. part: of the server that this is.
    """

    def __init__(
        self, name: str, member_role: Literal["region", "worker"], identity: Identity, parameter_map: ParameterMap,
        rule: Rule, members: tuple[str, ...], up: CodecConfig, down: CodecConfig, limits: LimitsConfig,
        part: ServerPart = WHOLE, above: tuple[CodecConfig, CodecConfig] | None = None,
        validates: bool = False, bf16_state: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(identity, parameter_map, rule, members, down, limits, part)
        self.name, self.member_role = name, member_role
        self.up: Codec = make_codec(up)
        self.store = Store(name, parameter_map, self.numbers, rule, self.up, down, above, validates, bf16_state)
        # Number and versions of the global weights that a worker evaluates at present. The store keeps a copy.
        self.frozen: tuple[int, list[int]] | None = None
        judged = limits.norm_deviations is not None
        self.norms = NormLimits(limits, len(parameter_map.fragments), len(members)) if judged else None
        # Workers of a flat run, which has one level, are answered at once.
        self.waits = bool(getattr(rule, "waits", False)) and (name != GLOBAL or member_role == "region")
        self._sends: list[Send] = []  # what `handle` is about to return

    def handle(self, message: Message) -> Handled:
        """Process a message. Raises Refused; then nothing has changed."""
        taken, rest = self.take(message), self.go_on()
        return Handled(taken.reply, taken.sends + rest.sends, taken.events + rest.events)

    def take(self, message: Message) -> Handled:
        """Do the part of `handle` for which the sender waits. `go_on` must be called before the next message."""
        reply = self._route(message)
        if self.waits and not isinstance(message, UpdatePart | LeaseRequest):
            self.end_waits(self.numbers)  # who was waited for may be at work no more
        return self._handled(reply)

    def go_on(self) -> Handled:
        """Do what the message makes due for others, such as a region's update for the global server."""
        return self._handled(None)

    def _handled(self, reply: Any) -> Handled:
        # What a message that failed has queued leaves with this one: its updates are recorded as in flight.
        handled = Handled(reply, tuple(self._sends), tuple(self._events))
        self._sends, self._events = [], []
        return handled

    def _route(self, message: Message) -> Any:
        """Call the method for this kind of message. Subclasses add the messages that only they understand."""
        match message:
            case UpdatePart():
                return self._on_part(message)
            case Join():
                return self._on_join(message)
            case AnswerWanted():
                return self._on_answer_wanted(message)
            case Leave():
                return self._on_leave(message)
            case MemberSilent():
                return self._on_member_silent(message)
            case AnswersDue():
                return self.release(message.members, message.fragment)
            case UpdateRejected():
                return self._on_update_rejected(message)
            case LiftQuarantine():
                return self._on_lift_quarantine(message)
            case OperatorCommand(what="expel"):
                return self._on_expel(message.region)
            case Standing():
                return self._on_standing(message)
            case Facts():
                return self._on_facts(message)
            case WentBack():
                return self._on_went_back(message)
        raise Refused(f"a {type(message).__name__} means nothing to this server")

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether nothing is left to train for anybody."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether this server has nothing left to do and may end."""

    def recalls(self, member: str) -> bool:
        """Whether this member, a region, is to give back the data that no worker has asked for."""
        return False

    @property
    def lost_updates(self) -> int:
        """How many updates, counted by fragment, were applied here and never reach the global weights."""
        return 0

    def most_weight(self, member: str) -> int:
        """Upper bound on the workers' deltas that an update of this member may stand for; more is refused."""
        return 1

    def max_credible_weight(self, member: str) -> int:
        """Upper bound on the workers' deltas that its leases make credible: more does not widen the norm limit."""
        return 1

    @abstractmethod
    def workers_of(self, member: str) -> tuple[str, ...]:
        """Return the workers that this member speaks for."""

    def lease_is_due(self, worker: str) -> bool:
        """Whether repeating a LeaseRequest that got no lease would bring a reply now. Always False on region servers,
        where the reply comes as a message of its own when the global server has sent it."""
        return False

    # -- updates

    def _on_part(self, part: UpdatePart) -> bool:
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
        parts[part.part] = self.store.receive_part(part)
        if len(parts) < member.parts:
            if len(parts) == 1:
                self._note_stage(part.member, part.fragment, part.sequence, "arrived")
            self._heard(part.member)
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
        if len(self.unsaid) >= MOST_UNSAID:  # not in `handle`: no journal has what the ledger knows
            raise Refused(f"{self.name}: this shard's ledger has not answered for {MOST_UNSAID} updates", retry_s=5.0)
        self._check(part, member)
        if part.part in member.fragments[part.fragment].arriving:
            return False
        member.admitted[part.fragment, part.part] = outline(part)
        return True

    def _check(self, part: UpdatePart, member: Member) -> None:
        version, most = self.fragments[part.fragment].version, self.most_weight(part.member)
        check_part(part, member, self.parameter_map, self.up, version, most)
        if self.rule.in_rounds:
            check_round(part, member.fragments[part.fragment])

    def _expecting(self, part: UpdatePart) -> Member | None:
        """Return the sender if the part belongs to its next update; None if that update was applied before."""
        member = self.current(part.member, part.incarnation, part.part)
        own = self._exchange_of(part.member, part.fragment)
        if part.sequence <= own.sequence:
            return None
        if part.fragment not in self.fragments:
            raise Refused("this server has no weights yet", retry_s=1.0)
        if own.refused is not None and own.refused[0] == part.sequence:
            raise own.refused[1].with_traceback(None)
        if part.sequence != own.sequence + 1:
            came = update_id(part.member, part.fragment, part.sequence)
            raise Refused(f"{part.member}: update {came} came, but {own.sequence + 1} is next", retry_s=0.2)
        self._check_own(part.member, part.contains)
        return member

    def answer(self, name: str, incarnation: str, part: int, fragment: int, sequence: int) -> Answer | None:
        """Return the answer to the member's update `sequence` of a fragment (0: to its join) for one part; None: not
        yet.

        All parts get the same version, however late they ask: ranks may hold copies of one parameter, which would
        differ if each got the newest version.

        Where `lacks_answer`, it is frozen now. Whoever keeps a journal says `AnswerWanted` before.
        """
        if self.lacks_answer(name, incarnation, part, fragment, sequence):
            self.handle(AnswerWanted(name, incarnation, fragment, sequence))
        own = self.members[name].fragments[fragment]
        if own.answer != sequence or own.version is None:
            return None  # no weights yet, or the update's other parts, or those of others, are still on their way
        return Answer(fragment, sequence, self.store.answer(name, part, fragment), self.incarnation)

    # -- validation of the global weights

    @property
    def final_validation(self) -> int:
        """Number of the validation that the run's final weights still need; 0: none. Region servers have none."""
        return 0

    def weights_to_validate(self, name: str, incarnation: str, part: int, number: int) -> Answer:
        """Return the elements of the global weights that one part holds, in bf16, for validation `number`.

        The first to ask has them copied, so that all parts evaluate the same weights. Empty when they are not here.
        """
        self.current(name, incarnation, part)
        if self.frozen is None or self.frozen[0] < number:
            versions = self.versions_to_validate()
            self.copy_weights((number, list(versions)) if versions else None)
        if self.frozen is None or self.frozen[0] != number:
            return Answer(0, number, (), self.incarnation)
        return Answer(0, number, self.store.copied(name, part, dict(enumerate(self.frozen[1]))), self.incarnation)

    def copy_weights(self, of: tuple[int, list[int]] | None) -> None:
        """Copy the newest global weights, for validation. of: its number and the weights' versions;
        None: drop the copy, which nobody needs any more."""
        self.frozen = of
        self.store.copy_newest(of is not None)

    @abstractmethod
    def versions_to_validate(self) -> list[int]:
        """Return the versions of the newest global weights, by fragment; empty if they are not here."""

    # -- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, JSON data), from which `load` restores the server."""
        tensors, of_store = self.store.state()
        return tensors, {
            **of_store,
            "parameter_map_digest": self.parameter_map.digest,
            "data": self.data,
            "origin": self.origin,
            "fragments": [[number, asdict(counts)] for number, counts in sorted(self.fragments.items())],
            "members": {name: member.state() for name, member in self.members.items()},
            "sent": {name: self._sent(name) for name in self.members if self.store.fingerprints_of(name)},
            "norms": self.norms.state() if self.norms else None,
            **self._part_state(),
        }

    def _sent(self, name: str) -> dict[str, Any]:
        """Save what the member was sent, where weights travel as changes: its fingerprints and its answers, those
        that wait with no chunks."""
        answers = []
        for fragment, own in sorted(self.members[name].fragments.items()):
            if own.answer is not None:
                sent = () if own.version is None else self.store.answer(name, 0, fragment)
                answers.append([fragment, own.answer, [[w.chunk, w.version, w.increment] for w in sent]])
        fingerprints = [[chunk, *both] for chunk, both in self.store.fingerprints_of(name).items()]
        return {"fingerprints": fingerprints, "answers": answers}

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Load what `state` returned. Raises ParameterMapError when it is another model's, or is cut otherwise."""
        self.parameter_map.check_digest(meta["parameter_map_digest"])
        self.fragments = {number: Counts(**saved) for number, saved in meta["fragments"]}
        self.data, self.origin = meta["data"] or self.data, meta["origin"]
        if self.norms and meta["norms"]:
            self.norms.load(meta["norms"])
        for name, saved in meta["members"].items():
            if name in self.members:
                self.members[name].load(saved)
                self._note_share(name)
        self._load_part(meta)
        for name, saved in self.store.load(tensors, meta, self.members).items():
            member = self.members[name]
            member.parts = 1  # where weights travel as changes
            for fragment, sequence, sent in saved["answers"]:
                own = member.fragments[fragment]
                own.answer, own.version = sequence, sent[0][1] if sent else None

    def weights(self, fragment: int) -> Tensor:
        """Return the fragment's weights: fp32, 1-D; not to be written."""
        return self.store.weights(fragment)

    def status(self) -> dict[str, Any]:
        """Return plain data for people and tests. sharing: how many have a share, where the rule averages. awaited:
        those for whose deltas answers wait."""
        return {
            "versions": self.versions,
            "in_rounds": self.rule.in_rounds,
            "awaited": sorted({name for fragment in self.numbers for name in self.awaited(fragment)}),
            "members": {name: {**m.status(), "leases": len(self.holds(name))} for name, m in self.members.items()},
            "sharing": len(self.sharing) if getattr(self.rule, "averages", False) else 0,
            "over": self.over,
            "finished": self.finished,
            "refused": {name: member.refused for name, member in self.members.items() if member.refused},
        }

    # -- for subclasses

    @abstractmethod
    def _count_trained(self, applied: Fact) -> tuple[int, int | None]:
        """Note that the leases of an update are trained.

        Returns (their samples, tokens committed in the run so far or None where that is not known).
        """

    def set_weights(self, vectors: Mapping[int, Tensor] | Sequence[Tensor]) -> None:
        """Begin with these weights: an fp32 vector for each fragment."""
        self.store.set_weights(vectors)
        self.fragments = {number: Counts() for number in self.numbers}

    def left_out(self, name: str) -> list[UpdatePart]:
        """Return the parts of the member's updates that are not whole yet, as they came."""
        arriving = [part for own in self.members[name].fragments.values() for part in own.arriving.values()]
        return [self.store.as_received(part) for part in arriving]

    # -- inside

    def _apply(self, name: str, member: Member, parts: list[UpdatePart]) -> None:
        first, fragment = parts[0], parts[0].fragment
        own, state, update = member.fragments[fragment], self.fragments[fragment], (fragment, first.sequence)
        own.arriving = {}  # also when it is refused below, so that it can be sent anew
        spoken = [(p.contains, p.job, p.weight) for p in parts]
        try:
            if any(each != spoken[0] for each in spoken):
                raise Refused(f"{name}: the parts of update {update_id(name, *update)} speak of different leases")
            self._judge(name, own, first)
        except Refused as refused:
            self.store.forget(name, updates=(update,))
            if len(parts) > 1:
                own.refused = first.sequence, refused
            raise
        self._heard(name)  # not before: what is refused is no sign of life
        own.sequence, own.answer, own.version = first.sequence, first.sequence, None
        own.staleness = state.version - first.deltas[0].anchor_version
        own.need_s = min(part.need_s for part in parts)
        if not (self.rule.in_rounds and 0 < first.job <= own.came):
            own.owed = True  # until the rule says that it is to be answered, perhaps at once
            own.came = first.job
            inputs, answered = self.rule.on_delta(state, name, first.weight, len(self.sharing))
            self.store.apply(name, *update, state.version, inputs)
        else:
            # A former incarnation sent this round's delta. This one is only answered, now or when it is complete.
            answered = () if own.owed else (name,)
        # Before answers take memory. Every part has adopted the answer before, or would not have sent this update.
        self.store.forget(name, answers=(fragment,), updates=(update,))
        if self.waits:
            state.waiting[name] = 0
            self.end_waits((fragment,))
            if own.need_s <= 0:
                self.release((name,), fragment)
        else:
            self.answer_members(answered, fragment)
        size_bytes = 0
        if self.reports_updates:
            pushes = [join.pushes[delta.chunk] for join in member.joined.values() for delta in first.deltas]
            size_bytes = sum(self.up.encoded_bytes(numel(slices)) for slices in pushes)
        fact = Fact(
            "applied", name, member.incarnation, fragment, first.sequence, first.job, first.weight, first.contains,
            state.version, own.staleness, size_bytes, own.norm, metrics=first.metrics,
        )  # fmt: skip
        if not self.ledger:  # which notes them, too
            self._note_metrics(fact)
        self._report(fact)
        if name in self.held(fragment):
            self._note_stage(name, fragment, first.sequence, "waits")

    def _on_applied(self, fact: Fact) -> None:
        """Account for an update that was applied, here or by a shard."""
        name, member = fact.member, self.members[fact.member]
        member.job, member.updates = fact.job, member.updates + 1
        own = member.fragments[fact.fragment]
        own.sequence, own.came = fact.sequence, max(own.came, fact.job)
        metrics = self._note_metrics(fact)
        samples, tokens = self._count_trained(fact)
        if self.reports_updates:
            applied = name, fact.fragment, fact.sequence, fact.job, self.versions, fact.staleness, samples
            self._events.append(
                UpdateApplied(*applied, fact.size_bytes, metrics.get("loss"), metrics, fact.norm, tokens)
            )

    def _judge(self, name: str, own: MemberFragment, first: UpdatePart) -> None:
        """Raise Refused when the update is not finite, or its norm not to be believed."""
        decoded = self.store.decode(name, first.fragment, first.sequence)
        for each in decoded:
            if each.fault:
                raise BadDelta(f"{name}, part {each.part}: {self.parameter_map.called(each.chunk)}: {each.fault}")
        own.norm = norm([each.squares for each in decoded])
        if own.norm == inf:  # some few of these, and the weights were infinite
            raise BadDelta(f"{name}: fragment {first.fragment}: the update's norm is beyond all numbers")
        if self.norms is not None:
            weight = min(first.weight, self.max_credible_weight(name))
            known = self.norms.senders(first.fragment) & self.members.keys()
            at_work = {m for m in known if not self.members[m].away}
            self.norms.check(name, first.fragment, own.norm, weight, at_work)
            self.norms.note(name, first.fragment, own.norm, weight)
