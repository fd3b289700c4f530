"""A shard: some of a server's vectors and payloads, and the arithmetic on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from geotrain.config import CodecConfig
from geotrain.outer.codec import Codec, CodecError, NonFiniteError, make_codec, refusal, residual_dtype, rounding_seed
from geotrain.outer.downlink import VALIDATION_CODEC, WeightsReceiver, WeightsSender
from geotrain.outer.messages import Answer, ChunkWeights, Join, UpdatePart
from geotrain.outer.mirror_store import MirrorStore
from geotrain.outer.rules import RegionRule, Rule, Vectors
from geotrain.outer.shards.protocol import (
    Apply,
    Command,
    Copy,
    Decoded,
    Forget,
    Freeze,
    Merge,
    SendUp,
    StartOver,
    digest,
)
from geotrain.parameters.parameter_map import Chunk, ParameterMap, gather, numel, scatter
from geotrain.staging.interface import from_bytes, to_bytes


class HeldPayload:
    """Holds one rank's payload of a chunk, and its digest, which is computed once."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    @cached_property
    def digest(self) -> str:
        return digest(self.content)


@dataclass
class _Frozen:
    """The answer to a member's update of a fragment. weights: by part and chunk."""

    sequence: int
    weights: dict[tuple[int, int], ChunkWeights] = field(default_factory=dict)


@dataclass
class _Known:
    """A shard's record of a member."""

    joins: dict[int, Join] = field(default_factory=dict)  # part → its slices
    # (fragment, sequence) → (part, chunk) → what came
    updates: dict[tuple[int, int], dict[tuple[int, int], HeldPayload]] = field(default_factory=dict)
    answers: dict[int, _Frozen] = field(default_factory=dict)  # by fragment
    senders: dict[int, WeightsSender] = field(default_factory=dict)  # part → its downlink


NO_UPDATE = "", 0, 0
MIRRORS = "held.", "mirror."  # how the names of those begin in `ServerShard.state`
DISPENSABLE = "held.", "answer."  # and of what members were sent: without it they are sent whole weights


def no_snapshot(*tensors: Tensor) -> None:
    """Do nothing: no snapshot is being written that would need these tensors as they are."""


