"""The schedule of one worker's rank: when its deltas leave, and when their answers are adopted.

A method that may have to wait is a generator: it yields the future that it waits for, and is sent the future's
result. The trainer blocks on real futures (`wait_for`), the simulator waits for events of its virtual clock, so the
same code schedules both.

All ranks of a worker must adopt the same answers at the same inner step, since they hold parts and copies of one
model. Much here serves this rule: wherever ranks could see different things, they agree first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from geotrain.config import OuterConfig
from geotrain.kernels.spans import span
from geotrain.outer.codec import rounding_seed
from geotrain.outer.events import Event, LeaseBegun, UpdateEncoded, UpdateStage
from geotrain.outer.messages import (
    Answer,
    ChunkDelta,
    ChunkWeights,
    Identity,
    Join,
    Lease,
    UpdatePart,
    Welcome,
    update_id,
)
from geotrain.staging.interface import Pending

T = TypeVar("T")
Waiting = Generator[Pending[Any], Any, T]


class Client(Protocol):
    """A rank's connection to the server above. Every future that it returns has a deadline."""

    def join(self, join: Join) -> Welcome: ...
    def push(self, part: UpdatePart) -> Pending[None]: ...
    def pull(self, fragment: int, sequence: int) -> Pending[Answer]: ...


class Weights(Protocol):
    """A rank's weights: makes deltas and adopts answers (`geotrain.outer.worker.WorkerRank` says how)."""

    @property
    def pushes(self) -> tuple[tuple[Any, ...], ...]: ...
    @property
    def holds(self) -> tuple[tuple[Any, ...], ...]: ...
    def parameters(self, fragments: tuple[int, ...]) -> Collection[str]: ...
    def make_delta(self, chunk: int, seed: int) -> Pending[ChunkDelta]: ...
    def when_made(self, call: Callable[[], Pending[T]]) -> Pending[T]: ...
    def on_weights(self, weights: ChunkWeights, start: bool = False) -> None: ...


