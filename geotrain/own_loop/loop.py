"""Puts a user's own training loop into the outer loop: `geotrain.OuterLoop`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from geotrain.config import ClusterConfig, ConfigError, RunConfig, load_cluster, load_run
from geotrain.data.loader import RunSamples
from geotrain.data.order import SampleOrder
from geotrain.own_loop.masters import Masters
from geotrain.own_loop.rank import TorchRank
from geotrain.own_loop.state import StateFiles, Stateful
from geotrain.worker.connection import connected
from geotrain.worker.loop import WorkerLoop


class MapStyle(Protocol):
    """A map-style data set: it has a length, and a sample for each number below it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def places_of(run: RunConfig, length: int | None) -> Callable[[range], list[int]]:
    """Make the function from samples of the run to their places in a data set of `length` samples. None: the run's
    own data set, in which they have their numbers."""
    if length is None:
        return list
    order = SampleOrder(length, run.seed)
    return lambda samples: order.positions(np.arange(samples.start, samples.stop)).tolist()


@dataclass
class OwnStep:
    """The numbers of one step of a user's loop (`geotrain.monitor.utilization.StepNumbers`)."""

    given: float | Tensor
    lr: float
    grad_norm: float
    tokens: int

    @property
    def loss(self) -> float:
        return float(self.given)  # here and not before: on a GPU this waits for the step


