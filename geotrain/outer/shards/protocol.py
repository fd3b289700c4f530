"""The interface between a server's coordinator and its shards: commands, reports, and what shards do.

A server is a *coordinator*, the state machine that decides (`geotrain.outer.server.server`), and shards, each of
which holds some of the model's chunks. The coordinator touches no tensor: it gives commands, plain data, which every
shard executes on its own chunks, and which cannot be refused. What a shard does with a chunk depends on no other
chunk, so the number of shards changes no bit. Slices and payloads reach a shard in its members' own messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Protocol

from torch import Tensor

from geotrain.outer.messages import Answer, ChunkWeights, Join, Message, UpdatePart
from geotrain.outer.rules.rule import Inputs
from geotrain.parameters.parameter_map import ParameterMap

# -- commands


@dataclass(frozen=True)
class Apply:
    """Let the rule apply the member's update of this fragment, which is decoded now if it was not yet.

    version: of the fragment's weights, with this update. inputs: of the rule, see `Rule.apply`. judged: digest of the
    payloads of each of its chunks that were judged (`digest_of_all`); empty where the shards are not remote.
    """

    member: str
    fragment: int
    sequence: int
    version: int
    inputs: Inputs
    judged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Freeze:
    """Encode the fragment's weights now, for all ranks of the member, as the answer to its update `sequence`.

    They must be delivered: the next change is coded against them.
    """

    member: str
    fragment: int
    sequence: int
    version: int


@dataclass(frozen=True)
class Forget:
    """Drop what is kept for a member.

    joins: its slices, and the payloads of its updates. updates: the payloads of these, each (fragment, sequence),
    which are judged, and of all before them. answers: those of these fragments. mirrors: what it was sent of these
    fragments, so that its next weights go whole.
    """

    member: str
    joins: bool = False
    mirrors: tuple[int, ...] = ()
    answers: tuple[int, ...] = ()
    updates: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class SendUp:
    """Encode the region's progress in a fragment, as its update `sequence`."""

    fragment: int
    sequence: int
    inputs: Inputs


@dataclass(frozen=True)
class Merge:
    """Merge the received global weights of this fragment. first: they take the place of the region's own. inputs: of
    the rule, see `RegionRule.merge`."""

    fragment: int
    first: bool
    inputs: Inputs


@dataclass(frozen=True)
class StartOver:
    """Drop all weights, and all that was sent to the global server or received from it."""


@dataclass(frozen=True)
class Copy:
    """Keep a copy of the newest global weights (bf16), to be evaluated while the run goes on.

    number: of the validation; 0: drop the copy.
    """

    number: int


@dataclass(frozen=True)
class NewIncarnation:
    """Begin a new incarnation of the server: forget who had joined, and what had come and was not taken.

    For shards that outlive their coordinator's process. incarnation: its name.
    """

    incarnation: str


Command = Apply | Freeze | Forget | SendUp | Merge | StartOver | Copy
ShardCommand = Command | NewIncarnation


def counts(command: ShardCommand | Join, changes: bool) -> bool:
    """Whether the command changes what a shard keeps for good: these are numbered, so that none can be missed.

    All others concern who is there in this incarnation of the server. changes: weights go down to members as changes.
    """
    match command:
        case Freeze():
            return changes
        case Forget():
            return changes and bool(command.mirrors or command.answers)
    return isinstance(command, Apply | SendUp | Merge | StartOver)


# -- reports


@dataclass(frozen=True)
class Decoded:
    """Result of decoding one rank's payload of one chunk.

    squares: sum of the squares of the values. fault: what is wrong with the payload; "" if nothing is.
    """

    chunk: int
    part: int
    squares: float
    fault: str = ""


@dataclass(frozen=True)
class Measured:
    """Size, sum of squares, fault and digest of the payload of one chunk, as a remote shard found them."""

    chunk: int
    size_bytes: int
    squares: float
    fault: str
    digest: str


@dataclass(frozen=True)
class HeldPart:
    """A part of a member's update whose payloads the remote shards have on disk.

    part: without payloads. measured: in the order of its deltas.
    """

    part: UpdatePart
    measured: tuple[Measured, ...]


