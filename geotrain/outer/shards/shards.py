"""A server's shards, as its coordinator sees them: in the same process (`LocalShards`), or in processes of their own
(`RemoteShards`). docs/servers.md has the whole picture."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from geotrain.outer.codec import Codec
from geotrain.outer.downlink import sends_changes
from geotrain.outer.messages import Answer, ChunkWeights, Elsewhere, Join, Refused, UpdatePart
from geotrain.outer.mirror_store import MirrorStore
from geotrain.outer.rules import Rule, Vectors
from geotrain.outer.shards.old_snapshots import state_as_now
from geotrain.outer.shards.shard import (
    Apply,
    Command,
    Decode,
    Decoded,
    Forget,
    Freeze,
    Merge,
    SendUp,
    ServerShard,
    StartOver,
)
from geotrain.parameters.chunks import deal
from geotrain.parameters.parameter_map import ParameterMap, ParameterMapError

if TYPE_CHECKING:
    from geotrain.outer.server.member import Member


class LocalShards:
    """A server's shards in this process, which all get every order. of: chunk → the shard that has it."""

    def __init__(self, shards: Sequence[ServerShard]) -> None:
        self.all, self.parameter_map = shards, shards[0].parameter_map
        self.of = {chunk.index: shard for shard in shards for chunk in shard.chunks}

    @staticmethod
    def here(name: str, rule: Rule, shards: int, parameter_map: ParameterMap, *settings: Any) -> LocalShards:
        """So many, of a server of that name. settings: as `ServerShard` takes them, after the rule."""
        return LocalShards(
            [ServerShard(name, parameter_map, own, rule, *settings) for own in deal(parameter_map.chunks, shards)]
        )

    def unwrap(self, message: Any) -> Any:
        """What a message says to the coordinator. Here: itself, since members speak to coordinator and shards at
        once."""
        return message

    def execute(self, command: Command) -> list[Decoded]:
        """Replies in the order of chunks and parts, which is that of one shard alone."""
        if len(self.all) == 1:
            return self.all[0].execute(command)
        replies = [reply for shard in self.all for reply in shard.execute(command)]
        return sorted(replies, key=lambda reply: (reply.chunk, reply.part))

    def hear_update(self, part: UpdatePart) -> UpdatePart:
        """Returns what is left for the coordinator: the part without its payloads."""
        self.receive(part)
        return replace(part, deltas=tuple([replace(delta, payload=b"") for delta in part.deltas]))

    def as_it_came(self, part: UpdatePart) -> UpdatePart:
        """The counterpart of `hear_update`, as long as the update is not whole."""
        came = [self.of[d.chunk].arrived(part.member, part.sequence, part.part, d.chunk) for d in part.deltas]
        return _with(part, came)

    def as_it_goes(self, part: UpdatePart) -> UpdatePart:
        """An update to the global server that is in flight, with its payloads."""
        return _with(part, [self.of[delta.chunk].in_flight[delta.chunk] for delta in part.deltas])

    def receive(self, message: Join | UpdatePart | Answer) -> list[Decoded]:
        faults = [fault for shard in self.all for fault in shard.receive(message)]
        return sorted(faults, key=lambda fault: fault.chunk)

    def fingerprints_of(self, member: str) -> dict[int, tuple[int, int]]:
        """See `ServerShard.fingerprints_of`."""
        return dict(
            sorted(fingerprint for shard in self.all for fingerprint in shard.fingerprints_of(member).items())
        )

    def was_sent(self, member: str) -> bool:
        """Whether changes are coded against what the member was sent."""
        return bool(self.fingerprints_of(member))

    def settled(self, member: str) -> bool:
        """Whether `fingerprints_of` has the marks of all that was frozen for the member."""
        return True

    def own_fingerprints(self) -> dict[int, int]:
        """The marks of what the global server sent, by chunk."""
        return dict(sorted(fingerprint for shard in self.all for fingerprint in shard.downlink.fingerprints.items()))

    def answer(self, member: str, sequence: int, part: int, chunk: int) -> tuple[bytes, bool]:
        return self.of[chunk].answer(member, sequence, part, chunk)

    def vectors(self, chunk: int) -> Vectors:
        return self.of[chunk].vectors[chunk]

    def set_weights(self, chunk: int, x: Tensor) -> None:
        self.of[chunk].set_weights(chunk, x)

    def copied(self, member: str, part: int, chunk: int) -> bytes:
        return self.of[chunk].copied(member, part, chunk)

    def state(self) -> dict[str, Tensor]:
        return {name: tensor for shard in self.all for name, tensor in shard.state().items()}

    def meta(self) -> dict[str, Any]:
        """What the coordinator's state says of them, as JSON data."""
        return {}

    def load(
        self, tensors: dict[str, Tensor], meta: dict[str, Any], parameter_map: ParameterMap, members: Collection[str]
    ) -> dict[str, Any]:
        """The counterpart of `state`, from a server's whole state. Returns of `meta["sent"]` what is usable: what
        has lost a tensor is not loaded. Raises ParameterMapError when the state is cut otherwise."""
        tensors = state_as_now(tensors)
        for chunk in parameter_map.chunks if meta["fragments"] else ():
            x = tensors.get(f"chunk.{chunk.index}.x")
            if x is None or x.numel() != chunk.numel:
                raise ParameterMapError(
                    f"the state is not cut into chunks of {parameter_map.chunk_elements:,} elements; resume with the "
                    "outer.fragments.chunk_elements with which the run began. Of a run from before there were chunks "
                    "and with larger fragments, begin a new one from its export"
                )
        changes = any(sends_changes(shard.down) for shard in self.all)
        sent = {
            name: saved
            for name, saved in (meta.get("sent", {}).items() if changes else ())
            if saved is not None and name in members and tensors.keys() >= sent_tensors(name, saved)
        }
        # older snapshots have none: the next weights come whole
        fingerprints = meta.get("region", {}).get("fingerprints", {})
        for shard in self.all:
            shard.load(tensors, fingerprints, sent)
        return sent

    def take_over(self, former: Any) -> None:
        """The server's process begins a new incarnation; `load` follows. former: those of the incarnation before."""

    def put_mirrors_on(self, mirror_store: MirrorStore) -> None:
        """See `ServerShard.put_mirrors_on`."""
        for shard in self.all:
            shard.put_mirrors_on(mirror_store)

    def watch(self, will_change: Callable[..., None]) -> None:
        """See `ServerShard.will_change`."""
        for shard in self.all:
            shard.will_change = will_change


