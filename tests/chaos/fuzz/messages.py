"""Mutated messages against servers' state machines (a part of the fuzzer)."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import msgpack
import torch

from geotrain.config import OuterConfig, codec_config, rule_config
from geotrain.net.storage.recovery import KINDS
from geotrain.net.transport import rpc, wire
from geotrain.outer.messages import (
    ChunkDelta,
    Finished,
    Identity,
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
)
from geotrain.outer.rules import region_rule
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.parameters.parameter_map import Parameter, ParameterMap

LIMIT_BYTES = 65536
NUMBERS = (-1, 0, 1, 2, 63, 2**31, 2**62, -(2**63), 1.5, float("nan"), float("inf"))
ODD = (*NUMBERS, "", "a", "b", "eu", "x" * 5000, None, True, [], [[]], {}, {"loss": 1e308}, b"", b"\xff" * 9)
CALLS = (rpc.Pull, rpc.AskLease, rpc.ReleaseLeases, rpc.SayLeave, rpc.Beat, rpc.Resume, rpc.Control)


def toy_layout() -> ParameterMap:
    shapes = [("embed", (6, 4), None), ("layer.0", (4, 4), 0), ("layer.1", (4, 4), 1), ("norm", (8,), None)]
    return ParameterMap([Parameter(name, shape, layer, "normal") for name, shape, layer in shapes], 1)


def outer_config() -> OuterConfig:
    plain = codec_config("fp32")
    return OuterConfig(
        rule=rule_config("region_momentum", updates_per_send=2),
        up=codec_config("int4", block=32),
        down=plain,
        local=plain,
    )


class Servers:
    """A region server with two workers joined, and the global server above it: fresh ones, always the same."""

    def __init__(self) -> None:
        self.parameter_map, config = toy_layout(), outer_config()
        self.identity = Identity("fuzz", "config", self.parameter_map.digest, "a toy")
        self.top = GlobalServer(self.identity, self.parameter_map, config, {"eu": ("a", "b")}, 64, 2)
        self.top.set_weights([torch.ones(f.numel) for f in self.parameter_map.fragments])
        self.region = RegionServer(
            "eu", self.identity, self.parameter_map, config, region_rule(config.rule, ("a", "b"), 16.0), ("a", "b")
        )
        self.region.incarnation = self.top.incarnation = "1"
        self.region.handle(self.top.handle(self.region.join_message()).reply)
        everything = tuple(range(len(self.parameter_map.fragments)))
        answer = self.top.answer("eu", "1", 0, 0, everything)
        assert answer is not None
        self.answer = answer
        self.region.handle(answer)
        for name in ("a", "b"):
            self.region.handle(self.join(name))
        lease = self.top.handle(LeaseRequest("a", 1)).reply
        self.region.handle(lease)
        self.lease = lease
        self.region.handle(self.update("a", 1, {0: 0.1}))

    def join(self, name: str) -> Join:
        whole = tuple(self.parameter_map.whole(f.index) for f in self.parameter_map.fragments)
        i = self.identity
        return Join(i.run, i.config_digest, i.parameter_map_digest, i.model, name, "1", 0, 1, whole, whole)

    def update(self, name: str, sequence: int, values: dict[int, float]) -> UpdatePart:
        deltas = tuple(
            ChunkDelta(f, 0, torch.full((self.parameter_map.fragments[f].numel,), v).numpy().tobytes())
            for f, v in values.items()
        )
        return UpdatePart(name, "1", sequence, 0, deltas, job=1, leases=(1,), metrics={"loss": 1.0})


def digest(server: Any) -> int:
    """Digest of all that a server holds, and not only of what it saves."""
    tensors, meta = server.state()
    crc = zlib.crc32(repr(meta).encode())
    for name, tensor in tensors.items():
        crc = zlib.crc32(tensor.contiguous().numpy().tobytes(), zlib.crc32(name.encode(), crc))
    for name, member in server.members.items():
        arriving = {s: sorted(parts) for s, parts in member.arriving.items()}
        answers = {s: list(given.items()) for s, given in member.answers.items()}
        held = sorted(member.joined), arriving, member.awaiting, answers, server.shards.fingerprints_of(name)
        crc = zlib.crc32(repr(held).encode(), crc)
    return crc


class Messages:
    """kinds: what a server may be told, and what its calls carry; each mutated and given to one of two servers."""

    def __init__(self) -> None:
        self._begin()
        servers = self.servers
        worker = servers.update("a", 2, {0: 0.2, 1: 0.3})
        samples: list[Any] = [worker] * 4
        samples += [servers.join("a"), servers.region.join_message(), servers.update("b", 1, {2: 1.0})]
        samples += [
            Welcome(3, 1, "1", (0,) * 4),
            servers.answer,
            LeaseRequest("a", 2, 0.5),
            servers.lease,
            Finished("a", 2),
        ]
        samples += [
            Release((1,)),
            TakeBack("a", (1,)),
            TakenBack("a", (), (1,)),
            Leave("b"),
            MemberSilent("b", "1"),
            UpdateRejected("b", "1", "why"),
            LiftQuarantine("b"),
            RunComplete(),
            Recall(),
        ]
        samples += [rpc.Pull("a", "1", 0, 1, (0,), 1.0), rpc.AskLease("a", "1", LeaseRequest("a", 1), 1.0)]
        samples += [rpc.SayLeave("a", "1", 0, 1), rpc.Beat("a", "1", 0), rpc.Resume("a", "1", 0, 7)]
        samples += [rpc.ReleaseLeases("a", "1", Release((1,))), rpc.Control("stop"), Lease("b", 1, 9, 0, 8, 4)]
        self._samples = [list(wire.frames(sample)) for sample in samples]

    def _begin(self) -> None:
        self.servers = Servers()
        self._digests = {id(s): digest(s) for s in (self.servers.top, self.servers.region)}
        self._changes = 0

    def attempt(self, rng: random.Random) -> str:
        frames = mutate(rng, rng.choice(self._samples))
        server: Any = rng.choice((self.servers.top, self.servers.region))
        try:
            reader = wire.FrameReader(*KINDS, *CALLS, limit_bytes=LIMIT_BYTES)
            for frame in frames:
                reader.feed(frame)
                if isinstance(reader.header, UpdatePart) and not server.admit(reader.header):
                    return "taken"
            message = reader.message
            _round_trip(message)
            if isinstance(message, rpc.Pull):
                server.answer(message.member, message.incarnation, message.part, message.sequence, message.fragments)
            elif isinstance(message, CALLS):
                server.current(getattr(message, "member", ""), getattr(message, "incarnation", ""))
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
