"""The specification's world, where each server has a double: the same coordinator with shards elsewhere, which are
reached late, lose what is under way, and die. After all that, the double has the same bits as the server in one
process."""

from __future__ import annotations

import json
import random
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from geotrain.net.storage.recovery import left_out
from geotrain.net.transport import wire
from geotrain.outer.messages import GLOBAL, Answer, ChunkWeights, Join, Message, Refused, UpdatePart
from geotrain.outer.server.server import Server
from geotrain.outer.server.shard_server import ShardServer
from geotrain.outer.shards.shards import Froze, HeldAnswer, HeldPart, Holdings, RemoteShards
from tests.support.recorded_world import frozen, thawed
from tests.support.specified_world import REGIONS, SpecifiedWorld

PATIENCE = 10_000  # turns of a transport that makes progress


def over_the_wire(message: Any) -> Any:
    reader = wire.FrameReader(type(message), limit_bytes=1 << 20)
    for frame in wire.frames(message):
        reader.feed(frame)
    return reader.message


class FarShard:
    """A shard's process: its disk, and the orders on their way to it."""

    def __init__(self, double: Double, index: int) -> None:
        self.double, self.index = double, index
        self.machine = self.build()
        self.snapshot, self.journal, self.flushed = frozen(self.machine), [], 0
        self.written = [(self.snapshot, self.journal)]  # all snapshots, each with the journal that follows it
        self.commands: deque[Any] = deque()

    def build(self) -> ShardServer:
        double = self.double
        whole = double.world.build_here(double.name, double.shards)
        if double.name == GLOBAL:
            whole.set_weights([x.clone() for x in double.world.start])
        return ShardServer(
            whole.shards.all[self.index], self.index, double.shards, tuple(whole.members), whole.member_role
        )

    def tell(self, message: Any) -> Any:
        """What it says. It is on disk before."""
        message = over_the_wire(message)
        self.journal.append(message)
        handled = self.machine.handle(message)
        if handled.sends:
            self.flushed = len(self.journal)
        return [over_the_wire(send.message) for send in handled.sends]

    def execute(self) -> None:
        """The next order reaches it."""
        for said in self.tell(self.commands.popleft()):
            self.double.said(said)

    def keep(self) -> None:
        """It writes a snapshot."""
        self.snapshot, self.journal = frozen(self.machine), list(self.machine.left_out())
        self.written.append((self.snapshot, self.journal))
        self.flushed = len(self.journal)

    def die(self, dice: random.Random) -> None:
        """It loses what was not on disk, and comes back."""
        del self.journal[dice.randint(self.flushed, len(self.journal)) :]
        self.flushed = len(self.journal)
        self.machine = self.build()
        self.machine.load(*thawed(self.snapshot))
        for message in self.journal:
            with suppress(Refused):  # as it was then
                self.machine.handle(message)
        self.machine.end_incarnation()


