"""Replay what a server's processes have written in all incarnations, without an interruption, and hold it against
each snapshot that they wrote and each state that a recovery had. Bit for bit. Pure.

A server of one process is replayed by its journal. Where shards are processes of their own, the journals of its
coordinator and of each shard are replayed side by side and compared by commands. Those that count have a number: each
shard must have executed what the coordinator gave, all of it, in that sequence. The others must stand where the
coordinator gave them, between two that count. What the coordinator took from shards (sizes, sums of squares,
fingerprints) they must have said, and the payload of each update that it took must be in a shard's journal.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch

from geotrain.net.storage.recovery import Dismissed, Restarted, StillJoined, Stopped, end_incarnations, restarted
from geotrain.net.storage.snapshots import Snapshot
from geotrain.net.transport import wire
from geotrain.outer.messages import Join, Refused, UpdatePart
from geotrain.outer.server.server import Server
from geotrain.outer.server.shard_server import PayloadLost, ShardServer
from geotrain.outer.shards.protocol import (
    Forget,
    Freeze,
    Froze,
    HeldAnswer,
    HeldPart,
    NewIncarnation,
    ShardCommand,
    counts,
)
from geotrain.outer.shards.remote import RemoteShards

Payload = tuple[str, str, int, int, int]  # member, incarnation, sequence, part, chunk
Machine = TypeVar("Machine", Server, ShardServer)


@dataclass(frozen=True)
class Written(Generic[Machine]):
    """The record that one process has written in all its incarnations.

    build: makes its state machine, without state. begin: gives that what it has when a run begins. segments: (number,
    messages) of its journal, without a gap. snapshots: by the segment that follows each; read when they are compared.
    """

    build: Callable[[], Machine]
    begin: Callable[[Machine], None]
    segments: Iterable[tuple[int, Iterable[Any]]]
    snapshots: Mapping[int, Callable[[], Snapshot]]


class Replay(ABC, Generic[Machine]):
    """Replays the record of one process. now: its state, as if it had never ended. snapshots, recoveries: how many
    states were compared."""

    def __init__(self, written: Written[Machine]) -> None:
        self.build, self.now = written.build, written.build()
        written.begin(self.now)
        self._shadow: Machine | None = None  # what a recovery would have: the newest snapshot, then the journal
        self.snapshots = self.recoveries = 0
        self.mismatches: list[str] = []

    def play(self, written: Written[Machine]) -> None:
        for segment, messages in written.segments:
            if segment in written.snapshots:
                self._meet(written.snapshots[segment]())
            for message in messages:
                self._take(message)

    def _meet(self, saved: Snapshot) -> None:
        self.snapshots += 1
        self._compare(saved.tensors, saved.meta["state"], f"snapshot {saved.number}")
        self._shadow = self.build()
        self._shadow.load({name: t.clone() for name, t in saved.tensors.items()}, saved.meta["state"])

    @abstractmethod
    def _take(self, message: Any) -> None:
        """One message of the journal."""

    def _recovered(self) -> None:
        """At this point a recovery had what the shadow has."""
        if self._shadow is not None:
            self.recoveries += 1
            self._compare(*self._shadow.state(), f"recovery {self.recoveries}")

    def _compare(self, tensors: Mapping[str, torch.Tensor], meta: Any, what: str) -> None:
        ours, state = self.now.state()
        differing = list(_paths(*(json.loads(json.dumps(plain)) for plain in (state, meta))))
        differing += [name for name in ours.keys() | tensors.keys() if not _equal(ours.get(name), tensors.get(name))]
        if differing:
            self.mismatches.append(f"{what}: {', '.join(sorted(differing)[:5])}")


class CoordinatorReplay(Replay[Server]):
    """Replays a server's process, with or without shards in it.

    applied: (member, incarnation, sequence, digest of its payloads) of each update. committed: ranges of samples
    (global server). commands: to shards elsewhere, those that count. others: the rest, packed, and how many that
    count came before. saved_after: how many had come at each snapshot. payloads: digests of what the shards have.
    said: what those have said, as `facts` gives it.
    """

    def __init__(
        self, written: Written[Server], payloads: Mapping[Payload, str] | None = None, said: Collection[Any] = ()
    ) -> None:
        super().__init__(written)
        self.applied: list[tuple[str, str, int, int, str]] = []
        self.committed: list[tuple[int, int]] = []
        self.commands: list[ShardCommand] = []
        self.others: set[tuple[int, bytes]] = set()
        self.saved_after: set[int] = set()
        self._written = written
        self._payloads, self._said = payloads or {}, said
        self._digests: dict[tuple[str, int], str] = {}
        self._live_on(self.now)
        self.play(written)

    def _live_on(self, server: Server) -> None:
        self.now = server
        if isinstance(server.shards, RemoteShards):
            server.shards.emit = self._give

    def _give(self, command: ShardCommand | Join) -> None:
        if counts(command, cast(RemoteShards, self.now.shards).changes):
            self.commands.append(cast(ShardCommand, command))
        else:
            self.others.add((len(self.commands), wire.pack(command)))

    def _meet(self, saved: Snapshot) -> None:
        super()._meet(saved)
        self.saved_after.add(len(self.commands))
        if saved.meta.get("ended") and self._launch_after(saved) not in ("", saved.meta["launch"]):
            for server in (self.now, self._shadow):  # as `recover` does in a later launch
                assert server is not None
                server.begin_again()

    def _launch_after(self, saved: Snapshot) -> str:
        """Name the launch of the next snapshot; "" if this is the last one."""
        later = min((s for s in self._written.snapshots if s > saved.meta["segment"]), default=None)
        return "" if later is None else str(self._written.snapshots[later]().meta["launch"])

    def _take(self, message: Any) -> None:
        shadow = self._shadow
        if isinstance(message, Restarted):
            self._recovered()
            self._live_on(restarted(self.build, self.now))
            self._shadow = None if shadow is None else restarted(self.build, shadow)
        elif isinstance(message, Stopped):
            for server in (self.now, *([] if shadow is None else [shadow])):
                end_incarnations(server)
        elif isinstance(message, StillJoined):
            for server in (self.now, *([] if shadow is None else [shadow])):
                server.note_joined(message.join)
        elif not isinstance(message, Dismissed):  # that changes no state
            if shadow is not None:
                _deliver(shadow, message)
            self._note(message)

    def _recovered(self) -> None:
        super()._recovered()
        far = None if self._shadow is None else self._shadow.shards
        kept = [c for _, c in far.kept if not isinstance(c, Join)] if isinstance(far, RemoteShards) else []
        if kept != self.commands[len(self.commands) - len(kept) :]:
            self.mismatches.append(f"recovery {self.recoveries}: the commands that it would give again")

    def _note(self, message: Any) -> None:
        leases = getattr(self.now, "lease_table", None)  # the global server's
        before = {**leases.returned, **leases.open} if leases else {}
        reply = _deliver(self.now, message)
        if isinstance(message, HeldPart | HeldAnswer | Froze):
            self.mismatches += [f"no shard has said {fact}" for fact in facts(message) if fact not in self._said]
        if not isinstance(message, UpdatePart | HeldPart):
            return
        part, content = self._content(message)
        key = part.member, part.fragment, part.sequence
        self._digests[key] = hashlib.sha256(self._digests.get(key, "").encode() + (content or b"")).hexdigest()
        if reply and content is not None:  # else it is lost, whatever the coordinator has
            self.applied.append((part.member, part.incarnation, part.fragment, part.sequence, self._digests[key]))
        if reply and leases:
            done = [before[n] for n in part.contains if n in before and n not in {**leases.returned, **leases.open}]
            self.committed += [(lease.start, lease.samples) for lease in done]

    def _content(self, message: UpdatePart | HeldPart) -> tuple[UpdatePart, bytes | None]:
        """The part, and its payloads or their digests; None: not all of them are in a shard's journal."""
        if isinstance(message, UpdatePart):
            return message, b"".join(bytes(delta.payload) for delta in message.deltas)
        part = message.part
        keys = [_payload(part, delta.chunk) for delta in part.deltas]
        lost = [key for key in keys if key not in self._payloads]
        self.mismatches += [f"no shard has the payload {key}" for key in lost]
        return part, None if lost else "".join(self._payloads[key] for key in keys).encode()


