"""A shard in a process of its own: a state machine around `geotrain.outer.shards.shard.ServerShard`. Pure logic.

It receives commands from its coordinator, and payloads from members and from the global server's shards. Whoever runs
it keeps all of them in a journal, in the order in which they were handled, and lets its reports (`Handled.sends`)
leave when they are on disk. To members it looks like their server, but knows payloads only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from geotrain.outer.downlink import fingerprint, sends_changes
from geotrain.outer.messages import Answer, ChunkDelta, ChunkWeights, Join, Refused, Send, UpdatePart, update_id
from geotrain.outer.server.member import Member
from geotrain.outer.server.server import Handled
from geotrain.outer.shards.local import LocalShards, check_whole
from geotrain.outer.shards.protocol import (
    Apply,
    Checked,
    Copy,
    Fingerprint,
    Forget,
    Freeze,
    FromShards,
    Froze,
    HeldAnswer,
    HeldPart,
    Measured,
    Merge,
    NewIncarnation,
    SendUp,
    StartOver,
    bare,
    counts,
    digest_of_all,
)
from geotrain.outer.shards.shard import ServerShard
from geotrain.parameters.parameter_map import ParameterMapError, numel

COORDINATOR = "coordinator"  # receiver of its reports
RETRY_S = 0.2
MOST_HELD = 2  # updates of a rank: one that waits for the other ranks', and the next


class PayloadLost(RuntimeError):
    """A command names what is not here: this shard's disk was lost, or restored from another time."""


