"""Puts a user's own training loop into the outer loop: `geotrain.OuterLoop`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from geotrain.common.names import ENDLESS_SAMPLES
from geotrain.config import ClusterConfig, ConfigError, RunConfig, WorkerConfig, load_cluster, load_run
from geotrain.data.loader import RunSamples
from geotrain.data.order import SampleOrder
from geotrain.net.transport.worker_client import CONNECT_S
from geotrain.own_loop.enroll import enroll, is_address
from geotrain.own_loop.errors import in_two_lines
from geotrain.own_loop.masters import Masters
from geotrain.own_loop.rank import TorchRank
from geotrain.own_loop.state import LoopCheckpoints, Stateful
from geotrain.worker.connection import connected
from geotrain.worker.job_line import JobLine, say
from geotrain.worker.loop import WorkerLoop

FILLED = 4  # steps after which a loader's queue is full, though the first job may be shorter
MOST_AHEAD = 1024  # steps that may be read and not trained


class MapStyle(Protocol):
    """A map-style data set: it has a length, and a sample for each number below it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def length_of(data: MapStyle | None) -> int | None:
    """Return the length of a data set; None: the run's own. Raises ConfigError for one without samples by number."""
    if data is None or (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return None if data is None else len(data)
    raise ConfigError(
        f"data: a {type(data).__name__} has no __len__ or no __getitem__, but leases name samples by their numbers: "
        "give a map-style data set, or read the numbers from samples() and find the data yourself"
    )


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


def whole_steps(run: RunConfig) -> int:
    """Whole batches of the run, where schedules end. Raises ConfigError where it has no end."""
    if run.data.train_samples >= ENDLESS_SAMPLES:
        raise ConfigError(
            "the run has no end, by which a learning-rate schedule could go: state --steps to `geotrain serve`, or "
            "use a schedule without an end, as a constant rate after a warm-up"
        )
    return run.total_steps


class OuterLoop:
    """One rank of a worker, in a training loop of the user's own. Every rank of the worker makes the same calls.

    `OuterLoop(…)` takes a worker of a run and a cluster file; `OuterLoop.join(…)` joins what `geotrain serve` serves.

    run, cluster: their files, or what was read from them; by default cluster.json beside the run file. region,
    worker: which of the cluster's workers this is; without a name, the region's only one.
    model: any torch module, as it is trained: plain, under DDP, compiled, or sharded by FSDP2; or a DeepSpeed engine,
    of ZeRO 0 to 3. Its parameters are in fp32, or have fp32 masters; what is not trained, buffers too, is the same in
    all regions, and stays so. When all data is trained it holds the run's newest weights.
    Torch's default process group, if there is one, are the worker's ranks. Make this after the model is where it will
    train, and after the process group and the optimizer.

    state: what is saved with the worker, by name: the optimizer, and all else with `state_dict` and
    `load_state_dict`. Weights need not be: they come from the server. resume: begin with the newest saved state;
    False: without.
    validate: returns the loss of the validation set, on every rank; called when `monitor.validate_every_samples` says
    so, while the parameters hold the global weights. report: called on rank 0 after each job, with its numbers.
    connect_s: how long to try to reach the server at the beginning.

    resumed_job: the job after which the state was saved that this began with; 0: it began without.

    Raises ConfigError: the files are wrong, or do not go with the model; CheckpointError: the saved state does not go
    with model, ranks or `state`; `geotrain.outer.messages.Refused`: the server does not take this worker;
    TimeoutError or OSError: it cannot be reached.
    """

    @in_two_lines
    def __init__(
        self,
        run: str | Path | RunConfig,
        region: str,
        model: torch.nn.Module,
        *,
        cluster: str | Path | ClusterConfig | None = None,
        worker: str | None = None,
        state: Mapping[str, Stateful] | None = None,
        resume: bool = True,
        validate: Callable[[], float] | None = None,
        report: Callable[[dict[str, Any]], None] = lambda numbers: None,
        connect_s: float = CONNECT_S,
    ) -> None:
        if is_address(run):
            raise ConfigError(
                f"OuterLoop: {run} is an address: OuterLoop.join({run!r}, name, model, every=…) joins it"
            )
        if not isinstance(run, RunConfig):
            cluster = Path(run).parent / "cluster.json" if cluster is None else cluster
            run = load_run(run)
        if cluster is None:
            raise ConfigError("OuterLoop: with a run that is not given as a file, give the cluster too")
        cluster = cluster if isinstance(cluster, ClusterConfig) else load_cluster(cluster)
        self._joined = False
        mine = cluster.worker(region, worker)
        self._begin(TorchRank(), run, cluster, mine, model, {}, state, resume, validate, report, connect_s)

    @classmethod
    @in_two_lines
    def join(
        cls,
        address: str,
        name: str,
        model: torch.nn.Module,
        *,
        every: int,
        samples_per_step: int = 1,
        token: str | None = None,
        folder: str | Path | None = None,
        state: Mapping[str, Stateful] | None = None,
        resume: bool = True,
        validate: Callable[[], float] | None = None,
        report: Callable[[dict[str, Any]], None] = lambda numbers: None,
        connect_s: float = CONNECT_S,
    ) -> OuterLoop:
        """Join the run at the "host:port" that `geotrain serve` prints.

        name: a new one, or that of a worker which is started again. every: H, steps between deltas, the same for all.
        samples_per_step: if data is leased by `batches` or the like; without, `after_step` alone counts steps. token:
        that it prints; None: from the environment, GEOTRAIN_TOKEN. folder: for this worker's state; None: runs/ and
        the run's name. The rest is as for `OuterLoop`.
        """
        loop, rank = cls.__new__(cls), TorchRank()
        given, parameter_map = enroll(address, name, model, rank, every, samples_per_step, token, folder, connect_s)
        linked = {"parameter_map": parameter_map, "trust": given.trust}
        place = given.run, given.cluster, given.cluster.worker(name, None)
        loop._joined = True
        loop._begin(rank, *place, model, linked, state, resume, validate, report, connect_s)
        return loop

    def _begin(
        self,
        rank: TorchRank,
        run: RunConfig,
        cluster: ClusterConfig,
        mine: WorkerConfig,
        model: torch.nn.Module,
        linked: dict[str, Any],
        state: Mapping[str, Stateful] | None,
        resume: bool,
        validate: Callable[[], float] | None,
        report: Callable[[dict[str, Any]], None],
        connect_s: float,
    ) -> None:
        """Connect, and load the saved state. linked: what `connected` takes of a run that was joined."""
        self.rank, self.run, self._validate = rank, run, validate
        self._counted: Iterator[range] | None = None  # steps, where the loop has data of its own
        # Steps: how often `after_step` was called; how many may have been trained; how many the data side has read.
        self._steps = self._given = self._read = 0
        self._over = False  # whether a step was passed over, since the run had ended before any
        self._ahead, self._further = 0, True  # steps read ahead at the last step; whether it was more at each so far
        line = JobLine(run.monitor.every_s)

        def on_job(numbers: dict[str, Any]) -> None:
            say(line.of(numbers, time.monotonic()), sys.stdout)
            report(numbers)

        def on_trouble(what: str) -> None:
            say(f"geotrain: worker {mine.name}: {what}", sys.stderr)

        with ExitStack() as opened:
            member = opened.enter_context(
                connected(run, cluster, mine, connect_s=connect_s, report=on_job, trouble=on_trouble, **linked)
            )
            masters = Masters(member.parameter_map, model, rank.rank, rank.world_size)
            self._masters = rank.masters = masters
            digest = member.parameter_map.digest
            self._files = LoopCheckpoints(member.checkpoints, rank, state or {}, digest, run.checkpoint.keep)
            self.loop = WorkerLoop(
                member, rank, masters.shards, masters.device, validate=self._on_validation, save=self._save,
                joined=self._files.claim, adopt_last=True,
            )  # fmt: skip
            opened.callback(self.loop.watch.stop)
            self.resumed_job = self._files.load() if resume else 0
            lacks = f"no whole checkpoint is in {member.checkpoints}" if resume else "resume=False"
            self.loop.start(lacks if state and not self.resumed_job else "", self._files.files.faults)
            if masters.zero_3 and rank.is_metrics_rank:
                member.trouble(
                    "ZeRO 3 gives torch no moments to save: started again, this worker begins without them"
                )
            self._opened = opened.pop_all()

    def __enter__(self) -> OuterLoop:
        return self

    def __exit__(self, *error: object) -> None:
        if self._joined and not self.finished and not any(error) and not self.run.outer.rule.synchronous:
            self.loop.leave()
        if not self.finished and not any(error) and self.rank.is_metrics_rank:
            self.loop.member.trouble(
                f"the loop ends before the run's data: {self._given} steps were given, {self._steps} trained; others "
                "train what is left"
            )
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
    def step(self) -> float:
        """The run's step that is trained now, counted from 0 over all workers; while the batch grows, the whole
        batches trained so far. A learning-rate schedule should follow it, so that a worker that joins late, or is
        restarted, begins at the rate of the others."""
        return self.loop.schedule_step

    @property
    def total_steps(self) -> int:
        """Whole batches of the run, over all workers: where its schedule ends. Raises ConfigError: it has no end."""
        return whole_steps(self.run)

    def samples(self) -> Iterator[range]:
        """Yield this worker's part of the run's samples, a step at a time, until none is left. All its ranks get the
        same.

        A sample is a number below `data.train_samples`. Over all workers each is given out once; if a worker dies,
        what it had not sent goes to another. Raises RuntimeError where it is begun again before all that was given
        is trained.
        """
        for step in self._samples():
            self._given += 1
            yield step

    def _samples(self) -> Iterator[range]:
        if self._read != self._steps:
            raise RuntimeError(
                f"batches(), indices() or samples() begins anew, but of {self._read} steps that were read only "
                f"{self._steps} are trained, and the others would count as trained: read one of them to its end"
            )
        lease, done = self.loop.lease, self.loop.step
        begun = [lease] if lease is not None and done else []  # by a reader before this one
        for lease in chain(begun, self.loop.leases()):
            for step in (self.run.batches.steps(lease.start, lease.samples) or [])[done:]:
                if self._read - self._steps >= MOST_AHEAD:
                    raise RuntimeError(self._too_far())
                self._read += 1
                yield step
            done = 0

    def _too_far(self) -> str:
        return (
            f"{self._read} steps were read, and {self._steps} trained: the loader reads ahead without bound, or it "
            "passes over steps, which would count as trained. indices() gives each rank its own share: do not shard "
            "its loader again (accelerate's prepare, a DistributedSampler), and read a few steps ahead only"
        )

    def indices(self, length: int | None, parts: int = 1) -> Iterator[list[int]]:
        """Yield the places of this rank's share of each step's samples in a data set of `length` samples.

        The run's samples visit the places in an order that `seed` decides, each once in an epoch; without a length,
        they are given as they are. parts: into which a step is cut, for micro-batches. Use it as a DataLoader's
        `batch_sampler`. Raises ConfigError: a step does not divide.
        """
        return self._indices(length, parts, self.samples)

    def _indices(self, length: int | None, parts: int, samples: Callable[[], Iterator[range]]) -> Iterator[list[int]]:
        order, cuts = places_of(self.run, length), self.rank.world_size * parts
        for size in self.run.batches.sizes:
            if size % cuts:
                raise ConfigError(
                    f"a step's {size} samples do not divide into {parts} micro-batches on {self.rank.world_size} "
                    "ranks"
                )

        def places() -> Iterator[list[int]]:
            for step in samples():
                share, micro_batch = len(step) // self.rank.world_size, len(step) // cuts
                own = order(step[self.rank.rank * share :][:share])
                yield from (own[at : at + micro_batch] for at in range(0, share, micro_batch))

        return places()

    def batches(self, data: MapStyle | None = None, parts: int = 1, **options: Any) -> Iterator[Any]:
        """Yield this rank's batches of a map-style data set, until no data is left for this worker; without one, of
        the run's own data (`data.train`), as int64 [samples, sequence_length + 1].

        Train each, then call `after_step`. parts: micro-batches of a step; then call it after every parts-th.
        options: of torch's DataLoader, such as `collate_fn`, `num_workers`, `pin_memory`. Raises ConfigError; and
        RuntimeError where `after_step` was not called after each step.
        """
        source: Any = RunSamples(self.run) if data is None else data
        length, trained, given = length_of(data), self._steps, 0
        while not self.finished:  # a loader that reads ahead may end before data comes back from who has died
            indices: Any = self._indices(length, parts, self._samples)
            for batch in DataLoader(source, batch_sampler=indices, **options):
                if given // parts != self._steps - trained:
                    raise RuntimeError(
                        f"{given} batches of {parts} to a step were given, but after_step was called "
                        f"{self._steps - trained} times: call it once after each step"
                    )
                self.loop.laps.lap("waiting")
                given += 1
                self._given = trained + given // parts
                yield batch

    @in_two_lines
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
        leaves. tokens: that the worker trained on in this step; by default, as the run file says. The step of one
        that joined as the run ended is passed over. Raises RuntimeError: no step's data was given for it by
        `batches`, `indices` or `samples`; the run is over; the model is not what it was at the start.
        """
        if self._joined and (self._counted is not None or not self._read) and not self._count():
            return
        reads = self.rank.rank == 0 or self._read  # Trainer's first process reads for all
        if self._steps >= self._given and reads and not self.finished:
            raise RuntimeError(
                f"after_step is called for step {self._steps + 1}, but batches(), indices() or samples() have given "
                f"the data of {self._given}: its samples would count as trained; call it once after each step"
            )
        if self._steps == 0:
            self._masters.check()
        # A loader with workers fills its queue before the first step; one that is sharded again reads some for each.
        ahead, before = self._read - self._steps, self._ahead
        self._ahead, self._further = ahead, self._further and (ahead > before or not self._steps)
        if self._further and self._steps + 1 == max(self.run.outer.local_steps, FILLED):
            raise RuntimeError(self._too_far())
        given = loss.detach() if isinstance(loss, Tensor) else loss
        usual = self.loop.step_samples * self.run.data.sequence_length
        self._steps += 1
        self.loop.after_step(OwnStep(given, lr, grad_norm, usual if tokens is None else tokens))
        self.loop.watch.begin_step(self.loop.step_samples)

    def _count(self) -> bool:
        """Take a step of a lease, which has no data here. False, once: the run was over before there was one, as for
        who joins when it ends."""
        while not self.finished:
            self._counted = self._counted or self.samples()
            if next(self._counted, None) is not None:
                return True
            self._counted = None  # it may end before steps come back from who has died
        if self._over or self._steps:
            raise RuntimeError("after_step is called, and the run is over: leave the loop where `finished` says so")
        self._over = True
        return False

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
