"""GeoTrain's own trainer: the samples of each lease, trained by its engine on the loop that all workers share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from geotrain.checkpoint.folders import CheckpointError
from geotrain.checkpoint.saving import Checkpoints
from geotrain.config import RunConfig
from geotrain.data.loader import LeasedLoader
from geotrain.inner.engine.engine import GeoEngine
from geotrain.outer.messages import Identity, Lease
from geotrain.parameters.parameter_map import ParameterMap
from geotrain.worker.loop import LoopClient, WorkerLoop


class Trainer:
    """One rank of a worker. All ranks make the same calls of engine and loop, which contain collectives.

    name: of the worker. identity: of the run, for the join. loader: this rank's batches. checkpoints: the worker's
    folder for them. workers: that the run has. validation: this rank's micro-batches of the validation set, empty
    where there is none. min_step_s: seconds that an inner step takes at least, for rehearsals. report: called on
    the metrics rank after every job. trouble: called there with what a person should know. peak_flops_per_token_s:
    as `WorkerLoop` has it.
    """

    def __init__(
        self,
        run: RunConfig,
        name: str,
        identity: Identity,
        parameter_map: ParameterMap,
        engine: GeoEngine,
        loader: LeasedLoader,
        client: LoopClient,
        checkpoints: Path,
        *,
        workers: int = 1,
        validation: Sequence[Tensor] = (),
        min_step_s: float = 0.0,
        report: Callable[[dict[str, Any]], None] = lambda numbers: None,
        trouble: Callable[[str], None] = lambda what: None,
        peak_flops_per_token_s: float | None = None,
    ) -> None:
        self.run, self.engine, self.loader = run, engine, loader
        self.checkpoints = Checkpoints(engine, checkpoints, run.checkpoint.keep, no_room=self.go_on_without)
        self.validation = validation
        self.min_step_s, self.report, self.trouble = min_step_s, report, trouble
        self.loop = WorkerLoop(
            run,
            name,
            identity,
            parameter_map,
            engine,
            engine.shards(),
            engine.device,
            client,
            workers=workers,
            validate=self.validate,
            save=self.save,
            expect=lambda lease: loader.expect(lease.start, lease.samples),
            report=self.tell,
            peak_flops_per_token_s=peak_flops_per_token_s,
        )

    def train(self, resume: bool) -> None:
        """Train until no data is left for this worker. resume: begin with the optimizer state of the newest
        checkpoint, if there is one. Weights always come from the server, where others' training is part of them."""
        if resume:
            self.checkpoints.load()
        self.loop.start()
        for lease in self.loop.leases():
            self.train_job(lease)
        self.checkpoints.close()

    def train_job(self, lease: Lease) -> None:
        """Train the inner steps of the lease that the loop has begun."""
        for batch in self.loader.steps(lease.start, lease.samples):
            ends_s = time.perf_counter() + self.min_step_s
            self.loop.laps.lap("waiting")  # for the loader, at the first step also for the lease
            result = self.engine.train_step(batch, self.loop.schedule_step)
            time.sleep(max(0.0, ends_s - time.perf_counter()))
            self.loop.after_step(result)

    def tell(self, numbers: dict[str, Any]) -> None:
        """A job is done: its numbers go to DeepSpeed's boards, and to `report`."""
        self.engine.write_scalars({name: value for name, value in numbers.items() if name not in ("job", "start")})
        self.report(numbers)

    def validate(self, number: int) -> None:
        """Evaluate the global weights between two jobs; afterwards the masters are as they were, bit for bit."""
        begin = time.perf_counter()
        if self.validation and (answer := self.loop.lent(number)) is not None:
            loss = self.engine.evaluate_swapped_in(self.loop.weights.lent(answer.weights), self.validation)
            self.loop.validated(number, answer, loss, time.perf_counter() - begin)

    def save(self, job: int) -> None:
        """Save the worker's optimizer state after this job, for a resume; of the last job, before the worker leaves.
        Raises CheckpointError."""
        self.checkpoints.save(f"job-{job:08d}", {"job": job})
        if self.loop.lease is None:
            self.checkpoints.wait()

    def go_on_without(self, error: CheckpointError) -> None:
        """There is no room on a disk. The worker trains on and tries again at the next save: the older checkpoints
        are there, and a death would cost more than the state of a few jobs."""
        if self.engine.is_metrics_rank:
            self.trouble(f"{error}; training goes on without this checkpoint")
