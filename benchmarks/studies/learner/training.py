"""The workers of a virtual world really train: the small byte model, on real text, in place of timing only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.studies.learner.model import SmallLM, small_architecture
from benchmarks.studies.learner.optimizers import InnerSettings, Stacked, StackedOptimizer
from benchmarks.studies.learner.text import carried_text
from geotrain.config import OuterConfig
from geotrain.outer.messages import ChunkDelta, ChunkWeights, Lease
from geotrain.outer.worker import OwnedSlices, WorkerRank
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import ParameterMap, StridedSlice, canonical_parameters
from geotrain.plan.model.sizes import Sizes
from geotrain.simulate.spec import WorkerSpec
from geotrain.simulate.world import VirtualTask, VirtualWorld
from geotrain.staging.interface import Pending

T = TypeVar("T")
FINAL_WINDOWS = 5120


@dataclass(frozen=True)
class Study:
    """A training task, the same for all methods that are compared. steps: inner steps of the whole run, all workers
    together. batch, length: samples of an inner step, and bytes of a sample."""

    steps: int
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    ffn: int = 176
    batch: int = 4
    length: int = 64
    seed: int = 0
    inner: InnerSettings = field(default_factory=InnerSettings)

    def model(self, device: str = "cpu") -> SmallLM:
        a = small_architecture(self.hidden, self.layers, self.heads, self.ffn, self.length)
        start = [initial_tensor(p, self.seed).flatten() for p in canonical_parameters(a)]
        return SmallLM(a, torch.cat(start).to(device))


def training_task(
    study: Study, outer: OuterConfig, travelling_numel: int, devices: int = 1, device: str = "cpu"
) -> VirtualTask:
    """The task of a VirtualWorld in which every worker has a `Learning`, computed on `device`.

    travelling_numel: the messages take as long as those of a model with so many parameters. devices: batches that a
    worker trains in one inner step; data parallelism over several devices is simulated as one worker.
    """
    model = study.model(device)
    parameter_map = ParameterMap(model.parameters, outer.fragments.layers_per_fragment)
    share = travelling_numel / parameter_map.numel
    named = model.parts(model.start.cpu())
    start = tuple(torch.cat([named[p.name] for p in fragment.parameters]) for fragment in parameter_map.fragments)
    samples = study.batch * devices
    steps = study.steps // devices
    learner = Fleet(study, model, outer, parameter_map, steps * samples, samples)
    sizes = Sizes(outer, tuple(max(1, round(f.numel * share)) for f in parameter_map.fragments))
    return VirtualTask(outer, sizes, parameter_map, start, steps * samples, samples, learner)


class Fleet:
    """All workers of a world: their models are stacked, and whatever steps they have begun are computed together.

    A worker's step waits in its queue until somebody wants that worker's weights or losses; then a step of
    every worker that has one waiting is computed at once, and so on until the queue is empty. A step follows from
    the worker's own weights and data alone, so that nobody's results depend on when that is.
    """

    def __init__(
        self, study: Study, model: SmallLM, outer: OuterConfig, parameter_map: ParameterMap, train_samples: int,
        samples: int,
    ) -> None:  # fmt: skip
        self.study, self.model, self.outer, self.parameter_map = study, model, outer, parameter_map
        self.train_samples, self.samples = train_samples, samples
        self.optimizer = StackedOptimizer(study.inner, model.parameters)
        self.members: list[Learning] = []
        self._models: Stacked | None = None
        self._steps: dict[int, StackedStep] = {}  # by the number of rows

    def __getstate__(self) -> dict[str, Any]:
        """Without what was recorded."""
        return self.__dict__ | {"_steps": {}}

    def __call__(self, spec: WorkerSpec) -> Learning:
        assert self._models is None, "a world makes all its workers before the first of them is born"
        self.members.append(Learning(self, len(self.members)))
        return self.members[-1]

    @property
    def models(self) -> Stacked:
        if self._models is None:
            self._models = Stacked.of(self.model.start, len(self.members))
        return self._models

    def settle(self, mine: Learning) -> None:
        """Compute the steps that this worker has begun, and as many of the others'."""
        while mine.queue:
            samples = {row: member.queue.popleft() for row, member in enumerate(self.members) if member.queue}
            for row, loss in self._step(samples):
                self.members[row].losses.append(loss)

    def _step(self, samples: Mapping[int, int]) -> list[tuple[int, Tensor]]:
        """Take a step of these rows, from their samples on. Returns their losses."""
        study, text = self.study, carried_text()
        tokens = [text.samples(first, self.samples, study.length, study.seed) for first in samples.values()]
        shares = [(first + self.samples) / self.train_samples for first in samples.values()]
        rates = np.array([study.inner.rate(share) for share in shares])
        if len(samples) not in self._steps:
            self._steps[len(samples)] = StackedStep(self, len(samples))
        losses = self._steps[len(samples)](np.array(list(samples)), np.stack(tokens), rates)
        return list(zip(samples, losses, strict=True))


