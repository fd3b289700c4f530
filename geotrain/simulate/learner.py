"""Training mode: the workers of the virtual world really train, the small byte model on real text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from geotrain.canonical import Run, canonical_parameters
from geotrain.config import OuterConfig
from geotrain.initial import initial_tensor
from geotrain.outer.layout import Layout
from geotrain.outer.messages import FragmentDelta, FragmentWeights, Lease
from geotrain.outer.staging import Pending
from geotrain.outer.worker import Piece, WorkerRank
from geotrain.simulate.lm import FlatAdamW, InnerSettings, SmallLM, small_architecture
from geotrain.simulate.sizes import Sizes
from geotrain.simulate.spec import WorkerSpec
from geotrain.simulate.text import standard_library
from geotrain.simulate.world import Task, World

T = TypeVar("T")
CHECKPOINT_JOBS = 8  # jobs between a worker's checkpoints, as in `checkpoint.every_jobs`


@dataclass(frozen=True)
class Study:
    """What is trained, for all methods alike. steps: of a worker's batch, over all workers and the whole run.

    batch, length: samples of an inner step, and bytes of a sample. quarter_of: worker → the kind of text it reads;
    workers that are not in it read all kinds. device: of the workers' models; in bf16 where it is no CPU.
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
    device: str = "cpu"

    def model(self, gradient: Tensor | None = None) -> SmallLM:
        a = small_architecture(self.hidden, self.layers, self.heads, self.ffn, self.length)
        start = [initial_tensor(p, self.seed).flatten() for p in canonical_parameters(a)]
        return SmallLM(a, torch.cat(start), device=self.device, gradient=gradient)


def training_task(study: Study, outer: OuterConfig, travelling_numel: int, devices: int = 1) -> Task:
    """travelling_numel: parameters of the model whose size the messages have. devices: batches that a worker trains
    in one inner step (data parallelism over several devices is one worker)."""
    model = study.model()
    layout = Layout(model.parameters, outer.fragments.layers_per_fragment)
    share = travelling_numel / layout.numel
    start = tuple(
        torch.cat([model.masters[p.name] for p in fragment.parameters]).cpu().clone() for fragment in layout.fragments
    )
    samples = study.batch * devices
    steps = study.steps // devices

    shared = Shared(model.gradient, model.decays().to(study.device))

    def learner(spec: WorkerSpec) -> Learning:
        quarter = study.quarter_of.get(spec.name)
        return Learning(study, outer, layout, shared, steps * samples, samples, quarter)

    sizes = Sizes(outer, tuple(max(1, round(f.numel * share)) for f in layout.fragments))
    return Task(outer, sizes, layout, start, steps * samples, samples, learner)


@dataclass(frozen=True)
class Shared:
    """What one vector is enough of for all workers, since they step one after another: the caches hold more."""

    gradient: Tensor
    decays: Tensor


class Learning:
    """One worker's weights, optimizer and place in the data (`geotrain.simulate.worker.Learner`)."""

    every_step = True

    def __init__(
        self,
        study: Study,
        outer: OuterConfig,
        layout: Layout,
        shared: Shared,
        train_samples: int,
        samples: int,
        quarter: int | None,
    ) -> None:
        self.study, self.train_samples, self.samples, self.quarter = study, train_samples, samples, quarter
        self.model = study.model(shared.gradient)
        self.outer, self.layout = outer, layout
        self.jobs = 0
        self.losses: list[float] = []
        self.optimizer = FlatAdamW(study.inner, shared.decays)
        self._saved = self._checkpoint()

    def born(self) -> None:
        """The optimizer's state comes from the last checkpoint, the weights from the server."""
        masters = self.model.masters
        pieces = [Piece((Run(name, 0, master.numel()),), master, True) for name, master in masters.items()]
        self.rank = WorkerRank(self.layout, self.outer, pieces)
        self.pushes, self.holds = self.rank.pushes, self.rank.holds
        m, v, steps = self._saved
        self.optimizer.m, self.optimizer.v, self.optimizer.steps = m.clone(), v.clone(), steps

    def make_delta(self, fragment: int, seed: int) -> Pending[FragmentDelta]:
        return self.rank.make_delta(fragment, seed)

    def when_made(self, call: Callable[[], Pending[T]]) -> Pending[T]:
        return call()  # it waits for the deltas: on a GPU they are made while virtual time stands still

    def on_weights(self, weights: FragmentWeights, start: bool = False) -> None:
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

    Give `watch` to the World; `last` adds the end of the run. windows: of the selection slice, and of the test slice;
    fewer where a slice has no so many without overlap.
    """

    def __init__(self, study: Study, points: int, windows: int = 640, tell: Callable[[Point], None] | None = None):
        text = standard_library()
        self.model = study.model()
        windows = min(windows, *(len(part) // (study.length + 1) for part in (text.selection, text.test)))
        self.selection = torch.from_numpy(text.windows(text.selection, windows, study.length))
        self.test = torch.from_numpy(text.windows(text.test, windows, study.length))
        self.every, self.next_share = 1 / points, 1 / points
        self.points: list[Point] = []
        self.tell = tell

    def watch(self, world: World) -> None:
        share = world.top.server.book.committed_samples / world.task.train_samples
        if share >= self.next_share:
            self.next_share = share + self.every
            self.add(world, share)

    def add(self, world: World, share: float) -> None:
        point = Point(world.clock.now, share, self.model.evaluate(self._flat(world), self.test))
        self.points.append(point)
        if self.tell:
            self.tell(point)

    def last(self, world: World, share: float) -> float:
        """Adds the end of the run; returns the loss on the selection slice, by which settings are chosen."""
        self.add(world, share)
        return self.model.evaluate(self._flat(world), self.selection)

    def _flat(self, world: World) -> Tensor:
        named = {
            name: tensor
            for fragment, state in enumerate(world.top.server.fragments)
            for name, tensor in world.task.layout.split(fragment, state.x)
        }
        return torch.cat([named[p.name].flatten() for p in self.model.parameters])
