"""One run of the product's servers and workers' links in virtual time: `geotrain.net` as it is, its event loops,
threads, sockets and disks in the hand of one seed. Processes die, lose power, are cut off, are started again."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
import shutil
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, MagicMock

import torch

from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, FragmentConfig, RunConfig, parse, shards_of
from geotrain.config.batches import BatchSchedule
from geotrain.config.cluster import shard_name
from geotrain.config.outer import LimitsConfig
from geotrain.monitor.events import EventLog, Trouble
from geotrain.net.server.first_weights import initial_weights
from geotrain.net.server.server_host import ServerHost
from geotrain.net.server.server_process import EXPECTED, FOR_GOOD, _recovered, any_server
from geotrain.net.server.server_setup import ServerSetup
from geotrain.net.storage.recovery import Recovered, restarted
from geotrain.net.storage.snapshots import SNAPSHOTS, SnapshotStore
from geotrain.net.transport import rpc, wire
from geotrain.net.transport.certs import OPERATOR, Role, open_channel, trust_between
from geotrain.outer.events import Event, Left
from geotrain.outer.messages import Refused
from geotrain.outer.server.server import Server
from geotrain.parameters.parameter_map import parameter_map_of
from tests.simulation.account import STEP, Account
from tests.simulation.machine import Machine
from tests.simulation.network import PROCESS, site
from tests.simulation.worker import HOME, REGIONS, SimulatedWorker, certificates
from tests.support.net_worlds import TINY, outer

DISK_LOST = "loses its disk"
EVERY_S = 12.0  # between snapshots
SHARDS = 2  # of a server that has some in processes of their own
LEAVE_S = 300.0  # after the global server's end, those who were never disturbed have ended within this time
SKIPPED = 5, 6  # samples that the run file skips, in steps of two
LIMITS = LimitsConfig(strikes=2, quarantine_s=40.0)
MODEL = {**TINY, "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}


@cache
def _configs(
    rule: str,
    train_samples: int,
    shards: tuple[str, ...] = (),
    keep: int = 2,
    pieces: int = 1,
    ramp: tuple[int, int, int] | None = None,
    secure: bool = False,
    **settings: Any,
) -> tuple[RunConfig, ClusterConfig]:
    skip = [] if rule == "sync" else [SKIPPED]
    cut = FragmentConfig(layers_per_fragment=1, pieces=pieces)
    raw = {
        "name": "tiny",
        "seed": 1,
        "model": {"config": MODEL},
        "data": {"train": "none", "sequence_length": 8, "train_samples": train_samples, "skip": skip}
        | ({"rampup_batch_size": ramp} if ramp else {}),
        "deepspeed": {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 2},
        "outer": outer(rule, limits=LIMITS, fragments=cut, **settings).model_dump(by_alias=True, mode="json"),
        "checkpoint": {"every_minutes": EVERY_S / 60, "keep": keep},
        "monitor": {"enabled": False},
    }
    host, ports = [{"host": "localhost", "slots": 1}], itertools.count(101)
    regions = [
        {
            "name": region,
            "server": {"port": next(ports)},
            "workers": [{"name": worker, "hosts": host} for worker in workers],
            "shards": [{"port": next(ports)} for _ in range(SHARDS) if region in shards],
        }
        for region, workers in REGIONS.items()
    ]
    above = [{"port": next(ports)} for _ in range(SHARDS) if GLOBAL in shards]
    cluster = {"name": "here", "global_server": {"port": 100}, "global_shards": above, "regions": regions}
    cluster |= {"security": {"folder": certificates()}} if secure else {}
    return parse(RunConfig, raw, "run"), parse(ClusterConfig, cluster, "cluster")


class _Events:
    """A process's event log: into the world's record, as long as the process lives."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.alive = world, name, True

    def write(self, event: Event) -> None:
        if self.alive:
            self.world.note(self.name, event)

    def report(self, trouble: str) -> None:
        self.write(Trouble(trouble))


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
    kept: dict[str, Any] = field(default_factory=dict)  # checkpoint id → what its snapshot must give back
    rotten: dict[str, int] = field(default_factory=dict)  # member → newest snapshot when a bit of its `sent` flipped
    ended: bool = False  # in good order


