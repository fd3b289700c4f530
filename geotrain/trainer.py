"""THE loop of one rank: lease → H inner steps → delta → weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from geotrain.config import RunConfig
from geotrain.data.loader import LeasedLoader
from geotrain.inner import checkpoint
from geotrain.inner.engine import GeoEngine, StepResult
from geotrain.outer import exchange
from geotrain.outer.exchange import Exchange, wait_for
from geotrain.outer.layout import Layout, fragments_due
from geotrain.outer.messages import Finished, Lease, LeaseRequest
from geotrain.outer.server import Identity
from geotrain.outer.worker import Piece, WorkerRank


class Client(exchange.Client, Protocol):
    """This rank's connection to the server above (`geotrain.net.client.MemberClient`). Futures have deadlines."""

    def lease(self, request: LeaseRequest) -> Future[Lease | Finished]: ...
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
        self.report: Callable[[dict[str, Any]], None] = lambda numbers: None
        pieces = [Piece(s.runs, s.master, s.pushes) for s in engine.shards()]
        self.worker = WorkerRank(layout, run.outer, pieces)
        self.exchange = Exchange(
            name, run.outer, engine, self.worker, client, len(layout.fragments), time.perf_counter
        )

    def train(self, resume: bool) -> None:
        """Until no data is left. resume: with the optimizer state of the newest checkpoint, if there is one."""
        if resume:
            checkpoint.load(self.engine, self.checkpoints)
        life = self.engine.from_rank_0(f"{self.name}-{time.time_ns():x}")
        job = wait_for(self.exchange.start(self.identity, life))
        lease = self.client.lease(LeaseRequest(self.name, job)).result()
        while isinstance(lease, Lease):
            following = self.client.lease(LeaseRequest(self.name, lease.job + 1, self.exchange.step_s))
            self.train_job(lease)
            if lease.job % self.run.checkpoint.every_jobs == 0:
                self.save(lease.job)
            lease = following.result()
        wait_for(self.exchange.finish())
        self.save(lease.job - 1)
        self.client.leave()

    def train_job(self, lease: Lease) -> None:
        """The inner steps of one lease; deltas leave, and weights are adopted, when they are due."""
        begin = time.perf_counter()
        results: list[StepResult] = []
        self.exchange.begin(lease)
        for step, micro_batches in enumerate(self.loader.steps(lease.start, lease.samples), 1):
            # The rate follows the run's dispatched samples: one schedule step is one batch, whoever trains it.
            schedule_step = lease.start // self.run.samples_per_step + step - 1
            results.append(self.engine.train_step(micro_batches, schedule_step))
            due = fragments_due(len(self.layout.fragments), lease.steps, step)
            metrics = _metrics(results, time.perf_counter() - begin, self.exchange.waited_s) if due else {}
            wait_for(self.exchange.after_step(due, metrics))
        if self.engine.is_metrics_rank:
            metrics = _metrics(results, time.perf_counter() - begin, self.exchange.waited_s)
            self.report({"job": lease.job, "start": lease.start, **metrics})

    def save(self, job: int) -> None:
        keep = self.run.checkpoint.keep
        checkpoint.save(self.engine, self.checkpoints, f"job-{job:08d}", {"job": job}, keep)


def _metrics(results: Sequence[StepResult], elapsed_s: float, waited_s: float) -> dict[str, float]:
    tokens = sum(r.tokens for r in results)
    return {
        "loss": sum(r.loss for r in results) / len(results),
        "lr": results[-1].lr,
        "grad_norm": results[-1].grad_norm,
        "tokens": float(tokens),
        "tokens_per_s": tokens / elapsed_s,
        "steps": float(len(results)),
        "waited_s": waited_s,
    }
