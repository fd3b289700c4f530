"""The ledger of training data: which samples were handed out, to whom, and which are trained for good.

Pure: no clock, no disk. Samples are numbered 0 … train_samples − 1 over the run; the data loader turns a number
into text. A lease is *committed* when the update that contains it was applied by the global server; until then it
may return to the pool and be trained by another worker.
"""

from __future__ import annotations

from math import ceil, inf
from typing import Any

from geotrain.outer.messages import Finished, Lease, LeaseRequest, Refused

ROUNDS_KEPT = 8  # of a synchronous run: a worker's next life may ask for one of them again


class LeaseBook:
    """Leases of one run.

    train_samples: how many the run has, a multiple of samples_per_step (one inner step of any worker).
    local_steps: H. scale_local_steps: H_i = max(1, ceil(H · speed_i)), the speed relative to the fastest worker
    known (DyLU, arXiv 2401.09135). rounds: for synchronous rules, the workers' names: job j of every worker is then
    laid out at once, in the order of names, so that a run is the same whoever asks first.
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
        self.laid_out: dict[int, dict[str, tuple[int, int]]] = {}  # round → worker → (start, samples)
        self._held: dict[str, dict[int, Lease]] = {}  # worker → job → what is open
        self._fastest_s = inf

    @property
    def finished(self) -> bool:
        """Nothing left to hand out, nothing out."""
        return not self.open and not self._left()

    def grant(self, request: LeaseRequest, new: bool = True, validate: int = 0) -> Lease | Finished | None:
        """The lease for this worker's job; the same one again when asked again.

        new: whether more data may be handed out; otherwise None stands for what would have been a new lease. A round
        that some worker has begun is not new: the others would wait for those who are left out.
        validate: goes with a lease that is made now.

        Finished does not wait for leases that are out with others: should one come back, its worker's next life
        asks for it.
        """
        held = self._held.get(request.worker, {}).get(request.job)
        if held:
            return held
        if request.job == self.dismissed.get(request.worker):  # the same to all its ranks
            return Finished(request.worker, request.job)
        if 0 < request.step_s < inf:
            self.note_speed(request.worker, request.step_s)
        if self.rounds is not None:
            return self._grant_round(request, new, validate)
        if not self._left():
            return self.dismiss(request)
        if not new:
            return None
        return self._open(request, *self._take(self._steps(request.worker) * self.samples_per_step), validate)

    def dismiss(self, request: LeaseRequest) -> Finished:
        """This worker gets no more data."""
        self.dismissed[request.worker] = request.job
        return Finished(request.worker, request.job)

    def commit(self, leases: tuple[int, ...]) -> int:
        """These leases are trained for good. Returns the samples committed; unknown or committed ones count 0."""
        samples = 0
        for number in leases:
            lease = self._close(number)
            if lease:
                samples += lease.samples
        self.committed_samples += samples
        return samples

    def release(self, leases: tuple[int, ...]) -> None:
        """These leases return to the pool; unknown or committed ones are passed over."""
        for number in leases:
            lease = self._close(number)
            if lease is None:
                continue
            self.dismissed.pop(lease.worker, None)
            if self.rounds is None:
                self.pool.append((lease.start, lease.samples))
        self.pool.sort()

    def held_by(self, workers: set[str]) -> tuple[int, ...]:
        return tuple(lease.lease for worker in workers for lease in self._held.get(worker, {}).values())

    def state(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "next_lease": self.next_lease,
            "next_start": self.next_start,
            "pool": [list(r) for r in self.pool],
            "open": [[n, v.worker, v.job, v.start, v.samples, v.steps, v.validate] for n, v in self.open.items()],
            "committed_samples": self.committed_samples,
            "dismissed": self.dismissed,
            "step_s": self.step_s,
            "laid_out": {str(job): {w: list(place) for w, place in p.items()} for job, p in self.laid_out.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        self.next_lease, self.next_start = state["next_lease"], state["next_start"]
        self.pool = [(start, samples) for start, samples in state["pool"]]
        self.open = {n: Lease(worker, job, n, *place) for n, worker, job, *place in state["open"]}
        self.committed_samples = state["committed_samples"]
        self.dismissed = dict(state["dismissed"])
        self.step_s = dict(state["step_s"])
        self.laid_out = {
            int(job): {w: (start, samples) for w, (start, samples) in places.items()}
            for job, places in state["laid_out"].items()
        }
        self._held = {}
        for lease in self.open.values():
            self._held.setdefault(lease.worker, {})[lease.job] = lease
        self._fastest_s = min(self.step_s.values(), default=inf)

    def _steps(self, worker: str) -> int:
        if not self.scale_local_steps or worker not in self.step_s:
            return self.local_steps
        return max(1, ceil(self.local_steps * self._fastest_s / self.step_s[worker]))

    def note_speed(self, worker: str, step_s: float) -> None:
        """Lease requests tell it; before the first one where speeds were measured before the run."""
        was_fastest = self.step_s.get(worker) == self._fastest_s
        self.step_s[worker] = step_s
        if was_fastest and step_s > self._fastest_s:
            self._fastest_s = min(self.step_s.values())
        else:
            self._fastest_s = min(self._fastest_s, step_s)

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

    def _grant_round(self, request: LeaseRequest, new: bool, validate: int) -> Lease | Finished | None:
        assert self.rounds is not None
        if request.worker not in self.rounds:
            raise Refused(f"worker {request.worker!r} is not one of this synchronous run's: {', '.join(self.rounds)}")
        newest = max(self.laid_out, default=0)
        if newest < request.job and not new and self.next_start < self.train_samples:
            return None
        while newest < request.job and self._lay_out(newest + 1):
            newest += 1
        if newest < request.job:
            return self.dismiss(request)
        if request.job not in self.laid_out:
            raise Refused(f"worker {request.worker!r} asks for round {request.job}; the run is at round {newest}")
        return self._open(request, *self.laid_out[request.job][request.worker], validate)

    def _lay_out(self, job: int) -> bool:
        """Give every worker its place in a round; False when the run ends before it. A round is whole or not at all:
        with equal steps the same bits follow whoever asks first; with DyLU the speeds known to the first who asks
        decide for all."""
        assert self.rounds is not None
        samples = {worker: self._steps(worker) * self.samples_per_step for worker in self.rounds}
        if self.next_start + sum(samples.values()) > self.train_samples:
            self.next_start = self.train_samples
            return False
        places = {}
        for worker in self.rounds:
            places[worker] = (self.next_start, samples[worker])
            self.next_start += samples[worker]
        self.laid_out[job] = places
        self.laid_out.pop(job - ROUNDS_KEPT, None)  # nobody is that far behind: a round ends before the next begins
        return True

    def _close(self, number: int) -> Lease | None:
        lease = self.open.pop(number, None)
        if lease:
            del self._held[lease.worker][lease.job]
        return lease

    def _open(self, request: LeaseRequest, start: int, samples: int, validate: int) -> Lease:
        steps = samples // self.samples_per_step
        lease = Lease(request.worker, request.job, self.next_lease, start, samples, steps, validate)
        self.open[self.next_lease] = lease
        self._held.setdefault(request.worker, {})[request.job] = lease
        self.next_lease += 1
        return lease
