"""A worker of a simulated world: its links are the product's, its training is time that passes."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
import uuid
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.net.transport.authority import ALWAYS, make_named
from geotrain.net.transport.certs import Role, trust_between
from geotrain.net.transport.fragment_links import shards_above
from geotrain.outer.identity import identity_of
from geotrain.outer.messages import Answer, Lease, LeaseRequest
from geotrain.parameters.parameter_map import StridedSlice
from tests.support.net_worlds import FakeWorker, halves, whole

if TYPE_CHECKING:
    from tests.simulation.world import World

REGIONS = {"eu": ("a", "b"), "us": ("c",)}
HOME = {worker: region for region, workers in REGIONS.items() for worker in workers}
NAN = b"\0\0\xc0\x7f"  # as fp32
STEP_S = 0.5  # an inner step's time


@cache
def certificates() -> str:
    """The folder of all processes' certificates, which all secure lives share."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    names: dict[Role, tuple[str, ...]] = {"shard": (GLOBAL, *REGIONS), "region": (*REGIONS,), "worker": (*HOME,)}
    make_named("here", [*ALWAYS, *((role, name) for role in names for name in names[role])], Path(folder))
    return folder


class SimulatedWorker(FakeWorker):
    """A worker whose ranks wait as coroutines of the simulation's loop, where `FakeWorker` blocks."""

    def __init__(self, world: World, name: str) -> None:
        self.world, parameter_map = world, world.parameter_map
        cut, identity = (
            {1: whole, 2: halves}[world.ranks[name]](parameter_map),
            identity_of(world.run_config, parameter_map),
        )
        there = world.server_of(name), parameter_map, world.run_config.outer, cut, identity
        shards = shards_above(world.cluster, parameter_map, "worker", name, HOME[name])
        trust = trust_between(world.cluster, "worker", name, "region", HOME[name])
        super().__init__(name, uuid.uuid4().hex, *there, trust, shards, deadline_s=1e6)
        self.waits = getattr(world.run_config.outer.rule, "answers", "") == "wait"
        for client in self.clients:
            client.on_acknowledged = self._acknowledged

    def _acknowledged(self, fragment: int, sequence: int) -> None:
        self.world.acknowledged.add((self.name, self.incarnation, fragment, sequence))

    async def live(self) -> bool:
        """Join, train until no data is left, and leave. Returns whether it is to be started again, with other ranks:
        then it does not say goodbye, as where a lost host is back at a job's end."""
        for client, join in zip(self.clients, self.joins(), strict=True):
            welcome = await client._first_join(join)
        self.sequences, self.job = list(welcome.sequences), welcome.job
        await self._begun()
        told = False
        while isinstance(lease := await self._leased(), Lease) or not told:
            if told := not isinstance(lease, Lease):
                self.job += 1
                continue
            self.world.note(self.name, lease)
            self._spoils(lease)
            while self.name in self.world.hung:
                await asyncio.sleep(5.0)
            for f in range(len(self.parameter_map.fragments)):
                await asyncio.sleep(STEP_S * self.world.random.uniform(0.5, 2.0))
                pushed, parts = [], self.parts(lease, f)
                if self.waits:
                    need_s = self.world.random.choice([0.0, 0.5, 2.0, 10.0])
                    parts = [replace(part, need_s=need_s) for part in parts]
                if not self.spoilt:
                    self.world.account.trains(parts, self.slicing)
                for client, part in zip(self.clients, parts, strict=True):
                    await asyncio.sleep(self.world.random.uniform(0.0, 0.5))  # ranks are not equally fast
                    pushed.append(client.push(part))
                answers = [c.pull(f, self.sequences[f]) for c in self.clients]
                await asyncio.gather(*map(asyncio.wrap_future, pushed))
                await self._pulled(answers)
                self.sequences[f] += 1
            self.job += 1
            forming = self.world.forming
            if forming is not None and not self.world.run_config.outer.rule.synchronous and forming.random() < 0.1:
                self.world.disturb(self.name)
                self.world.absent.add(self.name)
                self.world.note(self.name, "is formed anew after its job")
                return True
        await self._begun()
        await asyncio.gather(*(client._leave() for client in self.clients))
        return False

    async def _begun(self) -> None:
        """Adopt the server's weights as they are now."""
        fragments = range(len(self.parameter_map.fragments))
        pulled = [[c.pull(fragment, 0) for c in self.clients] for fragment in fragments]
        for answers in pulled:
            await self._pulled(answers)

    def _spoils(self, lease: Lease) -> None:
        """Whether what this lease's training gives is of no use: then the worker is refused, and ends."""
        self.spoilt = bool(set(self.world.spoiled) & set(range(lease.start, lease.start + lease.samples)))
        if self.spoilt:
            self.world.struck.add(self.name)
            self.world.disturb(self.name)
            self.world.absent.add(self.name)

    def _encoded(self, delta: Tensor, cut: tuple[StridedSlice, ...]) -> bytes:
        payload = super()._encoded(delta, cut)
        return NAN * (len(payload) // len(NAN)) if self.spoilt else payload

    async def end(self) -> None:
        for client in self.clients:
            await client._shut()

    async def _leased(self) -> Any:
        asked = [asyncio.wrap_future(c.lease(LeaseRequest(self.name, self.job, STEP_S))) for c in self.clients]
        granted = set(await asyncio.gather(*asked))
        assert len(granted) == 1, f"ranks were told different things: {granted}"
        return granted.pop()

    async def _pulled(self, answers: list[Future[Answer]]) -> None:
        arrived = list(await asyncio.gather(*map(asyncio.wrap_future, answers)))
        update = arrived[0].fragment, arrived[0].sequence
        while len({answer.incarnation for answer in arrived}) > 1:
            again = [asyncio.wrap_future(c.pull(*update)) for c in self.clients]
            arrived = list(await asyncio.gather(*again))
        self.take(arrived)
        self.world.account.adopts(self.name, update[0], self.anchor[update[0]])
