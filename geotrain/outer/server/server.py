"""The base of region and global servers: a state machine that takes members' updates and answers them.

`Server.handle` is the only way to change its durable state: it takes a message and returns the reply, the messages to
send, and what happened. `geotrain.net` calls it, in two parts, behind a journal and sockets, `geotrain.simulate`
under a virtual clock, tests as a plain function. The journal holds messages, not states: recovery handles them again,
so what `handle` does, and what it refuses, must follow from the durable state and the message alone. Its vectors are
in its store (`geotrain.outer.server.store`); it may be several processes (`geotrain.outer.server.parts`).

Every update of a fragment is applied whole (all its parts) and once (by its sequence number) or not at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import CodecConfig, LimitsConfig
from geotrain.outer.codec import make_codec
from geotrain.outer.events import Event, FactsLost, UpdateApplied
from geotrain.outer.messages import (
    Answer,
    AnswersDue,
    AnswerWanted,
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
    Welcome,
    WentBack,
    update_id,
)
from geotrain.outer.rules import Counts, Rule
from geotrain.outer.server.answers import Answers
from geotrain.outer.server.core import Core
from geotrain.outer.server.intake import Intake
from geotrain.outer.server.member import check_identity
from geotrain.outer.server.membership import Leases, Membership
from geotrain.outer.server.parts import OF_MEMBER, UNHEARD, WHOLE, ServerPart
from geotrain.outer.server.store import Store
from geotrain.parameters.parameter_map import ParameterMap


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


class Server(ABC):
    """State of a region server or a global server, and what it does with each message.

    Beside `handle` there are reads, which leave the durable state as it is; both kinds of server have all of them, so
    that callers need not ask which kind it is.

    name: as others address it. members: names of those who may join. member_role: what they are. up, down: codecs of
    the links to them. part: of the server that this is.
    """

    def __init__(
        self, name: str, member_role: Literal["region", "worker"], identity: Identity, parameter_map: ParameterMap,
        rule: Rule, members: tuple[str, ...], leases: Leases, up: CodecConfig, down: CodecConfig,
        limits: LimitsConfig, part: ServerPart = WHOLE, above: tuple[CodecConfig, CodecConfig] | None = None,
        validates: bool = False, bf16_state: bool = False,
    ) -> None:  # fmt: skip
        codec, store_of = make_codec(up), part.numbers(len(parameter_map.fragments))
        store = Store(name, parameter_map, store_of, rule, codec, down, above, validates, bf16_state)
        self.core = core = Core(name, member_role, part, parameter_map, rule, codec, down, limits, store)
        self.name, self.member_role, self.identity, self.part = name, member_role, identity, part
        self.parameter_map, self.rule, self.fragments = parameter_map, rule, core.fragments
        self.ledger, self.all, self.numbers = core.ledger, core.all, core.numbers
        # incarnation: names the server's present one; its process sets it, since drawing it is not pure.
        # settings: all that it takes from configuration, as text. remade: makes it, without state, from another text.
        self.incarnation, self.settings = "", ""
        self.remade: Any = None
        # Of the run: its global server's process draws it where the run begins, regions get it when they join.
        self.origin = ""
        self.data = identity.data  # sha256 of the run's training data, once a member's join has named it
        # Number and versions of the global weights that a worker evaluates at present. The store keeps a copy.
        self.frozen: tuple[int, list[int]] | None = None
        self._sends, self._events = core.sends, core.events
        self.membership = Membership(core, members, leases)
        self.members, self.as_ledger = self.membership.members, self.membership.as_ledger
        self.as_shard = self.membership.as_shard
        # Workers of a flat run, which has one level, are answered at once.
        waits = bool(getattr(rule, "waits", False)) and (name != GLOBAL or member_role == "region")
        self.answers = Answers(core, self.members, waits, self._answer_now)
        self.intake = Intake(core, self.membership, self.answers, self._report)

    @property
    def store(self) -> Store:
        """Where its vectors are."""
        return self.core.store

    @property
    def versions(self) -> list[int]:
        """Versions by fragment, of those of other processes as far as they are known; empty before this server has
        all its weights."""
        if any(number not in self.fragments for number in self.numbers):
            return []
        return [self.fragments[number].version if number in self.fragments else 0 for number in self.all]

    @property
    def own_versions(self) -> tuple[int, ...]:
        """Versions of this process's fragments."""
        return tuple(self.fragments[n].version if n in self.fragments else 0 for n in self.numbers)

    def handle(self, message: Message) -> Handled:
        """Process a message. Raises Refused; then nothing has changed."""
        taken, rest = self.take(message), self.go_on()
        return Handled(taken.reply, taken.sends + rest.sends, taken.events + rest.events)

    def take(self, message: Message) -> Handled:
        """Do the part of `handle` for which the sender waits. `go_on` must be called before the next message."""
        reply = self._route(message)
        if self.answers.waits and not isinstance(message, UpdatePart | LeaseRequest):
            self.answers.end_waits(self.numbers)  # who was waited for may be at work no more
        return self._handled(reply)

    def go_on(self) -> Handled:
        """Do what the message makes due for others, such as a region's update for the global server."""
        return self._handled(None)

    def _handled(self, reply: Any) -> Handled:
        # What a message that failed has queued leaves with this one: its updates are recorded as in flight.
        handled = Handled(reply, tuple(self._sends), tuple(self._events))
        self._sends.clear()
        self._events.clear()
        return handled

    def _route(self, message: Message) -> Any:
        """Call the method for this kind of message. Subclasses add the messages that only they understand."""
        match message:
            case UpdatePart():
                return self.intake.take(message)
            case Join():
                return self._on_join(message)
            case AnswerWanted():
                return self._on_answer_wanted(message)
            case Leave():
                return self.membership.leave(message)
            case MemberSilent():
                return self.membership.silence(message)
            case AnswersDue():
                return self.answers.release(message.members, message.fragment)
            case UpdateRejected():
                return self.membership.count_strike(message)
            case LiftQuarantine():
                return self.membership.lift_quarantine(message)
            case OperatorCommand(what="expel"):
                return self.membership.expel(message.region)
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

    @property
    @abstractmethod
    def ending(self) -> bool:
        """Whether this server is about to end, and would answer nobody who joins now."""

    def recalls(self, member: str) -> bool:
        """Whether this member, a region, is to give back the data that no worker has asked for."""
        return False

    @abstractmethod
    def workers_of(self, member: str) -> tuple[str, ...]:
        """Return the workers that this member speaks for."""

    def lease_is_due(self, worker: str) -> bool:
        """Whether repeating a LeaseRequest that got no lease would bring a reply now. Always False on region servers,
        where the reply comes as a message of its own when the global server has sent it."""
        return False

    def ends(self, name: str) -> bool:
        """Whether this worker ends, as there was no data for its last job. On a global server its leases say so."""
        return False

    def waited_for_by(self, name: str) -> bool:
        """Whether the member waits for something of this server, as far as this process knows."""
        return bool(self.members[name].owed)

    def begin_again(self) -> None:
        """Resume a saved run that had ended, perhaps with more data: members that left may come back."""
        self.membership.begin_again()

    def _on_join(self, join: Join) -> Welcome:
        """Let a rank join. Raises Refused when its member, or its model, does not belong here; then nothing has
        changed."""
        check_identity(join, self.identity, self.data, self.origin)
        self.membership.join(join, self.ending)
        self.data = self.data or join.data
        # The next that is not applied here: who missed an acknowledgement learns so that its update was taken.
        sequences = tuple(self.members[join.member].fragments[number].sequence + 1 for number in self.all)
        # Of other processes' fragments these say it themselves: a rank joins each of them (`FragmentLinks.join`).
        here = tuple(self.incarnation if number in self.numbers else "" for number in self.all)
        return Welcome(sequences, self.membership.next_job(join.member), here, tuple(self.versions), self.origin)

    def comes_from_copy(self, drawn: int) -> None:  # noqa: B027
        """Begin from a state of before this server lost its disk: what it did after that nobody knows here. drawn: a
        number that differs from one such beginning to the next, below 2¹⁶."""

    # -- between the ledger and shards

    def stand(self) -> Standing:
        """Say how the run stands, for shards."""
        members, begun, number = self.membership.standing(self.ends), self.membership.begun, self.as_ledger.changes
        return Standing(self.incarnation, self.origin, self.data, members, begun, number=number, **self._stands())

    def _stands(self) -> dict[str, Any]:
        """Return what this kind of server's shards must know beside its members."""
        return {}

    def _on_standing(self, standing: Standing) -> None:
        before = self.as_shard.take(standing)
        self.origin, self.data = standing.origin, standing.data
        self.membership.follow(standing)
        # A validation is done, so nobody asks for the copy of the weights any more.
        if before is None or before.validated != standing.validated:
            self.copy_weights(None)

    def facts(self, safe: tuple[int, ...]) -> Facts:
        """Return what a shard has to say. safe: `Facts.safe`."""
        return self.as_shard.facts(self.own_versions, safe, self.quiet_since())

    def quiet_since(self) -> int:
        """Return `Facts.quiet`."""
        return 0

    def _report(self, fact: Fact) -> None:
        """Note a fact in the ledger, or to be said to it."""
        if self.ledger:
            self._on_fact(fact)
        else:
            self.as_shard.unsaid.append(fact)

    @abstractmethod
    def _on_fact(self, fact: Fact) -> None:
        """Note a fact, of this process or of a shard, in the ledger."""

    def _on_facts(self, said: Facts) -> int:
        """Note what a shard has done, each fact once. Returns how many of its facts are known."""
        known = self.as_ledger
        # All that may be refused is looked at first: what follows changes the state.
        numbers = known.check(said)
        if lost := known.lost(said):
            self._events.append(FactsLost(said.shard, lost))
            # How far members are there nobody knows: none waits with its goodbye until that is heard.
            for own in [member.fragments[number] for member in self.members.values() for number in numbers]:
                own.sequence = UNHEARD
            # First: what is said now may name leases of before a backup, whose numbers others have by now.
            self.membership.leases.facts_lost()
        for number, version in zip(numbers, said.versions, strict=True):
            self.fragments.setdefault(number, Counts()).version = version
        for fact in known.new_facts(said):
            if fact.what in OF_MEMBER and fact.member not in self.members:
                continue  # the run has it no more
            # An update is a sign of life, whichever process took it.
            if fact.what == "applied":
                self.membership.note_alive(fact.member)
            self._on_fact(fact)
        # Last: leases of who is gone may go only when all that the shard took from it is counted above.
        known.note_seen(said)
        self.membership.settle()
        return known.taken[said.shard]

    def _on_went_back(self, back: WentBack) -> None:
        """Go on with a shard whose disk was lost, and came back from a copy."""
        known = self.as_ledger
        numbers = known.fragments_of(back.shard, back.versions)
        # Facts are numbered: from here on the shard says anew what its copy did not know.
        known.taken[back.shard] = back.facts
        for number, version in zip(numbers, back.versions, strict=True):
            self.fragments.setdefault(number, Counts()).version = version
            for member in self.members.values():
                own = member.fragments[number]
                own.came = min(own.came, back.job) if self.rule.in_rounds else own.came

    # -- answers

    def lacks_answer(self, name: str, incarnation: str, part: int, fragment: int, sequence: int) -> bool:
        """Whether the answer, as for `answer`, is due and only an `AnswerWanted` is missing. Raises Refused."""
        self.membership.current(name, incarnation, part)
        own = self.intake.exchange_of(name, fragment)
        if fragment not in self.fragments or sequence > own.sequence:
            return False
        if sequence not in (0, own.sequence) or 0 < sequence == own.adopted:
            raise Refused(f"{name}: the answer to update {update_id(name, fragment, sequence)} was adopted before")
        # Nobody has wanted it in this incarnation; or it was released while its member had not joined anew.
        return own.answer != sequence or (own.version is None and not own.owed)

    def _on_answer_wanted(self, wanted: AnswerWanted) -> None:
        name, fragment, sequence = wanted.member, wanted.fragment, wanted.sequence
        member = self.membership.current(name, wanted.incarnation)
        if not self.lacks_answer(name, wanted.incarnation, min(member.joined), fragment, sequence):
            return  # another part has asked
        own = member.fragments[fragment]
        if sequence == 0:  # nobody trains meanwhile
            self.answers.release((name,), fragment)
        if own.answer != sequence:
            if sequence == 0:  # it begins anew
                self.store.forget(name, mirrors=(fragment,))
            own.answer, own.version = sequence, None
        if not own.owed:
            self.answers.freeze(name, fragment)

    @abstractmethod
    def _answer_now(self, names: tuple[str, ...], fragment: int) -> None:
        """Answer these members, or send up what they wait for."""

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
        self.membership.current(name, incarnation, part)
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
            "norms": self.intake.norms.state() if self.intake.norms else None,
            "part": self.membership.part_state(),
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
        self.fragments.clear()
        for number, saved in meta["fragments"]:
            waiting = {name: sent for name, sent in saved["waiting"].items() if name in self.members}
            self.fragments[number] = Counts(**{**saved, "waiting": waiting})
        self.data, self.origin = meta["data"] or self.data, meta["origin"]
        if self.intake.norms and meta["norms"]:
            self.intake.norms.load(meta["norms"])
        for name, saved in meta["members"].items():
            # A resumed run may have other members: of those that it has no more nothing is kept, none is answered.
            if name in self.members:
                self.members[name].load(saved)
                self.membership.note_share(name)
        self.membership.load_part(meta["part"])
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
            "awaited": sorted({name for fragment in self.numbers for name in self.answers.awaited(fragment)}),
            "members": {
                name: {**m.status(), "leases": len(self.membership.leases.holds(name))}
                for name, m in self.members.items()
            },
            "sharing": len(self.membership.sharing) if getattr(self.rule, "averages", False) else 0,
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
        self.fragments.clear()
        self.fragments.update((number, Counts()) for number in self.numbers)

    # -- inside

    def _on_applied(self, fact: Fact) -> None:
        """Account for an update that was applied, here or by a shard."""
        name, member = fact.member, self.members[fact.member]
        member.job, member.updates = fact.job, member.updates + 1
        own = member.fragments[fact.fragment]
        # So they are already in the process that applied it; a ledger follows its shards.
        own.sequence, own.came = fact.sequence, max(own.came, fact.job)
        metrics = self.membership.note_metrics(fact)
        samples, tokens = self._count_trained(fact)
        if self.answers.reports_updates:
            applied = UpdateApplied(
                name, fact.fragment, fact.sequence, fact.job, self.versions, fact.staleness, samples, fact.size_bytes,
                loss=metrics.get("loss"), metrics=metrics, delta_norm=fact.norm, tokens=tokens,
            )  # fmt: skip
            self._events.append(applied)
