"""A server's vaults, as its book sees them: in the same process (`Vaults`), or in processes of their own
(`FarVaults`). docs/servers.md has the whole picture."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from geotrain.outer.codec import Codec
from geotrain.outer.downlink import sends_changes
from geotrain.outer.messages import Answer, Elsewhere, Join, PieceWeights, Refused, UpdatePart
from geotrain.outer.mirror_store import Shelf
from geotrain.outer.rules import Rule, Vectors
from geotrain.outer.shards.old_snapshots import state_as_now
from geotrain.outer.shards.shard import Apply, Decode, Decoded, Forget, Freeze, Merge, Order, SendUp, StartOver, Vault
from geotrain.parameters.layout import Layout, LayoutError
from geotrain.parameters.pieces import deal

if TYPE_CHECKING:
    from geotrain.outer.server.member import Member


class Vaults:
    """A server's vaults in this process, which all get every order. of: piece → the vault that has it."""

    def __init__(self, vaults: Sequence[Vault]) -> None:
        self.all, self.layout = vaults, vaults[0].layout
        self.of = {piece.index: vault for vault in vaults for piece in vault.pieces}

    @staticmethod
    def here(name: str, rule: Rule, vaults: int, layout: Layout, *settings: Any) -> Vaults:
        """So many, of a server of that name. settings: as `Vault` takes them, after the rule."""
        return Vaults([Vault(name, layout, own, rule, *settings) for own in deal(layout.pieces, vaults)])

    def told(self, message: Any) -> Any:
        """What a message says to the book. Here: itself, since members speak to book and vaults at once."""
        return message

    def obey(self, order: Order) -> list[Decoded]:
        """Replies in the order of pieces and parts, which is that of one vault alone."""
        if len(self.all) == 1:
            return self.all[0].obey(order)
        replies = [reply for vault in self.all for reply in vault.obey(order)]
        return sorted(replies, key=lambda reply: (reply.piece, reply.part))

    def hear_update(self, part: UpdatePart) -> UpdatePart:
        """Returns what is left for the book: the part without its payloads."""
        self.hear(part)
        return replace(part, deltas=tuple([replace(delta, payload=b"") for delta in part.deltas]))

    def as_it_came(self, part: UpdatePart) -> UpdatePart:
        """The counterpart of `hear_update`, as long as the update is not whole."""
        came = [self.of[d.piece].arrived(part.member, part.sequence, part.part, d.piece) for d in part.deltas]
        return _with(part, came)

    def as_it_goes(self, part: UpdatePart) -> UpdatePart:
        """An update to the global server that is in flight, with its payloads."""
        return _with(part, [self.of[delta.piece].in_flight[delta.piece] for delta in part.deltas])

    def hear(self, message: Join | UpdatePart | Answer) -> list[Decoded]:
        faults = [fault for vault in self.all for fault in vault.hear(message)]
        return sorted(faults, key=lambda fault: fault.piece)

    def marks_of(self, member: str) -> dict[int, tuple[int, int]]:
        """See `Vault.marks_of`."""
        return dict(sorted(mark for vault in self.all for mark in vault.marks_of(member).items()))

    def was_sent(self, member: str) -> bool:
        """Whether changes are coded against what the member was sent."""
        return bool(self.marks_of(member))

    def settled(self, member: str) -> bool:
        """Whether `marks_of` has the marks of all that was frozen for the member."""
        return True

    def own_marks(self) -> dict[int, int]:
        """The marks of what the global server sent, by piece."""
        return dict(sorted(mark for vault in self.all for mark in vault.downlink.marks.items()))

    def answer(self, member: str, sequence: int, part: int, piece: int) -> tuple[bytes, bool]:
        return self.of[piece].answer(member, sequence, part, piece)

    def vectors(self, piece: int) -> Vectors:
        return self.of[piece].vectors[piece]

    def set_weights(self, piece: int, x: Tensor) -> None:
        self.of[piece].set_weights(piece, x)

    def copied(self, member: str, part: int, piece: int) -> bytes:
        return self.of[piece].copied(member, part, piece)

    def state(self) -> dict[str, Tensor]:
        return {name: tensor for vault in self.all for name, tensor in vault.state().items()}

    def meta(self) -> dict[str, Any]:
        """What the book's state says of them, as JSON data."""
        return {}

    def load(
        self, tensors: dict[str, Tensor], meta: dict[str, Any], layout: Layout, members: Collection[str]
    ) -> dict[str, Any]:
        """The counterpart of `state`, from a server's whole state. Returns of `meta["sent"]` what is usable: what
        has lost a tensor is not loaded. Raises LayoutError when the state is cut otherwise."""
        tensors = state_as_now(tensors)
        for piece in layout.pieces if meta["fragments"] else ():
            x = tensors.get(f"piece.{piece.index}.x")
            if x is None or x.numel() != piece.numel:
                raise LayoutError(
                    f"the state is not cut into pieces of {layout.piece_elements:,} elements; resume with the "
                    "outer.fragments.piece_elements with which the run began. Of a run from before there were pieces "
                    "and with larger fragments, begin a new one from its export"
                )
        changes = any(sends_changes(vault.down) for vault in self.all)
        sent = {
            name: saved
            for name, saved in (meta.get("sent", {}).items() if changes else ())
            if saved is not None and name in members and tensors.keys() >= sent_tensors(name, saved)
        }
        marks = meta.get("region", {}).get("marks", {})  # older snapshots have none: the next weights come whole
        for vault in self.all:
            vault.load(tensors, marks, sent)
        return sent

    def take_over(self, former: Any) -> None:
        """The server's process begins a new life; `load` follows. former: those of the life before."""

    def put_mirrors_on(self, shelf: Shelf) -> None:
        """See `Vault.put_mirrors_on`."""
        for vault in self.all:
            vault.put_mirrors_on(shelf)

    def watch(self, will_change: Callable[..., None]) -> None:
        """See `Vault.will_change`."""
        for vault in self.all:
            vault.will_change = will_change