def sent(shards: LocalShards | RemoteShards, name: str, member: Member) -> dict[str, Any]:
    """What the member was sent, where weights travel as changes: its part of a server's state."""
    answers = []
    for sequence, given in member.answers.items():
        frozen = [
            [chunk.index, version, shards.answer(name, sequence, 0, chunk.index)[1]]
            for fragment, version in given.items()
            for chunk in shards.parameter_map.chunks_of[fragment]
        ]
        answers.append([sequence, sorted(member.awaiting.get(sequence, ())), frozen])
    return {
        "fingerprints": [[chunk, *both] for chunk, both in shards.fingerprints_of(name).items()],
        "answers": answers,
    }


def sent_tensors(name: str, saved: dict[str, Any]) -> set[str]:
    """The tensors of what a member was sent. saved: its part of a server's state."""
    held = {f"held.{name}.{chunk}" for chunk, _, _ in saved["fingerprints"]}
    return held | {f"answer.{name}.{s}.{chunk}" for s, _, frozen in saved["answers"] for chunk, _, _ in frozen}


# -------------------------------------------------------------------------- in processes of their own


@dataclass(frozen=True)
class Measured:
    """What a shard found in the payload of one chunk: its size, its sum of squares, and its fault, as `Decoded`."""

    chunk: int
    size_bytes: int
    squares: float
    fault: str


