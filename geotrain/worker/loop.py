"""Takes one rank through a run: ask for a lease, train its H inner steps, send the delta, adopt the answer.

GeoTrain's own trainer (`geotrain.worker.trainer`) and a loop of the user's own (`geotrain.own_loop`) both run on
`WorkerLoop`. It has two sides. The data side, `leases`, may be read ahead by a data loader; the training side,
`after_step`, goes from step to step, and does everything else when it is due.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from geotrain.common.device_state import DeviceState
from geotrain.config import RunConfig
from geotrain.inner.runtime.shards import OwnedShard
from geotrain.kernels.spans import span
from geotrain.monitor.utilization import PhaseTimer, StepNumbers, job_metrics
from geotrain.outer import exchange
from geotrain.outer.codec import NonFiniteError
from geotrain.outer.events import Acknowledged, Event, UpdateStage
from geotrain.outer.exchange import Exchange, wait_for
from geotrain.outer.messages import Answer, Finished, Identity, Lease, LeaseRequest, Validated, update_id
from geotrain.outer.worker import OwnedSlices, WorkerRank
from geotrain.parameters.parameter_map import ParameterMap, fragments_due
from geotrain.staging.cuda import staging_for
from geotrain.worker.profile import StepProfiler
from geotrain.worker.rank_watch import CHECKPOINT, EXCHANGE, VALIDATION, RankWatch
from geotrain.worker.schedule import schedule_step


class LoopClient(exchange.Client, Protocol):
    """This rank's connection to the server above (`net.transport.worker_client.WorkerClient`). Its futures have
    deadlines."""

    mirrors: Callable[[], tuple[int, ...]]  # gives the fingerprints of what the rank was last sent, for a join
    # Called with fragment and sequence of an update that begins to be sent, and of each that the server has applied.
    on_sent: Callable[[int, int], None]
    on_acknowledged: Callable[[int, int], None]
    on_profile: Callable[[int], None]  # called with inner steps that are to be recorded

    def lease(self, request: LeaseRequest) -> Future[Lease | Finished]: ...
    def global_weights(self, number: int) -> Future[Answer]: ...
    def validated(self, result: Validated) -> None: ...
    def report_nonfinite_delta(self, lease: int) -> None: ...
    def leave(self) -> None: ...


class LoopRank(exchange.Rank, Protocol):
    """One rank among the ranks of its worker: an engine, or what stands for a loop of the user's own."""

    @property
    def is_metrics_rank(self) -> bool:
        """Whether it reports for the worker."""

    @property
    def peak_memory_bytes(self) -> float:
        """The most memory that it has held at once."""

    def from_rank_0(self, text: str) -> str:
        """Give every rank the text of rank 0. A collective."""

    def mean_loss(self, loss: float) -> float:
        """Average the loss of each rank's part of the batch: the worker's loss. A collective."""


@dataclass(frozen=True)
class RunMember:
    """One rank of a worker as a member of its run, connected to the server above (`geotrain.worker.connection`).

    name: of the worker. identity: of the run, for the join. workers: that the run has. report: called on the metrics
    rank after every job, with what `geotrain.outer.metrics.JobTrained` has. trouble: called with what a person
    should know. write_event: writes an event of this rank, of the stages of its updates among others. watch_device:
    begins to watch the device of this rank, whose number it takes, and returns what gives its state at once.
    device_failed: called with a rank, its device's name, and why that is not fit to compute.
    """

    run: RunConfig
    name: str
    identity: Identity
    parameter_map: ParameterMap
    client: LoopClient
    workers: int = 1
    report: Callable[[dict[str, Any]], None] = lambda numbers: None
    trouble: Callable[[str], None] = lambda what: None
    write_event: Callable[[Event], None] = lambda event: None
    watch_device: Callable[[torch.device, int], Callable[[], DeviceState]] = lambda device, rank: DeviceState
    device_failed: Callable[[int, str, str], None] = lambda rank, device, what: None

    @property
    def checkpoints(self) -> Path:
        """The folder for this worker's own state."""
        return self.run.checkpoint_folder / self.name


