"""Region servers and a global server joined in this process: tests decide when a message is delivered."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import torch
from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import CodecConfig, MomentumConfig, OuterConfig, codec_config
from geotrain.net.storage.recovery import StillJoined, left_out
from geotrain.outer.codec import make_codec
from geotrain.outer.messages import (
    ChunkDelta,
    Finished,
    Identity,
    Join,
    Lease,
    LeaseRequest,
    Message,
    TakenBack,
    UpdatePart,
)
from geotrain.outer.rules import region_rule
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.parts import WHOLE, ServerPart
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.server.server import Server
from geotrain.parameters.chunks import cut_slice
from geotrain.parameters.parameter_map import Parameter, ParameterMap, StridedSlice, gather, numel, scatter
from geotrain.staging.interface import from_bytes, to_bytes
from tests.support.outer_configs import outer_config

PLAIN = codec_config("fp32")

UPDATES = 1000.0  # of a region in the run, for the momentum's decay


def parameter_map(layers_per_fragment: int | None = None, chunk_elements: int = 1 << 27) -> ParameterMap:
    """Two layers of a toy model: 4 parameters, 64 elements."""
    return ParameterMap(
        [
            Parameter("embed", (6, 4), None, "normal"),
            Parameter("layer.0", (4, 4), 0, "normal"),
            Parameter("layer.1", (4, 4), 1, "normal"),
            Parameter("norm", (8,), None, "ones"),
        ],
        layers_per_fragment,
        chunk_elements,
    )


class FakeWorker:
    """A worker of several parts, each with its slices of each chunk; here a plain function makes deltas."""

    def __init__(
        self, name: str, parameter_map: ParameterMap, slicings: list[list[tuple[StridedSlice, ...]]]
    ) -> None:
        self.name, self.parameter_map, self.slicings = name, parameter_map, slicings
        self.sequences = [0] * len(parameter_map.fragments)
        self.job = 0

    def joins(self, identity: Identity, incarnation: str = "life-1") -> list[Join]:
        i = identity
        return [
            Join(i.run, i.config_digest, i.parameter_map_digest, i.model, self.name, incarnation, part,
                 len(self.slicings),
                 tuple(pushes), tuple(pushes))
            for part, pushes in enumerate(self.slicings)
        ]  # fmt: skip

    def parts(self, deltas: dict[int, Tensor], contains: tuple[int, ...] = (), incarnation: str = "life-1",
              version: int = 0, codec: CodecConfig = PLAIN) -> list[UpdatePart]:  # fmt: skip
        """Make the next update of each of these fragments, by all ranks."""
        self.job += 1
        coder, made = make_codec(codec), list[UpdatePart]()
        for fragment, delta in deltas.items():
            self.sequences[fragment] += 1
            chunks = by_chunk(self.parameter_map, {fragment: delta})
            made += [
                UpdatePart(
                    self.name, incarnation, fragment, self.sequences[fragment], part,
                    tuple(
                        ChunkDelta(p, version, to_bytes(coder.encode(gather(d, pushes[p]).contiguous()).payload))
                        for p, d in chunks.items()
                    ),
                    job=self.job, contains=contains,
                )
                for part, pushes in enumerate(self.slicings)
            ]  # fmt: skip
        return made


class InProcess:
    """The transport: it gives messages to `handle`, and takes what is sent to where it goes. What regions say to the
    global server waits in `up`, what they say to their workers in `down`."""

    def __init__(self, top: GlobalServer, regions: dict[str, RegionServer]) -> None:
        self.top, self.regions = top, regions
        self.up: dict[str, deque[Message]] = {name: deque() for name in regions}
        self.down: dict[str, Message] = {}  # worker → what it was told last
        for name in regions:
            self.connect(name)

    def connect(self, name: str) -> None:
        """Join the region to the global server, as its client does: it takes the weights if it has none, and sends
        again what may be lost."""
        region = self.regions[name]
        welcome = self.top.handle(region.join_message()).reply
        region.handle(welcome)
        for fragment in region.numbers if not region.fragments else ():
            self.answer(name, fragment, 0)
        self.up[name] = deque(send.message for send in region.resend())

    def server(self, name: str) -> Any:
        return self.top if name == GLOBAL else self.regions[name]

    def tell(self, server: str, message: Message) -> Any:
        """The server's reply."""
        handled = self.server(server).handle(message)
        for send in handled.sends:
            if send.to == GLOBAL:
                self.up[server].append(send.message)
            else:
                self.down[send.to] = send.message
        return handled.reply

    def deliver(self, region: str) -> Message:
        """The region's next message reaches the global server; a lease is the reply to its request."""
        message = self.up[region].popleft()
        reply = self.top.handle(message).reply
        if isinstance(reply, Lease | Finished | TakenBack):
            self.tell(region, reply)
        return message

    def answer(self, region: str, fragment: int, sequence: int) -> bool:
        """The global server's answer reaches the region, if there is one."""
        answer = self.top.answer(region, self.regions[region].incarnation, 0, fragment, sequence)
        if answer is not None:
            self.tell(region, answer)
        return answer is not None


