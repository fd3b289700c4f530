"""What region and global servers have in common: members, parts of updates, answers. A state machine.

It takes a message and returns the messages to send; `geotrain.net` runs it on sockets, `geotrain.simulate` under a
virtual clock. Every update is applied whole (all its parts) and once (by its sequence number) or not at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geotrain.config import CodecConfig, LimitsConfig, RunConfig, config_digest
from geotrain.outer.codec import Codec, make_codec
from geotrain.outer.downlink import WeightsSender, from_bytes, sends_changes, to_bytes
from geotrain.outer.layout import Layout, LayoutError, Slice, gather, numel, scatter
from geotrain.outer.limits import NormLimits, norm
from geotrain.outer.member import Member
from geotrain.outer.messages import (
    Answer,
    FragmentDelta,
    FragmentWeights,
    Join,
    NotJoined,
    Offence,
    Pardon,
    Refused,
    Silence,
    UpdatePart,
    Welcome,
)
from geotrain.outer.rules import FragmentState, Rule


@dataclass(frozen=True)
class Identity:
    """What both ends of a link must agree on."""

    run: str
    config_digest: str
    layout_digest: str
    model: str  # in words, for error messages
    data: str = ""  # sha256 of the training data, where it is known


def identity_of(run: RunConfig, layout: Layout, data: str = "") -> Identity:
    assert isinstance(run.model.config, dict)
    model = f"{run.model.config.get('model_type')} of {layout.numel:,} parameters"
    return Identity(run.name, config_digest(run), layout.digest, model, data)


VALIDATION_CODEC = CodecConfig(name="bf16")


@dataclass
class Frozen:
    """Global weights as they were when a validation's first part asked. weights: bf16, one vector a fragment."""

    number: int
    versions: list[int]
    weights: list[Tensor]