@dataclass(frozen=True)
class Checked:
    """Global weights of a chunk that a remote shard has on disk.

    fingerprint: of its mirror, once they are merged. fault: what is wrong with them; "" if nothing is.
    """

    chunk: int
    version: int
    increment: bool
    fingerprint: int
    fault: str


@dataclass(frozen=True)
class HeldAnswer:
    """The global server's answer whose payloads the remote shards have on disk. answer: without payloads."""

    answer: Answer
    checked: tuple[Checked, ...]


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprints of what a member holds of one chunk, before and after the last weights sent."""

    chunk: int
    now: int
    before: int


@dataclass(frozen=True)
class Froze:
    """Fingerprints of all that a shard has sent a member, after the first `commands` commands."""

    member: str
    shard: int
    commands: int
    fingerprints: tuple[Fingerprint, ...]


FromShards = HeldPart | HeldAnswer | Froze  # reports of remote shards that the coordinator handles as messages


# -- the interface


class Shards(Protocol):
    """A server's shards, as its coordinator uses them, wherever they are."""

    parameter_map: ParameterMap

    def unwrap(self, message: Message | FromShards) -> Message | None:
        """Note what the message says to the shards' side; return what the coordinator is to handle, if anything."""

    def execute(self, command: Command) -> None:
        """Give a command to all shards."""

    def decode(self, member: str, fragment: int, sequence: int) -> list[Decoded]:
        """Decode a member's update, all of whose parts were received. Results by chunk and part. Changes no state."""

    def receive_part(self, part: UpdatePart) -> UpdatePart:
        """Receive a part of an update that the coordinator has accepted; return it without its payloads."""

    def receive(self, message: Join | Answer) -> list[Decoded]:
        """Receive slices or global weights that the coordinator has accepted. Returns the faults of the weights,
        which change nothing before they are merged."""

    def as_received(self, part: UpdatePart) -> UpdatePart | HeldPart:
        """Restore the message of a part given to `receive_part`, as long as its update is not whole."""

    def going_up(self, update: UpdatePart) -> UpdatePart:
        """Fill in the payloads, or their sizes, of an update to the global server that is in flight."""

    def answer(self, member: str, part: int, fragment: int, version: int) -> tuple[ChunkWeights, ...]:
        """Weights of a frozen answer, of this version, for one rank; without payloads where members get these from
        the shards."""

    def copied(self, member: str, part: int, versions: Sequence[int]) -> tuple[ChunkWeights, ...]:
        """Copied weights (`Copy`) for one rank, like `answer`. versions: by fragment."""

    def fingerprints_of(self, member: str) -> dict[int, tuple[int, int]]:
        """Chunk → fingerprints of what the member holds, after and before the last weights sent. Empty where weights
        travel whole. Remote shards' may lag (see `settled`)."""

    def settled(self, member: str) -> bool:
        """Whether `fingerprints_of` covers all that was frozen for the member."""

    def was_sent(self, member: str) -> bool:
        """Whether changes are coded against what the member was sent."""

    def own_fingerprints(self) -> dict[int, int]:
        """Chunk → fingerprint of what the global server sent."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON data that the server's own snapshot keeps of its shards."""

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any], members: Collection[str]) -> dict[str, Any]:
        """Load from a server's whole state. Returns what of `meta["sent"]` is usable, by member.

        Raises ParameterMapError when the state is of other chunks, or of another number of remote shards.
        """


def digest(payload: bytes) -> str:
    """Digest by which coordinator and shard know that they mean the same payload."""
    return sha256(payload).hexdigest()[:32]


def digest_of_all(digests: Iterable[str]) -> str:
    """Digest of the payloads of all ranks, in their order, of which these are the digests."""
    return digest("".join(digests).encode())


def bare(part: UpdatePart) -> UpdatePart:
    """Replace a part's payloads by empty ones."""
    return with_payloads(part, [b""] * len(part.deltas))


def with_payloads(update: UpdatePart, payloads: Sequence[bytes]) -> UpdatePart:
    """Replace a part's payloads, delta by delta."""
    deltas = [replace(delta, payload=payload) for delta, payload in zip(update.deltas, payloads, strict=True)]
    return replace(update, deltas=tuple(deltas))
