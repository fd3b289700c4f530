"""One run of the product's servers and workers' links in virtual time: `geotrain.net` as it is, its event loops,
threads, sockets and disks in the hand of one seed. Processes die, lose power, are cut off, are started again."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import random
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, RunConfig, parse
from geotrain.monitor.events import EventLog, Trouble
from geotrain.net.server import grpc_service, process_host, server_host, server_thread
from geotrain.net.server.rate_limits import RateLimits
from geotrain.net.server.resumable_uploads import ResumableUploads
from geotrain.net.server.server_host import RegionServerHost, ServerHost
from geotrain.net.server.server_process import EXPECTED, FOR_GOOD, _recovered, any_server, begin_server
from geotrain.net.server.server_setup import ServerSetup
from geotrain.net.storage import frozen_state
from geotrain.net.storage.recovery import restarted
from geotrain.net.transport import grpc_client, rpc, wire, worker_client
from geotrain.net.transport.tcp_counters import Traffic
from geotrain.net.transport.worker_client import ServerForgot, WorkerClient
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import WeightsReceiver
from geotrain.outer.events import Event
from geotrain.outer.messages import Answer, ChunkDelta, Join, Lease, LeaseRequest, UpdatePart
from geotrain.outer.server.server import Server, identity_of
from geotrain.parameters.parameter_map import gather, numel, parameter_map_of, scatter
from geotrain.staging.interface import to_bytes
from tests.simulation.disk import Disk
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import PROCESS, Channel, Network
from tests.support.net_worlds import TINY, halves, outer, whole

FRAME_BYTES = 2048  # so that transfers have several frames, and can break between them
STEP_S = 0.5  # an inner step's time
LEAVE_S = 1_000.0  # after the global server's end, those who were never disturbed have ended within this time
REGIONS = {"eu": ("a", "b"), "us": ("c",)}
HOME = {worker: region for region, workers in REGIONS.items() for worker in workers}


# -- what takes the places of threads, pools and clocks


class _Idle(BaseException):
    """Raised where a thread would wait for work: its run goes on when there is some."""


class _Inbox:
    """A queue whose reader, the target of a thread, runs in the event loop whenever something was put in."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self.reader: Callable[[], None] = lambda: None

    def put(self, item: Any) -> None:
        self._items.append(item)
        # Not at once: what comes meanwhile shares a flush of the journal.
        World.now.loop.call_later(World.now.random.uniform(0.0, 0.02), self.run)

    def get(self) -> Any:
        if not self._items:
            raise _Idle
        return self._items.pop(0)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    def run(self) -> None:
        try:
            if self._items:
                self.reader()
        except _Idle:
            pass


class _InboxThread:
    """The thread of a `ServerThread`: it runs where its inbox runs it."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._inbox = target.__self__._queue  # type: ignore[attr-defined]
        self._inbox.reader = target

    def start(self) -> None:
        pass

    def join(self) -> None:
        self._inbox.run()


class _NoThread:
    """A thread whose work the event loop of the simulation does, or nobody."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    start = stop = join = __init__

    def traffic(self) -> dict[str, Traffic]:
        return {}


class _Counters(_NoThread):
    """`TcpCounters` where there are no sockets."""

    total = Traffic()

    def take_recent(self) -> Traffic:
        return Traffic()


class _Writes:
    """A pool of one thread that writes snapshots: a while later, or when somebody waits for it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[Future[Any], Callable[[], Any]] = {}
        world.pools.append(self)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting[future] = functools.partial(function, *args)
        self._world.loop.call_later(self._world.random.uniform(0.0, 3.0), self.write, future)
        return future

    def write(self, future: Future[Any]) -> None:
        if (work := self._waiting.pop(future, None)) is not None:
            try:
                future.set_result(work())
            except OSError as error:
                future.set_exception(error)

    def shutdown(self) -> None:
        for future in list(self._waiting):
            self.write(future)

    def drop(self) -> None:
        self._waiting.clear()


def _wait(futures: list[Future[Any]], timeout: float) -> Any:
    """`concurrent.futures.wait` for what `_Writes` were given."""
    for future in futures:
        for pool in World.now.pools:
            pool.write(future)
    return SimpleNamespace(not_done=set())


class _Events:
    """A process's event log: into the world's record, as long as the process lives."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.alive = world, name, True

    def write(self, event: Event) -> None:
        if self.alive:
            self.world.note(self.name, event)

    def report(self, trouble: str) -> None:
        self.write(Trouble(trouble))


