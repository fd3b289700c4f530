"""THE loop of one rank: lease → H inner steps → delta → weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from geotrain.config import RunConfig
from geotrain.data.loader import LeasedLoader
from geotrain.inner import checkpoint
from geotrain.inner.acco_engine import AccoEngine
from geotrain.inner.engine import GeoEngine, StepResult
from geotrain.monitor.laps import Laps
from geotrain.outer import exchange
from geotrain.outer.exchange import Exchange, wait_for
from geotrain.outer.layout import Layout, fragments_due
from geotrain.outer.messages import Answer, Finished, Lease, LeaseRequest, Validated
from geotrain.outer.server import Identity
from geotrain.outer.worker import Piece, WorkerRank


class Client(exchange.Client, Protocol):
    """This rank's connection to the server above (`geotrain.net.client.MemberClient`). Futures have deadlines."""

    def lease(self, request: LeaseRequest) -> Future[Lease | Finished]: ...
    def global_weights(self, number: int) -> Future[Answer]: ...
    def validated(self, result: Validated) -> None: ...
    def leave(self) -> None: ...


class Trainer:
    """One rank of a worker. `report` is called on the metrics rank after every job, with plain numbers."""

    def __init__(
        self,
        run: RunConfig,
        name: str,
        identity: Identity,
        layout: Layout,
        engine: GeoEngine,
        loader: LeasedLoader,
        client: Client,
        checkpoints: Path,
    ) -> None:
        self.run, self.name, self.identity, self.layout = run, name, identity, layout
        self.engine, self.loader, self.client = engine, loader, client
        self.checkpoints = checkpoints
        self.validation: Sequence[Tensor] = ()  # this rank's micro-batches of the validation set
        self.life = ""  # of this worker: the same on all its ranks, new whenever it is started
        self.min_step_s = 0.0  # an inner step takes at least so long
        self.report: Callable[[dict[str, Any]], None] = lambda numbers: None
        self.peak_flops_per_token_s: float | None = None  # the worker's peak over the FLOPs of one token
        self.laps = Laps(time.perf_counter, "compute", "communication", "waiting", "checkpoint")
        pieces = [Piece(s.runs, s.master, s.pushes) for s in engine.shards()]
        self.worker = WorkerRank(layout, run.outer, pieces)
        self.exchange = Exchange(
            name, run.outer, engine, self.worker, client, len(layout.fragments), time.perf_counter
        )

    def train(self, resume: bool) -> None:
        """Until no data is left. resume: with the optimizer state of the newest checkpoint, if there is one."""
        if resume:
            checkpoint.load(self.engine, self.checkpoints)
        self.life = self.engine.from_rank_0(f"{self.name}-{time.time_ns():x}")
        job = wait_for(self.exchange.start(self.identity, self.life))
        self.laps.restart()
        lease = self.client.lease(LeaseRequest(self.name, job)).result()
        while isinstance(lease, Lease):
            if lease.validate:
                self.validate(lease.validate)
            following = self.client.lease(LeaseRequest(self.name, lease.job + 1, self.exchange.step_s))
            self.train_job(lease)
            if lease.job % self.run.checkpoint.every_jobs == 0:
                self.save(lease.job)
                self.laps.lap("checkpoint")
            lease = following.result()
        wait_for(self.exchange.finish())
        self.save(lease.job - 1)
        self.client.leave()

    def train_job(self, lease: Lease) -> None:
        """The inner steps of one lease; deltas leave, and weights are adopted, when they are due."""
        begin = time.perf_counter()
        results: list[StepResult] = []
        self.exchange.begin(lease)
        for step, train in enumerate(self._steps(lease), 1):
            # The rate follows the run's dispatched samples: one schedule step is one batch, whoever trains it.
            schedule_step = lease.start // self.run.samples_per_step + step - 1
            ends_s = time.perf_counter() + self.min_step_s
            self.laps.lap("waiting")
            results.append(train(schedule_step))
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

    def _steps(self, lease: Lease) -> Iterator[Callable[[int], StepResult]]:
        """The inner steps, each to be called with its schedule step."""
        if isinstance(self.engine, AccoEngine) and self.engine.balances:
            for read in self.loader.shared_steps(lease.start, lease.samples):
                yield partial(self.engine.train_step_shared, read)
        else:
            for micro_batches in self.loader.steps(lease.start, lease.samples):
                yield partial(self.engine.train_step, micro_batches)

    def validate(self, number: int) -> None:
        """Evaluate the global weights between two jobs; left out when they are not the same for all ranks (a server
        was restarted meanwhile)."""
        begin = time.perf_counter()
        answer = self.client.global_weights(number).result()
        versions = [w.version for w in answer.weights]
        words = f"{answer.life} {versions}"
        same = self.engine.from_rank_0(words) == words
        if not self.engine.agree(same and bool(versions) and bool(self.validation)):
            return
        loss = self.engine.evaluate_lent(self.worker.lent(answer.weights), self.validation)
        if self.engine.is_metrics_rank:
            seconds = time.perf_counter() - begin
            self.client.validated(Validated(self.name, number, max(versions), loss, seconds))

    def save(self, job: int) -> None:
        keep = self.run.checkpoint.keep
        checkpoint.save(self.engine, self.checkpoints, f"job-{job:08d}", {"job": job}, keep)

    def _metrics(self, results: Sequence[StepResult], begin_s: float) -> dict[str, float]:
        """Of the job so far, as in `geotrain.monitor.events.JobTrained`. Where ACCO's last step is still under way,
        this waits for it."""
        tokens = sum(r.tokens for r in results)
        spent = self.laps.seconds
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