class WorkerLoop:
    """One rank of a worker in the outer loop. All ranks make the same calls, which contain collectives.

    shards: the fp32 masters that this rank owns. device: where it trains. validate: called with the number of a
    validation that a lease asks for, before the lease is trained. save: called with a job's number when the worker's
    own state is to be saved. joined: called with the run's origin before anything is asked of it. report: in place of
    the member's. peak_flops_per_token_s: the worker's peak FLOP/s over the FLOPs of one token, for the utilization
    (MFU); None: not known. expect: called with the lease after this one
    once it is known, in another thread, for data that take long. adopt_last: whether the masters end as the run's
    newest weights, and not as this worker trained them. lost: called, in another thread, when a rank of the worker
    hangs; None: the loop is the user's. ends: called after a job, where it is set: whether the worker ends now, to be
    started again though it has work; rank 0 decides.
    """

    def __init__(
        self, member: RunMember, rank: LoopRank, shards: Iterable[OwnedShard], device: torch.device, *,
        validate: Callable[[int], None] = lambda number: None, save: Callable[[int], None] = lambda job: None,
        joined: Callable[[str], None] = lambda origin: None, report: Callable[[dict[str, Any]], None] | None = None,
        expect: Callable[[Lease], None] = lambda lease: None, peak_flops_per_token_s: float | None = None,
        adopt_last: bool = False, lost: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.member, self.rank = member, rank
        self.ends: Callable[[], bool] | None = None
        self.run, self.name, self.client = member.run, member.name, member.client
        self.validate, self.save, self.report, self.expect = validate, save, report or member.report, expect
        self.joined = joined
        self.peak_flops_per_token_s, self._adopt_last = peak_flops_per_token_s, adopt_last
        clock = time.perf_counter
        self.laps = PhaseTimer(clock, "compute", "communication", "waiting", "checkpoint")
        chunks = [OwnedSlices(s.runs, s.master, s.pushes) for s in shards]
        run, client, parameter_map = member.run, member.client, member.parameter_map
        staging = staging_for(run.outer.state_device, device, [chunk.master for chunk in chunks])
        self.weights = WorkerRank(parameter_map, run.outer, chunks, staging)
        client.mirrors = self.weights.mirrors
        self._profiler = StepProfiler(
            run.run_folder / "profiles", member.name, rank.rank, member.write_event, member.trouble
        )
        client.on_profile = self._profiler.ask
        watched = member.watch_device(device, rank.rank)
        self.watch = RankWatch(device, member.trouble, lost, run.monitor.hang_s, state=watched)
        numbers, groups = parameter_map.chunk_numbers, parameter_map.groups
        self.exchange = Exchange(member.name, run.outer, rank, self.weights, client, numbers, groups, clock)
        self.finished = False  # whether all was trained and sent, and the worker has left
        self.lease: Lease | None = None  # in training
        self.step = 0  # inner steps of it that are trained
        self._share = 1.0  # of a whole batch that the last job's steps had
        self._results: list[StepNumbers] = []  # of its steps
        self._unread: deque[Lease] = deque()  # that the data side has not given out
        self._untrained: deque[Lease] = deque()  # that the training side has not begun
        self._following: Future[Lease | Finished] | None = None  # the lease after these; None: there was no data

    def start(self, lacks: str = "", faults: Sequence[str] = ()) -> None:
        """Join, adopt the server's weights, begin the first lease. Every rank must call it, before `leases`.

        lacks: why the worker begins without its saved state; "": it has it, or saves none. faults: sentences about
        what was passed over there. Both are reported, the first if the worker has trained before.
        """
        # Names this incarnation of the worker, by the time as earlier ones had another; all ranks must say the same.
        incarnation = self.rank.from_rank_0(f"{self.name}-{time.time_ns():x}")
        self.watch.start()
        write = self.member.write_event
        # By every rank: only the one whose part came last gets the acknowledgement that the update is applied.
        self.client.on_acknowledged = lambda *update: write(Acknowledged(self.name, incarnation, *update))
        if self.rank.is_metrics_rank:
            self.client.on_sent = lambda *update: write(UpdateStage(update_id(self.name, *update), "sent"))
            self.exchange.report = write
        job = wait_for(self.exchange.start(self.member.identity, incarnation))
        self.joined(self.exchange.origin)
        self.laps.restart()
        self._ask(job)
        self._last_job = job - 1  # by this worker's earlier incarnations
        begins = f"has trained {job - 1} jobs before, and begins without its saved state: {lacks}"
        for fault in (*faults, *[begins] * bool(lacks and job > 1)) if self.rank.is_metrics_rank else ():
            self.member.trouble(fault)
        self._begin_or_finish()

    def leases(self) -> Iterator[Lease]:
        """Yield the leases of the worker's jobs, in the order in which they are to be trained, until none is left."""
        while self._unread or self._fetch():
            yield self._unread.popleft()

    def after_step(self, result: StepNumbers) -> None:
        """Send deltas and adopt answers that are due after an inner step. After a lease's last step the next lease
        begins; after the last of all, everything is sent and the worker leaves."""
        if self.lease is None:
            raise RuntimeError("no lease is in training: its steps are over, or the loop was not started")
        self.watch.after_step()
        self._after_step(self.lease, result)
        self._profiler.after_step(None if self.lease is None else (self.lease.job, self.step))

    def _after_step(self, lease: Lease, result: StepNumbers) -> None:
        self.laps.lap("compute")
        self._results.append(result)
        self.step += 1
        due = fragments_due(self.member.parameter_map.groups, lease.steps, self.step)
        if (after := self._following) is not None and due:
            known = after.done() and not after.cancelled() and after.exception() is None
            self.exchange.ends = not self._untrained and known and isinstance(after.result(), Finished)
        self._wait_for(self.exchange.after_step(due, self._metrics() if due else {}))
        self.laps.lap("communication")
        if self.step < lease.steps:
            return
        self._share = lease.samples / lease.steps / self.run.samples_per_step
        self.watch.after_job()
        metrics = self._metrics()
        if self.rank.is_metrics_rank:
            self.report({"job": lease.job, "start": lease.start, **metrics})
        self.laps.restart()
        if self.ends is not None and self.rank.from_rank_0("ends" * self.ends()):
            self.lease, self._following = None, None
            self._unread.clear()
            self._wait_for(self.exchange.finish())
            self._leave(for_good=False)
            return
        if lease.job % self.run.checkpoint.every_jobs == 0:
            with self.watch.doing(CHECKPOINT):
                self.save(lease.job)
            self.laps.lap("checkpoint")
        self._begin_or_finish()

    @property
    def step_samples(self) -> int:
        """Samples of the step that is trained now, or of a whole batch."""
        batches = self.run.batches
        if self.lease is None:
            return batches.batch
        begin = batches.after(self.lease.start, self.step)
        return batches.after(begin) - begin

    @property
    def schedule_step(self) -> float:
        """The run's step that is trained now, counted from 0, for the learning-rate schedule: it follows the run's
        progress and not this worker's, so a worker that joins late begins at the rate of the others."""
        if self.lease is None:
            return self.run.total_steps
        return schedule_step(self.run, self.member.workers, self.lease, self.step)

    def _fetch(self) -> bool:
        """Wait for the next lease, and ask for the one after it; False when there is no data for this worker now.

        It asks one job ahead, so that no job begins with waiting for a round trip (through the region to the global
        server). The speed that it reports is that of the job before.
        """
        if self._following is None:
            return False
        with span("lease"), self.watch.elsewhere():
            lease = self._following.result()
        if isinstance(lease, Finished):
            self._following = None
            return False
        self._unread.append(lease)
        self._untrained.append(lease)
        self._ask(lease.job + 1)
        self._following.add_done_callback(self._expect)
        return True

    def _ask(self, job: int) -> None:
        self._asked = job
        step_s = self.exchange.step_s / self._share  # of a whole batch, as later ones will be
        self._following = self.client.lease(LeaseRequest(self.name, job, step_s))

    def _expect(self, answered: Future[Lease | Finished]) -> None:
        if not answered.cancelled() and answered.exception() is None:
            lease = answered.result()
            if isinstance(lease, Lease):
                self.expect(lease)

    def _begin_or_finish(self) -> None:
        if not self._untrained and not self._fetch():
            # Nothing more is expected of a worker that has left, so all it has must be sent before. And others may
            # die: what they held is for those who are still here, so it waits until all is committed.
            self.lease = None
            self._wait_for(self.exchange.finish())
            self._ask(self._asked + 1)
            if not self._fetch():
                self._leave()
                return
        self.lease, self.step, self._results = self._untrained.popleft(), 0, []
        self._last_job, self._begun = self.lease.job, self.lease.lease
        if self.lease.validate:
            with self.watch.doing(VALIDATION):
                self.validate(self.lease.validate)
        self._begin_s = time.perf_counter()
        self.exchange.begin(self.lease)

    def leave(self) -> None:
        """Leave a run that goes on, in good order: what is under way is sent, and others get what is not trained of
        the lease. Every rank must call it."""
        self._wait_for(self.exchange.finish())
        self._leave()

    def _leave(self, for_good: bool = True) -> None:
        if self._adopt_last:
            self._wait_for(self.exchange.adopt_newest())
        with self.watch.doing(CHECKPOINT):
            self.save(self._last_job)
        self.watch.stop()
        self.finished = for_good  # else its next incarnation has the leases that this one has not trained
        if for_good:
            self.client.leave()

    def _wait_for(self, waiting: exchange.Waiting[None]) -> None:
        """Run a part of the exchange. A delta that is not finite ends this worker, and is reported to the server: the
        data may be to blame, and would end one worker after another."""
        try:
            with self.watch.doing(EXCHANGE):
                wait_for(waiting, self.watch.elsewhere)
        except NonFiniteError:
            self.client.report_nonfinite_delta(self._begun)
            raise

    def weights_to_evaluate(self, number: int) -> Answer | None:
        """Fetch the global weights that validation `number` is to evaluate; None, on all ranks, if it is left out. A
        collective."""
        with self.watch.elsewhere():
            answer = self.client.global_weights(number).result()
        versions = [w.version for w in answer.weights]
        words = f"{answer.incarnation} {versions}"
        same = self.rank.from_rank_0(words) == words
        # Evaluation is a collective: all ranks take part or none. None do if the server was restarted between their
        # requests and gave them different weights, or has no global weights; then this validation is left out.
        return answer if self.rank.agree(same and bool(versions)) else None

    def validated(self, number: int, answer: Answer, loss: float, seconds: float) -> None:
        """Send the result of a validation to the server. loss: nats a token. seconds: that it took."""
        if self.rank.is_metrics_rank:
            version = max(w.version for w in answer.weights)
            self.client.validated(Validated(self.name, number, version, loss, seconds))

    def _metrics(self) -> dict[str, float]:
        """Compute the metrics of the job so far. A collective. Where ACCO's last step is still under way, this waits
        for it: so it is called only where a delta leaves, and at the end of a job."""
        seconds = time.perf_counter() - self._begin_s
        numbers = job_metrics(self._results, self.laps, seconds, self.peak_flops_per_token_s)
        mine = {"waited_s": self.exchange.waited_s, "memory_bytes": self.rank.peak_memory_bytes}
        return {**numbers, **mine, **self.watch.numbers(), "loss": self.rank.mean_loss(numbers["loss"])}