class World(InProcess):
    def __init__(self, config: OuterConfig, regions: dict[str, list[FakeWorker]], start: list[Tensor],
                 parameter_map: ParameterMap,
                 train_samples: int = 1 << 20, samples_per_step: int = 1,
                 momentum_decay: float | None = None,
                 identity: Identity | None = None) -> None:  # fmt: skip
        self.parameter_map, self.config, self.start = parameter_map, config, start
        self.identity = identity or Identity("test", "config", parameter_map.digest, "toy")
        self.names = {r: tuple(w.name for w in workers) for r, workers in regions.items()}
        self.plan, self.momentum_decay = (train_samples, samples_per_step), momentum_decay
        home = {r: GLOBAL if config.flat else r for r in regions}
        self.workers = {w.name: (home[r], w) for r, workers in regions.items() for w in workers}
        super().__init__(self.begun(GLOBAL), {r: self.begun(r) for r in home.values() if r != GLOBAL})
        for r, w in self.workers.values():
            for join in w.joins(self.identity):
                self.tell(r, join)

    def build(self, name: str, part: ServerPart = WHOLE) -> Any:
        """Make a server of this world, or a part of it, without state."""
        if name == GLOBAL:
            return GlobalServer(self.identity, self.parameter_map, self.config, self.names, *self.plan, part=part)
        rule = region_rule(self.config, self.names[name], UPDATES, self.momentum_decay)
        server = RegionServer(name, self.identity, self.parameter_map, self.config, rule, self.names[name], part=part)
        server.incarnation = "life-1"
        return server

    def begin(self, server: Any) -> None:
        """Give a new server what it starts from: the global one the first weights, a region nothing."""
        if isinstance(server, GlobalServer):
            server.set_weights([v.clone() for v in self.start])

    def begun(self, name: str) -> Any:
        server = self.build(name)
        self.begin(server)
        return server

    def push(
        self, worker: str, deltas: dict[int, Tensor], contains: tuple[int, ...] = ()
    ) -> dict[int, Tensor] | None:
        """A whole update of each of these fragments by one worker; the weights it is answered with, if any yet."""
        r, w = self.workers[worker]
        for part in w.parts(deltas, contains):
            self.tell(r, part)
        return self.weights(worker, {fragment: w.sequences[fragment] for fragment in deltas})

    def weights(self, worker: str, updates: dict[int, int]) -> dict[int, Tensor] | None:
        """The answers to these updates of a worker, sequences by fragment."""
        r, w = self.workers[worker]
        result = {f: torch.full((self.parameter_map.fragments[f].numel,), torch.nan) for f in updates}
        for fragment, sequence in updates.items():
            for part, slices in enumerate(w.slicings):
                answer = self.regions[r].answer(worker, "life-1", part, fragment, sequence)
                if answer is None:
                    return None
                for item in answer.weights:
                    chunk, vector = self.parameter_map.chunks[item.chunk], result[fragment]
                    values = make_codec(self.config.local).decode(from_bytes(item.payload), numel(slices[item.chunk]))
                    scatter(values, slices[item.chunk], vector[chunk.start : chunk.start + chunk.numel])
        return result

    def deliver_up(self, region: str) -> UpdatePart | None:
        """All that the region has to say reaches the global server, up to its next update."""
        while self.up[region]:
            message = self.deliver(region)
            if isinstance(message, UpdatePart):
                return message
        return None

    def deliver_down(self, region: str, update: UpdatePart) -> bool:
        """The answer to that update reaches the region, if there is one."""
        return self.answer(region, update.fragment, update.sequence)

    def settle(self, region: str) -> None:
        """All that the region says reaches the global server, and all answers that are there reach the region."""
        answered = True
        while self.up[region] or answered:
            while self.up[region]:
                self.deliver(region)
            answered = any(self.deliver_down(region, u) for u in list(self.regions[region].uplink.in_flight.values()))

    def lease(self, worker: str) -> Lease | None:
        """The worker's next lease, which the global server gives and the region is told of."""
        r, w = self.workers[worker]
        granted = self.top.handle(LeaseRequest(worker, w.job + 1)).reply
        assert granted is not None, "the run is paused"
        self.tell(r, granted)
        return granted if isinstance(granted, Lease) else None