class Rank(Protocol):
    """One rank among the ranks of its worker. The three methods are collective: all ranks call them in the same
    order."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def agree(self, flag: bool) -> bool:
        """Whether the flag is true on every rank."""

    def settle(self) -> None:
        """Wait until the master weights contain every optimizer step (with ACCO the last one may still travel)."""

    def refresh(self, changed: Collection[str]) -> None:
        """Copy the master weights to the weights that training computes with, on all ranks. changed: the parameters
        whose masters were overwritten on some rank; no others need travel."""


def wait_for(waiting: Waiting[T], blocked: Callable[[], AbstractContextManager[None]] = nullcontext) -> T:
    """Run the generator to its end, blocking on each future that it yields, in the context that `blocked` gives.
    Raises what a future failed with."""
    try:
        pending = next(waiting)
        while True:
            with blocked():
                result = pending.result()
            pending = waiting.send(result)
    except StopIteration as end:
        return end.value


def _report_nowhere(event: Event) -> None:
    """Drop the event. A function with a name: studies keep exchanges in pickles."""


@dataclass
class _InFlight:
    """Updates that left together, and whose answers are not adopted yet.

    pushes: each done when its update is acknowledged. They also fail where a delta could not be made; then nothing
    was sent, and no answer will ever come. due_step: the inner step at which the answers are to be adopted.
    """

    pushes: list[Pending[None]]
    answers: list[Pending[Answer]]
    fragments: tuple[int, ...]
    due_step: int


class Exchange:
    """One rank's exchange with the server above. All ranks of a worker call it with the same steps and fragments.

    name: of the worker. chunks, groups: the chunks of each fragment, and its group, whose fragments leave together.
    clock: a monotonic clock, in seconds; it is handed in because the simulator has a virtual one.
    """

    def __init__(
        self, name: str, outer: OuterConfig, rank: Rank, weights: Weights, client: Client,
        chunks: Sequence[Sequence[int]], groups: Sequence[int], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.name, self.overlap, self.clock = name, outer.overlap, clock
        self.in_rounds = outer.rule.synchronous  # the servers wait for every worker's delta: none may be left out
        self.rank, self.weights, self.client = rank, weights, client
        self.chunks, self.groups, self.all = chunks, groups, tuple(range(len(chunks)))
        self.report: Callable[[Event], None] = _report_nowhere  # takes what happens to leases and updates
        self.incarnation = self.origin = ""  # of the worker; of the run, see `Welcome`
        self.server_incarnations = [""] * len(chunks)  # of the server that gave the last weights of each fragment
        self.sequences = [1] * len(chunks)  # of the next update of each fragment
        self.step = 0  # inner steps in this incarnation of the worker
        self.step_s = 0.0  # seconds of one inner step, exchanges not counted
        self.waited_s = 0.0  # seconds of this job in which training stood still for an answer
        self.in_flight: list[_InFlight] = []
        # Trained lease → fragments of which no delta has left since its last step. When fragments are sent in turn,
        # the deltas that complete a lease leave during the next job.
        self.unsent: dict[int, set[int]] = {}
        self.lease: Lease | None = None  # in training now
        self.next_job = 1
        self.ends = False  # whether no data is left after the lease in training

    def start(self, identity: Identity, incarnation: str) -> Waiting[int]:
        """Join the server and adopt its weights. Returns the number of the next job.

        identity: of the run, as this worker's configuration has it. incarnation: names this incarnation of the
        worker; the same on all its ranks, new in every incarnation.
        """
        self.incarnation = incarnation
        i, rank, w = identity, self.rank, self.weights
        names = i.run, i.config_digest, i.parameter_map_digest, i.model, self.name, incarnation
        join = Join(*names, part=rank.rank, parts=rank.world_size, pushes=w.pushes, holds=w.holds, data=i.data)
        welcome = self.client.join(join)
        self.sequences, self.next_job, self.origin = list(welcome.sequences), welcome.job, welcome.origin
        self.server_incarnations = list(welcome.incarnations)
        yield from self.adopt_newest()
        return welcome.job

    def adopt_newest(self) -> Waiting[None]:
        """Adopt the server's weights as they are now, in place of this worker's."""
        yield from self._adopt([self.client.pull(fragment, 0) for fragment in self.all], start=True)

    def begin(self, lease: Lease) -> None:
        """Begin a job: the inner steps that follow train this lease."""
        self.lease, self.waited_s, self.next_job, self.ends = lease, 0.0, lease.job + 1, False
        self._job_begin, self._job_step = self.clock(), self.step
        self.report(LeaseBegun(self.name, lease.job, lease.lease, lease.start, lease.samples))

    def steps_at_rest(self, period: int) -> int:
        """Count the inner steps, at most `period`, a caller that takes several at once (the simulator) may take
        before it must call `after_step` for an answer that training waits for. With `late = "continue"` it waits for
        none."""
        if self.overlap.late == "continue" or not self.in_flight:
            return period
        return max(1, min(period, self.in_flight[0].due_step - self.step))

    def after_step(self, due: tuple[int, ...], metrics: dict[str, float], steps: int = 1) -> Waiting[None]:
        """An inner step is done: adopt the answers that are due, then send the fragments that are.

        due: fragments to send after this step; they may be sent later or with the next delta (`overlap.late`).
        metrics: for people, sent with the update. steps: inner steps since the last call; fragments may be due after
        the last of them only.
        """
        assert self.lease is not None
        # A push that failed ends the run here, and not after the deadline of an answer that will never come.
        for sent in self.in_flight:
            for push in sent.pushes:
                if push.done():
                    push.result()
        self.step += steps
        yield from self._adopt_answers()
        if self.step - self._job_step == self.lease.steps:
            # Without the waits: the speed goes with the next lease request, and is to be the machine's own.
            self.step_s = (self.clock() - self._job_begin - self.waited_s) / self.lease.steps
            # Before the push: the delta with the lease's last step is to name it.
            self.unsent[self.lease.lease] = set(self.all)
        if due:
            yield from self._push(due, metrics, self.lease.job)
            yield from self._adopt_answers()  # without overlap (τ = 0) the answer is due at once

    def finish(self) -> Waiting[None]:
        """Send the progress that no delta contains yet, and wait for every answer.

        In synchronous rounds this is a round too, in which all workers must send the same fragments: all but those
        that leave after a job's last step, whether or not there is progress in them.
        """
        # First, as nothing trains any more: answers are needed at once (`_need_s`).
        self.lease = None
        yield from self._adopt_answers(wait=True)
        unsent = {f for fragments in self.unsent.values() for f in fragments}
        if self.in_rounds:
            unsent = {f for f in self.all if self.groups[f] != self.groups[-1]}
        if left := tuple(sorted(unsent)):
            yield from self._push(left, {}, self.next_job)
            yield from self._adopt_answers(wait=True)

    def _push(self, due: tuple[int, ...], metrics: dict[str, float], job: int) -> Waiting[None]:
        busy = {f for sent in self.in_flight for f in sent.fragments} & set(due)
        if busy and self.overlap.late == "continue" and not self.in_rounds:
            due = tuple(f for f in due if f not in busy)  # the progress of the others goes with their next delta
            if not due:
                return
        elif busy:
            # A fragment has one update in flight: the next delta is counted from the answer to the last.
            yield from self._adopt_answers(wait=True)
        self.rank.settle()  # the delta must contain every step
        # Before this update is in flight: answers to all but those on their way are adopted.
        adopted = tuple(n - 1 - any(f in s.fragments for s in self.in_flight) for f, n in enumerate(self.sequences))
        self.in_flight.append(sent := _InFlight([], [], due, self.step + self.overlap.steps))
        for fragment in due:
            # For people: the last one brings the metrics of all.
            sent.pushes.append(self._send(fragment, job, adopted, metrics if fragment == due[-1] else {}))
            sent.answers.append(self.client.pull(fragment, self.sequences[fragment]))
            self.sequences[fragment] += 1

    def _send(self, fragment: int, job: int, adopted: tuple[int, ...], metrics: dict[str, float]) -> Pending[None]:
        sequence = self.sequences[fragment]
        stream = self.name, self.rank.rank, sequence
        with span("encode"):
            deltas = [self.weights.make_delta(c, rounding_seed(*stream, c)) for c in self.chunks[fragment]]
        contains = tuple(lease for lease, fragments in self.unsent.items() if fragment in fragments)
        self.unsent = {lease: left for lease, fragments in self.unsent.items() if (left := fragments - {fragment})}

        # Taken here and not in `push`, which runs when the next update may have its number already.
        header = self.name, self.incarnation, fragment, sequence, self.rank.rank
        needed_s = self.clock() + self._need_s()

        def push() -> Pending[None]:
            made = tuple(delta.result() for delta in deltas)
            need_s = max(0.0, needed_s - self.clock())
            part = UpdatePart(*header, made, job, contains=contains, metrics=metrics, need_s=need_s, adopted=adopted)
            size, update = sum(len(delta.payload) for delta in made), update_id(self.name, fragment, sequence)
            self.report(UpdateEncoded(update, job, list(contains), size))
            with span("send"):
                return self.client.push(part)

        # On a GPU the deltas are still being copied to the host: `push` runs when they are there, training goes on.
        return self.weights.when_made(push)

    def _need_s(self) -> float:
        """Return the seconds after which the answer to a delta that leaves now has to be here: a step before it is
        adopted; 0: at once, as training ends."""
        if self.lease is None:
            return 0.0
        trained = self.step - self._job_step
        steps = min(self.overlap.steps, self.lease.steps - trained) if self.ends else self.overlap.steps
        so_far_s = (self.clock() - self._job_begin - self.waited_s) / max(1, trained)
        return max(0, steps - 1) * (self.step_s or so_far_s)

    def _adopt_answers(self, wait: bool = False) -> Waiting[None]:
        """Adopt the answers that are due, oldest first. wait: adopt all of them, waiting for each.

        With `late = "continue"` an answer that is due but has not come is left for a later step.
        """
        while self.in_flight and (wait or self.in_flight[0].due_step <= self.step):
            first = self.in_flight[0]
            # An answer may have reached some ranks only. It is adopted by all or by none, or copies of one parameter
            # would differ.
            here = all(answer.done() for answer in first.answers)
            if not wait and self.overlap.late == "continue" and not self.rank.agree(here):
                return
            begin = self.clock()
            self.in_flight.pop(0)
            # Before the answers: if one failed there will be none, and this raises why.
            for push in first.pushes:  # noqa: UP028 (a list takes no results)
                yield push
            yield from self._adopt(first.answers)
            self.waited_s += self.clock() - begin

    def _adopt(self, pulled: Sequence[Pending[Answer]], start: bool = False) -> Waiting[None]:
        """Adopt answers once all ranks have each from the same incarnation of the server; until then pull it again.

        If the server restarts between the pulls of two ranks, it freezes the answer anew, perhaps with newer weights,
        and ranks that hold copies of one parameter would differ.

        A rank only knows its own answers, so it compares each with the one before. The ranks pull in rounds, since
        `agree` waits for all of them. If every rank saw the same incarnation in two successive rounds, all saw the
        same one: the incarnation that was there when the first round ended and the second began.
        """
        answers = []
        for pending in pulled:
            answer = yield pending
            while not self.rank.agree(answer.incarnation == self.server_incarnations[answer.fragment]):
                self.server_incarnations[answer.fragment] = answer.incarnation
                answer = yield self.client.pull(answer.fragment, answer.sequence)
            answers.append(answer)
        # A step that still travels would overwrite what is adopted.
        self.rank.settle()
        with span("adopt"):
            for answer in answers:
                for weights in answer.weights:
                    self.weights.on_weights(weights, start)
            self.rank.refresh(self.weights.parameters(tuple(answer.fragment for answer in answers)))
        for answer in answers:
            if answer.sequence:  # 0 is no update, but a join
                self.report(UpdateStage(update_id(self.name, answer.fragment, answer.sequence), "adopted"))