@dataclass(frozen=True)
class HeldPart:
    """A part of a member's update, whose payloads the shards hold on disk. part: without them. measured: in the order
    of its deltas."""

    part: UpdatePart
    measured: tuple[Measured, ...]


@dataclass(frozen=True)
class Checked:
    """A shard holds the global weights of a chunk. mark: of its mirror, once they are merged. fault: what is wrong
    with them."""

    chunk: int
    version: int
    increment: bool
    fingerprint: int
    fault: str


@dataclass(frozen=True)
class HeldAnswer:
    """The global server's answer, whose payloads the shards hold on disk. answer: without them."""

    answer: Answer
    checked: tuple[Checked, ...]


@dataclass(frozen=True)
class Fingerprint:
    """Of a member's mirror of a chunk, now and before its last weights."""

    chunk: int
    now: int
    before: int


@dataclass(frozen=True)
class Froze:
    """A shard tells the marks of all its mirrors of a member, as they are after its first `commands` orders."""

    member: str
    shard: int
    commands: int
    fingerprints: tuple[Fingerprint, ...]


@dataclass(frozen=True)
class NewIncarnation:
    """The server begins a new incarnation: who had joined, and what had come and was not taken, is forgotten. An
    order to shards that outlive their coordinator. incarnation: its name."""

    incarnation: str


ShardCommand = Command | NewIncarnation
FromShards = HeldPart | HeldAnswer | Froze  # what the coordinator's process says to the coordinator in their name


def counts(command: ShardCommand | Join, changes: bool) -> bool:
    """Whether the order changes what a shard keeps for good, so that none may be missed: those are counted. All
    others concern who is there in this incarnation of the server. changes: weights go down to members as changes."""
    match command:
        case Freeze():
            return changes
        case Forget():
            return changes and (command.mirrors or bool(command.answers))
    return isinstance(command, Apply | SendUp | Merge | StartOver)


