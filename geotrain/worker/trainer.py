"""Trains the samples of each lease with GeoTrain's own engine, on the loop that all workers share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from geotrain.checkpoint.folders import CheckpointError
from geotrain.checkpoint.saving import Checkpoints
from geotrain.data.loader import LeasedLoader
from geotrain.inner.engine.engine import GeoEngine
from geotrain.inner.engine.step import StepReader
from geotrain.kernels.spans import span
from geotrain.outer.messages import Lease
from geotrain.worker.loop import RunMember, WorkerLoop


class Trainer:
    """One rank of GeoTrain's own trainer. All ranks make the same calls of engine and loop, which contain
    collectives.

    loader: this rank's batches. validation: this rank's micro-batches of the validation set, empty where there is
    none. min_step_s: seconds that an inner step takes at least, for rehearsals. peak_flops_per_token_s: see
    `WorkerLoop`. verify: called before each step, with its batch.
    """

    def __init__(
        self, member: RunMember, engine: GeoEngine, loader: LeasedLoader, *, validation: Sequence[Tensor] = (),
        min_step_s: float = 0.0, peak_flops_per_token_s: float | None = None,
    ) -> None:  # fmt: skip
        self.member, self.engine, self.loader = member, engine, loader
        self.validation, self.min_step_s = validation, min_step_s
        self.verify: Callable[[StepReader], None] = lambda batch: None
        self.checkpoints = Checkpoints(
            engine, member.checkpoints, member.run.checkpoint.keep, no_room=self.go_on_without
        )
        self.loop = WorkerLoop(
            member, engine, engine.shards(), engine.device, validate=self.validate, save=self.save,
            joined=self.checkpoints.files.claim, expect=lambda lease: loader.expect(lease.start, lease.samples),
            report=self.report, peak_flops_per_token_s=peak_flops_per_token_s,
            lost=lambda: os._exit(1),  # the launcher ends the other ranks, and starts the worker again
        )  # fmt: skip

    def train(self, resume: bool) -> None:
        """Train until no data is left for this worker. resume: begin with the optimizer state of the newest
        checkpoint, if there is one. Weights always come from the server, where others' training is part of them."""
        lacks = f"no whole checkpoint is in {self.member.checkpoints}" if resume else "started without --resume"
        self.loop.start("" if resume and self.checkpoints.load() else lacks, self.checkpoints.files.faults)
        for lease in self.loop.leases():
            self.train_job(lease)
        self.checkpoints.close()

    def train_job(self, lease: Lease) -> None:
        """Train the inner steps of the lease that the loop has begun."""
        for batch in self.loader.steps(lease.start, lease.samples):
            ends_s = time.perf_counter() + self.min_step_s
            samples = self.loop.step_samples
            self.engine.set_train_batch_size(samples)
            self.verify(batch)
            self.loop.watch.begin_step(samples)
            self.loop.laps.lap("waiting")  # for the loader, at the first step also for the lease
            with span("step"):
                result = self.engine.train_step(batch, self.loop.schedule_step)
            time.sleep(max(0.0, ends_s - time.perf_counter()))
            self.loop.after_step(result)

    def report(self, numbers: dict[str, Any]) -> None:
        """Write a job's numbers to DeepSpeed's boards, and report them to the run."""
        self.engine.write_scalars({name: value for name, value in numbers.items() if name not in ("job", "start")})
        self.member.report(numbers)

    def validate(self, number: int) -> None:
        """Evaluate the global weights between two jobs; afterwards the masters are as they were, bit for bit."""
        begin = time.perf_counter()
        if self.validation and (answer := self.loop.weights_to_evaluate(number)) is not None:
            loss = self.engine.evaluate_swapped_in(self.loop.weights.swapped_in(answer.weights), self.validation)
            self.loop.validated(number, answer, loss, time.perf_counter() - begin)

    def save(self, job: int) -> None:
        """Save the worker's optimizer state after this job, for a resume; of the last job, before the worker leaves.
        Raises CheckpointError."""
        self.checkpoints.save(f"job-{job:08d}", {"job": job})
        if self.loop.lease is None:
            self.checkpoints.wait()

    def go_on_without(self, error: CheckpointError) -> None:
        """Report that there is no room on a disk, and train on: the next save tries again. The older checkpoints are
        there, and a death would cost more than the state of a few jobs."""
        if self.engine.is_metrics_rank:
            self.member.trouble(f"{error}; training goes on without this checkpoint")
