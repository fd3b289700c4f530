"""A vault in a process of its own: a state machine around `geotrain.outer.shards.shard.Vault`. Pure logic.

It is told its book's orders, and payloads by members and by the global server's vaults. Whoever runs it keeps all of
them in a journal, in the order in which they were handled, and lets what it says (`Handled.sends`) leave when they
are on disk. To members it looks like their server, but knows payloads only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor

from geotrain.outer.downlink import mark, sends_changes
from geotrain.outer.messages import Answer, Join, PieceDelta, PieceWeights, Refused, Send, UpdatePart
from geotrain.outer.server.member import Member
from geotrain.outer.server.server import Handled
from geotrain.outer.shards.shard import Apply, Copy, Forget, Freeze, Merge, SendUp, StartOver, Vault
from geotrain.outer.shards.shards import (
    Checked,
    Froze,
    HeldAnswer,
    HeldPart,
    Mark,
    Measured,
    NewLife,
    Vaults,
    bare,
    counts,
)
from geotrain.parameters.layout import LayoutError, numel

BOOK = "book"  # to whom it speaks
RETRY_S = 0.2
MOST_HELD = 2  # updates of a rank: one that waits for the other ranks', and the next


class PayloadLost(RuntimeError):
    """An order speaks of what is not here: this vault's disk was lost, or brought back from another time."""


