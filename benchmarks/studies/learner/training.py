"""The workers of a virtual world really train: the small byte model, on real text, in place of timing only."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.studies.learner.model import SmallLM, small_architecture
from benchmarks.studies.learner.optimizers import FlatOptimizer, InnerSettings
from benchmarks.studies.learner.text import standard_library
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
CHECKPOINT_JOBS = 8  # jobs between a worker's checkpoints, as in `checkpoint.every_jobs`


@dataclass(frozen=True)
class Study:
    """A training task, the same for all methods that are compared. steps: inner steps of the whole run, all workers
    together.

    batch, length: samples of an inner step, and bytes of a sample. quarter_of: worker → the kind of text it reads;
    workers that are not in it read all kinds.
    """

    steps: int
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    ffn: int = 176
    batch: int = 4
    length: int = 64
    seed: int = 0
    inner: InnerSettings = field(default_factory=InnerSettings)
    quarter_of: dict[str, int] = field(default_factory=dict)

    def model(self) -> SmallLM:
        a = small_architecture(self.hidden, self.layers, self.heads, self.ffn, self.length)
        start = [initial_tensor(p, self.seed).flatten() for p in canonical_parameters(a)]
        return SmallLM(a, torch.cat(start))


def training_task(study: Study, outer: OuterConfig, travelling_numel: int, devices: int = 1) -> VirtualTask:
    """The task of a VirtualWorld in which every worker has a `Learning`.

    travelling_numel: the messages take as long as those of a model with so many parameters. devices: batches that a
    worker trains in one inner step; data parallelism over several devices is simulated as one worker.
    """
    model = study.model()
    parameter_map = ParameterMap(model.parameters, outer.fragments.layers_per_fragment)
    share = travelling_numel / parameter_map.numel
    start = tuple(
        torch.cat([model.masters[p.name] for p in fragment.parameters]) for fragment in parameter_map.fragments
    )
    samples = study.batch * devices
    steps = study.steps // devices
    learner = partial(Learning, study, outer, parameter_map, steps * samples, samples)
    sizes = Sizes(outer, tuple(max(1, round(f.numel * share)) for f in parameter_map.fragments))
    return VirtualTask(outer, sizes, parameter_map, start, steps * samples, samples, learner)


class Learning:
    """One worker's weights, optimizer and place in the data: a `geotrain.simulate.worker.Learner` that trains."""

    every_step = True

    def __init__(
        self,
        study: Study,
        outer: OuterConfig,
        parameter_map: ParameterMap,
        train_samples: int,
        samples: int,
        spec: WorkerSpec,
    ) -> None:
        self.study, self.train_samples, self.samples = study, train_samples, samples
        self.quarter = study.quarter_of.get(spec.name)
        self.model = study.model()
        self.outer, self.parameter_map = outer, parameter_map
        self.jobs = 0
        self.losses: list[float] = []
        self.optimizer = FlatOptimizer(study.inner, self.model.parameters)
        self._saved = self._checkpoint()

    def born(self) -> None:
        """The optimizer's state comes from the last checkpoint, the weights from the server."""
        masters = self.model.masters
        chunks = [
            OwnedSlices((StridedSlice(0, master.numel(), parameter=name),), master, True)
            for name, master in masters.items()
        ]
        self.rank = WorkerRank(self.parameter_map, self.outer, chunks)
        self.pushes, self.holds = self.rank.pushes, self.rank.holds
        m, v, steps = self._saved
        self.optimizer.m, self.optimizer.v, self.optimizer.steps = m.clone(), v.clone(), steps

    def parameters(self, fragments: tuple[int, ...]) -> Collection[str]:
        return self.rank.parameters(fragments)

    def make_delta(self, chunk: int, seed: int) -> Pending[ChunkDelta]:
        return self.rank.make_delta(chunk, seed)

    def when_made(self, call: Callable[[], Pending[T]]) -> Pending[T]:
        return call()  # virtual time stands still meanwhile: also on a GPU, deltas need no background work

    def on_weights(self, weights: ChunkWeights, start: bool = False) -> None:
        self.rank.on_weights(weights, start)

    def train(self, lease: Lease, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            sample = lease.start + step * self.samples
            tokens = standard_library().samples(
                sample, self.samples, self.study.length, self.study.seed, self.quarter
            )
            self.losses.append(self.model.backward(torch.from_numpy(tokens)))
            rate = self.study.inner.rate((sample + self.samples) / self.train_samples)
            self.optimizer.step(self.model.flat, self.model.gradient, rate)

    def job_done(self, lease: Lease) -> dict[str, float]:
        self.jobs += 1
        if self.jobs % CHECKPOINT_JOBS == 0:
            self._saved = self._checkpoint()
        loss = sum(self.losses) / len(self.losses)
        self.losses.clear()
        return {"loss": loss}

    def _checkpoint(self) -> tuple[Tensor, Tensor, int]:
        return self.optimizer.m.clone(), self.optimizer.v.clone(), self.optimizer.steps


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

    def __init__(self, study: Study, points: int, windows: int = 640, tell: Callable[[Point], None] | None = None):
        text = standard_library()
        self.model = study.model()
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