class World:
    """A whole run, which `play` plays to its end. All that happens is in `record`, what must not in `faults`."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        rule: str = "halos",
        train_samples: int = 48,
        copies: bool = False,
        **settings: Any,
    ) -> None:
        self.random, self.folder = random.Random(seed), folder
        self.run_config, self.cluster = _configs(rule, train_samples, **settings)
        if copies:
            checkpoint = self.run_config.checkpoint.model_copy(update={"snapshots": f"file://{folder}/copies"})
            self.run_config = self.run_config.model_copy(update={"checkpoint": checkpoint})
        self.parameter_map = parameter_map_of(self.run_config)
        self.addresses = {
            GLOBAL: str(self.cluster.global_server),
            **{r: str(self.cluster.region(r).server) for r in REGIONS},
        }
        for server in list(self.addresses):
            for i, address in enumerate(shards_of(self.cluster, server)):
                self.addresses[shard_name(server, i)] = str(address)
        self.machine = Machine(self.random, {address: name for name, address in self.addresses.items()})
        self.loop, self.network, self.disk = self.machine.loop, self.machine.network, self.machine.disk
        self.processes = {name: Process(name) for name in (*self.addresses, *HOME)}
        for name in self.addresses:
            self.processes[name].folder = folder / name
        self.record: list[tuple[float, str, Any]] = []
        self.faults: list[str] = []
        self.disturbed: set[str] = set()  # whom the run may have given up: killed, or cut off
        self.absent: set[str] = set()  # whom others may take for dead
        self.spoiled = range(0)  # samples whose training gives nothing of use
        self.hung: set[str] = set()  # workers that beat, and train nothing
        self.late: dict[str, float] = {}  # who comes only after so many seconds
        self.struck: set[str] = set()  # workers that may be refused for good
        self.resumed = False  # with another cluster
        self.ranks = {name: 2 if name == "a" else 1 for name in HOME}
        self.forming: random.Random | None = None  # draws how many ranks a worker comes back with: hosts are lost
        self.acknowledged: set[tuple[str, str, int, int]] = set()
        made = initial_weights(self.run_config, self.parameter_map, range(len(self.parameter_map.fragments)))
        start = [made[fragment] for fragment in sorted(made)]
        batches = BatchSchedule(STEP, self.run_config.data.rampup_batch_size)
        about = self.run_config.outer, self.parameter_map, REGIONS, start, train_samples
        self.account = Account(*about, self.absent, batches)

    def server_of(self, worker: str) -> str:
        """The address of a worker's server."""
        return self.addresses[HOME[worker]]

    def channel(self, role: Role, name: str, server: str) -> Any:
        """Open one as this member, or the operator, to a server or shard."""
        to: Role = "shard" if site(server) != server else "global" if server == GLOBAL else "region"
        trust = trust_between(self.cluster, role, name, to, site(server))
        return open_channel(self.network.transport(), self.addresses[server], trust, ())

    def note(self, name: str, what: Any) -> None:
        self.record.append((self.loop.time(), name, what))

    # -- playing

    def play(self, work: Callable[[World], Any], within_s: float) -> None:
        """Play `work`, a coroutine function that disturbs the world, until the run has ended."""
        with self.machine.in_place():
            self.loop.run_until_complete(self._play(work, within_s))
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.close()

    async def _play(self, work: Callable[[World], Any], within_s: float) -> None:
        for name in self.processes:
            if name in self.late:
                self._start_later(name, self.late[name])
            else:
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
        self.disturb(below)
        self.absent.add(below)
        self.note(below, f"is cut off from {above} for {seconds:g} s")
        self.network.cut(below, above, seconds)

    def disturb(self, name: str) -> None:
        """The run may give up this process, and those that depend on it: it may end without them."""
        self.disturbed |= {each for each in self.processes if site(name) in (site(each), HOME.get(each))}

    def stop(self, name: str, seconds: float) -> None:
        """Let a process stand still for so long."""
        self.disturb(name)
        self.absent.add(site(name))
        self.note(name, f"stands still for {seconds:g} s")
        self.loop.stopped[name] = self.loop.time() + seconds

    def twin(self, name: str) -> None:
        """Start a worker again while its former incarnation lives on, as where ssh to its host was lost."""
        process = self.processes[name]
        if process.task is not None and not process.ended:
            process.deaths += 1
            self.disturb(name)
            self.absent.add(name)
            self.struck.add(name)  # whichever joins later is the present one
            self.note(name, "is started a second time")
            self.start(name)

    def resume_without(self, gone: str) -> None:
        """Kill all, and start a run of all but this worker or region.

        The account knows nothing of such a change, and is left out: servers must go on, and train all samples.
        """
        self.note(GLOBAL, f"is resumed without {gone}")
        for name, process in self.processes.items():
            self.kill(name)
            process.expected, process.ended = None, gone in (name, site(name), HOME.get(name))
            process.kept.clear()
            if process.ended:
                self.disturb(name)
        regions = [
            region.model_copy(update={"workers": tuple(w for w in region.workers if w.name != gone)})
            for region in self.cluster.regions
            if region.name != gone
        ]
        self.cluster, self.resumed = self.cluster.model_copy(update={"regions": tuple(regions)}), True
        self.account = MagicMock(copied=False, older={GLOBAL: ""})
        self.account.ever.__contains__.return_value = True
        whole = SimpleNamespace(start=0, samples=self.run_config.data.train_samples)
        self.account.reached.items.return_value = [(whole, self.parameter_map.fragments)]
        for name in self.processes:
            self.start(name)

    def _start_later(self, name: str, seconds: float) -> None:
        """Start a process after so long: the run may go on, and end, without it."""
        self.disturb(name)
        self.absent.add(name)
        self.note(name, f"comes in {seconds:g} s")
        self.loop.call_later(seconds, self.start, name)

    def start(self, name: str) -> None:
        process = self.processes[name]
        if self.resumed and (process.ended or process.task is not None):  # whoever killed it before starts it, too
            return
        self.hung.discard(name)
        if name in HOME and process.deaths and self.forming is not None:
            self.ranks[name] = self.forming.choice([1, 2])
        context = contextvars.copy_context()
        context.run(PROCESS.set, name)
        run = self._serve(process) if name in self.addresses else self._work(process, process.deaths)
        process.task = self.loop.create_task(run, context=context)

    def kill(self, name: str, power_lost: bool = False) -> bool:
        """Kill a process at this very moment. Returns False where it is down, or has ended."""
        process = self.processes[name]
        if process.task is None or process.ended:
            return False
        process.deaths += 1
        self.disturb(name)
        self.absent.add(site(name))
        self.loop.stopped.pop(name, None)
        self.note(name, "loses power" if power_lost else "is killed")
        self.network.lose_process(name)
        self.network.servers.pop(self.addresses.get(name, ""), None)
        if process.folder is not None:
            if process.folder.exists():
                process.folder = self.disk.after(process.folder, power_lost)
            if process.host is not None:
                process.expected = durable(restarted_copy(self, process.host.server))
                if not SnapshotStore(process.folder / SNAPSHOTS).numbers():
                    process.expected["state"]["origin"] = ANY  # nobody has heard of it: it is drawn anew
                if self.random.random() < 0.5:
                    self._rot(process)
        if process.events is not None:
            process.events.alive = False
        process.task.cancel()
        process.task = process.host = None
        return True

    def _rot(self, process: Process) -> None:
        """Flip a bit of a dead server's newest snapshot. Where it is of what a member was sent, the older one is not
        taken: that member's next weights go whole."""
        assert process.folder is not None and process.expected is not None
        file = self.disk.rot(process.folder / SNAPSHOTS)
        self.note(process.name, f"a bit of {file} flips" if file else "no older snapshot is there")
        if file.startswith(("held.", "answer.")):
            process.rotten[file.split(".")[1]] = SnapshotStore(process.folder / SNAPSHOTS).numbers()[-1]

    def lose_disk(self, name: str) -> None:
        """Let a dead process find nothing of its own: it comes back from its newest copy. Without a copy a region's
        begins anew, and a global one would be refused."""
        process, (server, _, shard) = self.processes[name], name.partition(".shard-")
        setup = ServerSetup(self.run_config, self.cluster, server, self.folder, int(shard) if shard else None)
        copies = setup.copies()
        ledger = shard_name(name, 0) in self.processes
        whole = copies.own.whole() if copies and (shard or ledger or server == GLOBAL) else []
        goodbyes = any(isinstance(what, Left) for _, name, what in self.record if name == GLOBAL)
        if (ledger or server == GLOBAL) and (not whole or (goodbyes and not shard)):
            return  # it would be refused, or wait for those that have ended
        rule = self.run_config.outer.rule
        if getattr(rule, "answers", "") == "wait" and copies and not (shard or ledger):
            return  # it comes back from its copy with what waits to go up, of which the account would know nothing
        assert process.folder is not None
        shutil.rmtree(process.folder, ignore_errors=True)
        process.expected = process.kept.get(whole[-1]) if whole else None
        for region in REGIONS if name == GLOBAL else ():  # it may have forgotten them, and end without them
            self.disturb(region)
        if shard or ledger or server == GLOBAL:
            self.account.restores(name, whole[-1] if whole else "")
        else:
            if copies:  # its copies are gone, too
                shutil.rmtree(self.folder / "copies" / self.run_config.name / name, ignore_errors=True)
            self.account.begins(name)
            self.account.spec.region_forgets(name, range(len(self.account.parameter_map.fragments)))
            self.account.applied.pop(name, None)
            self.account.strikes -= Counter({worker: 99 for worker in REGIONS[name]})
        self.note(name, DISK_LOST)

    # -- what runs in a process

    async def _serve(self, process: Process) -> None:
        name, folder = process.name, process.folder
        assert folder is not None
        server, _, shard_number = name.partition(".shard-")
        number = int(shard_number) if shard_number else None
        setup = ServerSetup(self.run_config, self.cluster, server, folder, number, launch="one")
        log = process.events = _Events(self, name)
        events: EventLog = log  # type: ignore[assignment]
        incarnation = uuid.uuid4().hex

        def build() -> Server:
            made = any_server(self.run_config, self.cluster, server, number)
            made.incarnation = incarnation
            return made

        try:
            if (copies := setup.copies()) is not None:
                upload = copies.upload  # what the dead write goes to their own folder, which others do not see
                copies.upload = lambda *told: upload(*told) if log.alive else 0  # type: ignore[method-assign]
            recovered = _recovered(setup, events, build, copies.own if copies else None)
            if process.expected is not None:
                self._compare(name, process.expected, durable(recovered.server))
            self.account.watch(recovered.server, lambda: log.alive, self.faults.append)
            recovered.store.new_checkpoint_id = self._keeping(process, recovered)  # type: ignore[method-assign]
            monitor: Any = SimpleNamespace(page_url=None, metrics_url=None)
            process.host = ServerHost(setup, recovered, events, monitor, copies)
            await process.host.run()
        except Exception as error:
            process.host = process.task = None
            process.expected = None
            if isinstance(error, FOR_GOOD) or not isinstance(error, (*EXPECTED, OSError)):
                self.faults.append(f"{name} ended: {error!r}")
            else:  # as its launcher does
                self.note(name, f"ends: {error}")
                self.loop.call_later(1.0, self.start, name)
            return
        process.ended = True
        self.note(name, "has ended")

    def _keeping(self, process: Process, recovered: Recovered) -> Callable[[], str]:
        """A snapshot's checkpoint id is made as its state is frozen: from then on it must give back that."""
        draw, server = recovered.store.new_checkpoint_id, recovered.server

        def new_checkpoint_id() -> str:
            checkpoint_id = draw()
            if server.part.shard is not None or self.run_config.checkpoint.snapshots is not None:
                process.kept[checkpoint_id] = durable(restarted_copy(self, server))
                if server.name == GLOBAL:
                    process.kept[checkpoint_id]["state"]["leases"]["next_lease"] = ANY  # see `Older`
                self.account.keeps(process.name, server, checkpoint_id)
            return checkpoint_id

        return new_checkpoint_id

    def _compare(self, name: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
        process = self.processes[name]
        newest = max(SnapshotStore(process.folder / SNAPSHOTS).numbers(), default=0) if process.folder else 0
        for member, number in process.rotten.items():
            if newest < number + 2:  # by the older of two snapshots it comes back with what the newer one has lost
                for state in (expected, found):
                    state["state"]["sent"] = {m: sent for m, sent in state["state"]["sent"].items() if m != member}
                    for key in [key for key in state if key.startswith((f"held.{member}.", f"answer.{member}."))]:
                        del state[key]
        now, then = found["state"]["part"], expected["state"]["part"]
        if (known := then["said"] - now["said"]) > 0:  # that its ledger knows these facts is written down nowhere
            found["state"]["part"] = {**now, "said": then["said"], "unsaid": now["unsaid"][known:]}
        for key in expected.keys() | found.keys():
            if expected.get(key) != found.get(key):
                self.faults.append(f"{name}: {key} was {expected.get(key)!r:.300}, is {found.get(key)!r:.300}")

    async def _work(self, process: Process, life: int) -> None:
        """A worker's link over its production client, and training in place of which time passes. life: of how many
        deaths it comes, of which there may be more before it begins."""
        name = process.name
        worker = SimulatedWorker(self, name)
        try:
            again = await worker.live()
        except asyncio.CancelledError:  # it is killed, and all that it has begun with it
            for task in [task for client in worker.clients for task in client._tasks]:
                task.cancel()
            raise
        except Exception as error:
            rounds = self.run_config.outer.rule.synchronous
            lost = any(site(who) == HOME[name] and what == DISK_LOST for _, who, what in self.record)
            expected = ["others got its data", *["this server's state was lost"] * (lost or rounds)]
            expected += ["its region's server came back from an older state"] * lost
            shut_out = name in self.struck or any(each in str(error) for each in expected)
            again = isinstance(error, Refused) and shut_out
            missed = name in self.disturbed and "the run has ended here" in str(error)
            if process.deaths == life and not (again or missed):
                self.faults.append(f"{name} ended: {error!r}")
        await worker.end()
        if process.deaths != life:  # another incarnation has taken its place
            return
        if again:
            process.task = None
            process.deaths += self.forming is not None
            self.loop.call_later(2.0, self.start, name)  # as its launcher would
            return
        process.ended = True
        self.note(name, "has ended")


def restarted_copy(world: World, server: Server) -> Server:
    """The server as a replay of its journal must find it."""
    return restarted(lambda: any_server(world.run_config, world.cluster, server.name, server.part.shard), server)


def durable(server: Server) -> dict[str, Any]:
    """A server's durable state, as values that compare."""
    tensors, state = server.state()
    return {**{k: v.view(torch.uint8).numpy().tobytes() for k, v in tensors.items()}, "state": state}


async def operate(world: World, what: str, name: str = "", server: str = GLOBAL) -> str:
    """Give an operator's command to a server, as `geotrain` does. Raises AioRpcError."""
    PROCESS.set("operator")
    channel = world.channel("operator", OPERATOR, server)
    reply = await channel.unary_unary(f"/{rpc.SERVICE}/control")(wire.pack(rpc.Control(what, name)), timeout=60.0)
    answered: rpc.ControlReply = wire.unpack(reply, rpc.ControlReply)
    return answered.text