class VaultMachine:
    """index, vaults: which of how many it is. Its state says so, too.

    orders: how many it has obeyed that count. incarnation: the life of the server that it is, or was last, part of.
    open: whether that lasts; members are not spoken to before.
    """

    def __init__(
        self, vault: Vault, index: int, vaults: int, members: tuple[str, ...], role: Literal["region", "worker"]
    ) -> None:
        self.name, self.vault, self.index, self.number, self.member_role = vault.name, vault, index, vaults, role
        self.vaults, self.layout, self.up = Vaults([vault]), vault.layout, vault.up
        self.changes = sends_changes(vault.down)
        self.members = {name: Member() for name in members}
        self.orders = 0
        self.incarnation, self.open = "", False
        self.copied = 0  # number of the validation whose weights are copied
        self.pieces = {piece.index: piece for piece in vault.pieces}
        self._of = [[p.index for p in pieces if p.index in self.pieces] for pieces in self.layout.pieces_of]

    # -- what changes it

    def handle(self, message: Any) -> Handled:
        """Process an order, or payloads. Raises PayloadLost for an order; for payloads Refused, then nothing has
        changed."""
        match message:
            case UpdatePart():
                if not self.admit(message):
                    return Handled(None)
                self.vault.hear(message)
                return self._say(self._held(message))
            case Answer():
                return self._say(self._checked(message))
            case Join():
                member = self.members[message.member]
                if member.incarnation != message.incarnation:
                    member.joined.clear()
                    member.incarnation = message.incarnation
                member.parts, member.joined[message.part] = message.parts, message
                self.vault.hear(message)
            case NewLife():
                self._begin_life(message.life)
                return self._say(*[self._froze(name) for name in self.members if self.vault.marks_of(name)])
            case Apply() | Freeze() | Forget() | SendUp() | Merge() | StartOver() | Copy():
                try:
                    self.vault.obey(message)
                except KeyError as error:
                    raise PayloadLost(
                        f"vault {self.index} of {self.name!r} has not what {type(message).__name__} needs: its disk "
                        "was lost, or brought back from another time; docs/servers.md says what to do"
                    ) from error
                self.orders += counts(message, self.changes)
                if isinstance(message, Freeze) and self.changes:
                    return self._say(self._froze(message.member))
                if isinstance(message, Forget):
                    self._forget(message)
                if isinstance(message, Copy):
                    self.copied = message.number
            case _:
                raise Refused(f"a {type(message).__name__} means nothing to a vault")
        return Handled(None)

    take = handle  # see `Server.take`

    def go_on(self) -> Handled:
        """Nothing is left: each order is one message."""
        return Handled(None)

    def end_life(self) -> None:
        """The book is gone, or this process was: members are not spoken to before the next life."""
        self.open = False

    def _begin_life(self, life: str) -> None:
        self.incarnation, self.open, self.copied = life, True, 0
        self.vault.obey(Copy(0))
        for name, member in self.members.items():
            self.vault.forget_life(name, answers=not self.changes)
            member.joined.clear()
            member.incarnation, member.parts, member.sequence = "", 0, 0

    def _forget(self, order: Forget) -> None:
        """The book has judged the member's updates up to the one that it names."""
        member = self.members[order.member]
        if order.joins:
            member.joined.clear()
        if order.updates:
            member.sequence = max(order.updates)
            held = self.vault.members[order.member].updates
            for sequence in [sequence for sequence in held if sequence <= member.sequence]:
                del held[sequence]

    # -- what it says to its book

    def _say(self, *messages: HeldPart | HeldAnswer | Froze) -> Handled:
        return Handled(None, tuple(Send(BOOK, message) for message in messages))  # type: ignore[arg-type]

    def _held(self, part: UpdatePart) -> HeldPart:
        squares = {each.piece: each for each in self.vault.measure(part.member, part.sequence, part.part)}
        measured = [
            Measured(d.piece, len(d.payload), squares[d.piece].squares, squares[d.piece].fault) for d in part.deltas
        ]
        return HeldPart(bare(part), tuple(measured))

    def _checked(self, answer: Answer) -> HeldAnswer:
        faults = {each.piece: each.fault for each in self.vault.hear(answer)}
        checked, marks = [], self.vault.downlink.marks
        for w in answer.weights:
            after = mark(w, marks.get(w.piece, 0) if w.increment else 0) if self.vault.downlink.changes else 0
            checked.append(Checked(w.piece, w.version, w.increment, after, faults.get(w.piece, "")))
        weights = tuple(PieceWeights(w.piece, w.version, b"", w.increment) for w in answer.weights)
        return HeldAnswer(Answer(answer.sequence, weights, answer.life), tuple(checked))

    def _froze(self, member: str) -> Froze:
        marks = tuple(Mark(piece, *both) for piece, both in sorted(self.vault.marks_of(member).items()))
        return Froze(member, self.index, self.orders, marks)

    # -- what members ask

    def current(self, name: str, incarnation: str, part: int | None = None) -> Member:
        """The member, if this life of it has joined the book and the vault has heard of it. Raises Refused, always to
        be repeated: whether somebody may be here is for the book to say, and it is asked as well."""
        member = self.members.get(name)
        if member is None:
            raise Refused(f"no member is called {name!r} here; known: {', '.join(self.members)}")
        if not self.open or member.incarnation != incarnation or part not in (None, *member.joined):
            raise Refused(f"{name}: this vault has not heard that it joined", RETRY_S)
        return member

    def admit(self, part: UpdatePart) -> bool:
        """Whether these payloads are wanted; False: they are here, or were judged before. Reads their sizes only.
        Raises Refused."""
        member = self.current(part.member, part.incarnation, part.part)
        if part.sequence <= member.sequence:
            return False
        pieces = [delta.piece for delta in part.deltas]
        fragments = {self.layout.pieces[i].fragment for i in pieces if i in self.pieces}
        if pieces != [i for fragment, own in enumerate(self._of) if fragment in fragments for i in own]:
            raise Refused(f"{part.member}: pieces {pieces} are not what this vault has of a fragment")
        for delta in part.deltas:
            wanted = self.up.encoded_bytes(numel(member.joined[part.part].pushes[delta.piece]))
            if len(delta.payload) != wanted:
                where = f"{part.member}, part {part.part}: {self.layout.called(delta.piece)}"
                raise Refused(f"{where} has {len(delta.payload)} bytes, its slices need {wanted}")
        known = self.vault.members[part.member].updates
        held = {sequence for sequence, payloads in known.items() if any(p == part.part for p, _ in payloads)}
        if len(held - {part.sequence}) >= MOST_HELD:
            raise Refused(f"{part.member}: updates {sorted(held)} of this rank wait to be taken", RETRY_S)
        return not all((part.part, i) in known.get(part.sequence, {}) for i in pieces)

    def lacks_answer(self, name: str, life: str, part: int, sequence: int, fragments: tuple[int, ...]) -> bool:
        """That it is wanted, the book is told."""
        self.current(name, life, part)
        return False

    def answer(self, name: str, life: str, part: int, sequence: int, fragments: tuple[int, ...]) -> Answer | None:
        """The vault's pieces of an answer, once all of them are frozen."""
        self.current(name, life, part)
        answer = self.vault.members[name].answers.get(sequence, {})
        wanted = [i for f in sorted(set(fragments)) if f < len(self._of) for i in self._of[f]]
        if any((part, i) not in answer for i in wanted):
            return None
        return Answer(sequence, tuple(answer[part, i] for i in wanted), self.incarnation)

    def weights_to_validate(self, name: str, incarnation: str, part: int, number: int) -> Answer:
        """The vault's pieces of what validation `number` is to evaluate; empty when they are not here (any more)."""
        self.current(name, incarnation, part)
        weights = [
            PieceWeights(i, 0, self.vault.copied(name, part, i))
            for i in (self.pieces if number == self.copied else ())
        ]
        return Answer(number, tuple(weights), self.incarnation)

    def going_up(self, update: UpdatePart) -> UpdatePart:
        """The vault's part of an update that is in flight to the global server."""
        own = [d for d in update.deltas if d.piece in self.pieces]
        deltas = tuple(PieceDelta(d.piece, d.anchor_version, self.vault.in_flight[d.piece]) for d in own)
        return UpdatePart(update.member, update.incarnation, update.sequence, update.part, deltas)

    # -- state

    def left_out(self) -> Iterator[Any]:
        """What a journal that follows the state must begin with: members' slices, what came and is not taken yet."""
        for name, known in self.vault.members.items():
            yield from known.joins.values()
            for sequence, payloads in known.updates.items():
                for part in sorted({part for part, _ in payloads}):
                    deltas = [PieceDelta(i, 0, payload) for (p, i), payload in sorted(payloads.items()) if p == part]
                    yield UpdatePart(name, known.joins[part].incarnation, sequence, part, tuple(deltas))
        yield from self.vault.heard()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON data)."""
        return self.vault.state(), {
            "layout_digest": self.layout.digest,
            "vault": [self.index, self.number],
            "orders": self.orders,
            "life": self.incarnation,
            "marks": {str(piece): mark for piece, mark in self.vault.downlink.marks.items()},
            "sent": self.vault.sent(),
        }

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """The counterpart of `state`, for a replay, which `end_life` ends. Raises LayoutError."""
        if meta["layout_digest"] != self.layout.digest:
            raise LayoutError(f"the state is of layout {meta['layout_digest']}, the run's is {self.layout.digest}")
        if meta["vault"] != [self.index, self.number]:
            index, number = meta["vault"]
            raise LayoutError(
                f"the state is that of vault {index} of {number}, this is {self.index} of {self.number}; a run keeps "
                "the number of vaults with which it began"
            )
        self.orders, self.incarnation, self.open = meta["orders"], meta["life"], True
        self.vault.load(tensors, meta["marks"], meta["sent"])

    def status(self) -> dict[str, Any]:
        """Plain data for people and tests."""
        return {"vault": self.index, "of": self.number, "orders": self.orders, "pieces": len(self.pieces)}
