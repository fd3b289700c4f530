"""A server's vectors and payloads, and the arithmetic on them, chunk by chunk. It decides nothing: a server calls it,
after it has decided, and what is wrong with a payload is found before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from geotrain.config import CodecConfig
from geotrain.outer.codec import Codec, CodecError, NonFiniteError, make_codec, refusal, residual_dtype, rounding_seed
from geotrain.outer.downlink import VALIDATION_CODEC, WeightsReceiver, WeightsSender, sends_changes
from geotrain.outer.messages import Answer, ChunkWeights, Join, UpdatePart
from geotrain.outer.mirror_store import MirrorStore
from geotrain.outer.rules import RegionRule, Rule, Vectors
from geotrain.outer.rules.rule import Inputs
from geotrain.parameters.parameter_map import Chunk, ParameterMap, ParameterMapError, gather, numel, scatter
from geotrain.staging.interface import from_bytes, to_bytes


@dataclass(frozen=True)
class Decoded:
    """Result of decoding one rank's payload of one chunk.

    squares: sum of the squares of the values. fault: what is wrong with the payload; "" if nothing is.
    """

    chunk: int
    part: int
    squares: float
    fault: str = ""


@dataclass
class _Frozen:
    """The answer to a member's update of a fragment. weights: by part and chunk."""

    sequence: int
    weights: dict[tuple[int, int], ChunkWeights] = field(default_factory=dict)


@dataclass
class _Known:
    """What a store has of a member."""

    joins: dict[int, Join] = field(default_factory=dict)  # part → its slices
    # (fragment, sequence) → (part, chunk) → what came
    updates: dict[tuple[int, int], dict[tuple[int, int], bytes]] = field(default_factory=dict)
    answers: dict[int, _Frozen] = field(default_factory=dict)  # by fragment
    senders: dict[int, WeightsSender] = field(default_factory=dict)  # part → its downlink


NO_UPDATE = "", 0, 0
MIRRORS = "held.", "mirror."  # how the names of those begin in `Store.state`
DISPENSABLE = "held.", "answer."  # and of what members were sent: without it they are sent whole weights


def no_snapshot(*tensors: Tensor) -> None:
    """Do nothing: no snapshot is being written that would need these tensors as they are."""


