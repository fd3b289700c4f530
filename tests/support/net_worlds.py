"""Servers on real sockets in this process, and workers that are plain functions."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import Address, FragmentConfig, MomentumConfig, OuterConfig, architecture_from_hf, codec_config
from geotrain.net.server.grpc_service import GrpcService
from geotrain.net.server.region_client import RegionClient
from geotrain.net.server.server_thread import ServerThread
from geotrain.net.storage.recovery import begin_snapshot, finish_snapshot, recover
from geotrain.net.transport.certs import Trust, identity, load_credentials
from geotrain.net.transport.fragment_links import ShardsAbove
from geotrain.net.transport.grpc_client import GrpcClient
from geotrain.net.transport.operator_client import ask_status
from geotrain.net.transport.worker_client import WorkerClient
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import WeightsReceiver
from geotrain.outer.messages import Answer, ChunkDelta, Identity, Join, Lease, LeaseRequest, Send, UpdatePart
from geotrain.outer.rules import region_rule
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.outer.server.server import Server
from geotrain.parameters.parameter_map import ParameterMap, StridedSlice, canonical_parameters, gather, numel, scatter
from geotrain.staging.interface import to_bytes
from tests.support import outer_world
from tests.support.local_servers import first_weights
from tests.support.outer_configs import outer_config
from tests.support.outer_world import UPDATES, halves, whole  # noqa: F401

TINY = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
FP32 = codec_config("fp32")
BUSY_S = 120.0  # for what takes a moment, where the machine has other work
Slicing = Sequence[Sequence[tuple[StridedSlice, ...]]]  # part → fragment → its slices


def outer(rule: str = "halos", **changes: Any) -> OuterConfig:
    """fp32 everywhere, small K, one layer a fragment."""
    settings: dict[str, Any] = dict(
        local_steps=2,
        updates_per_send=2,
        merge_alpha=0.5,
        region=MomentumConfig(lr_per_update=0.5, beta=0.5, buffer=2),
        lr=1.0,
        momentum=0.5,
        up=FP32,
        down=FP32,
        local=FP32,
        fragments=FragmentConfig(layers_per_fragment=1),
    )
    return outer_config(rule, settings, **changes)


def tiny_layout(config: OuterConfig) -> ParameterMap:
    return ParameterMap(canonical_parameters(architecture_from_hf(TINY)), config.fragments.layers_per_fragment)


class Loop:
    """An event loop on a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def do(self, work: Any, within_s: float = BUSY_S) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(within_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(BUSY_S)
        self.loop.close()


class Running:
    """One server on its sockets, its state in a folder. `kill` drops it without a word; `again` recovers it."""

    def __init__(self, loop: Loop, build: Callable[[], Server], begin: Callable[[Server], None], folder: Path,
                 port: int = 0, above: str = "", certs: Path | None = None,
                 silent_s: float = 60.0, events: deque[Any] | None = None) -> None:  # fmt: skip
        self.certs, self.silent_s = certs, silent_s
        self.events: deque[Any] = deque() if events is None else events
        self.loop, self.build, self.begin, self.folder, self.above = loop, build, begin, folder, above
        self.region_client: RegionClient | None = None
        self.region_client_task: asyncio.Task[None] | None = None
        self.recovered = recover(build, begin, folder, keep=2)
        self.server: Any = self.recovered.server
        self.port = loop.do(self._start(port))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def again(self) -> Running:
        return Running(
            self.loop,
            self.build,
            self.begin,
            self.folder,
            self.port,
            self.above,
            self.certs,
            self.silent_s,
            self.events,
        )

    def snapshot(self) -> None:
        r = self.recovered
        begin = partial(begin_snapshot, self.server, r.store, r.journal, ended=False)
        copy = self.loop.do(self.server_thread.alone(begin))
        finish_snapshot(r.store, r.journal, *copy)

    async def _start(self, port: int) -> int:
        self.server_thread = ServerThread(self.server, self.recovered.journal, self._deliver, self.events.append)
        role, name = ("region", self.server.name) if self.above else ("global", GLOBAL)
        own = load_credentials(self.certs, role, name) if self.certs else None
        self.service = GrpcService(
            self.server_thread, self._snapshot, self._of_client, silent_s=self.silent_s, credentials=own
        )
        if self.above:
            trust = Trust(own, identity("global", GLOBAL)) if own else None
            link = GrpcClient(self.above, self.server.name, self.server.incarnation, trust)
            times = self.service.answer_timer.times
            self.region_client = RegionClient(self.server_thread, self.server, link, times=times)
            self.region_client_task = asyncio.create_task(self.region_client.run())
        return await self.service.start(Address(port=port))

    def _deliver(self, send: Send) -> None:
        (self.region_client if send.to == GLOBAL and self.region_client else self.service).deliver(send)

    async def _snapshot(self) -> str:
        return "nowhere"

    def _of_client(self, _: bool) -> dict[str, Any]:
        client = self.region_client
        if client is None:
            return {}
        return {"connected": client.connected, "queued": len(client._updates) + sum(map(len, client._said.values()))}

    def kill(self) -> None:
        self.loop.do(self._kill())

    async def _kill(self) -> None:
        if self.region_client is not None and self.region_client_task is not None:
            self.region_client_task.cancel()
            await asyncio.gather(self.region_client_task, return_exceptions=True)
            await self.region_client.close()
        await self.service.stop(None)
        await asyncio.to_thread(self.server_thread.close)
        self.recovered.journal.close()


class Cluster:
    """A global server and regions: region → its workers' slicings."""

    def __init__(self, loop: Loop, folder: Path, config: OuterConfig,
                 regions: dict[str, dict[str, Callable[[ParameterMap], Slicing]]],
                 train_samples: int = 64, samples_per_step: int = 2, certs: Path | None = None,
                 silent_s: float = 60.0) -> None:  # fmt: skip
        self.certs, self.silent_s = certs, silent_s
        self.config, self.parameter_map = config, tiny_layout(config)
        self.workers: list[FakeWorker] = []
        self.loop, self.folder, self.plan = loop, folder, (train_samples, samples_per_step)
        self.identity = Identity("test", "0123", self.parameter_map.digest, "a tiny llama")
        self.names = {region: tuple(workers) for region, workers in regions.items()}
        self.slicings = {w: cut for workers in regions.values() for w, cut in workers.items()}
        self.home = {w: r for r, workers in regions.items() for w in workers}
        self.top = Running(
            loop, self.new_global, self.first_weights, folder / "global", certs=certs, silent_s=silent_s
        )
        self.regions = {name: self.new_region(name, folder / name) for name in regions}

    def new_global(self) -> GlobalServer:
        server = GlobalServer(self.identity, self.parameter_map, self.config, self.names, *self.plan)
        server.incarnation = uuid.uuid4().hex
        return server

    def first_weights(self, server: Server) -> None:
        server.set_weights(first_weights(self.parameter_map))

    def new_region(self, name: str, folder: Path, port: int = 0) -> Running:
        def build() -> RegionServer:
            rule = region_rule(self.config, self.names[name], UPDATES)
            region = RegionServer(name, self.identity, self.parameter_map, self.config, rule, self.names[name])
            region.incarnation = uuid.uuid4().hex
            return region

        return Running(
            self.loop, build, lambda server: None, folder, port, self.top.address, self.certs, self.silent_s
        )

    def region_of(self, worker: str) -> Running:
        return self.regions[self.home[worker]]

    def worker(self, name: str, incarnation: str = "life-1") -> FakeWorker:
        cut = self.slicings[name](self.parameter_map)
        address = self.region_of(name).address
        trust = self.trust("worker", name, "region", self.home[name]) if self.certs else None
        place = address, self.parameter_map, self.config, cut, self.identity, trust
        self.workers.append(FakeWorker(name, incarnation, *place))
        return self.workers[-1]

    def joined(self, name: str, incarnation: str = "life-1") -> FakeWorker:
        """A worker that has joined its region."""
        worker = self.worker(name, incarnation)
        worker.join()
        return worker

    def trust(self, role: Any, name: str, server_role: Any, server: str) -> Trust:
        assert self.certs is not None
        return Trust(load_credentials(self.certs, role, name), identity(server_role, server))

    def restart_top(self) -> None:
        self.top.kill()
        self.top = self.top.again()

    def restart(self, region: str) -> None:
        self.regions[region].kill()
        self.regions[region] = self.regions[region].again()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for running in (*self.regions.values(), self.top):
            running.kill()


class FakeWorker:
    """All ranks of a worker in one object, each with a client of its own. It "trains" by gradient steps on
    |x − target|²/2 with a step size that depends on the lease, so that lost or doubled work shows."""

    def __init__(self, name: str, incarnation: str, address: str, parameter_map: ParameterMap, config: OuterConfig,
                 slicing: Slicing, identity: Identity, trust: Trust | None = None,
                 shards: ShardsAbove | None = None, deadline_s: float = 60) -> None:  # fmt: skip
        self.name, self.incarnation, self.parameter_map, self.slicing = name, incarnation, parameter_map, slicing
        self.identity = identity
        self.codec = make_codec(config.local)
        self.receivers = [WeightsReceiver(config.local) for _ in slicing]
        settings: Any = {"connect_s": deadline_s, "deadline_s": deadline_s, "trust": trust, "shards": shards}
        self.clients = [WorkerClient(address, **settings) for _ in slicing]
        self.anchor = [torch.zeros(f.numel) for f in parameter_map.fragments]
        self.versions = [0] * len(parameter_map.fragments)
        self.sequences = [0] * len(parameter_map.fragments)  # of the next update of each
        self.job = 0
        self.trained: list[Lease] = []

    def join(self) -> None:
        for client, join in zip(self.clients, self.joins(), strict=True):
            welcome = client.join(join)
        self.sequences, self.job = list(welcome.sequences), welcome.job
        for fragment in range(len(self.parameter_map.fragments)):
            self.adopt([c.pull(fragment, 0) for c in self.clients])

    def joins(self) -> list[Join]:
        """Make what each rank says at first."""
        return outer_world.FakeWorker(self.name, self.parameter_map, self.slicing).joins(
            self.identity, self.incarnation
        )

    def adopt(self, answers: list[Future[Answer]]) -> None:
        """As the trainer does: ranks adopt answers of one incarnation of the server only."""
        arrived = all_of(answers)
        while len({answer.incarnation for answer in arrived}) > 1:
            again = [c.pull(arrived[0].fragment, arrived[0].sequence) for c in self.clients]
            arrived = all_of(again)
        self.take(arrived)

    def take(self, arrived: Sequence[Answer]) -> None:
        """Take the weights of an answer to each rank, all of one incarnation of the server."""
        versions = set()
        for part, answer in enumerate(arrived):
            for w in answer.weights:
                cut = self.slicing[part][w.chunk]
                scatter(self.receivers[part].decode(w, numel(cut)), cut, self.anchor[w.chunk])
                self.versions[w.chunk] = w.version
                versions.add((w.chunk, w.version))
        assert len(versions) == len({f for f, _ in versions}), "ranks adopted different versions"

    def lease(self) -> Lease | None:
        granted = [c.lease(LeaseRequest(self.name, self.job)) for c in self.clients]
        leases = {g.result(BUSY_S) for g in granted}
        assert len(leases) == 1, "ranks were told different things"
        lease = leases.pop()
        return lease if isinstance(lease, Lease) else None

    def parts(self, lease: Lease, fragment: int) -> list[UpdatePart]:
        """Make the next update of the fragment, which contains the lease, by all ranks."""
        step = 0.01 * (1 + lease.start % 7)
        delta = (self.anchor[fragment] - target(self.parameter_map, fragment)) * step
        return [
            UpdatePart(
                self.name, self.incarnation, fragment, self.sequences[fragment], part,
                (ChunkDelta(fragment, self.versions[fragment], self._encoded(delta, cut[fragment])),),
                job=lease.job, contains=(lease.lease,),
                metrics={"loss": float(self.anchor[0].norm()), "tokens": 1.0},
            )
            for part, cut in enumerate(self.slicing)
        ]  # fmt: skip

    def _encoded(self, delta: Tensor, cut: tuple[StridedSlice, ...]) -> bytes:
        return to_bytes(self.codec.encode(gather(delta, cut).contiguous()).payload)

    def train(self, lease: Lease) -> None:
        """One job: each fragment's delta leaves as an update of its own, and is answered."""
        for f in range(len(self.parameter_map.fragments)):
            self.exchange(self.parts(lease, f))
        self.trained.append(lease)
        self.job += 1

    def exchange(self, parts: list[UpdatePart]) -> None:
        pushed = [c.push(p) for c, p in zip(self.clients, parts, strict=True)]
        answers = [c.pull(parts[0].fragment, parts[0].sequence) for c in self.clients]
        for push in pushed:
            push.result(BUSY_S)
        self.sequences[parts[0].fragment] += 1
        self.adopt(answers)

    def run(self) -> None:
        self.join()
        told = False  # that there is no data; asked again, it waits for what others hold
        while (lease := self.lease()) is not None or not told:
            if told := lease is None:
                self.job += 1
            else:
                self.train(lease)
        self.leave()

    def leave(self) -> None:
        with futures.ThreadPoolExecutor(len(self.clients)) as pool:
            list(pool.map(WorkerClient.leave, self.clients))

    def close(self) -> None:
        for client in self.clients:
            client.close()


def all_of(answers: list[Future[Answer]]) -> list[Answer]:
    """A rank that fails ends the others of its worker, whatever they wait for."""
    done, _ = futures.wait(answers, BUSY_S, return_when=futures.FIRST_EXCEPTION)
    for answer in done:
        answer.result()
    return [answer.result(0) for answer in answers]


def status_of(address: str) -> dict[str, Any]:
    status = ask_status(address, BUSY_S)
    assert status is not None, "the server does not answer"
    return status


def target(parameter_map: ParameterMap, fragment: int) -> Tensor:
    return torch.linspace(-1, 1, parameter_map.fragments[fragment].numel)


@contextmanager
def clusters(folder: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters, and ends them."""
    loop, made = Loop(), []

    def make(*arguments: Any, **settings: Any) -> Cluster:
        made.append(Cluster(loop, folder / str(len(made)), *arguments, **settings))
        return made[-1]

    try:
        yield make
    finally:
        for cluster in made:
            cluster.close()
        loop.close()


def wait_for(what: Callable[[], Any], within_s: float = BUSY_S) -> Any:
    """Polls; for what no message announces."""
    deadline = time.monotonic() + within_s
    while not (value := what()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


@contextmanager
def side_by_side(workers: list[FakeWorker]) -> Iterator[None]:
    """Let each worker run on a thread of its own. At the end of the block wait until all have ended, and raise what
    one of them raised."""
    with futures.ThreadPoolExecutor(len(workers)) as pool:
        try:
            ends = [pool.submit(worker.run) for worker in workers]
            yield
            for end in ends:
                end.result(BUSY_S)
        finally:
            for worker in workers:
                worker.close()


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