class ShardReplay(Replay[ShardServer]):
    """Replays a shard's process. commands: those that count, as it has executed them. others: the rest, and how many
    that count came before. saved_after: how many had come at each snapshot. payloads: digests of what members sent.
    said: what it has said to its coordinator, as `facts` gives it."""

    def __init__(self, written: Written[ShardServer]) -> None:
        super().__init__(written)
        self.commands: list[ShardCommand] = []
        self.others: list[tuple[int, Join | Forget | Freeze]] = []
        self.saved_after: set[int] = set()
        self._written = written
        self.payloads: dict[Payload, str] = {}
        self.said: set[Any] = set()
        self._stopped = False  # at a command for which it lacks a payload; what comes after is not compared any more
        self.play(written)

    def _meet(self, saved: Snapshot) -> None:
        if not self._stopped:
            super()._meet(saved)
            self.saved_after.add(self.now.commands)

    def _take(self, message: Any) -> None:
        if isinstance(message, UpdatePart):
            for delta in message.deltas:
                self.payloads[_payload(message, delta.chunk)] = hashlib.sha256(delta.payload).hexdigest()
        try:
            if not self._stopped:
                self._follow(message)
        except PayloadLost as lost:
            self._stopped = True
            self.mismatches.append(f"after {self.now.commands} commands: {lost}")

    def _follow(self, message: Any) -> None:
        # it follows every death: the shard's own, its coordinator's or another shard's
        if isinstance(message, NewIncarnation):
            self._recovered()
        if self._shadow is not None:
            with suppress(Refused):
                self._shadow.handle(message)
        if counts(message, self.now.changes):
            self.commands.append(message)
        elif isinstance(message, Forget | Freeze) or (isinstance(message, Join) and not self._has_received(message)):
            self.others.append((self.now.commands, message))
        self.execute(message)

    def _has_received(self, join: Join) -> bool:
        """Whether it was received before: it is repeated at the beginning of a segment."""
        known = self.now.shard.members.get(join.member)
        return known is not None and known.joins.get(join.part) == join

    def execute(self, message: Any) -> None:
        with suppress(Refused):
            for send in self.now.handle(message).sends:
                self.said.update(facts(send.message))