class RemoteShards:
    """What a coordinator knows of shards in processes of their own: what it has told them, and what they have told.

    Its orders go to `emit`, one after the other. Those that count are kept until all shards have them on disk, and
    are the same after a replay. shards: how many. up: codec of the region's progress. changes: see `counts`.
    """

    all: Sequence[ServerShard] = ()  # none is here

    def __init__(self, parameter_map: ParameterMap, shards: int, up: Codec, changes: bool) -> None:
        self.parameter_map, self.shards, self.up, self.changes = parameter_map, shards, up, changes
        self.emit: Callable[[ShardCommand | Join], None] = lambda command: None
        self.commands = 0  # how many that count were given
        self.kept: deque[ShardCommand] = deque()  # the last of them
        self._begin({}, {})

    def _begin(self, sent: dict[str, Any], fingerprints: dict[str, int]) -> None:
        self._measured: dict[tuple[str, int, int], tuple[Measured, ...]] = {}  # member, sequence, part
        self._coming: tuple[Measured, ...] = ()
        self._checked: dict[int, Checked] = {}  # by chunk, until it is merged
        self._own_fingerprints = {int(chunk): fingerprint for chunk, fingerprint in fingerprints.items()}
        self._fingerprints = {name: {p: (now, before) for p, now, before in saved} for name, saved in sent.items()}
        self._frozen: dict[str, int] = {}  # member → the order by which it was last sent something
        self._forgotten: dict[str, int] = {}  # member → the order by which what it was sent was last forgotten
        self._known: dict[str, dict[str, int]] = {}  # member → shard → the orders that its marks follow

    # -- orders

    def execute(self, command: Command) -> list[Decoded]:
        """As `LocalShards.execute`. A decoding is not asked for: it was measured as it came."""
        match command:
            case Decode():
                parts = {at[2]: m for at, m in self._measured.items() if at[:2] == (command.member, command.sequence)}
                found = [Decoded(m.chunk, part, m.squares, m.fault) for part, each in parts.items() for m in each]
                return sorted(found, key=lambda reply: (reply.chunk, reply.part))
            case Forget():
                for at in [at for at in self._measured if at[0] == command.member]:
                    if command.joins or at[1] in command.updates:
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
            self._fingerprints.pop(command.member, None)
            self._forgotten[command.member] = self.commands
        return []

    def _give(self, command: ShardCommand | Join) -> None:
        if counts(command, self.changes):
            self.commands += 1
            self.kept.append(command)  # type: ignore[arg-type]
        self.emit(command)

    def begin_incarnation(self, incarnation: str) -> None:
        """All shards are there."""
        self._give(NewIncarnation(incarnation))

    def since(self, commands: int) -> list[ShardCommand]:
        """The orders after so many that counted. Raises ValueError where they are not known."""
        missing = self.commands - commands
        if not 0 <= missing <= len(self.kept):
            raise ValueError(
                f"the shard has obeyed {commands} orders, its coordinator knows those from "
                f"{self.commands - len(self.kept) + 1} to {self.commands}"
            )
        return list(self.kept)[len(self.kept) - missing :]

    def drop(self, commands: int) -> None:
        """All shards have so many orders on disk."""
        while self.kept and self.commands - len(self.kept) < commands:
            self.kept.popleft()

    # -- messages

    def unwrap(self, message: Any) -> Any:
        """As `LocalShards.unwrap`; None: there was nothing in it but marks."""
        match message:
            case HeldPart():
                self._coming = message.measured
                both = zip(message.part.deltas, message.measured, strict=True)
                deltas = tuple(replace(delta, payload=Elsewhere(m.size_bytes)) for delta, m in both)
                return replace(message.part, deltas=deltas)
            case HeldAnswer():
                self._checked.update({each.chunk: each for each in message.checked})
                return message.answer
            case Froze():
                member = message.member
                if message.commands >= self._forgotten.get(member, 0):
                    self._fingerprints.setdefault(member, {}).update(
                        {m.chunk: (m.now, m.before) for m in message.fingerprints}
                    )
                    self._known.setdefault(member, {})[str(message.shard)] = message.commands
                return None
            case UpdatePart() | Answer():
                raise Refused("its payloads go to this server's shards: both ends must have the same cluster file")
        return message

    def hear_update(self, part: UpdatePart) -> UpdatePart:
        self._measured[part.member, part.sequence, part.part] = self._coming
        return bare(part)

    def as_it_came(self, part: UpdatePart) -> HeldPart:
        return HeldPart(part, self._measured[part.member, part.sequence, part.part])

    def as_it_goes(self, part: UpdatePart) -> UpdatePart:
        return _with(
            part, [Elsewhere(self.up.encoded_bytes(self.parameter_map.chunks[d.chunk].numel)) for d in part.deltas]
        )

    def receive(self, message: Join | UpdatePart | Answer) -> list[Decoded]:
        if isinstance(message, Join):
            self._give(message)
        chunks = [weights.chunk for weights in message.weights] if isinstance(message, Answer) else []
        inputs = [self._checked[chunk] for chunk in sorted(chunks)]
        return [Decoded(each.chunk, 0, 0.0, each.fault) for each in inputs if each.fault]

    def fingerprints_of(self, member: str) -> dict[int, tuple[int, int]]:
        """As they were told last: see `settled`."""
        return dict(sorted(self._fingerprints.get(member, {}).items()))

    def was_sent(self, member: str) -> bool:
        return self._frozen.get(member, 0) > self._forgotten.get(member, 0)

    def settled(self, member: str) -> bool:
        known = self._known.get(member, {})
        return all(known.get(str(shard), 0) >= self._frozen.get(member, 0) for shard in range(self.shards))

    def own_fingerprints(self) -> dict[int, int]:
        return dict(sorted(self._own_fingerprints.items()))

    def answer(self, member: str, sequence: int, part: int, chunk: int) -> tuple[bytes, bool]:
        return b"", False

    def copied(self, member: str, part: int, chunk: int) -> bytes:
        return b""

    def vectors(self, chunk: int) -> Vectors:
        raise RuntimeError("the weights are in other processes")

    def set_weights(self, chunk: int, x: Tensor) -> None:
        """A run's shards begin with the first weights themselves."""

    # -- state

    def state(self) -> dict[str, Tensor]:
        return {}

    def meta(self) -> dict[str, Any]:
        inputs = {
            name: [[p, *both] for p, both in sorted(fingerprints.items())]
            for name, fingerprints in self._fingerprints.items()
        }
        return {
            "shards": {
                "number": self.shards,
                "commands": self.commands,
                "fingerprints": inputs,
                "frozen": dict(self._frozen),
                "forgotten": dict(self._forgotten),
                "known": {name: dict(known) for name, known in self._known.items()},
            }
        }

    def load(
        self, tensors: dict[str, Tensor], meta: dict[str, Any], parameter_map: ParameterMap, members: Collection[str]
    ) -> dict[str, Any]:
        """The orders that are kept stay. Raises ParameterMapError when the state is of another number of shards."""
        saved = meta.get("shards", {"number": 0})
        if saved["number"] != self.shards:
            raise ParameterMapError(
                f"the state is of {saved['number'] or 'no'} shards in processes of their own, the cluster file names "
                f"{self.shards}; a run keeps the number with which it began"
            )
        self._begin(saved["fingerprints"], meta.get("region", {}).get("fingerprints", {}))
        self.commands = saved["commands"]
        self._frozen, self._forgotten = dict(saved["frozen"]), dict(saved["forgotten"])
        self._known = {name: dict(known) for name, known in saved["known"].items()}
        return {name: sent for name, sent in meta.get("sent", {}).items() if sent is not None and name in members}

    def take_over(self, former: Any) -> None:
        self.kept = former.kept

    def put_mirrors_on(self, mirror_store: MirrorStore) -> None:
        """There is no tensor here."""

    def watch(self, will_change: Callable[..., None]) -> None:
        """There is no tensor here."""