def sent(vaults: Vaults | FarVaults, name: str, member: Member) -> dict[str, Any]:
    """What the member was sent, where weights travel as changes: its part of a server's state."""
    answers = []
    for sequence, given in member.answers.items():
        frozen = [
            [piece.index, version, vaults.answer(name, sequence, 0, piece.index)[1]]
            for fragment, version in given.items()
            for piece in vaults.layout.pieces_of[fragment]
        ]
        answers.append([sequence, sorted(member.awaiting.get(sequence, ())), frozen])
    return {"marks": [[piece, *both] for piece, both in vaults.marks_of(name).items()], "answers": answers}


def sent_tensors(name: str, saved: dict[str, Any]) -> set[str]:
    """The tensors of what a member was sent. saved: its part of a server's state."""
    held = {f"held.{name}.{piece}" for piece, _, _ in saved["marks"]}
    return held | {f"answer.{name}.{s}.{piece}" for s, _, frozen in saved["answers"] for piece, _, _ in frozen}


# -------------------------------------------------------------------------- in processes of their own


@dataclass(frozen=True)
class Measured:
    """What a vault found in the payload of one piece: its size, its sum of squares, and its fault, as `Decoded`."""

    piece: int
    size_bytes: int
    squares: float
    fault: str


@dataclass(frozen=True)
class HeldPart:
    """A part of a member's update, whose payloads the vaults hold on disk. part: without them. measured: in the order
    of its deltas."""

    part: UpdatePart
    measured: tuple[Measured, ...]


@dataclass(frozen=True)
class Checked:
    """A vault holds the global weights of a piece. mark: of its mirror, once they are merged. fault: what is wrong
    with them."""

    piece: int
    version: int
    increment: bool
    mark: int
    fault: str


