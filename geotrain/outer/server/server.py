"""The base of region and global servers: a state machine that takes members' updates and answers them.

It decides; its vectors are in its shards (`geotrain.outer.shards`), to which it gives commands.

`Server.handle` is the only way to change its durable state: it takes a message and returns the reply, the messages to
send, and what happened. `geotrain.net` calls it, in two parts, behind a journal and sockets, `geotrain.simulate`
under a virtual clock, tests as a plain function. The journal holds messages, not states: recovery handles them again,
so what `handle` does, and what it refuses, must follow from the durable state and the message alone.

Every update is applied whole (all its parts) and once (by its sequence number) or not at all.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal

from torch import Tensor

from geotrain.config import CodecConfig, LimitsConfig, RunConfig
from geotrain.config.agreement import config_digest
from geotrain.outer.codec import Codec, make_codec
from geotrain.outer.events import Event, UpdateApplied, UpdateStage
from geotrain.outer.messages import (
    Answer,
    AnswerWanted,
    BadDelta,
    Identity,
    Join,
    Leave,
    LiftQuarantine,
    MemberSilent,
    Message,
    OperatorCommand,
    Refused,
    Send,
    UpdatePart,
    UpdateRejected,
    update_id,
)
from geotrain.outer.metrics import credible
from geotrain.outer.rules import Counts, Rule
from geotrain.outer.server.limits import NormLimits, norm
from geotrain.outer.server.member import Member, check_part, check_round, outline
from geotrain.outer.server.member_phase import MemberEvent
from geotrain.outer.server.membership import Membership
from geotrain.outer.shards.local import LocalShards
from geotrain.outer.shards.protocol import Apply, Copy, Decoded, Forget, Freeze, FromShards, HeldPart, Shards
from geotrain.outer.shards.shard import ServerShard
from geotrain.parameters.chunks import deal
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


class Server(Membership):
    """State of a region server or a global server, and what it does with each message.

    Beside `handle` there are reads, which leave the durable state as it is; both kinds of server have all of them, so
    that callers need not ask which kind it is.

    name: as others address it. members: names of those who may join. member_role: what they are. up, down: codecs of
    the links to them. shards: how many to create in this process, or remote ones; it changes nothing else.
    """

    reports_updates = True  # as events; a simulation without tensors has millions of updates and no reader

    def __init__(
        self, name: str, member_role: Literal["region", "worker"], identity: Identity, parameter_map: ParameterMap,
        rule: Rule, members: tuple[str, ...], up: CodecConfig, down: CodecConfig, limits: LimitsConfig,
        shards: int | Shards, above: tuple[CodecConfig, CodecConfig] | None = None,
        validates: bool = False, bf16_state: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(identity, parameter_map, rule, members, down, limits)
        self.name, self.member_role = name, member_role
        self.up: Codec = make_codec(up)
        if isinstance(shards, int):
            settings = rule, self.up, down, above, validates, bf16_state
            dealt = deal(parameter_map.chunks, shards)
            shards = LocalShards([ServerShard(name, parameter_map, chunks, *settings) for chunks in dealt])
        self.shards = shards
        # Number and versions of the global weights that a worker evaluates at present. The shards keep a copy.
        self.frozen: tuple[int, list[int]] | None = None
        judged = limits.norm_deviations is not None
        self.norms = NormLimits(limits, len(parameter_map.fragments), len(members)) if judged else None
        self._sends: list[Send] = []  # what `handle` is about to return

    def handle(self, message: Message | FromShards) -> Handled:
        """Process a message. Raises Refused; then nothing has changed."""
        taken, rest = self.take(message), self.go_on()
        return Handled(taken.reply, taken.sends + rest.sends, taken.events + rest.events)

    def take(self, message: Message | FromShards) -> Handled:
        """Do the part of `handle` for which the sender waits. `go_on` must be called before the next message."""
        return self._handled(None if (inner := self.shards.unwrap(message)) is None else self._route(inner))

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
            case UpdateRejected():
                return self._on_update_rejected(message)
            case LiftQuarantine():
                return self._on_lift_quarantine(message)
            case OperatorCommand(what="expel"):
                return self._on_expel(message.region)
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
        if member.admitted.pop(part.part, None) != outline(part):
            self._check(part, member)
        parts = member.arriving.setdefault(part.sequence, {})
        if part.part in parts:
            return False
        parts[part.part] = self.shards.receive_part(part)
        if len(parts) < member.parts:
            if len(parts) == 1:
                self._note_stage(part.member, part.sequence, "arrived")
            member.meet(MemberEvent.HEARD)
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
        self._check(part, member)
        if part.part in member.arriving.get(part.sequence, {}):
            return False
        member.admitted[part.part] = outline(part)
        return True

    def _check(self, part: UpdatePart, member: Member) -> None:
        most = self.most_weight(part.member)
        fragments = check_part(part, member, self.parameter_map, self.up, self.versions, most)
        if self.rule.in_rounds:
            check_round(part, fragments, member)

    def _expecting(self, part: UpdatePart) -> Member | None:
        """Return the sender if the part belongs to its next update; None if that update was applied before."""
        member = self.current(part.member, part.incarnation, part.part)
        if part.sequence <= member.sequence:
            return None
        if not self.fragments:
            raise Refused("this server has no weights yet", retry_s=1.0)
        if part.sequence in member.refusals:
            raise member.refusals[part.sequence].with_traceback(None)
        if part.sequence != member.sequence + 1:
            came, wanted = update_id(part.member, part.sequence), member.sequence + 1
            raise Refused(f"{part.member}: update {came} came, but {wanted} is next", retry_s=0.2)
        self._check_own(part.member, part.leases)
        return member

    def answer(
        self, name: str, incarnation: str, part: int, sequence: int, fragments: tuple[int, ...]
    ) -> Answer | None:
        """Return the answer to the member's update `sequence` (0: to its join) for one part; None: not yet.

        fragments: those of the update. All parts get the same versions, however late they ask: ranks may hold copies
        of one parameter, which would differ if each got the newest version.

        Where `lacks_answer`, it is frozen now. Whoever keeps a journal says `AnswerWanted` before.
        """
        if self.lacks_answer(name, incarnation, part, sequence, fragments):
            self.handle(AnswerWanted(name, incarnation, sequence, fragments))
        member = self.members[name]
        if sequence not in member.answers or member.awaiting.get(sequence):
            return None  # no weights yet, or the update's other parts, or those of others, are still on their way
        weights = self.shards.answer(name, part, sequence, member.answers[sequence])
        return Answer(sequence, weights, self.incarnation)

    def lacks_answer(self, name: str, incarnation: str, part: int, sequence: int, wanted: tuple[int, ...]) -> bool:
        """Whether the answer, as for `answer`, is due and only an `AnswerWanted` is missing. Raises Refused."""
        member = self.current(name, incarnation, part)
        known = set(range(len(self.parameter_map.fragments)))
        if part not in member.joined or sequence < 0 or not set(wanted) <= known:
            raise Refused(f"{name}: no part {part}, update {sequence} or fragments {list(wanted)}")
        if not self.fragments or sequence > member.sequence:
            return False
        return sequence not in member.answers or bool(member.awaiting.get(sequence, set()) - member.owed)

    def _on_answer_wanted(self, wanted: AnswerWanted) -> None:
        name, sequence = wanted.member, wanted.sequence
        member = self.current(name, wanted.incarnation)
        if not self.lacks_answer(name, wanted.incarnation, min(member.joined), sequence, wanted.fragments):
            return  # another part has asked
        if sequence not in member.answers:
            # A member has one answer a fragment to ask for; more would make the server hold weights without bound.
            if len(member.answers) > len(self.fragments):
                raise Refused(f"{name}: too many answers are held for it already; {sequence} is an old one")
            if sequence == 0:  # it begins anew
                self.shards.execute(Forget(name, mirrors=True))
            member.begin_answer(sequence, set(wanted.fragments))
        for fragment in sorted(member.awaiting[sequence] - member.owed):
            self._freeze(name, sequence, fragment)

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
            return Answer(number, (), self.incarnation)
        return Answer(number, self.shards.copied(name, part, self.frozen[1]), self.incarnation)

    def copy_weights(self, of: tuple[int, list[int]] | None) -> None:
        """Have the shards copy the newest global weights, for validation. of: its number and the weights' versions;
        None: drop the copy, which nobody needs any more."""
        self.frozen = of
        self.shards.execute(Copy(of[0] if of else 0))

    @abstractmethod
    def versions_to_validate(self) -> list[int]:
        """Return the versions of the newest global weights, by fragment; empty if they are not here."""

    # -- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, JSON data), from which `load` restores the server with any number of local shards."""
        tensors, of_shards = self.shards.state()
        return tensors, {
            **of_shards,
            "parameter_map_digest": self.parameter_map.digest,
            "data": self.data,
            "origin": self.origin,
            "fragments": [asdict(counts) for counts in self.fragments],
            "members": {name: member.state() for name, member in self.members.items()},
            "sent": {name: self._sent(name) for name in self.members if self.shards.was_sent(name)},
            "norms": self.norms.state() if self.norms else None,
        }

    def _sent(self, name: str) -> dict[str, Any]:
        """Save what the member was sent, where weights travel as changes: its fingerprints and frozen answers."""
        member, answers = self.members[name], []
        for sequence, versions in member.answers.items():
            frozen = [[w.chunk, w.version, w.increment] for w in self.shards.answer(name, 0, sequence, versions)]
            answers.append([sequence, sorted(member.awaiting.get(sequence, ())), frozen])
        fingerprints = [[chunk, *both] for chunk, both in self.shards.fingerprints_of(name).items()]
        return {"fingerprints": fingerprints, "answers": answers}

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Load what `state` returned. Raises ParameterMapError when it is another model's, or is cut otherwise."""
        self.parameter_map.check_digest(meta["parameter_map_digest"])
        self.fragments = [Counts(**saved) for saved in meta["fragments"]]
        self.data, self.origin = meta["data"] or self.data, meta["origin"]
        if self.norms and meta["norms"]:
            self.norms.load(meta["norms"])
        for name, saved in meta["members"].items():
            if name in self.members:
                self.members[name].load(saved)
                self._note_share(name)
        fragment_of = [chunk.fragment for chunk in self.parameter_map.chunks]
        for name, saved in self.shards.load(tensors, meta, self.members).items():
            member = self.members[name]
            member.parts = 1  # where weights travel as changes
            for sequence, waiting, frozen in saved["answers"]:
                member.answers[sequence] = {fragment_of[chunk]: version for chunk, version, _ in frozen}
                if waiting:
                    member.awaiting[sequence] = set(waiting)

    def weights(self, fragment: int) -> Tensor:
        """Return the fragment's weights, of shards in this process: fp32, 1-D; not to be written."""
        assert isinstance(self.shards, LocalShards)
        return self.shards.weights(fragment)

    def status(self) -> dict[str, Any]:
        """Return plain data for people and tests. sharing: how many have a share, where the rule averages."""
        return {
            "versions": self.versions,
            "members": {name: {**m.status(), "leases": len(self.holds(name))} for name, m in self.members.items()},
            "sharing": len(self.sharing) if getattr(self.rule, "averages", False) else 0,
            "over": self.over,
            "finished": self.finished,
            "refused": {name: member.refused for name, member in self.members.items() if member.refused},
        }

    # -- for subclasses

    @abstractmethod
    def _count_trained(self, part: UpdatePart) -> tuple[int, int | None]:
        """Note that the leases of an update, whose part 0 this is, are trained.

        Returns (their samples, tokens committed in the run so far or None where that is not known).
        """

    def set_weights(self, vectors: list[Tensor]) -> None:
        """Begin with these weights, one fp32 vector a fragment, in shards in this process."""
        assert isinstance(self.shards, LocalShards)
        for shard in self.shards.all:
            shard.set_weights(vectors)
        self.begin()

    def begin(self) -> None:
        """Begin the run: the shards have its first weights."""
        self.fragments = [Counts() for _ in self.parameter_map.fragments]

    def answer_members(self, names: tuple[str, ...], fragment: int) -> None:
        """Freeze the fragment's weights now, in the answer to each member's oldest update that still lacks them."""
        for name in names:
            member = self.members[name]
            member.owed.discard(fragment)
            waiting = [s for s, fragments in member.awaiting.items() if fragment in fragments]
            if waiting and member.complete:  # else it asks when it has joined this incarnation of the server
                self._freeze(name, min(waiting), fragment)

    def left_out(self, name: str) -> list[UpdatePart | HeldPart]:
        """Return the parts of the member's updates that are not whole yet, as they came."""
        arriving = self.members[name].arriving.values()
        return [self.shards.as_received(part) for parts in arriving for part in parts.values()]

    # -- inside

    def _apply(self, name: str, member: Member, parts: list[UpdatePart]) -> None:
        first = parts[0]
        fragments = self.parameter_map.fragments_of([d.chunk for d in first.deltas])
        del member.arriving[first.sequence]  # also when it is refused below, so that it can be sent anew
        spoken = [([d.chunk for d in p.deltas], p.leases, p.job, p.weight) for p in parts]
        try:
            if any(each != spoken[0] for each in spoken):
                update = update_id(name, first.sequence)
                raise Refused(f"{name}: the parts of update {update} speak of different fragments or leases")
            self._judge(name, member, first, fragments)
        except Refused as refused:
            self.shards.execute(Forget(name, updates=(first.sequence,)))
            if len(parts) > 1:
                member.refusals[first.sequence] = refused
            raise
        member.meet(MemberEvent.HEARD)  # not before: what is refused is no sign of life
        self._note_share(name)
        member.sequence, member.job = first.sequence, first.job
        member.updates += 1
        dropped = member.drop_adopted(set(fragments), min(part.adopted for part in parts))
        member.begin_answer(first.sequence, set(fragments))
        anchors = {self.parameter_map.chunks[d.chunk].fragment: d.anchor_version for d in first.deltas}
        answered = dict[int, tuple[str, ...]]()
        for fragment in fragments:
            state = self.fragments[fragment]
            member.staleness[fragment] = state.version - anchors[fragment]
            if self.rule.in_rounds and member.has_sent(fragment, first.job):
                # A former incarnation sent this round's delta. This one is only answered, now or when it is complete.
                answered[fragment] = () if fragment in member.owed else (name,)
            else:
                member.owed.add(fragment)  # until the rule says that it is to be answered, perhaps at once
                member.came[fragment] = first.job
                inputs, answered[fragment] = self.rule.on_delta(state, name, first.weight, len(self.sharing))
                self.shards.execute(Apply(name, first.sequence, fragment, state.version, inputs))
        self.shards.execute(Forget(name, answers=dropped, updates=(first.sequence,)))  # before answers take memory
        for fragment, names in answered.items():
            self.answer_members(names, fragment)
        staleness = max(member.staleness[fragment] for fragment in fragments)
        metrics = {name: value for name, value in credible(first.metrics).items() if name != "staleness"}
        member.metrics = {**metrics, "staleness": float(staleness)}
        samples, tokens = self._count_trained(first)
        if self.reports_updates:
            pushes = [join.pushes[delta.chunk] for join in member.joined.values() for delta in first.deltas]
            size_bytes = sum(self.up.encoded_bytes(numel(slices)) for slices in pushes)
            numbers = [member.staleness[f] for f in fragments], [member.norms[f] for f in fragments]
            applied = name, first.sequence, first.job, list(fragments), self.versions, staleness, samples, size_bytes
            self._events.append(UpdateApplied(*applied, metrics.get("loss"), metrics, *numbers, tokens))

    def _judge(self, name: str, member: Member, first: UpdatePart, fragments: tuple[int, ...]) -> None:
        """Raise Refused when the update is not finite, or its norm not to be believed."""
        self._measure(name, member, self.shards.decode(name, first.sequence, fragments))
        if self.norms is not None:
            sizes = [member.norms[fragment] for fragment in fragments]
            weight = min(first.weight, self.max_credible_weight(name))
            at_work = {m for m in self.norms.senders(fragments) if m in self.members and not self.members[m].away}
            for fragment, size in zip(fragments, sizes, strict=True):  # all of them before any is remembered
                self.norms.check(name, fragment, size, weight, at_work)
            for fragment, size in zip(fragments, sizes, strict=True):
                self.norms.note(name, fragment, size, weight)

    def _measure(self, name: str, member: Member, decoded: list[Decoded]) -> None:
        """Note the norms of a decoded update. Raises Refused when it is not finite."""
        squares: dict[int, list[float]] = {}
        for each in decoded:
            if each.fault:
                raise BadDelta(f"{name}, part {each.part}: {self.parameter_map.called(each.chunk)}: {each.fault}")
            squares.setdefault(self.parameter_map.chunks[each.chunk].fragment, []).append(each.squares)
        for fragment, sums in squares.items():
            member.norms[fragment] = norm(sums)
            if member.norms[fragment] == inf:  # some few of these, and the weights were infinite
                raise BadDelta(f"{name}: fragment {fragment}: the update's norm is beyond all numbers")

    def _freeze(self, name: str, sequence: int, fragment: int) -> None:
        """Encode the fragment's weights for all parts at once and put them into the member's answer."""
        member, version = self.members[name], self.fragments[fragment].version
        self.shards.execute(Freeze(name, sequence, fragment, version))
        member.answers[sequence][fragment] = version
        member.awaiting[sequence].discard(fragment)
        member.owed.discard(fragment)
        if not member.awaiting[sequence]:
            del member.awaiting[sequence]
            self._note_stage(name, sequence, "answered")

    def _note_stage(self, name: str, sequence: int, stage: str) -> None:
        if self.reports_updates and sequence:  # 0 is no update, but a join
            self._events.append(UpdateStage(update_id(name, sequence), stage))