class StackedStep:
    """A step of so many of a fleet's rows. On a GPU it is recorded when it is made, and then replayed: thousands of
    kernels are one call; its inputs lie where the recorded kernels read them."""

    def __init__(self, fleet: Fleet, width: int) -> None:
        self.fleet, device = fleet, fleet.model.start.device
        self.everybody = width == len(fleet.members)
        self.rows = torch.arange(width, device=device)
        self.tokens = torch.zeros(width, fleet.samples, fleet.study.length + 1, dtype=torch.int64, device=device)
        self.rates = torch.zeros(width, dtype=torch.float64, device=device)
        self.losses = torch.zeros(width, device=device)
        self._run = self._recorded() if device.type == "cuda" else self._compute

    def __call__(self, rows: np.ndarray, tokens: np.ndarray, rates: np.ndarray) -> Tensor:
        """Take the step; returns the rows' losses."""
        for mine, given in ((self.rows, rows), (self.tokens, tokens), (self.rates, rates)):
            mine.copy_(torch.from_numpy(given))
        self._run()
        return self.losses.clone()

    def _compute(self) -> None:
        models = self.fleet.models if self.everybody else self.fleet.models.rows(self.rows)
        self._step(models)
        if not self.everybody:
            self.fleet.models.put(self.rows, models)

    def _step(self, models: Stacked) -> None:
        losses, gradients = self.fleet.model.gradients(models.weights, self.tokens)
        self.fleet.optimizer.step(models, gradients, self.rates)
        self.losses.copy_(losses)

    def _recorded(self) -> Callable[[], None]:
        """Record the step after some of copies, in which libraries allocate what they keep."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                self._step(self.fleet.models.rows(self.rows))
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.empty_cache()  # the recorded steps' memory is their own
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_pool()):
            self._compute()
        return graph.replay


@cache
def _pool() -> Any:
    """The memory of all recorded steps: they run one after another, and nothing that they leave there is read."""
    return torch.cuda.graph_pool_handle()


class Learning:
    """One worker's row of a fleet, and its place in the data: a `geotrain.simulate.worker.Learner` that trains."""

    every_step = True

    def __init__(self, fleet: Fleet, row: int) -> None:
        self.fleet, self.row = fleet, row
        self.queue: deque[int] = deque()  # the first samples of the steps that have begun and are not computed
        self.losses: list[Tensor] = []

    def born(self) -> None:
        """The optimizer's state is new, the weights come from the server."""
        self.queue.clear()  # what another life began is of no use
        self.losses.clear()
        models = self.fleet.models
        masters = self.fleet.model.parts(models.weights[self.row])
        chunks = [
            OwnedSlices((StridedSlice(0, master.numel(), parameter=name),), master, True)
            for name, master in masters.items()
        ]
        self.rank = WorkerRank(self.fleet.parameter_map, self.fleet.outer, chunks)
        self.pushes, self.holds = self.rank.pushes, self.rank.holds
        for state in (models.m, models.v, models.steps):
            state[self.row] = 0

    def parameters(self, fragments: tuple[int, ...]) -> Collection[str]:
        return self.rank.parameters(fragments)

    def make_delta(self, chunk: int, seed: int) -> Pending[ChunkDelta]:
        self.fleet.settle(self)
        return self.rank.make_delta(chunk, seed)

    def when_made(self, call: Callable[[], Pending[T]]) -> Pending[T]:
        return call()  # virtual time stands still meanwhile: also on a GPU, deltas need no background work

    def on_weights(self, weights: ChunkWeights, start: bool = False) -> None:
        self.fleet.settle(self)
        self.rank.on_weights(weights, start)

    def train(self, lease: Lease, first: int, steps: int) -> None:
        self.queue.extend(lease.start + step * self.fleet.samples for step in range(first, first + steps))

    def job_done(self, lease: Lease) -> dict[str, float]:
        self.fleet.settle(self)
        loss = torch.stack(self.losses).double().mean().item()
        self.losses.clear()
        return {"loss": loss}