class Double:
    """A server in several processes."""

    def __init__(self, world: FarWorld, name: str, shards: int) -> None:
        self.world, self.name, self.shards, self.dice = world, name, shards, world.dice
        here = world.build_here(name, shards)
        changes = here.down.name not in ("fp32", "bf16")
        self.far = RemoteShards(world.shape, shards, here.shards.all[0].up_codec, changes)
        self.coordinator = self.build()
        if name == GLOBAL:
            self.coordinator.fragments = world.servers[name].fragments and [
                type(c)() for c in world.servers[name].fragments
            ]
        self.processes = [FarShard(self, i) for i in range(shards)]
        self.snapshot, self.journal = frozen(self.coordinator), []
        self.written = [(self.snapshot, self.journal)]
        self.begin_incarnation()

    def build(self) -> Server:
        return self.world.build_with(self.name, self.far)

    # -- lives

    def begin_incarnation(self) -> None:
        self.holdings = Holdings()
        for process in self.processes:
            process.commands = deque(self.far.since(process.machine.commands))
        self.far.emit = lambda command: [process.commands.append(command) for process in self.processes]  # type: ignore
        self.far.begin_incarnation(f"life-{self.dice.random()}")

    def restart(self) -> None:
        """The coordinator and some shards die; what is under way to and from them is lost."""
        self.far.emit = lambda command: None
        for process in self.processes:
            process.commands.clear()
            process.machine.end_incarnation()
            if self.dice.random() < 0.5:
                process.die(self.dice)
        self.far = RemoteShards(self.world.shape, self.shards, self.far.up, self.far.changes)
        self.coordinator = self.build()
        self.coordinator.load(*thawed(self.snapshot))
        for message in [*self.journal, None]:
            if message is None:
                fresh = self.build()
                fresh.load(*thawed(frozen(self.coordinator)))
                self.coordinator = fresh
                continue
            with suppress(Refused):  # as it was then
                self.coordinator.handle(message)
        self.journal.append(None)
        self.begin_incarnation()

    def keep(self) -> None:
        """The coordinator writes a snapshot, when all shards have written theirs of the same orders."""
        self.settle()
        for process in self.processes:
            process.keep()
        self.far.drop(self.far.commands)
        self.snapshot, self.journal = frozen(self.coordinator), [*left_out(self.coordinator)]
        self.written.append((self.snapshot, self.journal))

    # -- what is said

    def tell(self, message: Message) -> Any:
        if self.dice.random() < 0.1:
            self.dice.choice(self.processes).keep()
        for _ in range(self.dice.randrange(4)):
            self.move()
        if isinstance(message, UpdatePart):
            message = self.held_part(message)  # type: ignore[assignment]
        elif isinstance(message, Answer):
            message = self.held_answer(message)  # type: ignore[assignment]
        for _ in range(PATIENCE):
            self.journal.append(over_the_wire(message))
            try:
                handled = self.coordinator.handle(self.journal[-1])
                if isinstance(message, HeldPart):
                    self.holdings.drop(message.part)
                return handled
            except Refused as refused:
                if not (isinstance(message, Join) and "is being coded" in refused.reason):
                    raise
                self.move()
        raise AssertionError("the marks are never told")

    def said(self, said: Any) -> None:
        """A shard's word reaches the coordinator's process."""
        if isinstance(said, Froze):
            self.journal.append(said)
            self.coordinator.handle(said)
        else:
            self.holdings.take(said)

    def move(self) -> bool:
        """Some shard gets an order."""
        waiting = [process for process in self.processes if process.commands]
        if waiting:
            self.dice.choice(waiting).execute()
        return bool(waiting)

    def settle(self) -> None:
        while self.move():
            pass

    def held_part(self, part: UpdatePart) -> Message:
        """Its payloads go to the shards, each when that has heard of the sender."""
        left = list(self.processes)
        bare = replace(part, deltas=tuple(replace(d, payload=b"") for d in part.deltas))
        self.coordinator.current(part.member, part.incarnation, part.part)
        for _ in range(PATIENCE):
            if not left:
                break
            process = self.dice.choice(left)
            own = tuple(d for d in part.deltas if d.chunk in process.machine.chunks)
            try:
                if own:
                    for said in process.tell(replace(part, deltas=own)):
                        self.said(said)
                left.remove(process)
            except Refused as refused:
                process.journal.pop()
                if refused.retry_s is None or not self.move():
                    raise
        assert not left
        held = self.holdings.part(bare)
        if held is None:  # it was taken before
            member = self.coordinator.members[part.member]
            assert part.sequence <= member.sequence
            return HeldPart(replace(bare, deltas=()), ())  # type: ignore[return-value]
        return held  # type: ignore[return-value]

    def held_answer(self, answer: Answer) -> Message:
        left, header = list(self.processes), replace(answer, weights=tuple(bare_weights(w) for w in answer.weights))
        while left:
            process = self.dice.choice(left)
            if process.commands:  # it is told what to fetch behind its orders
                process.execute()
                continue
            own = tuple(w for w in answer.weights if w.chunk in process.machine.chunks)
            for said in process.tell(replace(answer, weights=own)) if own else ():
                self.said(said)
            left.remove(process)
        held = self.holdings.answer(header)
        assert isinstance(held, HeldAnswer)
        return held  # type: ignore[return-value]

    def answer(self, *asked: Any) -> Answer | None:
        """As a member pulls it: from the coordinator what it is, from the shards the payloads."""
        header = self.coordinator.answer(*asked)
        if header is None:
            return None
        found: dict[int, ChunkWeights] = {}
        for process in self.processes:
            for _ in range(PATIENCE):
                with suppress(Refused):
                    if (given := process.machine.answer(*asked)) is not None:
                        break
                process.execute()
            assert given is not None and given.incarnation == process.machine.incarnation
            found.update({w.chunk: w for w in given.weights})
        for each in header.weights:
            assert found[each.chunk].version == each.version
        return replace(header, weights=tuple(found[w.chunk] for w in header.weights))

    # -- what must hold

    def same_as(self, server: Server) -> None:
        self.settle()
        tensors, meta = self.coordinator.state()
        assert not tensors
        plain, wanted = json.loads(json.dumps(meta)), json.loads(json.dumps(server.state()[1]))
        assert plain.pop("shards")["commands"] == self.far.commands
        for state in (plain, wanted):  # whether an answer is a change is the shards' to know
            for sent in state["sent"].values():
                sent["answers"] = [[s, w, [each[:2] for each in f]] for s, w, f in sent["answers"]]
        assert plain == wanted
        found = {n: t for process in self.processes for n, t in process.machine.shard.state().items()}
        right = server.state()[0]
        assert found.keys() == right.keys()
        for name, tensor in right.items():
            assert torch.equal(found[name], tensor), name
        for process in self.processes:
            assert process.machine.commands == self.far.commands
            for member, known in process.machine.shard.members.items():
                assert known.joins.keys() == self.coordinator.members[member].joined.keys()


