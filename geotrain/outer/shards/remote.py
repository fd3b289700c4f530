"""A server's shards in processes of their own. docs/servers.md has the whole picture."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from geotrain.outer.codec import Codec
from geotrain.outer.messages import Answer, ChunkWeights, Elsewhere, Join, Message, Refused, UpdatePart
from geotrain.outer.shards.protocol import (
    Apply,
    Checked,
    Command,
    Decoded,
    Forget,
    Freeze,
    FromShards,
    Froze,
    HeldAnswer,
    HeldPart,
    Measured,
    Merge,
    NewIncarnation,
    ShardCommand,
    Shards,
    StartOver,
    bare,
    counts,
    digest_of_all,
    with_payloads,
)
from geotrain.parameters.parameter_map import ParameterMap, ParameterMapError


class RemoteShards(Shards):
    """A coordinator's record of its remote shards: the commands given to them, and what they have reported.

    Commands go to `emit`, in order. Those that count are kept until all shards have them on disk, and are the same
    after a replay; so are the joins between them, where a `Freeze` that is given again needs their slices.
    shards: how many. up: codec of the region's progress. changes: see `counts`.
    """

    def __init__(self, parameter_map: ParameterMap, shards: int, up: Codec, changes: bool) -> None:
        self.parameter_map, self.shards, self.up, self.changes = parameter_map, shards, up, changes
        self.emit: Callable[[ShardCommand | Join], None] = lambda command: None
        self.commands = 0  # how many that count were given
        # the last of them, each with its number, and joins with that of the command before
        self.kept: deque[tuple[int, ShardCommand | Join]] = deque()
        self._begin({}, {})

    def _begin(self, sent: dict[str, Any], fingerprints: dict[str, int]) -> None:
        # member, fragment, sequence, part
        self._measured: dict[tuple[str, int, int, int], tuple[Measured, ...]] = {}
        self._coming: tuple[Measured, ...] = ()
        self._checked: dict[int, Checked] = {}  # by chunk, until it is merged
        self._own_fingerprints = {int(chunk): fingerprint for chunk, fingerprint in fingerprints.items()}
        self._fingerprints = {name: {p: (now, before) for p, now, before in saved} for name, saved in sent.items()}
        self._frozen: dict[str, int] = {}  # member → number of the command by which it was last sent something
        self._forgotten: dict[str, int] = {}  # member → number of that by which what it was sent was last forgotten
        self._known: dict[str, dict[str, int]] = {}  # member → shard → number of the command its fingerprints follow

    # -- commands

    def execute(self, command: Command) -> None:
        match command:
            case Apply():
                command = replace(command, judged=self._judged(command))
            case Forget():
                for at in [at for at in self._measured if at[0] == command.member]:
                    if command.joins or at[1:3] in command.updates:
                        del self._measured[at]
            case Merge():
                for chunk in self.parameter_map.chunks_of[command.fragment]:
                    if fingerprint := self._checked.pop(chunk.index).fingerprint:
                        self._own_fingerprints[chunk.index] = fingerprint
            case StartOver():
                self._own_fingerprints.clear()
        self._give(command)
        if isinstance(command, Freeze) and self.changes:
            self._frozen[command.member] = self.commands
        if isinstance(command, Forget) and command.mirrors:
            known = self._fingerprints.get(command.member, {})
            for fragment in command.mirrors:
                for number in self.parameter_map.chunk_numbers[fragment]:
                    known.pop(number, None)
            self._forgotten[command.member] = self.commands

    def _judged(self, command: Apply) -> tuple[str, ...]:
        of = command.member, command.fragment, command.sequence
        parts = [{m.chunk: m.digest for m in each} for at, each in sorted(self._measured.items()) if at[:3] == of]
        chunks = self.parameter_map.chunks_of[command.fragment]
        return tuple(digest_of_all(part[chunk.index] for part in parts) for chunk in chunks)

    def _give(self, command: ShardCommand | Join) -> None:
        if counts(command, self.changes):
            self.commands += 1
            self.kept.append((self.commands, command))
        elif isinstance(command, Join) and self.changes:
            at = self.commands, command.member, command.part
            older = [e for e in self.kept if isinstance(e[1], Join) and (e[0], e[1].member, e[1].part) == at]
            for each in older:
                self.kept.remove(each)
            self.kept.append((self.commands, command))
        self.emit(command)

    def begin_incarnation(self, incarnation: str) -> None:
        """Begin an incarnation of the server, once all shards are there."""
        self._give(NewIncarnation(incarnation))

    def since(self, commands: int) -> list[ShardCommand | Join]:
        """The commands after the first `commands` that count, with the joins between them. Raises ValueError where
        they are not known."""
        known = self.commands - sum(not isinstance(command, Join) for _, command in self.kept)
        if not known <= commands <= self.commands:
            raise ValueError(
                f"the shard has executed {commands} commands, its coordinator knows those from "
                f"{known + 1} to {self.commands}"
            )
        # A join that followed the shard's last command may have been lost with its disk's last messages.
        return [each for number, each in self.kept if number > commands - isinstance(each, Join)]

    def drop(self, commands: int) -> None:
        """Drop the first `commands` commands, which all shards have on disk."""
        while self.kept and self.kept[0][0] <= commands - isinstance(self.kept[0][1], Join):
            self.kept.popleft()

    # -- messages

    def unwrap(self, message: Message | FromShards) -> Message | None:
        """Unwrap a message from remote shards. Returns None if it carried only fingerprints."""
        match message:
            case HeldPart():
                self._coming = message.measured
                return with_payloads(message.part, [Elsewhere(m.size_bytes) for m in message.measured])
            case HeldAnswer():
                self._checked.update({each.chunk: each for each in message.checked})
                return message.answer
            case Froze():
                member = message.member
                if message.commands >= self._forgotten.get(member, 0):
                    reported = {each.chunk: (each.now, each.before) for each in message.fingerprints}
                    self._fingerprints.setdefault(member, {}).update(reported)
                    self._known.setdefault(member, {})[str(message.shard)] = message.commands
                return None
            case UpdatePart() | Answer():
                raise Refused("its payloads go to this server's shards: both ends must have the same cluster file")
        return message

    def decode(self, member: str, fragment: int, sequence: int) -> list[Decoded]:
        """Look up what the shards measured when the payloads came to them."""
        update = member, fragment, sequence
        parts = {at[3]: measured for at, measured in self._measured.items() if at[:3] == update}
        found = [Decoded(m.chunk, part, m.squares, m.fault) for part, each in parts.items() for m in each]
        return sorted(found, key=lambda each: (each.chunk, each.part))

    def receive_part(self, part: UpdatePart) -> UpdatePart:
        self._measured[part.member, part.fragment, part.sequence, part.part] = self._coming
        return bare(part)

    def receive(self, message: Join | Answer) -> list[Decoded]:
        if isinstance(message, Join):
            self._give(message)
            return []
        checked = [self._checked[chunk] for chunk in sorted(weights.chunk for weights in message.weights)]
        return [Decoded(each.chunk, 0, 0.0, each.fault) for each in checked if each.fault]

    def as_received(self, part: UpdatePart) -> HeldPart:
        return HeldPart(part, self._measured[part.member, part.fragment, part.sequence, part.part])

    def going_up(self, update: UpdatePart) -> UpdatePart:
        sizes = [self.up.encoded_bytes(self.parameter_map.chunks[d.chunk].numel) for d in update.deltas]
        return with_payloads(update, [Elsewhere(size) for size in sizes])

    def answer(self, member: str, part: int, fragment: int, version: int) -> tuple[ChunkWeights, ...]:
        return self._headers({fragment: version})

    def copied(self, member: str, part: int, versions: Sequence[int]) -> tuple[ChunkWeights, ...]:
        return self._headers(dict(enumerate(versions)))

    def _headers(self, versions: Mapping[int, int]) -> tuple[ChunkWeights, ...]:
        """Weights without payloads: they say which versions a member is to get from the shards."""
        chunks_of = self.parameter_map.chunks_of
        return tuple(ChunkWeights(chunk.index, v, b"") for f, v in versions.items() for chunk in chunks_of[f])

    def fingerprints_of(self, member: str) -> dict[int, tuple[int, int]]:
        return dict(sorted(self._fingerprints.get(member, {}).items()))

    def settled(self, member: str) -> bool:
        known = self._known.get(member, {})
        return all(known.get(str(shard), 0) >= self._frozen.get(member, 0) for shard in range(self.shards))

    def was_sent(self, member: str) -> bool:
        return self._frozen.get(member, 0) > self._forgotten.get(member, 0)

    def own_fingerprints(self) -> dict[int, int]:
        return dict(sorted(self._own_fingerprints.items()))

    # -- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return no tensor, since the shards write snapshots of their own, and the number of their commands."""
        fingerprints = {
            name: [[chunk, *both] for chunk, both in sorted(known.items())]
            for name, known in self._fingerprints.items()
        }
        return {}, {
            "shards": {
                "number": self.shards,
                "commands": self.commands,
                "fingerprints": fingerprints,
                "frozen": dict(self._frozen),
                "forgotten": dict(self._forgotten),
                "known": {name: dict(known) for name, known in self._known.items()},
            }
        }

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any], members: Collection[str]) -> dict[str, Any]:
        """Load all but the commands that are kept, which stay. Raises ParameterMapError."""
        saved = meta.get("shards", {"number": 0})
        if saved["number"] != self.shards:
            raise ParameterMapError(
                f"the state is of {saved['number'] or 'no'} shards in processes of their own, the cluster file names "
                f"{self.shards}; a run keeps the number with which it began"
            )
        self._begin(saved["fingerprints"], meta["region"]["fingerprints"] if "region" in meta else {})
        self.commands = saved["commands"]
        self._frozen, self._forgotten = dict(saved["frozen"]), dict(saved["forgotten"])
        self._known = {name: dict(known) for name, known in saved["known"].items()}
        return {name: sent for name, sent in meta["sent"].items() if name in members}