class OuterLoop:
    """One rank of a worker, in a training loop of the user's own. Every rank of the worker makes the same calls.

    run, cluster: their files, or what was read from them; by default cluster.json beside the run file. region,
    worker: which of the cluster's workers this is; without a name, the region's only one.
    parameters: the named parameters of any torch module, as they are trained: plain, under DDP, or sharded by FSDP2;
    in place of them a DeepSpeed engine, of ZeRO 0 to 3. They are in fp32, or have fp32 masters.
    Torch's default process group, if there is one, are the worker's ranks. Make this after the model is where it will
    train, and after the process group and the optimizer.

    state: what is saved with the worker, by name: the optimizer, and all else with `state_dict` and
    `load_state_dict`. Weights need not be: they come from the server. resume: begin with the newest saved state.
    validate: returns the loss of the validation set, on every rank; called when `monitor.validate_every_samples` says
    so, while the parameters hold the global weights. report: called on rank 0 after each job, with its numbers.
    connect_s: how long to try to reach the server at the beginning.

    resumed_job: the job after which the state was saved that this began with; 0: it began without.

    Raises ConfigError: the files are wrong, or do not go with the model; `geotrain.outer.messages.Refused`: the
    server does not take this worker; TimeoutError or OSError: it cannot be reached.
    """

    def __init__(
        self,
        run: str | Path | RunConfig,
        region: str,
        parameters: Any,
        *,
        cluster: str | Path | ClusterConfig | None = None,
        worker: str | None = None,
        state: Mapping[str, Stateful] | None = None,
        resume: bool = True,
        validate: Callable[[], float] | None = None,
        report: Callable[[dict[str, Any]], None] = lambda numbers: None,
        connect_s: float = 60.0,
    ) -> None:
        if not isinstance(run, RunConfig):
            cluster = Path(run).parent / "cluster.json" if cluster is None else cluster
            run = load_run(run)
        if cluster is None:
            raise ConfigError("OuterLoop: with a run that is not given as a file, give the cluster too")
        if not isinstance(cluster, ClusterConfig):
            cluster = load_cluster(cluster)
        self.run, self._validate, self._steps = run, validate, 0  # steps: how often `after_step` was called
        with ExitStack() as opened:
            mine = cluster.worker(region, worker)
            member = opened.enter_context(connected(run, cluster, mine, connect_s=connect_s, report=report))
            self.rank = rank = TorchRank()
            masters = Masters(member.parameter_map, parameters, rank.rank, rank.world_size)
            self._masters = rank.masters = masters
            digest = member.parameter_map.digest
            self._files = StateFiles(member.checkpoints, rank, state or {}, digest, run.checkpoint.keep)
            trained = rank, masters.shards, masters.device
            self.loop = WorkerLoop(member, *trained, validate=self._on_validation, save=self._save)
            self.resumed_job = self._files.load() if resume else 0
            self.loop.start()
            self._opened = opened.pop_all()

    def __enter__(self) -> OuterLoop:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is under way. A worker that closes before it has finished counts as dead after a while, and
        others train the data of its leases."""
        self._opened.close()

    @property
    def finished(self) -> bool:
        """Whether no data is left, everything is sent, and the worker has left."""
        return self.loop.finished

    @property
    def step(self) -> int:
        """The run's step that is trained now, counted from 0 over all workers. A learning-rate schedule should follow
        it, so that a worker that joins late, or is restarted, begins at the rate of the others."""
        return self.loop.schedule_step

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, over all workers: where its schedule ends."""
        return self.run.total_steps

    def samples(self) -> Iterator[range]:
        """Yield this worker's part of the run's samples, a step at a time, until none is left. All its ranks get the
        same.

        A sample is a number below `data.train_samples`. Over all workers each is given out once; if a worker dies,
        what it had not sent goes to another.
        """
        size = self.run.samples_per_step
        for lease in self.loop.leases():
            for start in range(lease.start, lease.start + lease.samples, size):
                yield range(start, start + size)

    def indices(self, length: int | None, parts: int = 1) -> Iterator[list[int]]:
        """Yield the places of this rank's share of each step's samples in a data set of `length` samples.

        The run's samples visit the places in an order that `seed` decides, each once in an epoch; without a length,
        they are given as they are. parts: into which a step is cut, for micro-batches. Use it as a DataLoader's
        `batch_sampler`. Raises ConfigError: a step does not divide.
        """
        order, size = places_of(self.run, length), self.run.samples_per_step
        if size % (self.rank.world_size * parts):
            raise ConfigError(
                f"a step's {size} samples do not divide into {parts} micro-batches on {self.rank.world_size} ranks"
            )
        share = size // self.rank.world_size
        micro_batch = share // parts

        def places() -> Iterator[list[int]]:
            for step in self.samples():
                first = step.start + self.rank.rank * share
                own = order(range(first, first + share))
                yield from (own[at : at + micro_batch] for at in range(0, share, micro_batch))

        return places()

    def batches(self, data: MapStyle | None = None, parts: int = 1, **options: Any) -> Iterator[Any]:
        """Yield this rank's batches of a map-style data set, until no data is left for this worker; without one, of
        the run's own data (`data.train`), as int64 [samples, sequence_length + 1].

        Train each, then call `after_step`. parts: micro-batches of a step; then call it after every parts-th.
        options: of torch's DataLoader, such as `collate_fn`, `num_workers`, `pin_memory`. Raises ConfigError; and
        RuntimeError where `after_step` was not called after each step.
        """
        indices = self.indices(None if data is None else len(data), parts)
        source: Any = RunSamples(self.run) if data is None else data
        loader: Any = DataLoader(source, batch_sampler=indices, **options)
        trained, given = self._steps, 0
        while not self.finished:  # a loader may have read ahead to where no data was left; then some came back
            for batch in loader:
                self._check_given(given, parts, trained)
                self.loop.laps.lap("waiting")
                yield batch
                given += 1
            self._check_given(given, parts, trained)

    def _check_given(self, given: int, parts: int, trained: int) -> None:
        if given // parts != self._steps - trained:
            raise RuntimeError(
                f"{given} batches of {parts} to a step were given, but after_step was called "
                f"{self._steps - trained} times: call it once after each step"
            )

    def after_step(
        self,
        loss: float | Tensor = float("nan"),
        *,
        lr: float = float("nan"),
        grad_norm: float = float("nan"),
        tokens: int | None = None,
    ) -> None:
        """Send deltas, write answers into the parameters and save the state, when these are due. Call it after each
        step of the optimizer. After the last step everything is sent, and the worker leaves.

        loss, lr, grad_norm: for people. The loss is of this rank's part of the batch, and read only when a delta
        leaves. tokens: that the worker trained on in this step; by default, as the run file says.
        """
        given = loss.detach() if isinstance(loss, Tensor) else loss
        usual = self.run.samples_per_step * self.run.data.sequence_length
        self._steps += 1
        self.loop.after_step(OwnStep(given, lr, grad_norm, usual if tokens is None else tokens))

    def _save(self, job: int) -> None:
        if trouble := self._files.save(job):
            self.loop.member.trouble(trouble)

    def _on_validation(self, number: int) -> None:
        if self._validate is None or (answer := self.loop.weights_to_evaluate(number)) is None:
            return
        begin = time.perf_counter()
        with self.loop.weights.swapped_in(answer.weights):
            self._masters.refresh()
            with torch.no_grad():
                loss = float(self._validate())
        self._masters.refresh()
        self.loop.validated(number, answer, loss, time.perf_counter() - begin)