def bare_weights(weights: ChunkWeights) -> ChunkWeights:
    return replace(weights, payload=b"", increment=False)


class FarWorld(SpecifiedWorld):
    """Every server with its double, which is told the same."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.dice, self.doubles = random.Random(repr(args)), {}
        super().__init__(*args, **settings)

    def build_here(self, name: str, shards: int) -> Server:
        return self.build_with(name, shards)

    def build(self, name: str) -> Server:
        return self.build_with(name, 1)

    def snapshot(self, name: str) -> None:
        super().snapshot(name)
        if name in self.doubles:
            self.doubles[name].keep()
        else:
            self.doubles[name] = Double(self, name, self.dice.choice((1, 2, 3)))

    def replayed(self, name: str) -> Server:
        self.doubles[name].restart()
        return super().replayed(name)

    def tell(self, name: str, message: Message) -> Any:
        double = self.doubles[name]
        try:
            reply, refused = super().tell(name, message), None
        except Refused as error:
            reply, refused = None, error
        double.coordinator.incarnation = self.servers[name].incarnation
        try:
            other, also = double.tell(message).reply, None
        except Refused as error:
            other, also = None, error
        assert type(refused) is type(also) and str(refused) == str(also)
        if refused is not None:
            raise refused
        assert reply == other
        return reply

    def answer(self, server: str, *asked: Any) -> Answer | None:
        answer = super().answer(server, *asked)
        self.doubles[server].coordinator.incarnation = self.servers[server].incarnation
        assert self.doubles[server].answer(*asked) == answer
        return answer

    def check(self) -> None:
        super().check()
        if self.dice.random() < 0.2:  # else orders are still under way
            self.check_doubles()

    def check_doubles(self) -> None:
        for name, double in self.doubles.items():
            double.coordinator.incarnation = self.servers[name].incarnation
            double.same_as(self.servers[name])
            if name in REGIONS:
                assert double.coordinator.join_message() == self.region(name).join_message()