class ShardServer:
    """State of a shard's process: shard `index` of `shards`, which stands in its snapshots, too.

    commands: how many that count it has executed. incarnation: the incarnation of the server that it is, or was last,
    part of. open: whether that lasts; members are not served before.
    """

    def __init__(
        self, shard: ServerShard, index: int, shards: int, members: tuple[str, ...], role: Literal["region", "worker"]
    ) -> None:
        self.name, self.shard, self.index, self.number, self.member_role = shard.name, shard, index, shards, role
        self.shards, self.parameter_map, self.up = LocalShards([shard]), shard.parameter_map, shard.up
        self.changes = sends_changes(shard.down)
        self.members = {name: Member() for name in members}
        self.commands = 0
        self.incarnation, self.open = "", False
        self.copied = 0  # number of the validation whose weights are copied
        self.chunks = {chunk.index: chunk for chunk in shard.chunks}
        self._of = [[p.index for p in chunks if p.index in self.chunks] for chunks in self.parameter_map.chunks_of]

    # -- what changes it

    def handle(self, message: Any) -> Handled:
        """Process a command, or payloads. Raises PayloadLost for a command; for payloads Refused, then nothing has
        changed."""
        match message:
            case UpdatePart():
                if not self.admit(message):
                    return Handled(None)
                self.shard.receive(message)
                return self._say(self._held(message))
            case Answer():
                return self._say(self._checked(message))
            case Join():
                member = self.members.setdefault(message.member, Member())  # it may be a member no more
                if member.incarnation != message.incarnation:
                    self.shard.execute(Forget(message.member, joins=True))  # the coordinator's may have been missed
                    member.joined.clear()
                    member.incarnation = message.incarnation
                member.parts, member.joined[message.part] = message.parts, message
                self.shard.receive(message)
            case NewIncarnation():
                self._begin_incarnation(message.incarnation)
                return self._say(*[self._froze(name) for name in self.members if self.shard.fingerprints_of(name)])
            case Apply() | Freeze() | Forget() | SendUp() | Merge() | StartOver() | Copy():
                try:
                    if isinstance(message, Apply):
                        self._check_judged(message)
                    self.shard.execute(message)
                except KeyError as error:
                    raise PayloadLost(
                        f"shard {self.index} of {self.name!r} has not what {type(message).__name__} needs: its disk "
                        "was lost, or restored from another time; docs/servers.md says what to do"
                    ) from error
                self.commands += counts(message, self.changes)
                if isinstance(message, Freeze) and self.changes:
                    return self._say(self._froze(message.member))
                if isinstance(message, Forget):
                    self._forget(message)
                if isinstance(message, Copy):
                    self.copied = message.number
            case _:
                raise Refused(f"a {type(message).__name__} means nothing to a shard")
        return Handled(None)

    def _check_judged(self, command: Apply) -> None:
        """Raise PayloadLost where the payloads are not those that the coordinator has judged."""
        chunks = [chunk.index for chunk in self.parameter_map.chunks_of[command.fragment]]
        for chunk, judged in zip(chunks, command.judged, strict=True):
            if chunk not in self.chunks:
                continue
            known = self.shard.members[command.member]
            payloads = known.updates[command.fragment, command.sequence]
            if judged != digest_of_all(payloads[part, chunk].digest for part in sorted(known.joins)):
                raise PayloadLost(
                    f"shard {self.index} of {self.name!r}: update "
                    f"{update_id(command.member, command.fragment, command.sequence)}, "
                    f"{self.parameter_map.called(chunk)}: not what its coordinator has judged: nothing is applied"
                )

    take = handle  # nobody waits for half of a command

    def go_on(self) -> Handled:
        """Do nothing: `take` has done all that a message asks for."""
        return Handled(None)

    def end_incarnation(self) -> None:
        """End the incarnation, as the coordinator or this process was gone: members wait for the next."""
        self.open = False

    def _begin_incarnation(self, incarnation: str) -> None:
        self.incarnation, self.open, self.copied = incarnation, True, 0
        self.shard.execute(Copy(0))
        for name, member in self.members.items():
            self.shard.forget_incarnation(name, answers=not self.changes)
            member.joined.clear()
            member.incarnation, member.parts = "", 0
            member.fragments.clear()

    def _forget(self, command: Forget) -> None:
        """Drop the payloads of updates that the coordinator has judged: those up to the one that it names."""
        member = self.members.setdefault(command.member, Member())
        if command.joins:
            member.joined.clear()
        for fragment, sequence in command.updates:
            member.fragments[fragment].sequence = sequence
            held = self.shard.members[command.member].updates
            for update in [update for update in held if update[0] == fragment and update[1] <= sequence]:
                del held[update]

    # -- reports to the coordinator

    def _say(self, *messages: FromShards) -> Handled:
        return Handled(None, tuple(Send(COORDINATOR, message) for message in messages))  # type: ignore[arg-type]

    def _held(self, part: UpdatePart) -> HeldPart:
        held = self.shard.members[part.member].updates[part.fragment, part.sequence]
        measured = [
            Measured(each.chunk, len(payload.content), each.squares, each.fault, payload.digest)
            for each in self.shard.measure(part)
            for payload in (held[part.part, each.chunk],)
        ]
        return HeldPart(bare(part), tuple(measured))

    def _checked(self, answer: Answer) -> HeldAnswer:
        faults = {each.chunk: each.fault for each in self.shard.receive(answer)}
        checked, fingerprints = [], self.shard.downlink.fingerprints
        for w in answer.weights:
            after = (
                fingerprint(w, fingerprints.get(w.chunk, 0) if w.increment else 0)
                if self.shard.downlink.changes
                else 0
            )
            checked.append(Checked(w.chunk, w.version, w.increment, after, faults.get(w.chunk, "")))
        weights = tuple(ChunkWeights(w.chunk, w.version, b"", w.increment) for w in answer.weights)
        return HeldAnswer(replace(answer, weights=weights), tuple(checked))

    def _froze(self, member: str) -> Froze:
        fingerprints = tuple(
            Fingerprint(chunk, *both) for chunk, both in sorted(self.shard.fingerprints_of(member).items())
        )
        return Froze(member, self.index, self.commands, fingerprints)

    # -- what members ask

    def current(self, name: str, incarnation: str, part: int | None = None) -> Member:
        """Return the member if this incarnation of it has joined and the coordinator's command for that is here.

        Raises Refused, always to be repeated: whether somebody may be here is for the coordinator to say, and members
        ask it as well.
        """
        member = self.members.get(name)
        if member is None:
            raise Refused(f"no member is called {name!r} here; known: {', '.join(self.members)}")
        if not self.open or member.incarnation != incarnation or part not in (None, *member.joined):
            raise Refused(f"{name}: this shard does not know yet that it joined", RETRY_S)
        return member

    def admit(self, part: UpdatePart) -> bool:
        """Whether these payloads are wanted; False: they are here, or were judged before. Reads their sizes only.
        Raises Refused."""
        member = self.current(part.member, part.incarnation, part.part)
        if part.sequence <= member.fragments[part.fragment].sequence:
            return False
        chunks = [delta.chunk for delta in part.deltas]
        if not 0 <= part.fragment < len(self._of) or chunks != self._of[part.fragment]:
            raise Refused(f"{part.member}: chunks {chunks} are not what this shard has of a fragment")
        for delta in part.deltas:
            wanted = self.up.encoded_bytes(numel(member.joined[part.part].pushes[delta.chunk]))
            if len(delta.payload) != wanted:
                where = f"{part.member}, part {part.part}: {self.parameter_map.called(delta.chunk)}"
                raise Refused(f"{where} has {len(delta.payload)} bytes, its slices need {wanted}")
        known = self.shard.members[part.member].updates
        held = [n for (f, n), came in known.items() if f == part.fragment and any(p == part.part for p, _ in came)]
        if part.sequence in held:  # it may be judged already: what came first stays
            return False
        if len(held) >= MOST_HELD:
            raise Refused(f"{part.member}: updates {sorted(held)} of this rank wait to be taken", RETRY_S)
        return True

    def lacks_answer(self, name: str, incarnation: str, part: int, fragment: int, sequence: int) -> bool:
        """Always False: members ask the coordinator to freeze answers, never a shard."""
        self.current(name, incarnation, part)
        return False

    def answer(self, name: str, incarnation: str, part: int, fragment: int, sequence: int) -> Answer | None:
        """Return the shard's chunks of an answer, once all of them are frozen; None before."""
        self.current(name, incarnation, part)
        answer = self.shard.members[name].answers.get(fragment)
        wanted = self._of[fragment] if 0 <= fragment < len(self._of) else []
        if answer is None or answer.sequence != sequence or any((part, i) not in answer.weights for i in wanted):
            return None
        return Answer(fragment, sequence, tuple(answer.weights[part, i] for i in wanted), self.incarnation)

    def weights_to_validate(self, name: str, incarnation: str, part: int, number: int) -> Answer:
        """Return the shard's chunks of the weights for validation `number`; empty when they are not here."""
        self.current(name, incarnation, part)
        chunks = self.chunks if number == self.copied else ()
        return Answer(0, number, tuple(self.shard.copied(name, part, i, 0) for i in chunks), self.incarnation)

    def going_up(self, update: UpdatePart) -> UpdatePart:
        """Return the shard's chunks of an update that is in flight to the global server."""
        own = [d for d in update.deltas if d.chunk in self.chunks]
        deltas = tuple(ChunkDelta(d.chunk, d.anchor_version, self.shard.in_flight[d.chunk]) for d in own)
        return replace(update, deltas=deltas)

    # -- state

    def left_out(self) -> Iterator[Any]:
        """Yield the messages with which a journal that follows the state must begin: members' slices, and payloads
        that came and are not taken yet."""
        for name, known in self.shard.members.items():
            yield from known.joins.values()
            for update, payloads in known.updates.items():
                for part in sorted({part for part, _ in payloads}):
                    deltas = [ChunkDelta(i, 0, payloads[p, i].content) for p, i in sorted(payloads) if p == part]
                    yield UpdatePart(name, known.joins[part].incarnation, *update, part, tuple(deltas))
        yield from self.shard.received()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, JSON data), from which `load` restores the shard."""
        tensors, named = self.shards.state()
        return tensors, {
            **named,
            "parameter_map_digest": self.parameter_map.digest,
            "shard": [self.index, self.number],
            "commands": self.commands,
            "incarnation": self.incarnation,
            "fingerprints": {
                str(chunk): fingerprint for chunk, fingerprint in self.shard.downlink.fingerprints.items()
            },
            "sent": self.shard.sent(),
        }

    def load(self, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Load what `state` returned, for a replay, which `end_incarnation` ends. Raises ParameterMapError."""
        self.parameter_map.check_digest(meta["parameter_map_digest"])
        if meta["shard"] != [self.index, self.number]:
            index, number = meta["shard"]
            raise ParameterMapError(
                f"the state is that of shard {index} of {number}, this is {self.index} of {self.number}; a run keeps "
                "the number of shards with which it began"
            )
        check_whole(tensors, meta)
        self.commands, self.incarnation, self.open = meta["commands"], meta["incarnation"], True
        self.shard.load(tensors, meta["fingerprints"], meta["sent"])

    def status(self) -> dict[str, Any]:
        """Return plain data for people and tests."""
        return {"shard": self.index, "of": self.number, "commands": self.commands, "chunks": len(self.chunks)}