class Store:
    """Vectors and payloads of some fragments of server `name`. fragments: their numbers. up, down: codecs of the
    links to members. above: (up, down) of a region server's link to the global server. validates: whether a region
    keeps a copy of the newest global weights for workers that evaluate them (2 bytes a parameter). bf16_state:
    whether momenta and residuals are kept in bf16 between updates.
    """

    def __init__(
        self, name: str, parameter_map: ParameterMap, fragments: Collection[int], rule: Rule, up: Codec,
        down: CodecConfig,
        above: tuple[CodecConfig, CodecConfig] | None = None, validates: bool = False, bf16_state: bool = False,
    ) -> None:  # fmt: skip
        self.bf16_vectors = getattr(rule, "bf16_vectors", ()) if bf16_state else ()
        self.unmoved = getattr(rule, "unmoved", ())
        self.name, self.parameter_map = name, parameter_map
        self.chunks = tuple(chunk for fragment in fragments for chunk in parameter_map.chunks_of[fragment])
        self._largest = max((chunk.numel for chunk in self.chunks), default=0)
        self.rule, self.up, self.down = rule, up, down
        self._of = parameter_map.chunks_of  # by fragment
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
        self.mirror_store = MirrorStore()  # another one: see `set_mirror_store`
        # Called with tensors of `state` before they are changed in place, for a snapshot that is being written.
        self.will_change: Callable[..., None] = no_snapshot

    # -- what comes from outside

    def receive_join(self, join: Join) -> None:
        """Take a rank's slices."""
        self._member(join.member).joins[join.part] = join
        if self._decoded[0] == join.member:
            self._drop_deltas()  # decoded with the slices of an earlier join

    def receive_part(self, part: UpdatePart) -> UpdatePart:
        """Take the payloads of a part of an update; returns it without them."""
        payloads = {(part.part, delta.chunk): delta.payload for delta in part.deltas}
        self._member(part.member).updates.setdefault((part.fragment, part.sequence), {}).update(payloads)
        return with_payloads(part, [b""] * len(part.deltas))

    def as_received(self, part: UpdatePart) -> UpdatePart:
        """Restore the message of a part given to `receive_part`, as long as its update is not whole."""
        held = self._member(part.member).updates[part.fragment, part.sequence]
        return with_payloads(part, [held[part.part, delta.chunk] for delta in part.deltas])

    def receive_weights(self, answer: Answer) -> list[Decoded]:
        """Take global weights, which change nothing before they are merged. Returns what is wrong with them."""
        came = {weights.chunk: weights for weights in answer.weights}
        self._came.update(came)
        self.downlink.fetch(came)
        return [d for i, w in came.items() if (d := self._checked(w, self.parameter_map.chunks[i])).fault]

    def _checked(self, weights: ChunkWeights, chunk: Chunk) -> Decoded:
        try:
            self.downlink.check(weights, chunk.numel)
        except CodecError as error:
            return Decoded(chunk.index, 0, 0.0, str(error))
        return Decoded(chunk.index, 0, 0.0)

    def set_weights(self, vectors: Mapping[int, Tensor] | Sequence[Tensor]) -> None:
        """Begin with these weights of the run: an fp32 vector a fragment, of which the store keeps views."""
        for chunk in self.chunks:
            self.vectors[chunk.index] = Vectors(vectors[chunk.fragment][chunk.start : chunk.start + chunk.numel])

    # -- what its server has decided

    def apply(self, member: str, fragment: int, sequence: int, version: int, inputs: Inputs) -> None:
        """Let the rule apply the member's update of a fragment. version: of the fragment's weights, with this update.
        inputs: of the rule, see `Rule.apply`."""
        self._decode_all(member, fragment, sequence)
        for chunk in self._of[fragment]:
            v, delta = self.vectors[chunk.index], self._deltas[chunk.index][: chunk.numel]
            # First: a snapshot that is being written copies them as they are now.
            self.will_change(v.x, *(vector for name, vector in v.aux.items() if name not in self.unmoved))
            v.in_bf16 = self.bf16_vectors
            # Computed from what identifies the update, so that a replay rounds alike.
            v.seed = rounding_seed("momentum", self.name, version, chunk.index)
            self.rule.apply(v, member, delta, inputs)

    def start_over(self) -> None:
        """Drop all weights, and all that was sent to the global server or received from it."""
        for table in (self.vectors, self.in_flight, self.residuals, self._came):
            table.clear()
        self.downlink.clear()

    def copy_newest(self, keep: bool) -> None:
        """Keep a copy of the newest global weights (bf16), to be evaluated while the run goes on, or drop it."""
        newest = {i: v.x for i, v in self.vectors.items()} if self.newest is None else self.newest
        self.copy = {i: x.bfloat16() for i, x in newest.items()} if keep else {}

    def decode(self, member: str, fragment: int, sequence: int) -> list[Decoded]:
        """Decode the payloads of an update into buffers that hold them until the next one. Changes no state."""
        if not self.rule.in_rounds:  # it is answered next
            self._fetch(self._member(member), fragment)
        return self._decode_all(member, fragment, sequence)

    def decode_ahead(self, part: UpdatePart) -> None:
        """Decode, if the buffers are free for it, a part that is about to be received. Changes no state."""
        known = self.members.get(part.member)
        update = part.member, part.fragment, part.sequence
        if known and part.part in known.joins and self._decoded in (NO_UPDATE, update):
            for delta in part.deltas:
                self._decode(update, delta.chunk, part.part, delta.payload)

    def _decode_all(self, member: str, fragment: int, sequence: int) -> list[Decoded]:
        known, found, update = self._member(member), list[Decoded](), (member, fragment, sequence)
        payloads = known.updates[update[1:]]
        for chunk in self._of[fragment]:
            for part in sorted(known.joins):
                found.append(self._decode(update, chunk.index, part, payloads[part, chunk.index]))
        return found

    def _decode(self, update: tuple[str, int, int], chunk: int, part: int, payload: bytes) -> Decoded:
        """Decode a payload into the buffer of its chunk, unless it is there already."""
        if self._decoded != update:
            self._drop_deltas()
            self._decoded = update
        done = self._results.get((part, chunk))
        # The same object: to compare bytes would take as long as to decode them.
        if done is not None and done[0] is payload:
            return done[1]
        if chunk not in self._deltas:
            self._deltas[chunk] = self._spare.pop() if self._spare else torch.empty(self._largest)
        vector = self._deltas[chunk][: self.parameter_map.chunks[chunk].numel]
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

    def freeze(self, member: str, fragment: int, sequence: int, version: int) -> None:
        """Encode the fragment's weights now, for all ranks of the member, as the answer to its update `sequence`.
        They must be delivered: the next change is coded against them."""
        known = self._member(member)
        # Elsewhere `decode` has begun to, as the answer follows the update at once.
        if self.rule.in_rounds:
            self._fetch(known, fragment)
        answer = known.answers[fragment] = _Frozen(sequence)
        for chunk in self._of[fragment]:
            for part, join in known.joins.items():
                held = gather(self.vectors[chunk.index].x, join.holds[chunk.index])
                if part not in known.senders:
                    known.senders[part] = WeightsSender(self.down, self.mirror_store)
                sender = known.senders[part]
                if (mirror := sender.mirror.get(chunk.index)) is not None:
                    self.will_change(mirror)
                answer.weights[part, chunk.index] = sender.encode(chunk.index, version, held)

    def _fetch(self, known: _Known, fragment: int) -> None:
        """Begin to read what a member was sent of this fragment, as its answer is coded soon."""
        for sender in known.senders.values():
            sender.fetch(chunk.index for chunk in self._of[fragment])

    def forget(
        self, member: str, joins: bool = False, mirrors: Collection[int] = (), answers: Collection[int] = (),
        updates: Collection[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Drop what is kept for a member. joins: its slices, and the payloads of its updates. updates: the payloads
        of these, each (fragment, sequence). answers: those of these fragments. mirrors: what it was sent of these
        fragments, so that its next weights go whole."""
        known = self._member(member)
        if self._decoded[0] == member and self._decoded[1:] in updates:
            self._drop_deltas()
        if joins:
            known.joins.clear()
            known.updates.clear()
        for fragment in mirrors:
            for sender in known.senders.values():
                sender.forget(chunk.index for chunk in self._of[fragment])
        for fragment in answers:
            known.answers.pop(fragment, None)
        for update in updates:
            known.updates.pop(update, None)

    def send_up(self, fragment: int, sequence: int, inputs: Inputs) -> None:
        """Encode the region's progress in a fragment, as its update `sequence`."""
        for chunk in self._of[fragment]:
            self._send_up(chunk, sequence, inputs)

    def merge(self, fragment: int, first: bool, inputs: Inputs) -> None:
        """Merge the received global weights of a fragment. first: they take the place of the region's own. inputs: of
        the rule, see `RegionRule.merge`."""
        for chunk in self._of[fragment]:
            self._merge(chunk, first, inputs)

    def pass_over(self, fragment: int) -> None:
        """Move nothing but the mirror by the received global weights of a fragment."""
        for chunk in self._of[fragment]:
            self._take_weights(chunk)
            self.downlink.page_out(chunk.index)

    def _take_weights(self, chunk: Chunk) -> Tensor:
        """Decode the received global weights of a chunk, and keep what was sent for validation."""
        if (mirror := self.downlink.mirror.get(chunk.index)) is not None:
            self.will_change(mirror)
        vector = self.downlink.decode(self._came.pop(chunk.index), chunk.numel)
        if self.newest is not None:
            self.newest[chunk.index] = vector.bfloat16()
        return vector

    def _send_up(self, chunk: Chunk, sequence: int, inputs: Inputs) -> None:
        """Encode the region's progress. Raises NonFiniteError, naming the parameter."""
        rule: RegionRule = self.rule  # type: ignore[assignment]
        i, v = chunk.index, self.vectors[chunk.index]
        seed = rounding_seed(self.name, 0, sequence, i)
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

        rule.progress(v, inputs, encode)

    def _merge(self, chunk: Chunk, first: bool, inputs: Inputs) -> None:
        rule: RegionRule = self.rule  # type: ignore[assignment]
        i, vector = chunk.index, self._take_weights(chunk)
        if first:
            if i in self.vectors:
                self.will_change(*self.vectors[i].all())
                self.vectors[i].x.copy_(vector)
            else:
                self.vectors[i] = Vectors(vector.clone())
            rule.begin(self.vectors[i])
        else:
            self.in_flight.pop(i)
            self.will_change(*self.vectors[i].all())
            rule.merge(self.vectors[i], vector, inputs)
        self.downlink.page_out(i)

    # -- what others get

    def fingerprints_of(self, member: str) -> dict[int, tuple[int, int]]:
        """Chunk → fingerprints of what the member holds, after and before the last weights sent. Empty where weights
        travel whole."""
        sender = self._member(member).senders.get(0)  # where they travel as changes, a member has one part
        if sender is None or not sender.changes:
            return {}
        return {i: (now, sender.before[i]) for i, now in sender.fingerprints.items()}

    def own_fingerprints(self) -> dict[int, int]:
        """Chunk → fingerprint of what the global server sent."""
        return dict(sorted(self.downlink.fingerprints.items()))

    def answer(self, member: str, part: int, fragment: int) -> tuple[ChunkWeights, ...]:
        """The weights of a frozen answer for one rank."""
        weights = self._member(member).answers[fragment].weights
        return tuple(weights[part, chunk.index] for chunk in self._of[fragment])

    def copied(self, member: str, part: int, versions: Mapping[int, int]) -> tuple[ChunkWeights, ...]:
        """Encode the elements that this part holds of the copied weights, bf16. versions: by fragment."""
        holds, codec = self._member(member).joins[part].holds, make_codec(VALIDATION_CODEC)
        coded = ((c, codec.encode(gather(self.copy[c.index], holds[c.index]))) for c in self.chunks)
        return tuple(ChunkWeights(c.index, versions[c.fragment], to_bytes(e.payload)) for c, e in coded)

    def going_up(self, update: UpdatePart) -> UpdatePart:
        """Fill in the payloads of an update to the global server that is in flight."""
        return with_payloads(update, [self.in_flight[delta.chunk] for delta in update.deltas])

    def weights(self, fragment: int) -> Tensor:
        """The fragment's weights: fp32, 1-D; not to be written."""
        chunks = [self.vectors[chunk.index].x for chunk in self._of[fragment]]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def set_mirror_store(self, mirror_store: MirrorStore) -> None:
        """Keep all mirrors in this store, from the beginning: there is no state yet."""
        self.mirror_store = self.downlink.mirror_store = mirror_store

    # -- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all tensors, by names of chunk and owner, and the names of those that a state cannot do without.
        Joins, half-arrived updates and frozen whole weights are left out: members say or ask again. Where weights
        travel as changes, what each member was sent is in it."""
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
        return tensors, {"tensors": sorted(name for name in tensors if not name.startswith(DISPENSABLE))}

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any], members: Collection[str]) -> dict[str, Any]:
        """Load tensors. Returns what members were sent, where none of that is missing: it is usable. meta: a server's
        JSON data. Raises ParameterMapError."""
        check_whole(tensors, meta)
        begun = {number for number, _ in meta["fragments"]}
        for chunk in (chunk for chunk in self.chunks if chunk.fragment in begun):
            x = tensors.get(f"chunk.{chunk.index}.x")
            if x is None or x.numel() != chunk.numel:
                raise ParameterMapError(
                    f"the state is not cut into chunks of {self.parameter_map.chunk_elements:,} elements; resume "
                    "with the outer.fragments.chunk_elements with which the run began"
                )
        sent = {
            name: saved
            for name, saved in (meta["sent"].items() if sends_changes(self.down) else ())
            if name in members and tensors.keys() >= _sent_tensors(name, saved)
        }
        fingerprints = meta["region"]["fingerprints"] if "region" in meta else {}
        for i in (chunk.index for chunk in self.chunks):
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
                sender.fingerprints[i], sender.before[i] = now, before
                sender.mirror[i] = self.mirror_store.put(tensors[f"held.{name}.{i}"])
            for fragment, sequence, frozen in saved["answers"]:
                answer = known.answers[fragment] = _Frozen(sequence)
                for i, version, increment in frozen:
                    payload = to_bytes(tensors[f"answer.{name}.{i}"])
                    answer.weights[0, i] = ChunkWeights(i, version, payload, increment)
        return sent

    # -- inside

    def _member(self, member: str) -> _Known:
        return self.members.setdefault(member, _Known())


def check_whole(tensors: Collection[str], meta: Mapping[str, Any]) -> None:
    """Raise ParameterMapError where these are not all tensors that a state cannot do without. meta: its JSON data."""
    if lacking := {*meta.get("tensors", ())} - {*tensors}:
        raise ParameterMapError(f"{len(lacking)} tensors of the state are missing, such as {min(lacking)}")


def with_payloads(update: UpdatePart, payloads: Sequence[bytes]) -> UpdatePart:
    """Replace a part's payloads, delta by delta."""
    deltas = [replace(delta, payload=payload) for delta, payload in zip(update.deltas, payloads, strict=True)]
    return replace(update, deltas=tuple(deltas))


def _sent_tensors(name: str, saved: dict[str, Any]) -> set[str]:
    """Names of the tensors of what a member was sent. saved: its entry of a server's state."""
    held = {f"held.{name}.{chunk}" for chunk, _, _ in saved["fingerprints"]}
    return held | {f"answer.{name}.{chunk}" for _, _, sent in saved["answers"] for chunk, _, _ in sent}