@dataclass(frozen=True)
class HeldAnswer:
    """The global server's answer, whose payloads the vaults hold on disk. answer: without them."""

    answer: Answer
    checked: tuple[Checked, ...]


@dataclass(frozen=True)
class Mark:
    """Of a member's mirror of a piece, now and before its last weights."""

    piece: int
    now: int
    before: int


@dataclass(frozen=True)
class Froze:
    """A vault tells the marks of all its mirrors of a member, as they are after its first `orders` orders."""

    member: str
    vault: int
    orders: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class NewLife:
    """The server begins a new life: who had joined, and what had come and was not taken, is forgotten. An order to
    vaults that outlive their book. life: its name."""

    life: str


VaultOrder = Order | NewLife
FromVaults = HeldPart | HeldAnswer | Froze  # what the book's process says to the book in their name


def counts(order: VaultOrder | Join, changes: bool) -> bool:
    """Whether the order changes what a vault keeps for good, so that none may be missed: those are counted. All
    others concern who is there in this life of the server. changes: weights go down to members as changes."""
    match order:
        case Freeze():
            return changes
        case Forget():
            return changes and (order.mirrors or bool(order.answers))
    return isinstance(order, Apply | SendUp | Merge | StartOver)


class FarVaults:
    """What a book knows of vaults in processes of their own: what it has told them, and what they have told.

    Its orders go to `emit`, one after the other. Those that count are kept until all vaults have them on disk, and
    are the same after a replay. vaults: how many. up: codec of the region's progress. changes: see `counts`.
    """

    all: Sequence[Vault] = ()  # none is here

    def __init__(self, layout: Layout, vaults: int, up: Codec, changes: bool) -> None:
        self.layout, self.vaults, self.up, self.changes = layout, vaults, up, changes
        self.emit: Callable[[VaultOrder | Join], None] = lambda order: None
        self.orders = 0  # how many that count were given
        self.kept: deque[VaultOrder] = deque()  # the last of them
        self._begin({}, {})

    def _begin(self, sent: dict[str, Any], marks: dict[str, int]) -> None:
        self._measured: dict[tuple[str, int, int], tuple[Measured, ...]] = {}  # member, sequence, part
        self._coming: tuple[Measured, ...] = ()
        self._checked: dict[int, Checked] = {}  # by piece, until it is merged
        self._own_marks = {int(piece): mark for piece, mark in marks.items()}
        self._marks = {name: {p: (now, before) for p, now, before in saved} for name, saved in sent.items()}
        self._frozen: dict[str, int] = {}  # member → the order by which it was last sent something
        self._forgotten: dict[str, int] = {}  # member → the order by which what it was sent was last forgotten
        self._known: dict[str, dict[str, int]] = {}  # member → vault → the orders that its marks follow

    # -- orders

    def obey(self, order: Order) -> list[Decoded]:
        """As `Vaults.obey`. A decoding is not asked for: it was measured as it came."""
        match order:
            case Decode():
                parts = {at[2]: m for at, m in self._measured.items() if at[:2] == (order.member, order.sequence)}
                found = [Decoded(m.piece, part, m.squares, m.fault) for part, each in parts.items() for m in each]
                return sorted(found, key=lambda reply: (reply.piece, reply.part))
            case Forget():
                for at in [at for at in self._measured if at[0] == order.member]:
                    if order.joins or at[1] in order.updates:
                        del self._measured[at]
            case Merge():
                for piece in self.layout.pieces_of[order.fragment]:
                    if mark := self._checked.pop(piece.index).mark:
                        self._own_marks[piece.index] = mark
            case StartOver():
                self._own_marks.clear()
        self._give(order)
        if isinstance(order, Freeze) and self.changes:
            self._frozen[order.member] = self.orders
        if isinstance(order, Forget) and order.mirrors:
            self._marks.pop(order.member, None)
            self._forgotten[order.member] = self.orders
        return []

    def _give(self, order: VaultOrder | Join) -> None:
        if counts(order, self.changes):
            self.orders += 1
            self.kept.append(order)  # type: ignore[arg-type]
        self.emit(order)

    def begin_life(self, life: str) -> None:
        """All vaults are there."""
        self._give(NewLife(life))

    def since(self, orders: int) -> list[VaultOrder]:
        """The orders after so many that counted. Raises ValueError where they are not known."""
        missing = self.orders - orders
        if not 0 <= missing <= len(self.kept):
            raise ValueError(
                f"the vault has obeyed {orders} orders, its book knows those from "
                f"{self.orders - len(self.kept) + 1} to {self.orders}"
            )
        return list(self.kept)[len(self.kept) - missing :]

    def drop(self, orders: int) -> None:
        """All vaults have so many orders on disk."""
        while self.kept and self.orders - len(self.kept) < orders:
            self.kept.popleft()

    # -- messages

    def told(self, message: Any) -> Any:
        """As `Vaults.told`; None: there was nothing in it but marks."""
        match message:
            case HeldPart():
                self._coming = message.measured
                both = zip(message.part.deltas, message.measured, strict=True)
                deltas = tuple(replace(delta, payload=Elsewhere(m.size_bytes)) for delta, m in both)
                return replace(message.part, deltas=deltas)
            case HeldAnswer():
                self._checked.update({each.piece: each for each in message.checked})
                return message.answer
            case Froze():
                member = message.member
                if message.orders >= self._forgotten.get(member, 0):
                    self._marks.setdefault(member, {}).update({m.piece: (m.now, m.before) for m in message.marks})
                    self._known.setdefault(member, {})[str(message.vault)] = message.orders
                return None
            case UpdatePart() | Answer():
                raise Refused("its payloads go to this server's vaults: both ends must have the same cluster file")
        return message

    def hear_update(self, part: UpdatePart) -> UpdatePart:
        self._measured[part.member, part.sequence, part.part] = self._coming
        return bare(part)

    def as_it_came(self, part: UpdatePart) -> HeldPart:
        return HeldPart(part, self._measured[part.member, part.sequence, part.part])

    def as_it_goes(self, part: UpdatePart) -> UpdatePart:
        return _with(part, [Elsewhere(self.up.encoded_bytes(self.layout.pieces[d.piece].numel)) for d in part.deltas])

    def hear(self, message: Join | UpdatePart | Answer) -> list[Decoded]:
        if isinstance(message, Join):
            self._give(message)
        pieces = [weights.piece for weights in message.weights] if isinstance(message, Answer) else []
        told = [self._checked[piece] for piece in sorted(pieces)]
        return [Decoded(each.piece, 0, 0.0, each.fault) for each in told if each.fault]

    def marks_of(self, member: str) -> dict[int, tuple[int, int]]:
        """As they were told last: see `settled`."""
        return dict(sorted(self._marks.get(member, {}).items()))

    def was_sent(self, member: str) -> bool:
        return self._frozen.get(member, 0) > self._forgotten.get(member, 0)

    def settled(self, member: str) -> bool:
        known = self._known.get(member, {})
        return all(known.get(str(vault), 0) >= self._frozen.get(member, 0) for vault in range(self.vaults))

    def own_marks(self) -> dict[int, int]:
        return dict(sorted(self._own_marks.items()))

    def answer(self, member: str, sequence: int, part: int, piece: int) -> tuple[bytes, bool]:
        return b"", False

    def copied(self, member: str, part: int, piece: int) -> bytes:
        return b""

    def vectors(self, piece: int) -> Vectors:
        raise RuntimeError("the weights are in other processes")

    def set_weights(self, piece: int, x: Tensor) -> None:
        """A run's vaults begin with the first weights themselves."""

    # -- state

    def state(self) -> dict[str, Tensor]:
        return {}

    def meta(self) -> dict[str, Any]:
        told = {name: [[p, *both] for p, both in sorted(marks.items())] for name, marks in self._marks.items()}
        return {
            "vaults": {
                "number": self.vaults,
                "orders": self.orders,
                "marks": told,
                "frozen": dict(self._frozen),
                "forgotten": dict(self._forgotten),
                "known": {name: dict(known) for name, known in self._known.items()},
            }
        }

    def load(
        self, tensors: dict[str, Tensor], meta: dict[str, Any], layout: Layout, members: Collection[str]
    ) -> dict[str, Any]:
        """The orders that are kept stay. Raises LayoutError when the state is of another number of vaults."""
        saved = meta.get("vaults", {"number": 0})
        if saved["number"] != self.vaults:
            raise LayoutError(
                f"the state is of {saved['number'] or 'no'} vaults in processes of their own, the cluster file names "
                f"{self.vaults}; a run keeps the number with which it began"
            )
        self._begin(saved["marks"], meta.get("region", {}).get("marks", {}))
        self.orders = saved["orders"]
        self._frozen, self._forgotten = dict(saved["frozen"]), dict(saved["forgotten"])
        self._known = {name: dict(known) for name, known in saved["known"].items()}
        return {name: sent for name, sent in meta.get("sent", {}).items() if sent is not None and name in members}

    def take_over(self, former: Any) -> None:
        self.kept = former.kept

    def put_mirrors_on(self, shelf: Shelf) -> None:
        """There is no tensor here."""

    def watch(self, will_change: Callable[..., None]) -> None:
        """There is no tensor here."""


