"""What a server's processes have written down in all their lives, replayed without an interruption, and held against
each snapshot that they wrote and each state that a recovery had. Bit for bit. Pure.

A server of one process is replayed by its journal. Where vaults are processes of their own, the journals of its book
and of each vault are replayed side by side and compared by orders. Those that count have a number: each vault must
have obeyed what the book gave, all of it, in that sequence. The others must stand where the book gave them, between
two that count. What the book took from vaults (sizes, sums of squares, marks) they must have said, and the payload of
each update that it took must be in a vault's journal.
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

from geotrain.net.storage.recovery import Dismissed, Restarted, Stopped, end_lives, restarted
from geotrain.net.storage.snapshots import Snapshot
from geotrain.net.transport import wire
from geotrain.outer.messages import Join, Refused, UpdatePart
from geotrain.outer.server.server import Server
from geotrain.outer.server.shard_server import PayloadLost, VaultMachine
from geotrain.outer.shards.shard import Forget, Freeze
from geotrain.outer.shards.shards import FarVaults, Froze, HeldAnswer, HeldPart, NewLife, VaultOrder, counts

Payload = tuple[str, str, int, int, int]  # member, incarnation, sequence, part, piece
Machine = TypeVar("Machine", Server, VaultMachine)


@dataclass(frozen=True)
class Written(Generic[Machine]):
    """What one process has written in all its lives.

    build: makes its state machine, without state. begin: gives that what it has when a run begins. segments: (number,
    messages) of its journal, without a gap. snapshots: by the segment that follows each; read when they are compared.
    """

    build: Callable[[], Machine]
    begin: Callable[[Machine], None]
    segments: Iterable[tuple[int, Iterable[Any]]]
    snapshots: Mapping[int, Callable[[], Snapshot]]


class Replay(ABC, Generic[Machine]):
    """Of one process. now: its state, as if it had lived on. snapshots, recoveries: how many states were compared."""

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


class BookReplay(Replay[Server]):
    """Of a server's process, with or without vaults in it.

    applied: (member, incarnation, sequence, digest of its payloads) of each update. committed: ranges of samples
    (global server). orders: to vaults elsewhere, those that count. others: the rest, packed, and how many that count
    came before. saved_after: how many had come at each snapshot.
    payloads: digests of what the vaults have. said: what those have said, as `facts` gives it.
    """

    def __init__(
        self, written: Written[Server], payloads: Mapping[Payload, str] | None = None, said: Collection[Any] = ()
    ) -> None:
        super().__init__(written)
        self.applied: list[tuple[str, str, int, str]] = []
        self.committed: list[tuple[int, int]] = []
        self.orders: list[VaultOrder] = []
        self.others: set[tuple[int, bytes]] = set()
        self.saved_after: set[int] = set()
        self._payloads, self._said = payloads or {}, said
        self._digests: dict[tuple[str, int], str] = {}
        self._live_on(self.now)
        self.play(written)

    def _live_on(self, server: Server) -> None:
        self.now = server
        if isinstance(server.vaults, FarVaults):
            server.vaults.emit = self._give

    def _give(self, order: VaultOrder | Join) -> None:
        if counts(order, cast(FarVaults, self.now.vaults).changes):
            self.orders.append(cast(VaultOrder, order))
        else:
            self.others.add((len(self.orders), wire.pack(order)))

    def _meet(self, saved: Snapshot) -> None:
        super()._meet(saved)
        self.saved_after.add(len(self.orders))

    def _take(self, message: Any) -> None:
        shadow = self._shadow
        if isinstance(message, Restarted):
            self._recovered()
            self._live_on(restarted(self.build, self.now))
            self._shadow = None if shadow is None else restarted(self.build, shadow)
        elif isinstance(message, Stopped):
            for server in (self.now, *([] if shadow is None else [shadow])):
                end_lives(server)
        elif not isinstance(message, Dismissed):  # that changes no state
            if shadow is not None:
                _tell(shadow, message)
            self._note(message)

    def _recovered(self) -> None:
        super()._recovered()
        far = None if self._shadow is None else self._shadow.vaults
        if isinstance(far, FarVaults) and list(far.kept) != self.orders[len(self.orders) - len(far.kept) :]:
            self.mismatches.append(f"recovery {self.recoveries}: the orders that it would give again")

    def _note(self, message: Any) -> None:
        leases = getattr(self.now, "book", None)  # the global server's
        before = dict(leases.open) if leases else {}
        reply = _tell(self.now, message)
        if isinstance(message, HeldPart | HeldAnswer | Froze):
            self.mismatches += [f"no vault has said {fact}" for fact in facts(message) if fact not in self._said]
        if not isinstance(message, UpdatePart | HeldPart):
            return
        part, content = self._content(message)
        key = part.member, part.sequence
        self._digests[key] = hashlib.sha256(self._digests.get(key, "").encode() + (content or b"")).hexdigest()
        if reply and content is not None:  # else it is lost, whatever the book has
            self.applied.append((part.member, part.incarnation, part.sequence, self._digests[key]))
        if reply and leases:
            done = [before[n] for n in part.leases if n in before and n not in leases.open]
            self.committed += [(lease.start, lease.samples) for lease in done]

    def _content(self, message: UpdatePart | HeldPart) -> tuple[UpdatePart, bytes | None]:
        """The part, and its payloads or their digests; None: not all of them are in a vault's journal."""
        if isinstance(message, UpdatePart):
            return message, b"".join(bytes(delta.payload) for delta in message.deltas)
        part = message.part
        keys = [_payload(part, delta.piece) for delta in part.deltas]
        lost = [key for key in keys if key not in self._payloads]
        self.mismatches += [f"no vault has the payload {key}" for key in lost]
        return part, None if lost else "".join(self._payloads[key] for key in keys).encode()


