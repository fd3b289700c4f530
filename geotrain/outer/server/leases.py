"""Accounts for the training data: which samples were handed out, to whom, and which are trained for good.

Samples are numbered 0 … train_samples − 1 over the run; the data loader turns a number into text. A lease is
*committed* when the global server has applied the update that contains its training; until then it may return to the
pool and be trained by another worker. So each sample is counted once, whoever dies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import astuple
from heapq import nsmallest
from math import ceil, inf
from statistics import fmean
from typing import Any

from geotrain.config.batches import BatchSchedule, Ramp
from geotrain.outer.messages import Finished, Lease, LeaseRequest, Refused
from geotrain.outer.server.job_lengths import ending_together
from geotrain.outer.server.member import MOST_JOBS, attributes, set_attributes
from geotrain.outer.server.ranges import Range, take_out

RETURNED_KEPT = 4096  # leases that came back, which a late update may still name as trained
FASTER = 4.0  # than the next: what of a speed that a worker claims is believed
MOST_ASIDE = 0.05  # of the run's samples: beyond that it is not the data that is to blame
LEAST_ASIDE = 4  # leases that may be set aside in any run
# Attributes of a table that a snapshot keeps as they are.
SAVED = (
    *("local_steps", "next_lease", "next_start", "committed_samples", "trained_s", "dismissed", "step_s", "ends_s"),
)
RANGES = "pool", "failed", "aside", "skip"  # and these are lists of ranges
ALIKE = 1.25  # seconds of a step over the fastest's, up to which jobs that are to end together are cut so
ROUNDS_KEPT = 8  # of a synchronous run: the next incarnation of a worker that died may ask for a recent round again


class LeaseTable:
    """The leases of one run: what is left to hand out, what is out, and how much is committed.

    fragments: of the model. A lease is committed when the updates of all of them contain it. may_go_back: their
    weights are in processes, each of which may lose its disk: what is committed is remembered until a copy has it.
    train_samples: samples in the run, a whole number of steps of any worker, of samples_per_step each.
    local_steps: H, the inner steps of a job. scale_local_steps: slower workers take fewer, H_i = max(1, ceil(H ·
    speed_i)), their speed being relative to the fastest worker known (DyLU, arXiv 2401.09135). together: jobs
    are to end together, by when their requests came to the global server: lengths are steered so, those of workers
    nearly as fast as the fastest without scale_local_steps, too.
    rounds: for synchronous rules, the names of all workers. Job j of every worker is then laid out at once, in the
    order of names, so that the same worker trains the same samples whoever asks first.
    ramp: of the batch, before it has samples_per_step (`BatchSchedule`).
    Raises ValueError when train_samples is no whole number of steps.
    """

    def __init__(
        self,
        train_samples: int,
        samples_per_step: int,
        local_steps: int,
        scale_local_steps: bool = False,
        rounds: tuple[str, ...] | None = None,
        ramp: Ramp | None = None,
        fragments: int = 1,
        may_go_back: bool = False,
        together: bool = False,
    ) -> None:
        self.batches = BatchSchedule(samples_per_step, ramp)
        if self.batches.after(train_samples, 0) != train_samples:
            wanted = f"a multiple of a step's {samples_per_step} samples"
            if ramp:
                wanted = f"the end of a step; use {self.batches.after(train_samples, 0)}"
            raise ValueError(f"train_samples = {train_samples} is not {wanted}")
        self.train_samples = train_samples
        self.samples_per_step = samples_per_step
        self.local_steps = local_steps
        self.scale_local_steps, self.together = scale_local_steps, together
        self.rounds = tuple(sorted(rounds)) if rounds else None
        self.next_lease = 1
        self.next_start = 0  # samples from here on were never handed out
        self.pool: list[Range] = []  # what came back, sorted
        self.failed: list[Range] = []  # whose training gave nothing of use once
        self.aside: list[Range] = []  # what nobody shall train: it failed twice, or the run file says so
        self.skip: list[Range] = []  # of these, what the run file says, in whole steps
        self.open: dict[int, Lease] = {}  # lease number → lease that is handed out and not committed
        self.returned: dict[int, Lease] = {}  # lease number → lease that came back, the newest ones
        self.fragments = fragments
        # Lease number → fragments whose global weights contain all of its training → version that does. A state
        # leaves out what is neither open, returned nor `recent`.
        self.contained: dict[int, dict[int, int]] = {}
        self.may_go_back = may_go_back
        self.recent: dict[int, Lease] = {}  # committed leases that not every fragment's copy contains
        self._safe: dict[int, int] = {}  # fragment → version of its copy
        self.committed_samples = 0
        self.trained_s = 0.0  # seconds of inner steps in what is committed, over all workers, by what each last said
        self.dismissed: dict[str, int] = {}  # worker → last job for which it got Finished
        self.step_s: dict[str, float] = {}  # worker → seconds of an inner step, as it last said
        self.ends_s: dict[str, float] = {}  # worker → when its newest job is to end, by the global server's clock
        self.laid_out: dict[int, dict[str, tuple[int, int]]] = {}  # round → worker → (start, samples)
        # worker → job → open lease: those of `open`, found without a search in runs of thousands of workers
        self._held: dict[str, dict[int, Lease]] = {}

    @property
    def finished(self) -> bool:
        """Whether nothing is left to hand out, and nothing is out."""
        return not self.open and not self.left

    @property
    def left(self) -> bool:
        """Whether something is left to hand out now."""
        return bool(self.pool) or self.next_start < self.train_samples

    def grant(self, request: LeaseRequest, new: bool = True, validate: int = 0) -> Lease | Finished | None:
        """Return the lease for this worker's job, the same one every time; Finished when no data is left.

        new: whether more data may be handed out (not while the run is paused). If not, None is returned in place of a
        new lease. A round that some worker has begun does not count as new: leaving out the others would let those
        who have begun wait for them without end. validate: number of the validation that goes with a new lease.

        Finished is said as soon as nothing is left to hand out, although leases that are out with others may still
        come back: a worker sends its last progress only when it is answered so. Asked for a later job, be it as a
        region's reserve, the table returns None until leases have come back or all are committed, unless the worker
        has got a lease since: then it must be answered so again. In rounds Finished is final.
        Raises Refused for a worker or a round that is not of this synchronous run.
        """
        held = self._held.get(request.worker, {}).get(request.job)
        if held:
            return held
        # All ranks of a worker must get the same reply, even if a lease has come back between their requests.
        last = self.dismissed.get(request.worker, inf)
        if request.job == last or (self.rounds is not None and request.job > last):
            return Finished(request.worker, request.job)
        if request.step_s:
            self.note_speed(request.worker, request.step_s)
        if self.rounds is not None:
            return self._grant_round(request, new, validate)
        if not self.left:
            since = max(self._held.get(request.worker, ()), default=0) > last
            return None if self.open and request.job > last and not since else self.dismiss(request)
        if not new:
            return None
        known = self.together and request.at_s and request.worker in self.step_s
        steps = self._steered(request) if known else self._steps(request.worker)
        return self._open(request, *self._take(steps), validate)

    def dismiss(self, request: LeaseRequest) -> Finished:
        """Answer this worker that there is no data for it, and remember for which job."""
        self.dismissed[request.worker] = request.job
        return Finished(request.worker, request.job)

    def contain(self, leases: Collection[int], fragment: int, version: int = 0) -> int:
        """Note that the global weights of a fragment contain the training of these leases, and commit those of which
        all fragments do. Returns how many samples that are. Saying it again changes nothing; leases that are unknown
        or committed already count 0, so that no sample is counted twice.

        A lease that came back, as its worker was taken for dead, may have been trained all the same: it is committed,
        unless it is `gone`.
        """
        known = [number for number in dict.fromkeys(leases) if number in self.open or number in self.returned]
        for number in known:
            self.contained.setdefault(number, {})[fragment] = version
        whole = [number for number in known if len(self.contained[number]) == self.fragments]
        self.take_back(whole)
        closed = [lease for number in whole if (lease := self._close(number))]
        if self.may_go_back:
            self.recent |= {lease.lease: lease for lease in closed}
        samples = sum(lease.samples for lease in closed if not self._repeats(lease))
        self.committed_samples += samples
        self.trained_s += sum(
            lease.samples / self.samples_per_step * self.step_s.get(lease.worker, 0.0) for lease in closed
        )
        return samples

    def forget_safe(self, versions: Mapping[int, int]) -> None:
        """Forget which of a lease's training may be lost: copies of fragments have these versions."""
        if versions.items() <= self._safe.items():
            return
        self._safe |= versions
        for number in list(self.recent):
            left = {f: v for f, v in self.contained[number].items() if v > versions.get(f, -1)}
            self.contained[number] = left
            if not left:
                del self.recent[number], self.contained[number]

    def go_back(self, versions: Mapping[int, int]) -> int:
        """Hand out again the leases of whose training fragments that went back to these versions lack a part. Returns
        how many samples that are. In rounds a lease stays its worker's."""
        again = 0
        for number, within in list(self.contained.items()):
            lost = {f for f, version in within.items() if version > versions.get(f, version)}
            if lost and (lease := self.recent.pop(number, None)) is not None:
                again += lease.samples
                if self.rounds is None:
                    del self.contained[number]
                    self.pool = sorted([*self.pool, (lease.start, lease.samples)])
                    continue
                self.open[number] = self._held.setdefault(lease.worker, {})[lease.job] = lease
                within = {f: within.get(f, 0) for f in range(self.fragments)}
            self.contained[number] = {f: version for f, version in within.items() if f not in lost}
        self.committed_samples -= again
        return again

    def gone(self, leases: Collection[int]) -> tuple[int, ...]:
        """Return those of these leases that came back and cannot be had again: some of their samples are with others,
        trained by others, or set aside."""
        back = [self.returned[number] for number in leases if number in self.returned]
        return tuple(lease.lease for lease in back if self._without(lease) is None)

    def take_back(self, leases: Collection[int]) -> None:
        """Hand those of these leases that came back, and are not `gone`, out again as they were: their workers, which
        were taken for dead, may have trained them."""
        for lease in [self.returned[number] for number in leases if number in self.returned]:
            pool = self._without(lease)
            if pool is not None:
                self.pool = pool
                del self.returned[lease.lease]
                self.open[lease.lease] = self._held.setdefault(lease.worker, {})[lease.job] = lease

    def pass_numbers(self, leases: Collection[int]) -> None:
        """Give none of these numbers to leases to come: they are a region's, from before this table came back from a
        backup, and what is trained with them is none of the new ones'."""
        self.next_lease = max(self.next_lease, *(number + 1 for number in leases if number < MOST_JOBS), 1)

    def forget_returned(self, workers: Collection[str]) -> None:
        """Forget which leases of these workers came back: nobody has trained them."""
        self.returned = {number: lease for number, lease in self.returned.items() if lease.worker not in workers}

    def release(self, leases: Collection[int]) -> None:
        """Return these leases to the pool. Leases that are unknown or committed are ignored.

        Those of synchronous rounds stay out: a place is its worker's, whichever of its incarnations trains it.
        """
        # In the order of their numbers, since the oldest of `returned` are dropped, and a replay must drop the same.
        for number in sorted(leases) if self.rounds is None else ():
            lease = self._close(number)
            if lease is None:
                continue
            self.pool.append((lease.start, lease.samples))
            self.returned[number] = lease
            if len(self.returned) > RETURNED_KEPT:
                del self.returned[next(iter(self.returned))]  # the oldest
        self.pool.sort()

    @property
    def set_aside_samples(self) -> int:
        return sum(samples for _, samples in self.aside)

    def fail(self, leases: Collection[int]) -> list[Range]:
        """Return leases to the pool whose training gave nothing of use, and set aside what has failed before. In
        rounds a worker keeps its lease, and has other samples in its place once it has failed twice.

        Returns what was set aside. Of a run's samples that may be MOST_ASIDE: weights that have diverged spoil every
        update, and no data is to blame for it.
        """
        aside: list[Range] = []
        most = max(MOST_ASIDE * self.train_samples, LEAST_ASIDE * self.local_steps * self.samples_per_step)
        for lease in [self.open[number] for number in sorted(leases) if number in self.open]:
            self.release((lease.lease,))
            once, twice = take_out(self.failed, lease.start, lease.samples)
            fresh = [(lease.start, lease.samples)]
            few = self.set_aside_samples + sum(size for _, size in twice) <= most
            if twice and few and (self.rounds is None or self._replace(lease)):
                for start, size in twice:
                    self.pool, _ = take_out(self.pool, start, size)
                    fresh, _ = take_out(fresh, start, size)
                self.aside += twice
                aside += twice
            self.failed = [*once, *fresh][-RETURNED_KEPT:]
        return aside

    def skip_samples(self, skip: list[tuple[int, int]]) -> None:
        """Set aside what is not handed out of these samples, given as (first, last), in place of those before. A step
        that contains one of them is left out whole."""
        for start, samples in self.skip:
            self.aside, back = take_out(self.aside, start, samples)
            self.pool = sorted([*self.pool, *back])
        self.skip = []
        for first, last in skip:
            start = self.batches.after(first, 0)
            self.skip.append((start, self.batches.after(last) - start))
            self.pool, back = take_out(self.pool, *self.skip[-1])
            self.aside += back
        self._pass_over()

    def skip_to(self, newer: LeaseTable) -> int:
        """Set aside all that `newer`, a later state of this table, had handed out and this one has not committed.
        Returns how many samples that is."""
        self.release(tuple(self.open))
        handed, before = [(0, newer.next_start)], self.set_aside_samples
        for start, samples in newer.pool:
            handed, _ = take_out(handed, start, samples)
        self.pool.append((self.next_start, newer.next_start - self.next_start))
        self.next_start = newer.next_start
        for start, samples in handed:
            self.pool, passed = take_out(self.pool, start, samples)
            self.aside += passed
        # Late words of older leases name no new ones.
        self.next_lease, self.returned, self.contained, self.recent = newer.next_lease, {}, {}, {}
        return self.set_aside_samples - before

    def _shorten(self) -> None:
        """Drop samples that came back, where a resumed run has fewer than were handed out before."""
        held = self.committed_samples + sum(lease.samples for lease in self.open.values())
        surplus = held + sum(samples for _, samples in (*self.pool, *self.aside)) - self.train_samples
        while surplus > 0 and self.pool:
            start, samples = self.pool.pop()
            if samples > surplus:
                self.pool.append((start, samples - surplus))
            surplus -= samples
        self._pass_over()  # there may be more than before

    def held_by(self, workers: tuple[str, ...]) -> dict[int, Lease]:
        """Return the open leases of these workers, by their numbers."""
        return {lease.lease: lease for worker in workers for lease in self._held.get(worker, {}).values()}

    def given_to(self, number: int) -> str:
        """Return the worker that this lease went to, be it open or returned; "" if it is committed or unknown."""
        lease = self.open.get(number) or self.returned.get(number)
        return lease.worker if lease else ""

    def state(self) -> dict[str, Any]:
        """Return plain JSON data, from which `load` restores the table."""
        return {
            **attributes(self, SAVED),
            **{name: [list(r) for r in getattr(self, name)] for name in RANGES},
            "open": [list(astuple(lease)) for lease in self.open.values()],
            "returned": [list(astuple(lease)) for lease in self.returned.values()],
            "recent": [list(astuple(lease)) for lease in self.recent.values()],
            "contained": [
                [n, sorted(self.contained[n].items())]
                for n in (*self.open, *self.returned, *self.recent)
                if n in self.contained
            ],
            "safe": sorted(self._safe.items()),
            "laid_out": {str(job): {w: list(place) for w, place in p.items()} for job, p in self.laid_out.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        set_attributes(self, SAVED, state)
        for name in RANGES:
            setattr(self, name, [(start, samples) for start, samples in state[name]])
        self.open = {lease.lease: lease for lease in (Lease(*saved) for saved in state["open"])}
        self.returned = {lease.lease: lease for lease in (Lease(*saved) for saved in state["returned"])}
        self.recent = {lease.lease: lease for lease in (Lease(*saved) for saved in state["recent"])}
        self.contained = {number: dict(map(tuple, fragments)) for number, fragments in state["contained"]}
        self._safe = dict(map(tuple, state["safe"]))
        self.laid_out = {int(job): {w: (p[0], p[1]) for w, p in ps.items()} for job, ps in state["laid_out"].items()}
        self._held = {}
        for lease in self.open.values():
            self._held.setdefault(lease.worker, {})[lease.job] = lease
        self._shorten()

    def _steps(self, worker: str) -> int:
        """Return the inner steps of this worker's jobs: H in the mean of those that are nearly as fast as the fastest
        and end together. Shorter ones are more bytes a step, which costs more than waiting for who is slow.

        Whoever claims to be far faster than all others would cut their jobs to single steps. So it counts as at most
        FASTER times as fast as the next.
        """
        if worker not in self.step_s or not (self.scale_local_steps or self.together):
            return self.local_steps
        own_s, believed_s = self.step_s[worker], self._believed_s
        if self.scale_local_steps:
            return max(1, ceil(self.local_steps * min(1.0, believed_s / own_s)))
        at_work = (self.step_s[name] for name in {worker, *filter(self._held.get, self.step_s)})
        alike = [step_s for step_s in at_work if step_s <= ALIKE * believed_s]
        return (
            max(1, round(self.local_steps * min(ALIKE, fmean(alike) / own_s))) if own_s in alike else self.local_steps
        )

    @property
    def _believed_s(self) -> float:
        """Seconds of an inner step of the fastest worker, as far as that is believed."""
        return max(s / FASTER**others for others, s in enumerate(nsmallest(2, self.step_s.values())))

    def _steered(self, request: LeaseRequest) -> int:
        """Return the steps of a job that is to end with others', and note when. It is asked for as the one before
        begins."""
        worker, fastest = request.worker, min(self.step_s, key=lambda name: (self.step_s[name], name))
        own_s, believed_s = self.step_s[worker], self._believed_s
        before = self._held.get(worker, {}).get(request.job - 1)
        begins_s = request.at_s + (before.steps if before else 0) * own_s
        at_work = {name for name, jobs in self._held.items() if jobs and name in self.ends_s and name != worker}
        others = {name: (self.ends_s[name], max(believed_s, self.step_s[name])) for name in at_work}
        with_s = self.ends_s[fastest] if fastest in others else None
        steers = self.scale_local_steps or own_s <= ALIKE * believed_s
        own = begins_s, own_s
        steps = ending_together(self._steps(worker), own, [*others.values()], self._steps_left, steers, with_s)
        self.ends_s[worker] = begins_s + steps * own_s
        return steps

    @property
    def _steps_left(self) -> int:
        """Steps that are left to hand out."""
        ranges = [*((start, start + samples) for start, samples in self.pool), (self.next_start, self.train_samples)]
        return sum(self.batches.step_at(end) - self.batches.step_at(start) for start, end in ranges)

    def note_speed(self, worker: str, step_s: float) -> None:
        """Note how fast a worker is. Its lease requests say so; a simulation, whose speeds are known from the
        start, calls this before the first request. step_s: seconds of one inner step."""
        self.step_s[worker] = step_s

    def _take(self, steps: int) -> tuple[int, int]:
        """Take at most so many steps: (start, samples). What came back goes first: it is the oldest, and the run
        cannot end without it."""
        if self.pool:
            start, size = self.pool.pop(0)
            samples = self.batches.after(start, steps) - start
            if size > samples:
                self.pool.insert(0, (start + samples, size - samples))
            return start, min(size, samples)
        start = self.next_start
        ends = [skipped for skipped, _ in self.skip if skipped > start]
        self.next_start = end = min(self.batches.after(start, steps), self.train_samples, *ends)
        self._pass_over()
        return start, end - start

    def _pass_over(self) -> None:
        """Set aside what is to be skipped next of the samples that were never handed out."""
        while self.next_start < self.train_samples:
            ends = [start + samples for start, samples in self.skip if start <= self.next_start < start + samples]
            if not ends:
                return
            end = min(max(ends), self.train_samples)
            self.aside.append((self.next_start, end - self.next_start))
            self.next_start = end

    def _grant_round(self, request: LeaseRequest, new: bool, validate: int) -> Lease | Finished | None:
        assert self.rounds is not None
        if request.worker not in self.rounds:
            raise Refused(f"worker {request.worker!r} is not one of this synchronous run's: {', '.join(self.rounds)}")
        newest = max(self.laid_out, default=0)
        # Paused, and this would begin a new round. At the end of the data it would not: then Finished is due instead.
        if request.job > newest + 1:
            raise Refused(f"worker {request.worker!r} asks for round {request.job}, but round {newest + 1} is next")
        if newest < request.job and not new and self.next_start < self.train_samples:
            return None
        if newest < request.job and not self._lay_out(request.job):
            return self.dismiss(request)
        if request.job not in self.laid_out:
            raise Refused(f"worker {request.worker!r} asks for round {request.job}; the run is at round {newest}")
        return self._open(request, *self.laid_out[request.job][request.worker], validate)

    def _lay_out(self, job: int) -> bool:
        """Give every worker its samples of a round; False when too little data is left for a whole one.

        With equal steps the same bits follow whoever asks first. With DyLU the speeds that are known when the first
        worker asks decide for all.
        """
        assert self.rounds is not None
        places, end = dict[str, Range](), self.next_start
        for worker in self.rounds:
            start, end = end, self.batches.after(end, self._steps(worker))
            places[worker] = (start, end - start)
        # A round in which some had nothing to train could never be completed, so the last few samples are left out.
        self.next_start = min(end, self.train_samples)
        if end > self.train_samples:
            return False
        self.laid_out[job] = places
        self.laid_out.pop(job - ROUNDS_KEPT, None)  # nobody is that far behind: a round ends before the next begins
        return True

    def _without(self, lease: Lease) -> list[Range] | None:
        """Return the pool without this lease that came back; None: it is not whole in the pool, or its worker holds
        another one for that job."""
        pool, taken = take_out(self.pool, lease.start, lease.samples)
        whole = sum(size for _, size in taken) == lease.samples and lease.job not in self._held.get(lease.worker, {})
        return pool if whole else None

    def _replace(self, lease: Lease) -> bool:
        """Take other samples for a worker's place in a round: where too few are left, once more those that it has
        trained in the round before. Returns False where there was none."""
        end = self.batches.after(self.next_start, lease.steps)
        place, last = (self.next_start, end - self.next_start), end > self.train_samples
        if last:
            if (before := self.laid_out.get(lease.job - 1, {}).get(lease.worker)) is None or self._repeats(lease):
                return False
            place = before
        self.next_start = self.next_start if last else end
        self._close(lease.lease)
        self.laid_out[lease.job][lease.worker] = place
        return True

    def _repeats(self, lease: Lease) -> bool:
        """Whether a lease has the samples that its worker had in the round before, which count once."""
        return self.laid_out.get(lease.job - 1, {}).get(lease.worker, (-1, 0))[0] == lease.start

    def _close(self, number: int) -> Lease | None:
        """Strike a lease off the list of those that are out; None when it is not on it."""
        lease = self.open.pop(number, None)
        if lease:
            del self._held[lease.worker][lease.job]
        return lease

    def _open(self, request: LeaseRequest, start: int, samples: int, validate: int) -> Lease:
        steps = self.batches.step_at(start + samples) - self.batches.step_at(start)
        lease = Lease(request.worker, request.job, self.next_lease, start, samples, steps, validate)
        self.open[self.next_lease] = lease
        self._held.setdefault(request.worker, {})[request.job] = lease
        self.next_lease += 1
        return lease