class Holdings:
    """What the vaults of a server hold, as they have said in this life of it, until its book is told."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], dict[tuple[str, int], dict[int, Measured]]] = {}
        self._weights: dict[int, tuple[HeldAnswer, Checked]] = {}  # by piece: the newest

    def take(self, held: HeldPart | HeldAnswer) -> None:
        match held:
            case HeldPart(part):
                # A rank sends the next update when this one is taken, or awaits its other ranks'.
                known = self._parts.setdefault((part.member, part.part), {})
                for life, sequence in list(known):
                    if life != part.incarnation or sequence < part.sequence - 1:
                        del known[life, sequence]
                measured = {each.piece: each for each in held.measured}
                known.setdefault((part.incarnation, part.sequence), {}).update(measured)
            case HeldAnswer():
                self._weights.update({each.piece: (held, each) for each in held.checked})

    def part(self, part: UpdatePart) -> HeldPart | None:
        """What the book is to be told of this part of an update; None: not all of it is held."""
        known = self._parts.get((part.member, part.part), {}).get((part.incarnation, part.sequence), {})
        if any(delta.piece not in known for delta in part.deltas):
            return None
        return HeldPart(bare(part), tuple(known[delta.piece] for delta in part.deltas))

    def drop(self, part: UpdatePart) -> None:
        """The book has taken it, or refused it for good."""
        self._parts.get((part.member, part.part), {}).pop((part.incarnation, part.sequence), None)

    def answer(self, wanted: Answer) -> HeldAnswer | None:
        """The same of an answer. wanted: as the global server's book gives it, without payloads."""
        weights, checked = [], []
        for each in wanted.weights:
            held, found = self._weights.get(each.piece, (None, None))
            if held is None or found is None or found.version != each.version:
                return None
            if (held.answer.sequence, held.answer.life) != (wanted.sequence, wanted.life):
                return None
            weights.append(PieceWeights(each.piece, each.version, b"", found.increment))
            checked.append(found)
        return HeldAnswer(replace(wanted, weights=tuple(weights)), tuple(checked))


def bare(part: UpdatePart) -> UpdatePart:
    """Without its payloads."""
    return _with(part, [b""] * len(part.deltas))


def _with(update: UpdatePart, payloads: Sequence[bytes]) -> UpdatePart:
    deltas = [replace(delta, payload=payload) for delta, payload in zip(update.deltas, payloads, strict=True)]
    return replace(update, deltas=tuple(deltas))