def weights_of(server: Server) -> list[Tensor]:
    """By fragment."""
    return [server.weights(fragment.index) for fragment in server.parameter_map.fragments]


def by_chunk(parameter_map: ParameterMap, vectors: dict[int, Tensor]) -> dict[int, Tensor]:
    """vectors: by fragment. Views of them."""
    return {p.index: v[p.start : p.start + p.numel] for f, v in vectors.items() for p in parameter_map.chunks_of[f]}


def cut_at_chunks(parameter_map: ParameterMap, slices: list[StridedSlice]) -> list[tuple[StridedSlice, ...]]:
    """slices: one of each fragment. Returns those of each chunk."""
    found: list[tuple[StridedSlice, ...]] = [()] * len(parameter_map.chunks)
    for fragment, here in enumerate(slices):
        for each in cut_slice(parameter_map, fragment, here):
            found[each.chunk] = each.slices
    return found


def whole(parameter_map: ParameterMap) -> list[list[tuple[StridedSlice, ...]]]:
    return [[parameter_map.whole(p.index) for p in parameter_map.chunks]]


def halves(parameter_map: ParameterMap) -> list[list[tuple[StridedSlice, ...]]]:
    """Two parts: the front and the back of each fragment."""
    split = [f.numel // 3 for f in parameter_map.fragments]
    return [
        cut_at_chunks(parameter_map, [StridedSlice(0, s) for s in split]),
        cut_at_chunks(
            parameter_map, [StridedSlice(s, f.numel - s) for s, f in zip(split, parameter_map.fragments, strict=True)]
        ),
    ]


def columns(parameter_map: ParameterMap) -> list[list[tuple[StridedSlice, ...]]]:
    """Two parts: even and odd pairs of columns, as row-parallel matrices are cut."""
    return [
        cut_at_chunks(parameter_map, [StridedSlice(2 * part, 2, 4, f.numel // 4) for f in parameter_map.fragments])
        for part in range(2)
    ]


def config(rule="halos", **changes) -> OuterConfig:
    base = dict(
        up=PLAIN, down=PLAIN, local=PLAIN, updates_per_send=3, merge_alpha=0.25,
        region=MomentumConfig(lr_per_update=0.2, beta=0.9, buffer=4),
        **{"global": MomentumConfig(lr_per_update=0.15, beta=0.5, buffer=2)},
    )  # fmt: skip
    return outer_config(rule, base, **changes)


def start_vector() -> torch.Tensor:
    return torch.randn(64, generator=torch.Generator().manual_seed(1))


def make(cfg, cut_a=whole, cut_b=whole, fragments=None, chunk_elements=1 << 27, kind=World, **kwargs) -> Any:
    """Make a world with worker a in region eu, and b in us. kind: makes it of these."""
    lay = parameter_map(fragments, chunk_elements)
    start = [start_vector()[:1].expand(f.numel).clone() for f in lay.fragments]
    regions = {"eu": [FakeWorker("a", lay, cut_a(lay))], "us": [FakeWorker("b", lay, cut_b(lay))]}
    return kind(cfg, regions, start, lay, **kwargs)


def flat(
    rule: str = "halos",
    samples: int = 100_000,
    workers: tuple[str, ...] = ("a", "b"),
    others: tuple[str, ...] = (),
    **changes: Any,
) -> Any:
    """Make a global server whose members are the workers, all joined. others: those of region us."""
    shape, settings = parameter_map(), config(rule, **changes).model_copy(update={"levels": 1})
    regions = {"eu": workers, **({"us": others} if others else {})}
    top = GlobalServer(Identity("t", "c", shape.digest, "m"), shape, settings, regions, samples, 1)
    top.set_weights([torch.zeros(f.numel) for f in shape.fragments])
    for name in (*workers, *others):
        for join in FakeWorker(name, shape, whole(shape)).joins(top.identity):
            top.handle(join)
    return top


def random_deltas(world: World, seed: int) -> dict[int, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {f.index: torch.randn(f.numel, generator=gen) for f in world.parameter_map.fragments}


def saved_and_loaded(world: World, name: str) -> Any:
    """Return the server as a restart leaves it: without joins, and with its incarnation's name."""
    tensors, meta = world.server(name).state()
    new = world.build(name)
    new.load({key: tensor.clone() for key, tensor in tensors.items()}, json.loads(json.dumps(meta)))
    return new


def say_again(old: Server, new: Server) -> None:
    """Replay what a state leaves out."""
    for message in left_out(old):
        new.membership.note_joined(message.join) if isinstance(message, StillJoined) else new.handle(message)
