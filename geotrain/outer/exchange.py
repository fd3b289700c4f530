"""What of a rank's deltas is under way, and when their answers are adopted: the schedule of one worker's rank.

Whatever may take time is a generator that yields what it waits for (a future) and is sent its result. The trainer
waits for real futures (`wait_for`), the simulator for events of its virtual clock: the same schedule runs in both.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from geotrain.config import OuterConfig
from geotrain.outer.codec import rounding_seed
from geotrain.outer.messages import Answer, FragmentDelta, FragmentWeights, Join, Lease, UpdatePart, Welcome
from geotrain.outer.server import Identity
from geotrain.outer.staging import Pending

T = TypeVar("T")
Waiting = Generator["Pending[Any]", Any, T]


class Client(Protocol):
    """A rank's connection to the server above. What it returns has deadlines."""

    def join(self, join: Join) -> Welcome: ...
    def push(self, part: UpdatePart) -> Pending[None]: ...
    def pull(self, sequence: int, fragments: tuple[int, ...]) -> Pending[Answer]: ...


class Weights(Protocol):
    """Makes deltas and adopts weights (`geotrain.outer.worker.WorkerRank`)."""

    @property
    def pushes(self) -> tuple[tuple[Any, ...], ...]: ...
    @property
    def holds(self) -> tuple[tuple[Any, ...], ...]: ...
    def make_delta(self, fragment: int, seed: int) -> Pending[FragmentDelta]: ...
    def when_made(self, call: Callable[[], Pending[T]]) -> Pending[T]: ...
    def on_weights(self, weights: FragmentWeights, start: bool = False) -> None: ...