class ServerReplay:
    """Replays a server's coordinator, and its shards where they are processes of their own. behind: number of
    commands that they had not executed; the replay did."""

    def __init__(self, coordinator: Written[Server], shards: Sequence[Written[ShardServer]] = ()) -> None:
        self.shards = [ShardReplay(written) for written in shards]
        payloads = {key: digest for shard in self.shards for key, digest in shard.payloads.items()}
        self.coordinator = CoordinatorReplay(
            coordinator, payloads, frozenset().union(*(shard.said for shard in self.shards))
        )
        self.behind = sum(max(0, len(self.coordinator.commands) - shard.now.commands) for shard in self.shards)
        for shard in self.shards:
            shard.mismatches += hold_together(self.coordinator, shard)

    @property
    def mismatches(self) -> list[tuple[int | None, str]]:
        """Each with its shard; None: of the coordinator."""
        of_shards = [(i, text) for i, shard in enumerate(self.shards) for text in shard.mismatches]
        return [(None, text) for text in self.coordinator.mismatches] + of_shards


def hold_together(coordinator: CoordinatorReplay, shard: ShardReplay) -> list[str]:
    """List what is wrong with the shard's commands. It then executes those that it lacks."""
    for number, (executed, given) in enumerate(zip(shard.commands, coordinator.commands, strict=False), 1):
        if executed != given:
            return [f"command {number} is {executed}, the coordinator gave {given}"]
    done, all_given = len(shard.commands), len(coordinator.commands)
    if done > all_given:
        return [f"it has executed {done} commands, the coordinator gave {all_given}"]
    wrong = [
        f"{type(command).__name__} of {command.member} after {at} commands: the coordinator gave it at no such place"
        for at, command in shard.others
        if (at, wire.pack(command)) not in coordinator.others
    ]
    lacking = sorted(coordinator.saved_after - shard.saved_after)
    wrong += [f"it has no snapshot after {commands} commands, as its coordinator has" for commands in lacking]
    try:
        for command in coordinator.commands[len(shard.commands) :]:
            shard.execute(command)
    except PayloadLost as lost:
        wrong.append(f"after {shard.now.commands} commands, at one that it lacked: {lost}")
    return wrong


def facts(said: Any) -> Iterator[tuple[Any, ...]]:
    """Facts that shards tell a coordinator, and the coordinator has from them, in parts that may come to it in other
    messages."""
    match said:
        case HeldPart(part):
            for measured in said.measured:
                yield part.member, part.incarnation, part.fragment, part.sequence, part.part, measured
        case HeldAnswer(answer):
            for checked in said.checked:
                yield answer.fragment, answer.sequence, answer.incarnation, checked
        case Froze():
            yield (said,)


def _payload(part: UpdatePart, chunk: int) -> Payload:
    return part.member, part.incarnation, part.sequence, part.part, chunk


def _deliver(server: Server, message: Any) -> Any:
    with suppress(Refused):
        return server.handle(message).reply
    return None


def _paths(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Paths at which two pieces of plain data differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from _paths(one.get(key), other.get(key), f"{at}.{key}" if at else key)
    elif one != other:
        sorted_too = (
            isinstance(one, list) and isinstance(other, list) and sorted(map(str, one)) == sorted(map(str, other))
        )
        yield f"{at} (in its order only)" if sorted_too else at


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors are equal to the bit, so that −0 is not 0."""
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))