@dataclass(frozen=True)
class Point:
    """The global weights at a moment. test: loss in nats a byte on that held-out slice."""

    time_s: float
    committed_share: float
    test: float


class Curve:
    """Evaluates the global server's weights whenever another 1/points of the run's samples is committed.

    Pass `watch` to the VirtualWorld; `last` adds the end of the run. windows: number of windows that are evaluated,
    of the selection slice as of the test slice; fewer if they would overlap. tell: called with each new point.
    """

    def __init__(
        self, study: Study, points: int, windows: int = 640, tell: Callable[[Point], None] | None = None,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        text = carried_text()
        self.model = study.model(device)
        most = min(len(part) // (study.length + 1) for part in (text.selection, text.test))
        windows = min(windows, most)
        wide = min(FINAL_WINDOWS, most)
        self.final = tuple(
            torch.from_numpy(text.windows(part, wide, study.length)) for part in (text.test, text.selection)
        )
        self.selection = torch.from_numpy(text.windows(text.selection, windows, study.length))
        self.test = torch.from_numpy(text.windows(text.test, windows, study.length))
        self.every, self.next_share = 1 / points, 1 / points
        self.points: list[Point] = []
        self.tell = tell

    def __getstate__(self) -> dict[str, Any]:
        """Without whom to tell: that is set anew after unpickling."""
        return self.__dict__ | {"tell": None}

    @staticmethod
    def share(world: VirtualWorld) -> float:
        """Share of the run's samples that is committed."""
        return world.top.server.lease_table.committed_samples / world.task.train_samples

    def watch(self, world: VirtualWorld) -> None:
        share = self.share(world)
        if share >= self.next_share:
            self.next_share = share + self.every
            self.add(world, share)

    def add(self, world: VirtualWorld, share: float) -> None:
        point = Point(world.clock.now, share, self.model.evaluate(self._flat(world), self.test))
        self.points.append(point)
        if self.tell:
            self.tell(point)

    def last(self, world: VirtualWorld, share: float) -> float:
        """Adds the end of the run; returns the loss on the selection slice, by which settings are chosen."""
        self.add(world, share)
        return self.model.evaluate(self._flat(world), self.selection)

    def final_losses(self, world: VirtualWorld) -> tuple[float, float]:
        """The losses on more windows of the test slice and of the selection slice than a point's, for comparing runs
        that end close to each other: 640 windows of 32 bytes may tell them apart the wrong way round."""
        weights = self._flat(world)
        test, selection = (self.model.evaluate(weights, part) for part in self.final)
        return test, selection

    def _flat(self, world: VirtualWorld) -> Tensor:
        named = {
            name: tensor
            for fragment in range(len(world.task.parameter_map.fragments))
            for name, tensor in world.task.parameter_map.split(fragment, world.top.server.weights(fragment))
        }
        return torch.cat([named[p.name].flatten() for p in self.model.parameters])
