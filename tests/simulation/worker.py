"""A worker of a simulated world: its links are the product's, its training is time that passes."""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from geotrain.net.transport.worker_client import WorkerClient
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import WeightsReceiver
from geotrain.outer.messages import Answer, ChunkDelta, Join, Lease, LeaseRequest, UpdatePart
from geotrain.outer.server.server import identity_of
from geotrain.parameters.parameter_map import gather, numel, scatter
from geotrain.staging.interface import to_bytes
from tests.support.net_worlds import halves, whole

if TYPE_CHECKING:
    from tests.simulation.world import World

STEP_S = 0.5  # an inner step's time


class SimulatedWorker:
    """All ranks of a worker, each with a production `WorkerClient`. Training is time that passes; a delta is a step
    towards a target whose size depends on the lease, so that lost or doubled work shows in the weights."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.config, self.parameter_map = world.run_config.outer, world.parameter_map
        self.slicing = (halves if name == "a" else whole)(self.parameter_map)
        self.codec = make_codec(self.config.local)
        self.receivers = [WeightsReceiver(self.config.local) for _ in self.slicing]
        self.anchor = [torch.zeros(f.numel) for f in self.parameter_map.fragments]
        self.versions = [0] * len(self.parameter_map.fragments)
        self.incarnation = uuid.uuid4().hex
        address = world.server_of(name)
        self.clients = [WorkerClient(address, connect_s=1e6, deadline_s=1e6) for _ in self.slicing]
        for client in self.clients:
            client.on_acknowledged = self._acknowledged

    def _acknowledged(self, sequence: int) -> None:
        self.world.acknowledged.add((self.name, self.incarnation, sequence))

    async def run(self) -> None:
        i = identity_of(self.world.run_config, self.parameter_map)
        for part, (client, cut) in enumerate(zip(self.clients, self.slicing, strict=True)):
            cuts = tuple(tuple(c) for c in cut)
            join = Join(i.run, i.config_digest, i.parameter_map_digest, i.model, self.name, self.incarnation, part,
                        len(self.slicing), cuts, cuts)  # fmt: skip
            welcome = await client._first_join(join)
        self.sequence, self.job = welcome.sequence, welcome.job
        everything = tuple(range(len(self.parameter_map.fragments)))
        await self._adopt([c.pull(0, everything) for c in self.clients], everything)
        while isinstance(lease := await self._lease(), Lease):
            self.world.note(self.name, lease)
            for f in everything:
                await asyncio.sleep(STEP_S * self.world.random.uniform(0.5, 2.0))
                parts = self._parts(lease, f)
                pushed = []
                for client, part in zip(self.clients, parts, strict=True):
                    await asyncio.sleep(self.world.random.uniform(0.0, 0.5))  # ranks are not equally fast
                    pushed.append(client.push(part))
                answers = [c.pull(self.sequence, (f,)) for c in self.clients]
                await asyncio.gather(*map(asyncio.wrap_future, pushed))
                await self._adopt(answers, (f,))
                self.sequence += 1
            self.job += 1
        for client in self.clients:
            client._start(client._leave())
        await asyncio.gather(*(c._persist(lambda k, c=c: k.leave(c._part, c._sequence)) for c in self.clients))

    async def close(self) -> None:
        for client in self.clients:
            await client._shut()

    async def _lease(self) -> Any:
        asked = [asyncio.wrap_future(c.lease(LeaseRequest(self.name, self.job))) for c in self.clients]
        granted = set(await asyncio.gather(*asked))
        assert len(granted) == 1, f"ranks were told different things: {granted}"
        return granted.pop()

    async def _adopt(self, answers: list[Future[Answer]], fragments: tuple[int, ...]) -> None:
        arrived = list(await asyncio.gather(*map(asyncio.wrap_future, answers)))
        while len({answer.incarnation for answer in arrived}) > 1:
            again = [asyncio.wrap_future(c.pull(arrived[0].sequence, fragments)) for c in self.clients]
            arrived = list(await asyncio.gather(*again))
        versions = set()
        for part, answer in enumerate(arrived):
            for w in answer.weights:
                cut = self.slicing[part][w.chunk]
                scatter(self.receivers[part].decode(w, numel(cut)), cut, self.anchor[w.chunk])
                self.versions[w.chunk] = w.version
                versions.add((w.chunk, w.version))
        assert len(versions) == len({f for f, _ in versions}), "ranks adopted different versions"

    def _parts(self, lease: Lease, f: int) -> list[UpdatePart]:
        delta = (self.anchor[f] - 1.0) * (0.01 * (1 + lease.start % 7))
        leases = (lease.lease,) if f == len(self.parameter_map.fragments) - 1 else ()
        return [
            UpdatePart(
                self.name, self.incarnation, self.sequence, part,
                (ChunkDelta(f, self.versions[f], self._encoded(delta, cut[f])),), job=lease.job, leases=leases,
            )
            for part, cut in enumerate(self.slicing)
        ]  # fmt: skip

    def _encoded(self, delta: torch.Tensor, cut: Any) -> bytes:
        return to_bytes(self.codec.encode(gather(delta, cut).contiguous()).payload)
