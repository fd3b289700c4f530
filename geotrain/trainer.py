"""THE loop of one rank: lease → H inner steps → delta → weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from geotrain.config import RunConfig
from geotrain.data.loader import LeasedLoader
from geotrain.inner import checkpoint
from geotrain.inner.engine import GeoEngine, StepResult
from geotrain.outer.layout import Layout, fragments_due
from geotrain.outer.messages import Answer, Finished, Join, Lease, LeaseRequest, UpdatePart, Welcome
from geotrain.outer.server import Identity
from geotrain.outer.worker import Piece, WorkerRank


class Client(Protocol):
    """This rank's connection to the server above (`geotrain.net.client.MemberClient`). Futures have deadlines."""

    def join(self, join: Join) -> Welcome: ...
    def push(self, part: UpdatePart) -> Future[None]: ...
    def pull(self, sequence: int, fragments: tuple[int, ...]) -> Future[Answer]: ...
    def lease(self, request: LeaseRequest) -> Future[Lease | Finished]: ...
    def leave(self) -> None: ...


class Trainer:
    """One rank of a worker.

    report: called on the metrics rank after every job, with plain numbers.
    """

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
        report: Callable[[dict[str, float]], None],
    ) -> None:
        self.run, self.name, self.identity, self.layout = run, name, identity, layout
        self.engine, self.loader, self.client = engine, loader, client
        self.checkpoints, self.report = checkpoints, report
        pieces = [Piece(s.runs, s.master, s.pushes) for s in engine.shards()]
        self.worker = WorkerRank(layout, run.outer, pieces)
        self.exchange = Exchange(run, name, engine, self.worker, client, len(layout.fragments))

    def train(self, resume: bool) -> None:
        """Until no data is left. resume: with the optimizer state of the newest checkpoint, if there is one."""
        if resume:
            checkpoint.load(self.engine, self.checkpoints)
        job = self.exchange.start(self.identity)
        lease = self.client.lease(LeaseRequest(self.name, job)).result()
        while isinstance(lease, Lease):
            following = self.client.lease(LeaseRequest(self.name, lease.job + 1, self.exchange.step_s))
            self.train_job(lease)
            if lease.job % self.run.checkpoint.every_jobs == 0:
                self.save(lease.job)
            lease = following.result()
        self.exchange.finish()
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
            self.exchange.after_step(due, metrics)
        if self.engine.is_metrics_rank:
            metrics = _metrics(results, time.perf_counter() - begin, self.exchange.waited_s)
            self.report({"job": lease.job, "start": lease.start, **metrics})

    def save(self, job: int) -> None:
        keep = self.run.checkpoint.keep
        checkpoint.save(self.engine, self.checkpoints, f"job-{job:08d}", {"job": job}, keep)


@dataclass
class _Travelling:
    """Deltas under way. due_step: inner step at which their answer is to be adopted."""

    answer: Future[Answer]
    fragments: tuple[int, ...]
    due_step: int


