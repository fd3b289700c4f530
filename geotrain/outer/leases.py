"""The ledger of training data: which samples were handed out, to whom, and which are trained for good.

Pure: no clock, no disk. Samples are numbered 0 … train_samples − 1 over the run; the data loader turns a number
into text. A lease is *committed* when the update that contains it was applied by the global server; until then it
may return to the pool and be trained by another worker.
"""

from __future__ import annotations

from math import ceil, inf
from typing import Any

from geotrain.outer.messages import Finished, Lease, LeaseRequest, Refused


class LeaseBook:
    """Leases of one run.

    train_samples: how many the run has, a multiple of samples_per_step (one inner step of any worker).
    local_steps: H. scale_local_steps: H_i = max(1, ceil(H · speed_i)), the speed relative to the fastest worker
    known (DyLU, arXiv 2401.09135). rounds: for synchronous rules, the workers' names: job j of worker i then gets
    a place that depends on i and j only, so that a run is the same whoever asks first.
    """

    def __init__(
        self,
        train_samples: int,
        samples_per_step: int,
        local_steps: int,
        scale_local_steps: bool = False,
        rounds: tuple[str, ...] | None = None,
    ) -> None:
        if train_samples % samples_per_step:
            raise ValueError(
                f"train_samples = {train_samples} is not a multiple of a step's {samples_per_step} samples"
            )
        self.train_samples = train_samples
        self.samples_per_step = samples_per_step
        self.local_steps = local_steps
        self.scale_local_steps = scale_local_steps
        self.rounds = tuple(sorted(rounds)) if rounds else None
        self.next_lease = 1
        self.next_start = 0
        self.pool: list[tuple[int, int]] = []  # (start, samples) that came back, sorted
        self.open: dict[int, Lease] = {}
        self.committed_samples = 0
        self.dismissed: dict[str, int] = {}  # worker → job for which it was told that it is finished
        self.step_s: dict[str, float] = {}

    @property
    def finished(self) -> bool:
        """Nothing left to hand out, nothing out."""
        return not self.open and not self._left()

    def grant(self, request: LeaseRequest) -> Lease | Finished:
        """The lease for this worker's job; the same one again when asked again.

        Finished does not wait for leases that are out with others: should one come back, its worker's next life
        asks for it.
        """
        for lease in self.open.values():
            if (lease.worker, lease.job) == (request.worker, request.job):
                return lease
        if request.job == self.dismissed.get(request.worker):  # the same to all its ranks
            return Finished(request.worker, request.job)
        if 0 < request.step_s < inf:
            self.step_s[request.worker] = request.step_s
        steps = self._steps(request.worker)
        if self.rounds is not None:
            return self._grant_round(request, steps)
        if not self._left():
            return self._dismiss(request)
        return self._open(request, *self._take(steps * self.samples_per_step))

    def commit(self, leases: tuple[int, ...]) -> int:
        """These leases are trained for good. Returns the samples committed; unknown or committed ones count 0."""
        samples = 0
        for number in leases:
            lease = self.open.pop(number, None)
            if lease:
                samples += lease.samples
        self.committed_samples += samples
        return samples

    def release(self, leases: tuple[int, ...]) -> None:
        """These leases return to the pool; unknown or committed ones are passed over."""
        for number in leases:
            lease = self.open.pop(number, None)
            if lease is None:
                continue
            self.dismissed.pop(lease.worker, None)
            if self.rounds is None:
                self.pool.append((lease.start, lease.samples))
        self.pool.sort()

    def held_by(self, workers: set[str]) -> tuple[int, ...]:
        return tuple(n for n, lease in self.open.items() if lease.worker in workers)

    def state(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "next_lease": self.next_lease,
            "next_start": self.next_start,
            "pool": [list(r) for r in self.pool],
            "open": [[n, v.worker, v.job, v.start, v.samples, v.steps] for n, v in self.open.items()],
            "committed_samples": self.committed_samples,
            "dismissed": self.dismissed,
            "step_s": self.step_s,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.next_lease, self.next_start = state["next_lease"], state["next_start"]
        self.pool = [(start, samples) for start, samples in state["pool"]]
        self.open = {n: Lease(worker, job, n, *place) for n, worker, job, *place in state["open"]}
        self.committed_samples = state["committed_samples"]
        self.dismissed = dict(state["dismissed"])
        self.step_s = dict(state["step_s"])

    def _steps(self, worker: str) -> int:
        if not self.scale_local_steps or worker not in self.step_s:
            return self.local_steps
        speed = min(self.step_s.values()) / self.step_s[worker]
        return max(1, ceil(self.local_steps * speed))

    def _left(self) -> bool:
        return bool(self.pool) or self.next_start < self.train_samples

    def _take(self, samples: int) -> tuple[int, int]:
        if self.pool:
            start, size = self.pool.pop(0)
            if size > samples:
                self.pool.insert(0, (start + samples, size - samples))
            return start, min(size, samples)
        start = self.next_start
        self.next_start = min(start + samples, self.train_samples)
        return start, self.next_start - start

    def _grant_round(self, request: LeaseRequest, steps: int) -> Lease | Finished:
        assert self.rounds is not None
        if request.worker not in self.rounds:
            raise Refused(f"worker {request.worker!r} is not one of this synchronous run's: {', '.join(self.rounds)}")
        samples = steps * self.samples_per_step
        place = (request.job - 1) * len(self.rounds) + self.rounds.index(request.worker)
        round_end = request.job * len(self.rounds) * samples
        if round_end > self.train_samples:  # a round is whole or not at all
            self.next_start = self.train_samples
            return self._dismiss(request)
        self.next_start = max(self.next_start, min(round_end, self.train_samples))
        return self._open(request, place * samples, samples)

    def _dismiss(self, request: LeaseRequest) -> Finished:
        self.dismissed[request.worker] = request.job
        return Finished(request.worker, request.job)

    def _open(self, request: LeaseRequest, start: int, samples: int) -> Lease:
        steps = samples // self.samples_per_step
        lease = Lease(request.worker, request.job, self.next_lease, start, samples, steps)
        self.open[self.next_lease] = lease
        self.next_lease += 1
        return lease