class Holdings:
    """Reports of the remote shards in this incarnation, until the coordinator handles them."""

    def __init__(self) -> None:
        # (member, part, fragment) → (incarnation, sequence) → chunk → what was measured
        self._parts: dict[tuple[str, int, int], dict[tuple[str, int], dict[int, Measured]]] = {}
        self._weights: dict[int, tuple[HeldAnswer, Checked]] = {}  # by chunk: the newest

    def take(self, held: HeldPart | HeldAnswer) -> None:
        """Note one shard's report."""
        match held:
            case HeldPart(part):
                # A rank sends the next update when this one is taken, or awaits its other ranks'.
                known = self._parts.setdefault((part.member, part.part, part.fragment), {})
                for incarnation, sequence in list(known):
                    if incarnation != part.incarnation or sequence < part.sequence - 1:
                        del known[incarnation, sequence]
                measured = {each.chunk: each for each in held.measured}
                known.setdefault((part.incarnation, part.sequence), {}).update(measured)
            case HeldAnswer():
                self._weights.update({each.chunk: (held, each) for each in held.checked})

    def part(self, part: UpdatePart) -> HeldPart | None:
        """The message for the coordinator once the shards hold all of this part of an update; None before."""
        of_rank = self._parts.get((part.member, part.part, part.fragment), {})
        known = of_rank.get((part.incarnation, part.sequence), {})
        if any(delta.chunk not in known for delta in part.deltas):
            return None
        return HeldPart(bare(part), tuple(known[delta.chunk] for delta in part.deltas))

    def drop_weights(self) -> None:
        """Drop what is known of answers, as the region starts over: it gets the same weights again, perhaps."""
        self._weights.clear()

    def drop(self, part: UpdatePart) -> None:
        """Drop a part that the coordinator has taken, or refused for good."""
        self._parts.get((part.member, part.part, part.fragment), {}).pop((part.incarnation, part.sequence), None)

    def answer(self, wanted: Answer) -> HeldAnswer | None:
        """The message for the coordinator once the shards hold all of this answer; None before.

        wanted: as the global server's coordinator gives it, without payloads.
        """
        weights, checked = [], []
        for each in wanted.weights:
            held, found = self._weights.get(each.chunk, (None, None))
            if held is None or found is None or found.version != each.version:
                return None
            if (held.answer.sequence, held.answer.incarnation) != (wanted.sequence, wanted.incarnation):
                return None
            weights.append(ChunkWeights(each.chunk, each.version, b"", found.increment))
            checked.append(found)
        return HeldAnswer(replace(wanted, weights=tuple(weights)), tuple(checked))