class Exchange:
    """What of this rank's deltas is under way, and when their answers are adopted.

    All ranks of a worker call it with the same steps and fragments, and adopt at the same step.
    """

    def __init__(
        self, run: RunConfig, name: str, engine: GeoEngine, worker: WorkerRank, client: Client, fragments: int
    ) -> None:
        self.name, self.engine, self.worker, self.client = name, engine, worker, client
        self.overlap = run.outer.overlap
        self.all = tuple(range(fragments))
        self.incarnation = ""
        self.sequence = 0  # of the next update
        self.step = 0
        self.job = 0
        self.step_s = 0.0  # seconds of one inner step, exchanges not counted
        self.waited_s = 0.0  # in this job, with training at rest
        self.travelling: list[_Travelling] = []
        self.pushes: list[Future[None]] = []
        self.unsent: dict[int, set[int]] = {}  # lease → fragments whose delta does not hold all of it yet
        self.lease: Lease | None = None

    def start(self, identity: Identity) -> int:
        """Join the server and adopt its weights. Returns the number of the next job."""
        self.incarnation = self.engine.from_rank_0(f"{self.name}-{time.time_ns():x}")
        welcome = self.client.join(
            Join(
                identity.run,
                identity.config_digest,
                identity.layout_digest,
                identity.model,
                self.name,
                self.incarnation,
                self.engine.rank,
                self.engine.world_size,
                self.worker.pushes,
                self.worker.holds,
            )
        )
        self.sequence = welcome.sequence
        self._adopt(self.client.pull(0, self.all).result(), start=True)
        return welcome.job

    def begin(self, lease: Lease) -> None:
        self.lease, self.job, self.waited_s = lease, lease.job, 0.0
        self._job_begin = time.perf_counter()
        self._job_step = self.step

    def after_step(self, due: tuple[int, ...], metrics: dict[str, float]) -> None:
        """One inner step is done: adopt what is due, send the fragments whose turn it is."""
        assert self.lease is not None
        self.step += 1
        self._adopt_due()
        if self.step - self._job_step == self.lease.steps:
            spent = time.perf_counter() - self._job_begin - self.waited_s
            self.step_s = spent / self.lease.steps
            self.unsent[self.lease.lease] = set(self.all)
        if due:
            self._push(due, metrics)
            self._adopt_due()  # with τ = 0 at once

    def finish(self) -> None:
        """Send what no delta holds yet, and wait until every update is acknowledged."""
        self._adopt_all()
        left = tuple(sorted({f for fragments in self.unsent.values() for f in fragments}))
        if left:
            self._push(left, {})
            self._adopt_all()
        for push in self.pushes:
            push.result()

    def _push(self, due: tuple[int, ...], metrics: dict[str, float]) -> None:
        busy = {f for t in self.travelling for f in t.fragments} & set(due)
        if busy and self.overlap.late == "continue":
            due = tuple(f for f in due if f not in busy)  # their progress goes with the next delta
            if not due:
                return
        elif busy:
            self._adopt_all()
        deltas = tuple(self.worker.make_delta(f, self.sequence) for f in due)
        part = UpdatePart(
            self.name,
            self.incarnation,
            self.sequence,
            self.engine.rank,
            deltas,
            job=self.job,
            leases=self._leases_complete_with(due),
            metrics=metrics,
        )
        self.pushes = [push for push in self.pushes if not _succeeded(push)]
        self.pushes.append(self.client.push(part))
        answer = self.client.pull(self.sequence, due)
        self.travelling.append(_Travelling(answer, due, self.step + self.overlap.steps))
        self.sequence += 1

    def _leases_complete_with(self, due: tuple[int, ...]) -> tuple[int, ...]:
        for fragments in self.unsent.values():
            fragments.difference_update(due)
        complete = tuple(lease for lease, fragments in self.unsent.items() if not fragments)
        for lease in complete:
            del self.unsent[lease]
        return complete

    def _adopt_due(self) -> None:
        while self.travelling and self.travelling[0].due_step <= self.step:
            first = self.travelling[0]
            if self.overlap.late == "continue" and not self.engine.agree(first.answer.done()):
                return
            self._adopt_first()

    def _adopt_all(self) -> None:
        while self.travelling:
            self._adopt_first()

    def _adopt_first(self) -> None:
        begin = time.perf_counter()
        answer = self.travelling.pop(0).answer.result()
        self._adopt(answer)
        self.waited_s += time.perf_counter() - begin

    @torch.no_grad()
    def _adopt(self, answer: Answer, start: bool = False) -> None:
        for weights in answer.weights:
            self.worker.on_weights(weights, start)
        self.engine.refresh()


def _succeeded(push: Future[None]) -> bool:
    """Whether it is acknowledged; raises what it failed with."""
    return push.done() and push.result() is None


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
