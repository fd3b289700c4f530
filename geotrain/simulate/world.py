"""A run in virtual time: the production's servers, leases and exchanges, wired over virtual links."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from geotrain.common.names import GLOBAL
from geotrain.config import OuterConfig, codec_config
from geotrain.outer.messages import Identity
from geotrain.outer.rules import region_rule
from geotrain.outer.rules.region_momentum import updates_in_run
from geotrain.outer.server.global_server import GlobalServer
from geotrain.outer.server.region_server import RegionServer
from geotrain.parameters.parameter_map import ParameterMap
from geotrain.plan.model.server_rates import ServerRates
from geotrain.plan.model.servers import ServerSeconds, place_of, server_seconds
from geotrain.plan.model.sizes import Sizes
from geotrain.simulate.clock import Clock, VirtualProcess
from geotrain.simulate.links import Star
from geotrain.simulate.nodes import GlobalNode, Node, RegionNode, VirtualClient
from geotrain.simulate.server_work import ServerWork
from geotrain.simulate.spec import RegionSpec, WorkerSpec, WorldSpec
from geotrain.simulate.timed import timed
from geotrain.simulate.worker import Idle, Learner, SimWorker

FP32 = codec_config("fp32")


@dataclass(frozen=True)
class VirtualTask:
    """The training task of a virtual world.

    outer: of the state machines. sizes: bytes of messages. parameter_map, start: the tensors that the servers hold.
    train_samples: the run's length. learner: makes the part of a worker that learns. tensors: whether they are of the
    model's size (not so in timing only). momentum_decay: of an update, where a study states it. server_rates: what a
    server's work costs; None: nothing.
    """

    outer: OuterConfig
    sizes: Sizes
    parameter_map: ParameterMap
    start: tuple[Tensor, ...]
    train_samples: int
    samples_per_step: int
    learner: Callable[[WorkerSpec], Learner]
    global_server: Callable[..., GlobalServer] = GlobalServer
    region_server: Callable[..., RegionServer] = RegionServer
    tensors: bool = True
    momentum_decay: float | None = None
    server_rates: ServerRates | None = None


def timing_task(
    outer: OuterConfig,
    model: ParameterMap,
    steps: int,
    samples_per_step: int,
    server_rates: ServerRates | None = None,
) -> VirtualTask:
    """Build a task for timing only: a fragment is one number on the servers, and travels with its true size.

    model: the real model's parameters; no tensor of it is made. steps: inner steps of all workers together.
    """
    tiny = stand_in(model)
    return VirtualTask(
        outer.model_copy(update={"up": FP32, "down": FP32, "local": FP32}),
        Sizes(outer, tuple(f.numel for f in model.fragments)),
        tiny,
        tuple(torch.zeros(f.numel) for f in tiny.fragments),
        steps * samples_per_step,
        samples_per_step,
        lambda spec: Idle(tiny),
        lambda *about: timed(GlobalServer(*about)),
        lambda *about: timed(RegionServer(*about)),
        tensors=False,
        server_rates=server_rates,
    )


def stand_in(model: ParameterMap) -> ParameterMap:
    """Build a parameter map with as many fragments, of one element each."""
    firsts = [replace(f.parameters[0], shape=(1,)) for f in model.fragments]
    if len(firsts) == 1:
        return ParameterMap(firsts)
    # What lies before the first layer is one fragment, what lies behind it another.
    ends, layers = [p for p in firsts if p.layer is None], [p for p in firsts if p.layer is not None]
    return ParameterMap([*ends[:1], *layers, *ends[1:]], layers_per_fragment=1)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Python's garbage collector, else a fifth of a timing run, looks less often: what happens in one leaves few
    cycles, all small. (In training they may hold vectors.)"""
    before = gc.get_threshold()
    if before[0]:  # 0: the caller has turned it off
        gc.set_threshold(max(before[0], 100_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class VirtualWorld:
    """A run in virtual time. watch: called with the world after every update that the global server applied.

    A world can be pickled, while it is `at_rest`, if its task's learners and `watch` can; `wake` makes what comes of
    it go on, as if nothing had been.
    """

    def __init__(
        self, spec: WorldSpec, task: VirtualTask, watch: Callable[[VirtualWorld], None] | None = None
    ) -> None:
        self.spec, self.task, self.watch = spec, task, watch
        self.clock = Clock()
        self.identity = Identity("simulated", "config", task.parameter_map.digest, "simulated")
        names = {r.name: tuple(w.name for w in r.workers) for r in spec.regions}
        samples = task.train_samples, task.samples_per_step
        server = task.global_server(self.identity, task.parameter_map, task.outer, names, *samples)
        server.set_weights([v.clone() for v in task.start])
        # When all have left, the clock forgets the deaths and returns that were still to come.
        members = len(spec.workers) if task.outer.flat else len(spec.regions)
        work = self._work("global", members, spec.share)
        self.top = GlobalNode(server, task.sizes.wide, work, self._applied, self.clock.end)
        if spec.speeds_known:
            for worker in spec.workers:
                self.top.server.lease_table.note_speed(worker.name, worker.step_s)
        self.links = spec.links()
        self.local_links: dict[str, Star] = {}
        self.regions: dict[str, RegionNode] = {}
        self.workers: dict[str, SimWorker] = {}
        self._place: dict[str, tuple[Node, Star]] = {}
        self._lives: dict[str, tuple[VirtualClient, VirtualProcess]] = {}
        if not task.outer.flat:
            for region in spec.regions:
                self._build_region(region)
        for region in spec.regions:
            for worker in region.workers:
                self._build_worker(region.name, worker)

    def run(self, until_s: float = float("inf"), after_event: Callable[[], None] | None = None) -> dict[str, Any]:
        """Run until the data is trained and the servers have parted, or until that time; return the report.
        after_event: called after everything that happens."""
        with nullcontext() if self.task.tensors else rare_collections():
            self.clock.run(until_s, after_event)
        return self.report()

    @property
    def at_rest(self) -> bool:
        """Whether every worker that lives is in the midst of inner steps, the place of their scripts from which
        others can go on."""
        return all(process.dead or self.workers[name].in_steps for name, (_, process) in self._lives.items())

    def wake(self) -> None:
        """Set the living workers going again, after unpickling."""
        for name, (_, process) in self._lives.items():
            if not process.dead:
                self.workers[name].go_on(process)

    def report(self) -> dict[str, Any]:
        """Return the run's figures as plain JSON data."""
        end = max(self.clock.now, 1e-9)
        lease_table = self.top.server.lease_table
        committed_steps = lease_table.committed_samples / self.task.samples_per_step
        trained_s = sum(w.trained_s for w in self.workers.values())
        speed = sum(1 / w.step_s for w in self.spec.workers)
        usage = self.links.usage()
        for name, star in self.local_links.items():
            usage |= {f"{name} {way}": u for way, u in star.usage().items()}
        return {
            "seconds": self.clock.now,
            "hours": self.clock.now / 3600,
            "finished": self.top.server.finished,
            "committed_steps": committed_steps,
            "trained_steps": sum(w.trained_steps for w in self.workers.values()),
            "compute_bound_s": committed_steps / speed,
            "lost_s": sum(w.lost_s for w in self.workers.values()),
            "utilization": trained_s / (end * len(self.workers)),
            "goodput": committed_steps / speed / end,
            "global_versions": self.top.server.versions,
            "lost_updates": sum(node.server.uplink.lost_updates for node in self.regions.values()),
            "links": {name: asdict(u) for name, u in usage.items() if u.messages},
            "servers": {name: node.work.busy_s for name, node in {GLOBAL: self.top, **self.regions}.items()},
            "events": self.clock.events,
        }

    # -- building

    def _work(self, role: Literal["region", "global"], members: int, share: float) -> ServerWork:
        sizes, rates = self.task.sizes, self.task.server_rates
        if rates is None:
            return ServerWork(self.clock, ServerSeconds())
        seconds = server_seconds(place_of(role, sizes.config, members), sizes, rates.over(self.spec.encrypted))
        return ServerWork(self.clock, seconds.over(share))

    def _build_region(self, region: RegionSpec) -> None:
        name, workers = region.name, tuple(w.name for w in region.workers)
        task, every = self.task, len(self.spec.workers)
        updates = updates_in_run(
            task.train_samples // task.samples_per_step, task.outer.local_steps, len(workers), every
        )
        rule = region_rule(task.outer, workers, updates, task.momentum_decay)
        server = task.region_server(name, self.identity, task.parameter_map, task.outer, rule, workers)
        server.incarnation, server.worker_data.leases.jobs_each = f"{name}-1", updates / len(workers)
        uplink = self.top.uplinks[name] = VirtualClient(self.clock, self.links, self.top, name)
        work = self._work("region", len(workers), region.share)
        node = self.regions[name] = RegionNode(server, task.sizes.local, work, uplink)
        self.local_links[name] = Star({"local": region.local}, dict.fromkeys(workers, "local"))
        self.clock.at(0.0, node.start)

    def _build_worker(self, region: str, spec: WorkerSpec) -> None:
        task = self.task
        above = (self.top, self.links) if task.outer.flat else (self.regions[region], self.local_links[region])
        fragments = zip(task.parameter_map.fragments, task.sizes.numels, strict=True)
        shares = {f.parameters[0].name: numel / sum(task.sizes.numels) for f, numel in fragments}
        self._place[spec.name] = above
        self.workers[spec.name] = SimWorker(
            self.clock, spec, self.identity, task.outer, task.learner(spec), task.parameter_map, shares
        )
        if not spec.away or spec.away[0][0] > 0:  # otherwise it joins late
            self.clock.at(0.0, self._begin_incarnation, spec.name)
        for dies_s, back_s in spec.away:
            if dies_s > 0:
                self.clock.at(dies_s, self._die, spec.name)
            if back_s != float("inf"):
                self.clock.at(back_s, self._begin_incarnation, spec.name)

    # -- what happens

    def _begin_incarnation(self, name: str) -> None:
        worker = self.workers[name]
        if worker.left:
            return
        node, network = self._place[name]
        uplink = node.uplinks[name] = VirtualClient(self.clock, network, node, name)
        self._lives[name] = (uplink, worker.live(uplink))

    def _die(self, name: str) -> None:
        if self.workers[name].left:
            return
        uplink, process = self._lives[name]
        process.kill()
        self.workers[name].die()
        uplink.node.forget(uplink)

    def _applied(self) -> None:
        if self.watch is not None:
            self.watch(self)