class ServerShard:
    """Vectors and payloads of some chunks of server `name`. chunks: those that it has. up, down: codecs of the links
    to members. above: (up, down) of a region server's link to the global server. validates: whether a region keeps a
    copy of the newest global weights for workers that evaluate them (2 bytes a parameter). bf16_state: whether
    momenta and residuals are kept in bf16 between updates.
    """

    def __init__(
        self, name: str, parameter_map: ParameterMap, chunks: Sequence[Chunk], rule: Rule, up: Codec,
        down: CodecConfig,
        above: tuple[CodecConfig, CodecConfig] | None = None, validates: bool = False, bf16_state: bool = False,
    ) -> None:  # fmt: skip
        self.bf16_vectors = getattr(rule, "bf16_vectors", ()) if bf16_state else ()
        self.unmoved = getattr(rule, "unmoved", ())
        self.name, self.parameter_map, self.chunks = name, parameter_map, chunks
        self.rule, self.up, self.down = rule, up, down
        self._own = {chunk.index: chunk for chunk in chunks}
        self._of = [tuple(p for p in chunks if p.fragment == f.index) for f in parameter_map.fragments]  # by fragment
        self.vectors: dict[int, Vectors] = {}  # chunk → what the rule keeps; empty before there are weights
        # Chunk → its delta as decoded last, in one of the buffers that are kept for this: fresh memory for each
        # update would take longer to map than to fill; so rules must copy what they keep.
        self._deltas: dict[int, Tensor] = {}
        self._decoded = NO_UPDATE  # member, fragment and sequence of the update that they are
        self._results: dict[tuple[int, int], tuple[bytes, Decoded]] = {}  # by part and chunk, with what was decoded
        self._spare: list[Tensor] = []  # buffers that hold nothing; each has room for the largest chunk
        self.members: dict[str, _Known] = {}
        self.newest: dict[int, Tensor] | None = {} if validates else None  # global weights, bf16, for validation
        self.copy: dict[int, Tensor] = {}  # those that a worker evaluates at present
        self.residuals: dict[int, Tensor] = {}  # what coding has kept back on the way up so far
        self.in_flight: dict[int, bytes] = {}  # payloads whose answer has not come yet
        self._came: dict[int, ChunkWeights] = {}  # global weights that were received and are not merged yet
        self.up_codec = up if above is None else make_codec(above[0])
        self.residual_dtype = None if above is None else residual_dtype(above[0], bf16_state)
        self.downlink = WeightsReceiver(down if above is None else above[1])
        self.mirror_store = MirrorStore()  # another one: see `LocalShards.set_mirror_store`
        # Called with tensors of `state` before they are changed in place, for a snapshot that is being written.
        self.will_change: Callable[..., None] = no_snapshot

    # -- what comes from outside

    def receive(self, message: Join | UpdatePart | Answer) -> list[Decoded]:
        """Receive this shard's chunks of a message that the coordinator has accepted. Returns the faults of global
        weights, which change nothing yet."""
        own = self._own
        match message:
            case Join():
                self._member(message.member).joins[message.part] = message
                if self._decoded[0] == message.member:
                    self._drop_deltas()  # decoded with the slices of an earlier join
            case UpdatePart():
                payloads = {(message.part, d.chunk): HeldPayload(d.payload) for d in message.deltas if d.chunk in own}
                updates = self._member(message.member).updates
                updates.setdefault((message.fragment, message.sequence), {}).update(payloads)
            case Answer():
                came = {weights.chunk: weights for weights in message.weights if weights.chunk in own}
                self._came.update(came)
                self.downlink.fetch(came)
                return [d for i, w in came.items() if (d := self._checked(w, own[i])).fault]
        return []

    def _checked(self, weights: ChunkWeights, chunk: Chunk) -> Decoded:
        try:
            self.downlink.check(weights, chunk.numel)
        except CodecError as error:
            return Decoded(chunk.index, 0, 0.0, str(error))
        return Decoded(chunk.index, 0, 0.0)

    def set_weights(self, vectors: Sequence[Tensor]) -> None:
        """Begin with these weights of the run: an fp32 vector a fragment, of which the shard keeps views."""
        for chunk in self.chunks:
            self.vectors[chunk.index] = Vectors(vectors[chunk.fragment][chunk.start : chunk.start + chunk.numel])

    # -- commands

    def execute(self, command: Command) -> None:
        """Execute a command on this shard's chunks. Raises KeyError where it speaks of what is not here."""
        match command:
            case Apply():
                self._decode_all(command.member, command.fragment, command.sequence)
                for chunk in self._of[command.fragment]:
                    v, delta = self.vectors[chunk.index], self._deltas[chunk.index][: chunk.numel]
                    self.will_change(v.x, *(vector for name, vector in v.aux.items() if name not in self.unmoved))
                    v.in_bf16 = self.bf16_vectors
                    v.seed = rounding_seed("momentum", self.name, command.version, chunk.index)
                    self.rule.apply(v, command.member, delta, command.inputs)
            case Freeze():
                self._freeze(command)
            case Forget():
                self._forget(command)
            case SendUp():
                for chunk in self._of[command.fragment]:
                    self._send_up(chunk, command)
            case Merge():
                for chunk in self._of[command.fragment]:
                    self._merge(chunk, command)
            case StartOver():
                for table in (self.vectors, self.in_flight, self.residuals, self._came):
                    table.clear()
                self.downlink.clear()
            case Copy():
                newest = {i: v.x for i, v in self.vectors.items()} if self.newest is None else self.newest
                self.copy = {i: x.bfloat16() for i, x in newest.items()} if command.number else {}

    def decode(self, member: str, fragment: int, sequence: int) -> list[Decoded]:
        """Decode the payloads of an update into buffers that hold them until the next one. Changes no state."""
        if not self.rule.in_rounds:  # it is answered next
            self._fetch(self._member(member), fragment)
        return self._decode_all(member, fragment, sequence)

    def measure(self, part: UpdatePart) -> list[Decoded]:
        """Decode one part of an update before the others are here; `decode` takes what is still in the buffers then.
        Changes no state."""
        own = [(delta.chunk, delta.payload) for delta in part.deltas if delta.chunk in self._own]
        update = part.member, part.fragment, part.sequence
        return [self._decode(update, i, part.part, payload) for i, payload in own]

    def decode_ahead(self, part: UpdatePart) -> None:
        """Decode, if the buffers are free for it, a part that is about to be received. Changes no state."""
        known = self.members.get(part.member)
        update = part.member, part.fragment, part.sequence
        if known and part.part in known.joins and self._decoded in (NO_UPDATE, update):
            self.measure(part)

    def _decode_all(self, member: str, fragment: int, sequence: int) -> list[Decoded]:
        known, found, update = self._member(member), list[Decoded](), (member, fragment, sequence)
        payloads = known.updates.get(update[1:], {})  # none where a shard has no chunk of the fragment
        for chunk in self._of[fragment]:
            for part in sorted(known.joins):
                found.append(self._decode(update, chunk.index, part, payloads[part, chunk.index].content))
        return found

    def _decode(self, update: tuple[str, int, int], chunk: int, part: int, payload: bytes) -> Decoded:
        """Decode a payload into the buffer of its chunk, unless it is there already."""
        if self._decoded != update:
            self._drop_deltas()
            self._decoded = update
        done = self._results.get((part, chunk))
        if done is not None and done[0] is payload:
            return done[1]
        if chunk not in self._deltas:
            self._deltas[chunk] = self._spare.pop() if self._spare else torch.empty(max(p.numel for p in self.chunks))
        vector = self._deltas[chunk][: self._own[chunk].numel]
        slices = self._member(update[0]).joins[part].pushes[chunk]
        in_place = len(slices) == 1 and slices[0].count == 1  # contiguous: `gather` returns a view
        values = gather(vector, slices) if in_place else torch.empty(numel(slices))
        try:
            result = Decoded(chunk, part, self.up.decode_measured(from_bytes(payload), values))
        except ValueError as error:
            result = Decoded(chunk, part, 0.0, str(error))
        if not in_place and not result.fault:
            scatter(values, slices, vector)
        self._results[part, chunk] = payload, result
        return result

    def _drop_deltas(self) -> None:
        self._spare += self._deltas.values()
        self._deltas.clear()
        self._results.clear()
        self._decoded = NO_UPDATE

    def _freeze(self, command: Freeze) -> None:
        known = self._member(command.member)
        if self.rule.in_rounds:
            self._fetch(known, command.fragment)
        answer = known.answers[command.fragment] = _Frozen(command.sequence)
        for chunk in self._of[command.fragment]:
            for part, join in known.joins.items():
                held = gather(self.vectors[chunk.index].x, join.holds[chunk.index])
                if part not in known.senders:
                    known.senders[part] = WeightsSender(self.down, self.mirror_store)
                sender = known.senders[part]
                if (mirror := sender.mirror.get(chunk.index)) is not None:
                    self.will_change(mirror)
                answer.weights[part, chunk.index] = sender.encode(chunk.index, command.version, held)

    def _fetch(self, known: _Known, fragment: int) -> None:
        """Begin to read what a member was sent of this fragment, as its answer is coded soon."""
        for sender in known.senders.values():
            sender.fetch(chunk.index for chunk in self._of[fragment])

    def _forget(self, command: Forget) -> None:
        known = self._member(command.member)
        if self._decoded[0] == command.member and self._decoded[1:] in command.updates:
            self._drop_deltas()
        if command.joins:
            known.joins.clear()
            known.updates.clear()
        for fragment in command.mirrors:
            for sender in known.senders.values():
                sender.forget(chunk.index for chunk in self._of[fragment])
        for fragment in command.answers:
            known.answers.pop(fragment, None)
        for fragment, sequence in command.updates:
            known.updates.pop((fragment, sequence), None)

    def _send_up(self, chunk: Chunk, command: SendUp) -> None:
        """Encode the region's progress. Raises NonFiniteError, naming the parameter."""
        rule: RegionRule = self.rule  # type: ignore[assignment]
        i, v = chunk.index, self.vectors[chunk.index]
        seed = rounding_seed(self.name, 0, command.sequence, i)
        if self.residual_dtype and i not in self.residuals:
            self.residuals[i] = torch.zeros_like(v.x, dtype=self.residual_dtype)
        residual = self.residuals.get(i)
        self.will_change(*v.all(), *([] if residual is None else [residual]))

        def encode(values: Tensor, anchor: Tensor | None = None, moves_anchor: bool = False) -> None:
            try:
                coded = self.up_codec.encode(
                    values, anchor=anchor, residual=residual, seed=seed, moves_anchor=moves_anchor
                )
            except NonFiniteError:
                delta = values if anchor is None or moves_anchor else anchor - values
                parameter = self.parameter_map.not_finite(chunk.fragment, delta, chunk.start)
                what = f"parameter {parameter}" if parameter else "what earlier deltas left to be sent"
                raise refusal(f"region {self.name}: {what}") from None
            self.in_flight[i] = to_bytes(coded.payload)

        rule.progress(v, command.inputs, encode)

    def _merge(self, chunk: Chunk, command: Merge) -> None:
        rule: RegionRule = self.rule  # type: ignore[assignment]
        i = chunk.index
        if (mirror := self.downlink.mirror.get(i)) is not None:
            self.will_change(mirror)
        vector = self.downlink.decode(self._came.pop(i), chunk.numel)
        if self.newest is not None:
            self.newest[i] = vector.bfloat16()
        if command.first:
            if i in self.vectors:
                self.will_change(*self.vectors[i].all())
                self.vectors[i].x.copy_(vector)
            else:
                self.vectors[i] = Vectors(vector.clone())
            rule.begin(self.vectors[i])
        else:
            self.in_flight.pop(i)
            self.will_change(*self.vectors[i].all())
            rule.merge(self.vectors[i], vector, command.inputs)
        self.downlink.page_out(i)

    # -- what others get

    def fingerprints_of(self, member: str) -> dict[int, tuple[int, int]]:
        """Chunk → fingerprints of what the member holds, after and before the last weights sent. Empty where weights
        travel whole."""
        sender = self._member(member).senders.get(0)  # where they travel as changes, a member has one part
        if sender is None or not sender.changes:
            return {}
        return {i: (now, sender.before[i]) for i, now in sender.fingerprints.items()}

    def copied(self, member: str, part: int, chunk: int, version: int) -> ChunkWeights:
        """Encode the elements that this part holds of the copied weights, bf16."""
        held = gather(self.copy[chunk], self._member(member).joins[part].holds[chunk])
        return ChunkWeights(chunk, version, to_bytes(make_codec(VALIDATION_CODEC).encode(held).payload))

    # -- for a shard in a process of its own

    def forget_incarnation(self, member: str, answers: bool) -> None:
        """Forget what a state leaves out, as the server begins a new incarnation. answers: all of them, too."""
        known = self._member(member)
        for table in (known.joins, known.updates, *((known.answers, known.senders) if answers else ())):
            table.clear()
        self._drop_deltas()

    def received(self) -> Iterator[Answer]:
        """Yield the global weights that are not merged yet, for `receive`."""
        for weights in self._came.values():
            yield Answer(self._own[weights.chunk].fragment, 0, (weights,))

    def sent(self) -> dict[str, Any]:
        """Return what members were sent, where weights travel as changes, for `load`."""
        return {
            name: {
                "fingerprints": [[chunk, *both] for chunk, both in sorted(fingerprints.items())],
                "answers": [
                    [
                        fragment,
                        answer.sequence,
                        [[w.chunk, w.version, w.increment] for _, w in sorted(answer.weights.items())],
                    ]
                    for fragment, answer in sorted(self.members[name].answers.items())
                ],
            }
            for name in self.members
            if (fingerprints := self.fingerprints_of(name))
        }

    # -- state

    def state(self) -> dict[str, Tensor]:
        """Return all tensors, by names of chunk and owner. Joins, half-arrived updates and frozen whole weights are
        left out: members say or ask again. Where weights travel as changes, what each member was sent is in it."""
        self.mirror_store.settle()
        tensors: dict[str, Tensor] = {}
        for i, v in self.vectors.items():
            tensors.update(v.state(f"chunk.{i}."))
        tensors.update({f"residual.{i}": residual for i, residual in self.residuals.items()})
        tensors.update({f"in_flight.{i}": from_bytes(payload) for i, payload in self.in_flight.items()})
        tensors.update({f"mirror.{i}": mirror for i, mirror in self.downlink.mirror.items()})
        for name in self.members:
            if not self.fingerprints_of(name):
                continue
            known = self.members[name]
            tensors.update({f"held.{name}.{i}": mirror for i, mirror in known.senders[0].mirror.items()})
            for answer in known.answers.values():
                tensors.update({f"answer.{name}.{i}": from_bytes(w.payload) for (_, i), w in answer.weights.items()})
        return tensors

    def load(self, tensors: dict[str, Tensor], fingerprints: dict[str, int], sent: dict[str, Any]) -> None:
        """Load what `state` returned. fingerprints: of its own mirrors, by chunk. sent: by member, as the coordinator
        saved it."""
        for i in self._own:
            if f"chunk.{i}.x" in tensors:
                self.vectors[i] = Vectors.of(f"chunk.{i}.", tensors)
            if f"residual.{i}" in tensors:
                self.residuals[i] = tensors[f"residual.{i}"]
            if f"in_flight.{i}" in tensors:
                self.in_flight[i] = to_bytes(tensors[f"in_flight.{i}"])
            if f"mirror.{i}" in tensors:
                self.downlink.mirror[i] = self.mirror_store.put(tensors[f"mirror.{i}"])
            if str(i) in fingerprints:
                self.downlink.fingerprints[i] = fingerprints[str(i)]
        for name, saved in sent.items():
            known = self._member(name)
            sender = known.senders[0] = WeightsSender(self.down, self.mirror_store)
            for i, now, before in saved["fingerprints"]:
                if i in self._own:
                    sender.fingerprints[i], sender.before[i] = now, before
                    sender.mirror[i] = self.mirror_store.put(tensors[f"held.{name}.{i}"])
            for fragment, sequence, frozen in saved["answers"]:
                answer = known.answers[fragment] = _Frozen(sequence)  # also where no chunk of the fragment is here
                for i, version, increment in (each for each in frozen if each[0] in self._own):
                    payload = to_bytes(tensors[f"answer.{name}.{i}"])
                    answer.weights[0, i] = ChunkWeights(i, version, payload, increment)

    # -- inside

    def _member(self, member: str) -> _Known:
        return self.members.setdefault(member, _Known())
