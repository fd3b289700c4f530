"""The training loop of one rank: ask for a lease, train its H inner steps, send the delta, adopt the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from geotrain.config import RunConfig
from geotrain.data.loader import LeasedLoader
from geotrain.inner import checkpoint
from geotrain.inner.engine import GeoEngine, StepResult
from geotrain.inner.staging import CudaStaging
from geotrain.layout import Layout, fragments_due
from geotrain.monitor.utilization import PhaseTimer
from geotrain.outer import exchange
from geotrain.outer.exchange import Exchange, wait_for
from geotrain.outer.messages import Answer, Finished, Lease, LeaseRequest, Validated
from geotrain.outer.server import Identity
from geotrain.outer.worker import OwnedSlices, SynchronousStaging, WorkerRank


class TrainerClient(exchange.Client, Protocol):
    """This rank's connection to the server above (`net.worker_client.WorkerClient`). Its futures have deadlines."""

    mirrors: Callable[[], tuple[int, ...]]  # gives the marks of what the rank was last sent, for a join

    def lease(self, request: LeaseRequest) -> Future[Lease | Finished]: ...
    def global_weights(self, number: int) -> Future[Answer]: ...
    def validated(self, result: Validated) -> None: ...
    def leave(self) -> None: ...


class Trainer:
    """One rank of a worker. All ranks make the same calls of engine and exchange, which contain collectives.

    name: of the worker. identity: of the run, for the join. loader: this rank's batches. checkpoints: the worker's
    folder for them. validation: this rank's micro-batches of the validation set, empty where there is none.
    min_step_s: seconds that an inner step takes at least, for rehearsals. report: called on the metrics rank after
    every job. trouble: called there with what a person should know. peak_flops_per_token_s: the worker's peak FLOP/s
    over the FLOPs of one token, in tokens a second, for the utilization (MFU); None: not known.
    """

    def __init__(
        self,
        run: RunConfig,
        name: str,
        identity: Identity,
        layout: Layout,
        engine: GeoEngine,
        loader: LeasedLoader,
        client: TrainerClient,
        checkpoints: Path,
        *,
        validation: Sequence[Tensor] = (),
        min_step_s: float = 0.0,
        report: Callable[[dict[str, Any]], None] = lambda numbers: None,
        trouble: Callable[[str], None] = lambda what: None,
        peak_flops_per_token_s: float | None = None,
    ) -> None:
        self.run, self.name, self.identity, self.layout = run, name, identity, layout
        self.engine, self.loader, self.client = engine, loader, client
        self.checkpoints, self.validation = checkpoints, validation
        self.min_step_s, self.report, self.trouble = min_step_s, report, trouble
        self.peak_flops_per_token_s = peak_flops_per_token_s
        clock = time.perf_counter
        self.laps = PhaseTimer(clock, "compute", "communication", "waiting", "checkpoint")
        pieces = [OwnedSlices(s.runs, s.master, s.pushes) for s in engine.shards()]
        staging = CudaStaging if engine.device.type == "cuda" else SynchronousStaging
        self.worker = WorkerRank(layout, run.outer, pieces, staging(engine.device))
        client.mirrors = self.worker.mirrors
        self.exchange = Exchange(name, run.outer, engine, self.worker, client, len(layout.fragments), clock)

    def train(self, resume: bool) -> None:
        """Train until no data is left for this worker. resume: begin with the optimizer state of the newest
        checkpoint, if there is one. Weights always come from the server, where others' training is part of them."""
        if resume:
            checkpoint.load(self.engine, self.checkpoints)
        # Names this life of the worker: the time tells it from earlier ones, and all ranks must say the same.
        incarnation = self.engine.from_rank_0(f"{self.name}-{time.time_ns():x}")
        job = wait_for(self.exchange.start(self.identity, incarnation))
        self.laps.restart()
        lease = self.client.lease(LeaseRequest(self.name, job)).result()
        while isinstance(lease, Lease):
            if lease.validate:
                self.validate(lease.validate)
            # One job ahead, so that no job begins with waiting for a round trip (through the region to the global
            # server). The speed that it tells is that of the job before.
            following = self.client.lease(LeaseRequest(self.name, lease.job + 1, self.exchange.step_s))
            self.train_job(lease)
            if lease.job % self.run.checkpoint.every_jobs == 0:
                self.save(lease.job)
                self.laps.lap("checkpoint")
            lease = following.result()
        # No data is left. Nothing more is expected of a worker that has left, so all it has must be sent before.
        wait_for(self.exchange.finish())
        self.save(lease.job - 1)
        self.client.leave()

    def train_job(self, lease: Lease) -> None:
        """Train the inner steps of one lease; deltas leave, and answers are adopted, when they are due."""
        begin = time.perf_counter()
        results: list[StepResult] = []
        self.exchange.begin(lease)
        for step, batch in enumerate(self.loader.steps(lease.start, lease.samples), 1):
            # The learning rate follows the run's progress and not this worker's: a schedule step is one batch of the
            # run, whoever trains it. So a worker that joins late begins at the rate of the others.
            schedule_step = lease.start // self.run.samples_per_step + step - 1
            ends_s = time.perf_counter() + self.min_step_s
            self.laps.lap("waiting")  # for the loader, at the first step also for the lease
            results.append(self.engine.train_step(batch, schedule_step))
            time.sleep(max(0.0, ends_s - time.perf_counter()))
            self.laps.lap("compute")
            due = fragments_due(len(self.layout.fragments), lease.steps, step)
            wait_for(self.exchange.after_step(due, self._metrics(results, begin) if due else {}))
            self.laps.lap("communication")
        if self.engine.is_metrics_rank:
            metrics = self._metrics(results, begin)
            self.engine.write_scalars(metrics)
            self.report({"job": lease.job, "start": lease.start, **metrics})
        self.laps.restart()

    def validate(self, number: int) -> None:
        """Evaluate the global weights between two jobs; afterwards the masters are as they were, bit for bit."""
        begin = time.perf_counter()
        answer = self.client.global_weights(number).result()
        versions = [w.version for w in answer.weights]
        words = f"{answer.life} {versions}"
        same = self.engine.from_rank_0(words) == words
        # Evaluation is a collective: all ranks take part or none. None do if the server was restarted between their
        # requests and gave them different weights, or has no global weights; then this validation is left out.
        if not self.engine.agree(same and bool(versions) and bool(self.validation)):
            return
        loss = self.engine.evaluate_lent(self.worker.lent(answer.weights), self.validation)
        if self.engine.is_metrics_rank:
            seconds = time.perf_counter() - begin
            self.client.validated(Validated(self.name, number, max(versions), loss, seconds))

    def save(self, job: int) -> None:
        """Save the worker's optimizer state after this job, for a resume.

        Without room on the disk the worker trains on and tries again at the next save: the older checkpoints are
        there, and a death would cost more than the state of a few jobs. Raises CheckpointError.
        """
        try:
            checkpoint.save(self.engine, self.checkpoints, f"job-{job:08d}", {"job": job}, self.run.checkpoint.keep)
        except checkpoint.CheckpointError as error:
            if not error.no_room:
                raise
            if self.engine.is_metrics_rank:
                self.trouble(f"{error}; training goes on without this checkpoint")

    def _metrics(self, results: Sequence[StepResult], begin_s: float) -> dict[str, float]:
        """Metrics of the job so far, as in `geotrain.monitor.events.JobTrained`. Where ACCO's last step is still
        under way, this waits for it: so it is called only where a delta leaves, and at the end of a job."""
        tokens, spent = sum(r.tokens for r in results), self.laps.seconds
        metrics = {
            "loss": sum(r.loss for r in results) / len(results),
            "lr": results[-1].lr,
            "grad_norm": results[-1].grad_norm,
            "tokens": float(tokens),
            "tokens_per_s": tokens / (time.perf_counter() - begin_s),
            "steps": float(len(results)),
            "waited_s": self.exchange.waited_s,
            **{f"{name}_s": seconds for name, seconds in spent.items()},
            "memory_bytes": self.engine.peak_memory_bytes,
        }
        if self.peak_flops_per_token_s and spent["compute"] > 0:
            metrics["mfu"] = tokens / spent["compute"] / self.peak_flops_per_token_s
        return metrics