class _Condition:
    """The condition on which a `FrozenState` waits for its writer, which then writes to its end."""

    __enter__ = __exit__ = notify_all = lambda *_: None

    def wait(self, timeout: float | None = None) -> bool:
        for pool in World.now.pools:
            pool.shutdown()
        return True


# -- processes


@dataclass
class Process:
    """A server's or a worker's process, in its present incarnation. task: what it runs; None: it is down."""

    name: str
    task: asyncio.Task[None] | None = None
    host: ServerHost | None = None
    events: _Events | None = None
    folder: Path | None = None
    deaths: int = 0
    expected: dict[str, Any] | None = None  # the dead incarnation's durable state, which the next one must find
    ended: bool = False  # in good order


class World:
    """A whole run, which `play` plays to its end. All that happens is in `record`, what must not in `faults`."""

    now: World  # the one that is being played

    def __init__(
        self, seed: int, folder: Path, rule: str = "halos", train_samples: int = 48, **settings: Any
    ) -> None:
        self.random, self.folder = random.Random(seed), folder
        self.loop = VirtualLoop()
        World.now = self
        raw = {
            "name": "tiny",
            "seed": 1,
            "model": {"config": TINY},
            "data": {"train": "none", "sequence_length": 8, "train_samples": train_samples},
            "deepspeed": {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2},
            "outer": outer(rule, **settings).model_dump(by_alias=True, mode="json"),
            "checkpoint": {"every_minutes": 0.2},
            "monitor": {"enabled": False},
        }
        host = [{"host": "localhost", "slots": 1}]
        regions = [
            {"name": r, "server": {"port": 101 + i}, "workers": [{"name": w, "hosts": host} for w in workers]}
            for i, (r, workers) in enumerate(REGIONS.items())
        ]
        cluster = {"name": "here", "global_server": {"port": 100}, "regions": regions}
        self.run_config, self.cluster = parse(RunConfig, raw, "run"), parse(ClusterConfig, cluster, "cluster")
        self.parameter_map = parameter_map_of(self.run_config)
        self.addresses = {
            GLOBAL: str(self.cluster.global_server),
            **{r: str(self.cluster.region(r).server) for r in REGIONS},
        }
        self.network = Network(self.loop, self.random, {a: name for name, a in self.addresses.items()})
        self.disk = Disk(self.random)
        self.pools: list[_Writes] = []
        self.processes = {name: Process(name) for name in (*self.addresses, *HOME)}
        for name in self.addresses:
            self.processes[name].folder = folder / name
        self.record: list[tuple[float, str, Any]] = []
        self.faults: list[str] = []
        self.disturbed: set[str] = set()  # whom the run may have given up: killed, or cut off
        self.acknowledged: set[tuple[str, str, int]] = set()

    def note(self, name: str, what: Any) -> None:
        self.record.append((self.loop.time(), name, what))

    # -- playing

    def play(self, work: Callable[[World], Any], within_s: float) -> None:
        """Play `work`, a coroutine function that disturbs the world, until the run has ended."""
        with self._in_place():
            self.loop.run_until_complete(self._play(work, within_s))
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.close()

    async def _play(self, work: Callable[[World], Any], within_s: float) -> None:
        for name in self.processes:
            self.start(name)
        disturbing = asyncio.ensure_future(work(self))
        top, others = self.processes[GLOBAL], [p for p in self.processes.values() if p.name != GLOBAL]
        deadline_s = self.loop.time() + within_s
        while not (disturbing.done() and top.ended) and self._goes_on(deadline_s, [top]):
            await asyncio.sleep(1.0)
        # A run may end without those that it has given up: nobody is there any more to tell them.
        waited_for = [p for p in others if p.name not in self.disturbed]
        deadline_s = self.loop.time() + LEAVE_S
        while not all(p.ended for p in waited_for) and self._goes_on(deadline_s, waited_for):
            await asyncio.sleep(1.0)
        if disturbing.done():
            disturbing.result()

    def _goes_on(self, deadline_s: float, waited_for: list[Process]) -> bool:
        """Whether there is time left and nothing is broken yet."""
        if self.loop.time() > deadline_s:
            left = [p.name for p in waited_for if not p.ended]
            self.faults.append(f"the run has not ended after {self.loop.time():.0f} s; left: {left}")
        return not (self.faults or self.network.errors)

    def cut(self, below: str, above: str, seconds: float) -> None:
        """Let nothing pass for so long between a region or a worker and the server above it."""
        self.disturbed |= {below, *REGIONS.get(below, ())}
        self.note(below, f"is cut off from {above} for {seconds:g} s")
        self.network.cut(below, above, seconds)

    def start(self, name: str) -> None:
        process = self.processes[name]
        context = contextvars.copy_context()
        context.run(PROCESS.set, name)
        run = self._serve if name in self.addresses else self._work
        process.task = self.loop.create_task(run(process), context=context)

    def kill(self, name: str, power_lost: bool = False) -> bool:
        """Kill a process at this very moment. Returns False where it is down, or has ended."""
        process = self.processes[name]
        if process.task is None or process.ended:
            return False
        process.deaths += 1
        self.disturbed |= {name, *REGIONS.get(name, ())}
        self.note(name, "loses power" if power_lost else "is killed")
        self.network.lose_process(name)
        self.network.servers.pop(self.addresses.get(name, ""), None)
        if process.folder is not None:
            if process.folder.exists():
                process.folder = self.disk.after(process.folder, power_lost)
            if process.host is not None:
                process.expected = durable(restarted_copy(self, process.host.server))
        if process.events is not None:
            process.events.alive = False
        process.task.cancel()
        process.task = process.host = None
        return True

    # -- what runs in a process

    async def _serve(self, process: Process) -> None:
        name, folder = process.name, process.folder
        assert folder is not None
        setup = ServerSetup(self.run_config, self.cluster, name, folder, launch="one")
        process.events = _Events(self, name)
        events: EventLog = process.events  # type: ignore[assignment]
        incarnation = uuid.uuid4().hex

        def build() -> Server:
            server = any_server(self.run_config, self.cluster, name, 1)
            server.incarnation = incarnation
            return server

        recovered = _recovered(setup, events, build, begin_server)
        if process.expected is not None:
            self._compare(name, process.expected, durable(recovered.server))
        kind = ServerHost if name == GLOBAL else RegionServerHost
        monitor: Any = SimpleNamespace(page_url=None, metrics_url=None)
        process.host = kind(setup, recovered, events, monitor, None)
        try:
            await process.host.run()
        except Exception as error:
            process.host = process.task = None
            process.expected = None
            if isinstance(error, FOR_GOOD) or not isinstance(error, EXPECTED):
                self.faults.append(f"{name} ended: {error!r}")
            else:  # as its launcher does
                self.note(name, f"ends: {error}")
                self.loop.call_later(1.0, self.start, name)
            return
        process.ended = True
        self.note(name, "has ended")

    def _compare(self, name: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
        for key in expected.keys() | found.keys():
            if expected.get(key) != found.get(key):
                self.faults.append(f"{name}: {key} was {expected.get(key)!r:.300}, is {found.get(key)!r:.300}")

    async def _work(self, process: Process) -> None:
        """A worker's link over its production client, and training in place of which time passes."""
        name, death = process.name, process.deaths
        worker = SimulatedWorker(self, name)
        try:
            await worker.run()
        except ServerForgot:
            process.task = None
            self.loop.call_later(1.0, self.start, name)  # as its launcher would
            return
        finally:
            if process.deaths == death:
                await worker.close()
        process.ended = True
        self.note(name, "has ended")

    # -- in place of the machine

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Let virtual time, this network and this disk take the places of the machine's."""
        transport, loop = self.network.transport(), self.loop
        threads = SimpleNamespace(Thread=_NoThread, Event=None)
        put: list[tuple[Any, str, Any]] = [
            (server_thread, "threading", SimpleNamespace(Thread=_InboxThread)),
            (server_thread, "queue", SimpleNamespace(SimpleQueue=_Inbox)),
            (process_host, "ThreadPoolExecutor", lambda *_, **__: _Writes(self)),
            (process_host, "wait", _wait),
            (process_host, "ConnectionGuard", _NoThread),
            (process_host, "raise_file_limit", lambda: None),
            (frozen_state, "threading", SimpleNamespace(Condition=_Condition)),
            (server_host, "TcpCounters", _Counters),
            (grpc_service, "aio", transport),
            (grpc_service, "_check_free", lambda address: None),
            (grpc_service, "RateLimits", functools.partial(RateLimits, clock=loop.time)),
            (grpc_service, "ResumableUploads", functools.partial(ResumableUploads, clock=loop.time)),
            (grpc_client, "aio", transport),
            (worker_client, "threading", threads),
            (wire, "DATA_FRAME_BYTES", FRAME_BYTES),
        ]
        with ExitStack() as stack:
            for module, attribute, value in put:
                stack.enter_context(mock.patch.object(module, attribute, value))
            for target, clock in (("time.monotonic", loop.time), ("time.perf_counter", loop.time)):
                stack.enter_context(mock.patch(target, clock))
            stack.enter_context(mock.patch("time.time", lambda: 1e9 + loop.time()))
            stack.enter_context(mock.patch("os.fsync", self.disk.fsync))
            stack.enter_context(mock.patch("os.fdatasync", self.disk.fsync))
            stack.enter_context(mock.patch("os.pwrite", self.disk.pwrite))
            stack.enter_context(mock.patch("asyncio.new_event_loop", lambda: loop))
            stack.enter_context(mock.patch("uuid.uuid4", lambda: uuid.UUID(int=self.random.getrandbits(128))))
            stack.enter_context(mock.patch("random.uniform", self.random.uniform))
            asyncio.set_event_loop(loop)
            disabled, logging.root.manager.disable = logging.root.manager.disable, logging.CRITICAL
            try:
                yield
            finally:
                logging.root.manager.disable = disabled
                asyncio.set_event_loop(None)


def restarted_copy(world: World, server: Server) -> Server:
    """The server as a replay of its journal must find it."""
    return restarted(lambda: any_server(world.run_config, world.cluster, server.name, 1), server)


def durable(server: Server) -> dict[str, Any]:
    """A server's durable state, as values that compare."""
    tensors, state = server.state()
    return {**{k: v.view(torch.uint8).numpy().tobytes() for k, v in tensors.items()}, "state": state}


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
        address = world.addresses[HOME[name]]
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


async def operate(world: World, what: str, name: str = "", server: str = GLOBAL) -> str:
    """Give an operator's command to a server, as `geotrain` does. Raises AioRpcError."""
    PROCESS.set("operator")
    channel = Channel(world.network, world.addresses[server])
    reply = await channel.unary_unary(f"/{rpc.SERVICE}/control")(wire.pack(rpc.Control(what, name)), timeout=60.0)
    answered: rpc.ControlReply = wire.unpack(reply, rpc.ControlReply)
    return answered.text
