"""Mutated messages against servers' state machines (a part of the fuzzer)."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import msgpack
import torch

from geotrain.common.names import GLOBAL
from geotrain.config import codec_config
from geotrain.net.storage.recovery import KINDS
from geotrain.net.transport import rpc, wire
from geotrain.outer.messages import (
    Fact,
    Facts,
    Finished,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    LiftQuarantine,
    MemberSilent,
    Recall,
    Refused,
    Release,
    RunComplete,
    TakeBack,
    TakenBack,
    UpdatePart,
    UpdateRejected,
    Welcome,
    WentBack,
)
from geotrain.outer.server.parts import ServerPart
from tests.support.outer_world import FakeWorker, World, config, parameter_map, whole

LIMIT_BYTES = 65536
NUMBERS = (-1, 0, 1, 2, 63, 2**31, 2**62, -(2**63), 1.5, float("nan"), float("inf"))
ODD = (*NUMBERS, "", "a", "b", "eu", "x" * 5000, None, True, [], [[]], {}, {"loss": 1e308}, b"", b"\xff" * 9)
CALLS = (
    rpc.Pull, rpc.AskLease, rpc.ReleaseLeases, rpc.SayLeave, rpc.Beat, rpc.Resume, rpc.Control, rpc.ShardHello
)  # fmt: skip
DEALT = (0, 2), (1, 3)  # fragments of a server's shards


class Servers(World):
    """A region server with two workers joined, and the global server above it; then the ledger and a shard of another
    global server. Fresh ones, always the same."""

    def __init__(self) -> None:
        shape = parameter_map(1)
        workers = {"eu": [FakeWorker(name, shape, whole(shape)) for name in ("a", "b")]}
        settings = config("region_momentum", updates_per_send=2, up=codec_config("int4", block=32))
        super().__init__(settings, workers, [torch.ones(f.numel) for f in shape.fragments], shape, 64, 2)
        self.region = self.regions["eu"]
        self.first_lease = self.lease("a")
        self.tell("eu", self.update("a", 0, 1, 0.1))
        self.ledger, self.shard = (self.build(GLOBAL, ServerPart(DEALT, number)) for number in (None, 0))
        join = self.region.join_message()
        self.ledger.handle(join)
        self.shard.set_weights({number: self.start[number].clone() for number in DEALT[0]})
        self.standing = self.ledger.stand()
        only = tuple(join.pushes[i] if i in DEALT[0] else () for i in range(len(join.pushes)))
        for message in (self.standing, replace(join, pushes=only, holds=only)):
            self.shard.handle(message)

    @property
    def all(self) -> tuple[Any, ...]:
        return self.top, self.region, self.ledger, self.shard

    def join(self, name: str) -> Join:
        return self.workers[name][1].joins(self.identity)[0]

    def update(self, name: str, fragment: int, sequence: int, value: float) -> UpdatePart:
        fake = self.workers[name][1]
        fake.sequences, fake.job = [sequence - 1] * len(fake.sequences), 0
        delta = torch.full((self.parameter_map.fragments[fragment].numel,), value)
        [part] = fake.parts({fragment: delta}, (1,))
        return replace(part, metrics={"loss": 1.0})


def digest(server: Any) -> int:
    """Digest of all that a server holds, and not only of what it saves."""
    tensors, meta = server.state()
    crc = zlib.crc32(repr(meta).encode())
    for name, tensor in tensors.items():
        crc = zlib.crc32(tensor.contiguous().numpy().tobytes(), zlib.crc32(name.encode(), crc))
    for name, member in server.members.items():
        # Of fragments that were asked about only, there is nothing.
        exchanges = [(f, sorted(own.arriving), own.answer, own.version) for f, own in member.fragments.items()]
        held = sorted(member.joined), sorted(exchanges), server.store.fingerprints_of(name)
        crc = zlib.crc32(repr(held).encode(), crc)
    return crc


class Messages:
    """kinds: what a server may be told, and what its calls carry; each mutated and given to one of the servers."""

    def __init__(self) -> None:
        self._begin()
        servers = self.servers
        worker = servers.update("a", 0, 2, 0.2)
        samples: list[Any] = [worker] * 4
        samples += [servers.join("a"), servers.region.join_message(), servers.update("b", 2, 1, 1.0)]
        samples += [
            Welcome((3,) * 4, 1, ("1",) * 4, (0,) * 4),
            servers.top.answer("eu", "life-1", 0, 1, 0),
            LeaseRequest("a", 2, 0.5),
            servers.first_lease,
            Finished("a", 2),
        ]
        samples += [
            Release((1,)),
            TakeBack("a", (1,)),
            TakenBack("a", (), (1,)),
            Leave("b"),
            MemberSilent("b", "life-1"),
            UpdateRejected("b", "life-1", "why"),
            LiftQuarantine("b"),
            RunComplete(),
            Recall(),
        ]
        samples += [rpc.Pull("a", "life-1", 0, 0, 1, 1.0), rpc.AskLease("a", "life-1", LeaseRequest("a", 1), 1.0)]
        samples += [
            rpc.SayLeave("a", "life-1", 0, (1, 0, 0, 0)),
            rpc.Beat("a", "life-1", 0),
            rpc.Resume("a", "life-1", 0, 7),
        ]
        facts = Fact("applied", "eu", "life-1", 0, 1, 1, contains=(1,), metrics={"loss": 1.0}), Fact("up", fragment=2)
        samples += [Facts(0, 0, facts, (1, 0), (0, 0)), WentBack(0, 0, (0, 0))] * 2 + [servers.standing] * 4
        samples += [rpc.ShardHello(0, 1, (1, 0), 0, "o", False, 7, 1.0, False, 9, 9, "x")]
        samples += [rpc.ReleaseLeases("a", "life-1", Release((1,))), rpc.Control("stop"), Lease("b", 1, 9, 0, 8, 4)]
        self._samples = [list(wire.frames(sample)) for sample in samples]

    def _begin(self) -> None:
        self.servers = Servers()
        self._digests = {id(s): digest(s) for s in self.servers.all}
        self._changes = 0

    def attempt(self, rng: random.Random) -> str:
        frames = mutate(rng, rng.choice(self._samples))
        server: Any = rng.choice(self.servers.all)
        try:
            reader = wire.FrameReader(*KINDS, *CALLS, limit_bytes=LIMIT_BYTES)
            for frame in frames:
                reader.feed(frame)
                if isinstance(reader.header, UpdatePart) and not server.intake.admit(reader.header):
                    return "taken"
            message = reader.message
            _round_trip(message)
            if isinstance(message, rpc.Pull):
                server.answer(message.member, message.incarnation, message.part, message.fragment, message.sequence)
            elif isinstance(message, CALLS):
                server.membership.current(getattr(message, "member", ""), getattr(message, "incarnation", ""))
            else:
                server.handle(message)
        except (wire.WireError, Refused) as error:
            if digest(server) != self._digests[id(server)]:
                self._begin()
                return f"changed: {error}"
            return "refused" if len(str(error)) > 10 else f"unclear: {error!r}"
        self._changes += 1
        if self._changes >= 20:  # what was taken may have changed the state: now and then a fresh one
            self._begin()
        else:
            self._digests[id(server)] = digest(server)
        return "taken"


def _round_trip(message: Any) -> None:
    """Write what was read to the journal and read it again."""
    if isinstance(message, KINDS):
        reader = wire.FrameReader(*KINDS, limit_bytes=LIMIT_BYTES)
        for frame in wire.frames(message):
            reader.feed(frame)
        # As bytes, since a number that is none equals nothing.
        if [bytes(b) for b in wire.bodies(reader.message)] != [bytes(b) for b in wire.bodies(message)]:
            raise RuntimeError(f"{message} came back as {reader.message}")


def mutate(rng: random.Random, sample: list[bytes]) -> list[bytes]:
    bodies = [bytearray(frame[wire.CRC_BYTES :]) for frame in sample]
    for _ in range(rng.randint(1, 3)):
        kind, body = rng.randrange(7), rng.choice(bodies) if bodies else bytearray()
        if kind == 0 and body:
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        elif kind == 1 and body:
            del body[rng.randrange(len(body)) :]
        elif kind == 2:
            body[:] = rng.randbytes(rng.randrange(80))
        elif kind == 3 and len(bodies) > 1:
            rng.choice([rng.shuffle, lambda b: b.pop(), lambda b: b.append(b[-1])])(bodies)
        elif kind == 4 and len(bodies) > 1:  # wild numbers in a payload
            bodies[-1][: 4 * rng.randint(1, 6)] = rng.choice(
                [b"\x00\x00\x80\x7f", b"\xff\xff\xff\xff", b"\xff\xff\x7f\x7f"]
            )
        else:
            _change_a_field(rng, bodies)
    return [wire._sealed(bytes(body)) if rng.random() < 0.95 else rng.randbytes(4) + bytes(body) for body in bodies]


def _change_a_field(rng: random.Random, bodies: list[bytearray]) -> None:
    """One value somewhere in the header becomes another."""
    try:
        raw = msgpack.unpackb(bytes(bodies[0]), strict_map_key=False)
    except Exception:
        return
    found = list(places(raw))
    if found:
        holder, key = rng.choice(found)
        holder[key] = deepcopy(rng.choice(ODD))
        try:
            bodies[0][:] = msgpack.packb(raw)
        except (OverflowError, ValueError):
            return


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else []
    for key in keys:
        yield value, key
        yield from places(value[key])