class Holdings:
    """What the shards of a server hold, as they have said in this incarnation of it, until its coordinator is
    told."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], dict[tuple[str, int], dict[int, Measured]]] = {}
        self._weights: dict[int, tuple[HeldAnswer, Checked]] = {}  # by chunk: the newest

    def take(self, held: HeldPart | HeldAnswer) -> None:
        match held:
            case HeldPart(part):
                # A rank sends the next update when this one is taken, or awaits its other ranks'.
                known = self._parts.setdefault((part.member, part.part), {})
                for incarnation, sequence in list(known):
                    if incarnation != part.incarnation or sequence < part.sequence - 1:
                        del known[incarnation, sequence]
                measured = {each.chunk: each for each in held.measured}
                known.setdefault((part.incarnation, part.sequence), {}).update(measured)
            case HeldAnswer():
                self._weights.update({each.chunk: (held, each) for each in held.checked})

    def part(self, part: UpdatePart) -> HeldPart | None:
        """What the coordinator is to be told of this part of an update; None: not all of it is held."""
        known = self._parts.get((part.member, part.part), {}).get((part.incarnation, part.sequence), {})
        if any(delta.chunk not in known for delta in part.deltas):
            return None
        return HeldPart(bare(part), tuple(known[delta.chunk] for delta in part.deltas))

    def drop(self, part: UpdatePart) -> None:
        """The coordinator has taken it, or refused it for good."""
        self._parts.get((part.member, part.part), {}).pop((part.incarnation, part.sequence), None)

    def answer(self, wanted: Answer) -> HeldAnswer | None:
        """The same of an answer. wanted: as the global server's coordinator gives it, without payloads."""
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


def bare(part: UpdatePart) -> UpdatePart:
    """Without its payloads."""
    return _with(part, [b""] * len(part.deltas))


def _with(update: UpdatePart, payloads: Sequence[bytes]) -> UpdatePart:
    deltas = [replace(delta, payload=payload) for delta, payload in zip(update.deltas, payloads, strict=True)]
    return replace(update, deltas=tuple(deltas))