class VaultReplay(Replay[VaultMachine]):
    """Of a vault's process. orders: those that count, as it has obeyed them. others: the rest, and how many that
    count came before. saved_after: how many had come at each snapshot. payloads: digests of what members sent. said:
    what it has said to its book, as `facts` gives it."""

    def __init__(self, written: Written[VaultMachine]) -> None:
        super().__init__(written)
        self.orders: list[VaultOrder] = []
        self.others: list[tuple[int, Join | Forget | Freeze]] = []
        self.saved_after: set[int] = set()
        self.payloads: dict[Payload, str] = {}
        self.said: set[Any] = set()
        self._stopped = False  # at an order for which it lacks a payload; what comes after is not compared any more
        self.play(written)

    def _meet(self, saved: Snapshot) -> None:
        if not self._stopped:
            super()._meet(saved)
            self.saved_after.add(self.now.orders)

    def _take(self, message: Any) -> None:
        if isinstance(message, UpdatePart):
            for delta in message.deltas:
                self.payloads[_payload(message, delta.piece)] = hashlib.sha256(delta.payload).hexdigest()
        try:
            if not self._stopped:
                self._follow(message)
        except PayloadLost as lost:
            self._stopped = True
            self.mismatches.append(f"after {self.now.orders} orders: {lost}")

    def _follow(self, message: Any) -> None:
        if isinstance(message, NewLife):  # it follows every death: the vault's own, its book's or another vault's
            self._recovered()
        if self._shadow is not None:
            with suppress(Refused):
                self._shadow.handle(message)
        if counts(message, self.now.changes):
            self.orders.append(message)
        elif isinstance(message, Forget | Freeze) or (isinstance(message, Join) and not self._has_heard(message)):
            self.others.append((self.now.orders, message))
        self.obey(message)

    def _has_heard(self, join: Join) -> bool:
        """It is said again at the beginning of a segment."""
        known = self.now.vault.members.get(join.member)
        return known is not None and known.joins.get(join.part) == join

    def obey(self, message: Any) -> None:
        with suppress(Refused):
            for send in self.now.handle(message).sends:
                self.said.update(facts(send.message))


class ServerReplay:
    """Of a server's book, and of its vaults where they are processes of their own. behind: how many orders they have
    not obeyed; they were, in the replay."""

    def __init__(self, book: Written[Server], vaults: Sequence[Written[VaultMachine]] = ()) -> None:
        self.vaults = [VaultReplay(written) for written in vaults]
        payloads = {key: digest for vault in self.vaults for key, digest in vault.payloads.items()}
        self.book = BookReplay(book, payloads, frozenset().union(*(vault.said for vault in self.vaults)))
        self.behind = sum(max(0, len(self.book.orders) - vault.now.orders) for vault in self.vaults)
        for vault in self.vaults:
            vault.mismatches += hold_together(self.book, vault)

    @property
    def mismatches(self) -> list[tuple[int | None, str]]:
        """Each with its vault; None: of the book."""
        of_vaults = [(i, text) for i, vault in enumerate(self.vaults) for text in vault.mismatches]
        return [(None, text) for text in self.book.mismatches] + of_vaults


def hold_together(book: BookReplay, vault: VaultReplay) -> list[str]:
    """What is wrong with the vault's orders. It then obeys those that it lacks."""
    for number, (obeyed, given) in enumerate(zip(vault.orders, book.orders, strict=False), 1):
        if obeyed != given:
            return [f"order {number} is {obeyed}, the book gave {given}"]
    if len(vault.orders) > len(book.orders):
        return [f"it has obeyed {len(vault.orders)} orders, the book gave {len(book.orders)}"]
    wrong = [
        f"{type(order).__name__} of {order.member} after {at} orders: the book gave it elsewhere, or never"
        for at, order in vault.others
        if (at, wire.pack(order)) not in book.others
    ]
    lacking = sorted(book.saved_after - vault.saved_after)
    wrong += [f"it has no snapshot after {orders} orders, as its book has" for orders in lacking]
    try:
        for order in book.orders[len(vault.orders) :]:
            vault.obey(order)
    except PayloadLost as lost:
        wrong.append(f"after {vault.now.orders} orders, at one that it lacked: {lost}")
    return wrong


def facts(said: Any) -> Iterator[tuple[Any, ...]]:
    """What vaults tell a book, and the book has from them, in parts that may come to it in other messages."""
    match said:
        case HeldPart(part):
            for measured in said.measured:
                yield part.member, part.incarnation, part.sequence, part.part, measured
        case HeldAnswer(answer):
            for checked in said.checked:
                yield answer.sequence, answer.life, checked
        case Froze():
            yield (said,)


def _payload(part: UpdatePart, piece: int) -> Payload:
    return part.member, part.incarnation, part.sequence, part.part, piece


def _tell(server: Server, message: Any) -> Any:
    with suppress(Refused):
        return server.handle(message).reply
    return None


def _paths(one: Any, other: Any, at: str = "") -> Iterator[str]:
    """Where two pieces of plain data differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from _paths(one.get(key), other.get(key), f"{at}.{key}" if at else key)
    elif one != other:
        sorted_too = (
            isinstance(one, list) and isinstance(other, list) and sorted(map(str, one)) == sorted(map(str, other))
        )
        yield f"{at} (in its order only)" if sorted_too else at


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """To the bit, so that −0 is not 0."""
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))