class Server(ABC):
    """members: names of those who may join. up, down: codecs of the links to them."""

    def __init__(
        self,
        identity: Identity,
        layout: Layout,
        rule: Rule,
        members: tuple[str, ...],
        up: CodecConfig,
        down: CodecConfig,
        limits: LimitsConfig,
    ) -> None:
        self.identity, self.layout, self.rule = identity, layout, rule
        self.incarnation = ""  # set by whoever runs it; new in every life
        self.members = {name: Member() for name in members}
        self.fragments: list[FragmentState] = []  # empty until the first weights are known
        self.up: Codec = make_codec(up)
        self.down = down
        self.frozen: Frozen | None = None  # the global weights that a validation speaks of
        self.limits = limits
        judged = limits.norm_deviations is not None
        self.norms = NormLimits(limits, len(layout.fragments), len(members)) if judged else None
        self.data = identity.data  # sha256 of the run's training data, once a member has told it

    # -- joining

    def on_join(self, join: Join) -> Welcome:
        """Raises Refused when this member, or its model, does not belong here; then nothing has changed."""
        self._check_identity(join)
        member = self._member(join.member)
        self._check_quarantine(join.member, member, join.incarnation)
        if join.incarnation in member.former:
            raise Refused(f"{join.member}: another process has joined under this name since; this one must end")
        new = join.incarnation != member.incarnation
        parts = join.parts if new or not member.joined else member.parts
        if join.parts != parts or not 0 <= join.part < parts:
            raise Refused(f"{join.member}: part {join.part} of {join.parts} does not fit its {parts} parts")
        self._check_slices(join)
        joined = {**({} if new else member.joined), join.part: join}
        if len(joined) == parts:
            self._check_cover(join.member, joined)
        if new:
            member.begin_life(join.incarnation)
            self.on_new_life(join.member, join)
        member.parts, member.joined, member.silent = parts, joined, False
        self.data = self.data or join.data
        versions = tuple(state.version for state in self.fragments)
        return Welcome(member.sequence + 1, member.job + 1, self.incarnation, versions)

    def current(self, name: str, incarnation: str) -> Member:
        """The member, if this life of it has joined with every part. Raises Refused."""
        member = self._member(name)
        self._check_quarantine(name, member, incarnation)
        if not member.complete or member.incarnation != incarnation:
            raise NotJoined(f"{name}: join first, with every part", retry_s=0.5)
        return member

    def on_leave(self, name: str) -> None:
        self._member(name).left = True

    def on_silence(self, silence: Silence) -> None:
        """What this member had been given to train goes to others."""
        member = self._member(silence.member)
        if member.incarnation == silence.incarnation:
            member.silent = True
            self.release_leases(silence.member)

    def on_offence(self, offence: Offence) -> bool:
        """Returns whether the member has just been quarantined for it: then its leases go to others."""
        member = self._member(offence.member)
        if member.quarantined or member.incarnation != offence.incarnation:
            return False
        if member.offend(offence.reason, self.limits.offence_window) < self.limits.offences:
            return False
        member.quarantined, member.barred = True, offence.incarnation
        member.forget()
        self.release_leases(offence.member)
        return True

    def on_pardon(self, pardon: Pardon) -> None:
        """The life that was quarantined cannot come back; a new one may join."""
        member = self._member(pardon.member)
        member.quarantined = False
        member.offences.clear()

    @property
    def empty(self) -> bool:
        """Every member has been here and left."""
        return all(member.left for member in self.members.values())

    @property
    def idle(self) -> bool:
        """Nobody is at work: every member left, is dead or refused, or never came."""
        return all(member.away or not member.incarnation for member in self.members.values())

    # -- updates

    def on_part(self, part: UpdatePart) -> bool:
        """Take one part of an update; apply the update when it is whole. Returns whether it was applied now.

        A part of an update that was applied before is acknowledged again and changes nothing.
        Raises Refused; then nothing has changed.
        """
        if not self.wants(part):
            return False
        member = self.members[part.member]
        parts = member.arriving.setdefault(part.sequence, {})
        parts[part.part] = part
        if len(parts) < member.parts:
            member.silent = False
            return False
        self._apply(part.member, member, [parts[i] for i in range(member.parts)])
        return True

    def wants(self, part: UpdatePart) -> bool:
        """Whether `on_part` would take this part; False: it is here already. Of payloads only the sizes are read.

        Raises Refused.
        """
        member = self.current(part.member, part.incarnation)
        if part.sequence <= member.sequence:
            return False
        if not self.fragments:
            raise Refused("this server has no weights yet", retry_s=1.0)
        if part.sequence != member.sequence + 1:
            raise Refused(
                f"{part.member}: update {part.sequence} came, but {member.sequence + 1} is next", retry_s=0.2
            )
        self._check_part(part, member)
        return part.part not in member.arriving.get(part.sequence, {})

    def answer(
        self, name: str, incarnation: str, part: int, sequence: int, fragments: tuple[int, ...]
    ) -> Answer | None:
        """The answer to the member's update `sequence` (0: to its join) for one part; None: not yet.

        fragments: those that the update spoke of. All parts get the same versions, whenever they ask.
        """
        member = self.current(name, incarnation)
        if part not in member.joined or not set(fragments) <= set(range(len(self.layout.fragments))):
            raise Refused(f"{name}: no part {part}, or no fragments {list(fragments)}")
        if not self.fragments or sequence > member.sequence:
            return None  # no weights yet, or the update's other parts are still on their way
        if sequence not in member.answers:
            if len(member.answers) > len(self.fragments):
                raise Refused(f"{name}: too many answers are held for it already; {sequence} is an old one")
            self._begin_answer(member, sequence, set(fragments))
            for fragment in sorted(set(fragments) - member.owed):
                self._freeze(member, sequence, fragment)
        if member.awaiting.get(sequence):
            return None
        return Answer(sequence, tuple(member.answers[sequence][part]), self.incarnation)

    # -- validation of the global weights

    def weights_to_validate(self, name: str, incarnation: str, part: int, number: int) -> Answer:
        """The global weights that validation `number` speaks of, as far as one part holds them, in bf16: the same for
        all parts, whenever they ask. Empty when they are not here. Raises Refused."""
        member = self.current(name, incarnation)
        if part not in member.joined:
            raise Refused(f"{name}: part {part} has not joined")
        if self.frozen is None or self.frozen.number < number:
            weights = self.validation_weights()
            versions = [self.global_version_of(f) for f in range(len(weights))]
            self.frozen = Frozen(number, versions, [w.bfloat16() for w in weights]) if weights else None
        if self.frozen is None or self.frozen.number != number:
            return Answer(number, (), self.incarnation)
        plain, told = make_codec(VALIDATION_CODEC), []
        for f, (version, weights_16) in enumerate(zip(self.frozen.versions, self.frozen.weights, strict=True)):
            held = gather(weights_16.float(), member.joined[part].holds[f])
            told.append(FragmentWeights(f, version, to_bytes(plain.encode(held).payload)))
        return Answer(number, tuple(told), self.incarnation)

    @abstractmethod
    def validation_weights(self) -> list[Tensor]:
        """The newest global weights, one fp32 vector a fragment; none when they are not known here."""

    @abstractmethod
    def global_version_of(self, fragment: int) -> int:
        """Of `validation_weights`."""

    # -- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON data). What is not in it (parts on their way, joins) is said again by the members."""
        tensors: dict[str, Tensor] = {}
        fragments = []
        for i, state in enumerate(self.fragments):
            tensors[f"fragment.{i}.x"] = state.x
            tensors.update({f"fragment.{i}.aux.{name}": v for name, v in state.aux.items()})
            tensors.update({f"fragment.{i}.waiting.{name}": v for name, (v, _) in state.waiting.items()})
            weights = {name: weight for name, (_, weight) in state.waiting.items()}
            fragments.append({"version": state.version, "counts": dict(state.counts), "waiting": weights})
        return tensors, {
            "layout_digest": self.layout.digest,
            "data": self.data,
            "fragments": fragments,
            "members": {name: member.state() for name, member in self.members.items()},
            "norms": self.norms.state() if self.norms else None,
        }

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """The counterpart of `state`. Raises LayoutError when the state is another model's."""
        if meta["layout_digest"] != self.layout.digest:
            raise LayoutError(f"the state is of layout {meta['layout_digest']}, the run's is {self.layout.digest}")
        self.fragments = []
        for i, saved in enumerate(meta["fragments"]):
            aux, waiting = f"fragment.{i}.aux.", f"fragment.{i}.waiting."
            self.fragments.append(
                FragmentState(
                    tensors[f"fragment.{i}.x"],
                    saved["version"],
                    {k.removeprefix(aux): v for k, v in tensors.items() if k.startswith(aux)},
                    dict(saved["counts"]),
                    {name: (tensors[waiting + name], weight) for name, weight in saved["waiting"].items()},
                )
            )
        self.data = meta["data"]
        if self.norms and meta["norms"]:
            self.norms.load(meta["norms"])
        for name, saved in meta["members"].items():
            if name in self.members:
                self.members[name].load(saved)

    def status(self) -> dict[str, Any]:
        """Plain data for people and tests."""
        return {
            "versions": [state.version for state in self.fragments],
            "members": {name: member.status() for name, member in self.members.items()},
            "refused": {name: member.refused for name, member in self.members.items() if member.refused},
        }

    # -- for subclasses

    def begin_again(self) -> None:
        """The saved run was finished: it goes on (with more data, or to say so again) once members are back."""
        for member in self.members.values():
            member.left = False

    def release_leases(self, name: str) -> None:  # noqa: B027 (a hook: nothing to do is right)
        """The leases that this member holds and has not trained return to the pool."""

    def on_new_life(self, name: str, join: Join) -> None:  # noqa: B027 (a hook: nothing to do is right)
        """A member came back after a death, or came for the first time."""

    def on_applied(self, part: UpdatePart) -> None:  # noqa: B027 (a hook: nothing to do is right)
        """An update was applied; `part` is its part 0."""

    def set_weights(self, vectors: list[Tensor]) -> None:
        """The first weights: one fp32 vector a fragment."""
        self.fragments = [FragmentState(v) for v in vectors]

    def answer_members(self, names: tuple[str, ...], fragment: int) -> None:
        """Freeze the fragment's weights as answer to each member's oldest update that waits for them."""
        for name in names:
            member = self.members[name]
            member.owed.discard(fragment)
            waiting = [s for s, fragments in member.awaiting.items() if fragment in fragments]
            if waiting:
                self._freeze(member, min(waiting), fragment)

    # -- between tensors and payloads (timing-only simulations have neither)

    def decode_update(self, name: str, member: Member, deltas: list[FragmentDelta]) -> Tensor:
        """All parts of one fragment's delta, as one fp32 vector. Raises Refused when it is not finite."""
        fragment = deltas[0].fragment
        vector = torch.empty(self.layout.fragments[fragment].numel)
        for part, delta in enumerate(deltas):
            slices = self._pushes(member, part, fragment)
            try:
                scatter(self.up.decode(from_bytes(delta.payload), numel(slices)), slices, vector)
            except ValueError as error:
                raise Refused(f"{name}, part {part}: fragment {fragment}: {error}") from None
        member.norms[fragment] = norm(vector)
        return vector

    def encode_weights(self, member: Member, part: int, fragment: int) -> FragmentWeights:
        """The fragment's weights now, for one part of the member: what follows counts on their being delivered."""
        state = self.fragments[fragment]
        held = gather(state.x, member.joined[part].holds[fragment])
        if part not in member.senders:
            member.senders[part] = WeightsSender(self.down)
        return member.senders[part].encode(fragment, state.version, held)

    # -- inside

    def _member(self, name: str) -> Member:
        if name not in self.members:
            raise Refused(f"no member is called {name!r} here; known: {', '.join(self.members)}")
        return self.members[name]

    def _check_identity(self, join: Join) -> None:
        theirs, ours = (join.run, join.config_digest, join.layout_digest), self.identity
        for what, their, our in zip(
            ("run", "config digest", "layout digest"),
            theirs,
            (ours.run, ours.config_digest, ours.layout_digest),
            strict=True,
        ):
            if their != our:
                raise Refused(
                    f"{what} differs: {join.member} has {their} ({join.model}), "
                    f"this server has {our} ({ours.model}); start both from the same run file"
                )

        if join.data and self.data and join.data != self.data:
            raise Refused(
                f"data differs: {join.member} trains on data of sha256 {join.data[:16]}…, this run on "
                f"{self.data[:16]}…; copy one and the same prepared data set to every region"
            )

    def _check_quarantine(self, name: str, member: Member, incarnation: str) -> None:
        if member.quarantined:
            raise Refused(
                f"{name} is quarantined after {len(member.offences)} refused updates; the last one: {member.fault}. "
                f"Started anew it may join {self.limits.quarantine_s:g} s later, or once the operator pardons it"
            )
        if incarnation and incarnation == member.barred:
            raise Refused(f"{name}: this life of it was quarantined; start it anew")

    def _check_slices(self, join: Join) -> None:
        wanted = len(self.layout.fragments)
        if len(join.pushes) != wanted or len(join.holds) != wanted:
            raise Refused(f"{join.member}: slices for {len(join.pushes)} fragments, the run has {wanted}")
        try:
            for f in range(wanted):
                self.layout.check_slices(f, join.pushes[f])
                self.layout.check_slices(f, join.holds[f])
        except LayoutError as error:
            raise Refused(f"{join.member}, part {join.part}: {error}") from None
        whole = all(join.holds[f] == self.layout.whole(f) for f in range(wanted))
        if sends_changes(self.down) and not (join.parts == 1 and whole):
            # Ranks that hold copies of the same norm would see them drift apart, their blocks being different.
            raise Refused(f"{join.member}: codec {self.down.name!r} downwards needs a member that holds everything")

    def _check_cover(self, name: str, joined: dict[int, Join]) -> None:
        try:
            for f in range(len(self.layout.fragments)):
                self.layout.check_cover(f, [s for join in joined.values() for s in join.pushes[f]])
        except LayoutError as error:
            raise Refused(f"{name}: its ranks do not cover the model: {error}") from None

    def _check_part(self, part: UpdatePart, member: Member) -> None:
        if part.part not in member.joined:
            raise Refused(f"{part.member}: part {part.part} has not joined")
        fragments = [delta.fragment for delta in part.deltas]
        if not fragments or len(set(fragments)) < len(fragments) or part.weight < 1:
            raise Refused(f"{part.member}: an update of fragments {fragments} with weight {part.weight} is none")
        for delta in part.deltas:
            if not 0 <= delta.fragment < len(self.fragments):
                raise Refused(f"{part.member}: no fragment {delta.fragment}")
            wanted = self.up.encoded_bytes(numel(self._pushes(member, part.part, delta.fragment)))
            if len(delta.payload) != wanted:
                raise Refused(
                    f"{part.member}, part {part.part}: fragment {delta.fragment} has {len(delta.payload)} bytes, "
                    f"its slices need {wanted} with codec {self.up.name!r}"
                )
            version = self.fragments[delta.fragment].version
            if not 0 <= delta.anchor_version <= version:
                raise Refused(
                    f"{part.member}, part {part.part}: fragment {delta.fragment} starts from version "
                    f"{delta.anchor_version}, which this server never gave; it is at version {version}"
                )

    def _pushes(self, member: Member, part: int, fragment: int) -> tuple[Slice, ...]:
        return member.joined[part].pushes[fragment]

    def _apply(self, name: str, member: Member, parts: list[UpdatePart]) -> None:
        first = parts[0]
        fragments = [d.fragment for d in first.deltas]
        del member.arriving[first.sequence]
        if any([d.fragment for d in p.deltas] != fragments or p.leases != first.leases for p in parts):
            raise Refused(f"{name}: the parts of update {first.sequence} speak of different fragments or leases")
        deltas = [self.decode_update(name, member, [p.deltas[i] for p in parts]) for i in range(len(fragments))]
        self._check_norms(name, fragments, deltas, first.weight)
        member.silent = False  # what is refused is no sign of life
        staleness = 0
        member.sequence, member.job = first.sequence, first.job
        member.updates += 1
        for old in [s for s in member.answers if s not in member.awaiting]:
            if {w.fragment for w in member.answers[old][0]} & set(fragments):
                del member.answers[old]  # every part has adopted it, or it would not send these fragments again
        member.owed |= set(fragments)
        self._begin_answer(member, first.sequence, set(fragments))
        for fragment, delta, sent in zip(fragments, deltas, first.deltas, strict=True):
            state = self.fragments[fragment]
            member.staleness[fragment] = state.version - sent.anchor_version
            staleness = max(staleness, member.staleness[fragment])
            self.answer_members(self.rule.on_delta(state, name, delta, first.weight), fragment)
        member.metrics = {**first.metrics, "staleness": float(staleness)}
        self.on_applied(first)

    def _check_norms(self, name: str, fragments: list[int], deltas: list[Tensor], weight: int) -> None:
        if self.norms is not None:
            sizes = [self.members[name].norms[fragment] for fragment in fragments]
            for fragment, size in zip(fragments, sizes, strict=True):
                self.norms.check(name, fragment, size, weight)
            for fragment, size in zip(fragments, sizes, strict=True):
                self.norms.note(fragment, size, weight)

    def _begin_answer(self, member: Member, sequence: int, fragments: set[int]) -> None:
        member.awaiting[sequence] = set(fragments)
        member.answers[sequence] = {part: [] for part in range(member.parts)}

    def _freeze(self, member: Member, sequence: int, fragment: int) -> None:
        for part in member.joined:
            member.answers[sequence][part].append(self.encode_weights(member, part, fragment))
        member.awaiting[sequence].discard(fragment)
        member.owed.discard(fragment)
        if not member.awaiting[sequence]:
            del member.awaiting[sequence]