class Rank(Protocol):
    """The rank among the ranks of its worker."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def agree(self, flag: bool) -> bool: ...
    def settle(self) -> None: ...
    def refresh(self) -> None: ...


def wait_for(waiting: Waiting[T]) -> T:
    """Run to the end, blocking on each future. Raises what a future failed with."""
    try:
        pending = next(waiting)
        while True:
            pending = waiting.send(pending.result())
    except StopIteration as end:
        return end.value


@dataclass
class _Travelling:
    """Deltas under way. push: fails also where a delta could not be made; then no answer comes. due_step: inner step
    at which the answer is to be adopted."""

    push: Pending[None]
    answer: Pending[Answer]
    fragments: tuple[int, ...]
    due_step: int


class Exchange:
    """All ranks of a worker call it with the same steps and fragments, and adopt at the same step.

    clock: seconds, as good for differences as `time.perf_counter`.
    """

    def __init__(
        self,
        name: str,
        outer: OuterConfig,
        rank: Rank,
        weights: Weights,
        client: Client,
        fragments: int,
        clock: Callable[[], float],
    ) -> None:
        self.name, self.overlap, self.clock = name, outer.overlap, clock
        self.in_rounds = outer.rule == "sync"  # servers wait for a delta of every worker: none may be left out
        self.rank, self.weights, self.client = rank, weights, client
        self.all = tuple(range(fragments))
        self.incarnation = ""
        self.server_life = ""  # of the server that gave the last weights
        self.sequence = 0  # of the next update
        self.step = 0
        self.job = 0
        self.step_s = 0.0  # seconds of one inner step, exchanges not counted
        self.waited_s = 0.0  # in this job, with training at rest
        self.travelling: list[_Travelling] = []
        self.unsent: dict[int, set[int]] = {}  # lease → fragments whose delta does not hold all of it yet
        self.lease: Lease | None = None

    def start(self, identity: Identity, incarnation: str) -> Waiting[int]:
        """Join the server and adopt its weights. Returns the number of the next job.

        incarnation: names this life of the worker; the same on all its ranks, new in every life.
        """
        self.incarnation = incarnation
        welcome = self.client.join(
            Join(
                identity.run,
                identity.config_digest,
                identity.layout_digest,
                identity.model,
                self.name,
                self.incarnation,
                self.rank.rank,
                self.rank.world_size,
                self.weights.pushes,
                self.weights.holds,
                data=identity.data,
            )
        )
        self.sequence, self.server_life = welcome.sequence, welcome.life
        answer = yield from self._of_one_life((yield self.client.pull(0, self.all)), self.all)
        self._adopt(answer, start=True)
        return welcome.job

    def begin(self, lease: Lease) -> None:
        self.lease, self.job, self.waited_s = lease, lease.job, 0.0
        self._job_begin = self.clock()
        self._job_step = self.step

    def steps_at_rest(self, period: int) -> int:
        """How many inner steps may pass from here before `after_step` must be called for an answer that training
        waits for; `period` when there is none."""
        if self.overlap.late == "continue" or not self.travelling:
            return period
        return max(1, min(period, self.travelling[0].due_step - self.step))

    def after_step(self, due: tuple[int, ...], metrics: dict[str, float], steps: int = 1) -> Waiting[None]:
        """An inner step is done: adopt what is due, send the fragments whose turn it is.

        steps: inner steps since the last call; none but the last may have had fragments due.
        """
        assert self.lease is not None
        for travelling in self.travelling:
            if travelling.push.done():
                travelling.push.result()  # raises what it failed with, though nobody waits for the answer yet
        self.step += steps
        yield from self._adopt_due()
        if self.step - self._job_step == self.lease.steps:
            spent = self.clock() - self._job_begin - self.waited_s
            self.step_s = spent / self.lease.steps
            self.unsent[self.lease.lease] = set(self.all)
        if due:
            yield from self._push(due, metrics)
            yield from self._adopt_due()  # with τ = 0 at once

    def finish(self) -> Waiting[None]:
        """Send what no delta holds yet, and wait until every update is acknowledged."""
        yield from self._adopt_all()
        left = tuple(sorted({f for fragments in self.unsent.values() for f in fragments}))
        if left:
            yield from self._push(left, {})
            yield from self._adopt_all()

    def _push(self, due: tuple[int, ...], metrics: dict[str, float]) -> Waiting[None]:
        busy = {f for t in self.travelling for f in t.fragments} & set(due)
        if busy and self.overlap.late == "continue" and not self.in_rounds:
            due = tuple(f for f in due if f not in busy)  # their progress goes with the next delta
            if not due:
                return
        elif busy:
            yield from self._adopt_all()
        self.rank.settle()  # the masters must hold every step
        stream = (self.name, self.rank.rank, self.sequence)
        deltas = tuple(self.weights.make_delta(f, rounding_seed(*stream, f)) for f in due)
        leases = self._leases_complete_with(due)
        header = (self.name, self.incarnation, self.sequence, self.rank.rank)

        def push() -> Pending[None]:
            made = tuple(delta.result() for delta in deltas)
            return self.client.push(UpdatePart(*header, made, job=job, leases=leases, metrics=metrics))

        job = self.job
        pushed = self.weights.when_made(push)
        answer = self.client.pull(self.sequence, due)
        self.travelling.append(_Travelling(pushed, answer, due, self.step + self.overlap.steps))
        self.sequence += 1

    def _leases_complete_with(self, due: tuple[int, ...]) -> tuple[int, ...]:
        for fragments in self.unsent.values():
            fragments.difference_update(due)
        complete = tuple(lease for lease, fragments in self.unsent.items() if not fragments)
        for lease in complete:
            del self.unsent[lease]
        return complete

    def _adopt_due(self) -> Waiting[None]:
        while self.travelling and self.travelling[0].due_step <= self.step:
            first = self.travelling[0]
            if self.overlap.late == "continue" and not self.rank.agree(first.answer.done()):
                return
            yield from self._adopt_first()

    def _adopt_all(self) -> Waiting[None]:
        while self.travelling:
            yield from self._adopt_first()

    def _adopt_first(self) -> Waiting[None]:
        begin = self.clock()
        first = self.travelling.pop(0)
        yield first.push  # before the answer, which never comes to what was not sent
        answer = yield from self._of_one_life((yield first.answer), first.fragments)
        self._adopt(answer)
        self.waited_s += self.clock() - begin

    def _of_one_life(self, answer: Answer, fragments: tuple[int, ...]) -> Waiting[Answer]:
        """The answer, pulled again until all ranks have it from the same life of the server. Without this, ranks that
        hold copies of one parameter could adopt different weights when the server restarts between their pulls.

        Each rank compares with the life it saw before; since a round of pulls begins after every rank has ended the
        one before, two equal rounds on every rank are the same life on all."""
        while not self.rank.agree(answer.life == self.server_life):
            self.server_life = answer.life
            answer = yield self.client.pull(answer.sequence, fragments)
        return answer

    def _adopt(self, answer: Answer, start: bool = False) -> None:
        self.rank.settle()
        for weights in answer.weights:
            self.weights.on_weights(weights, start)
        self.rank.refresh()
