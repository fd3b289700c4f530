"""A region's leases: those it answers for to the global server until their training has gone up, how far its workers
have asked for data, and how far ahead of them it asks itself. Plain data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple
from itertools import count
from math import ceil
from typing import Any

from geotrain.config import OuterConfig
from geotrain.outer.messages import Lease
from geotrain.outer.server.lease_requests import MOST_HELD

CUT_S = 60.0  # longer cuts of a link are rare
MOST_BACK = 1024  # more leases do not go back while a request for one of them is under way
MOST_RESERVED = 0.02  # of a worker's jobs in the run


class RegionLeases:
    """The leases of one region's workers. in_rounds: leases stay with their workers, and there is no reserve."""

    def __init__(self, workers: tuple[str, ...], config: OuterConfig, in_rounds: bool) -> None:
        self.config, self.in_rounds = config, in_rounds
        self.jobs_each = 0.0  # jobs of a worker in the whole run, about; whoever builds the server may say
        self.held: dict[str, dict[int, Lease]] = {name: {} for name in workers}  # worker → job → not trained yet
        # Worker → lease number → lease that went back, though its present incarnation had asked for it: it counted as
        # dead, was only cut off, and may train it all the same.
        self.given_back: dict[str, dict[int, Lease]] = {name: {} for name in workers}
        # Held lease → fragments whose weights here contain all of its training. Those of all: it is trained.
        self.contained: dict[int, set[int]] = {}
        # Leases that went back since the global server was joined, the newest last: the reply to a request that was
        # made before that may give one of them once more, though others are to have it.
        self.back: list[int] = []
        self.asked: dict[str, int] = {}  # worker → last job that its present incarnation has asked for
        # Worker → last job for which the region has asked. Lasts as long as the process: to ask twice does no harm.
        self.asked_above = dict.fromkeys(workers, 0)

    def of(self, worker: str) -> dict[int, Lease]:
        """Return the leases that the worker holds, by their numbers."""
        return {lease.lease: lease for lease in self.held[worker].values()}

    @property
    def known(self) -> set[int]:
        """Numbers of the leases that a worker holds, or that it may hold again."""
        return {number for worker in self.held for number in (*self.of(worker), *self.given_back[worker])}

    def reserve(self, worker: str, step_s: float) -> int:
        """Return how many jobs of the worker are to have leases here beside the one that it asks for.

        step_s: seconds of its inner step; 0: not known.

        An automatic reserve keeps it busy while the region is cut off for as long as links usually are. It is not so
        large that others would wait for this worker at the run's end.
        """
        if self.in_rounds:
            return 0
        if isinstance(self.config.lease_reserve, int):
            return self.config.lease_reserve
        steps = max((lease.steps for lease in self.held[worker].values()), default=self.config.local_steps)
        usual = ceil(CUT_S / (steps * step_s)) if step_s else 0
        return min(usual, int(MOST_RESERVED * self.jobs_each), MOST_HELD)

    def ask(self, worker: str, job: int, last: int, step_s: float) -> range:
        """Note that the worker asks for this job. Returns the jobs beside it for which leases are due from above.

        last: job for which it may have one.
        """
        self.asked[worker] = max(job, self.asked.get(worker, 0))
        first = max(job, self.asked_above[worker]) + 1
        jobs = range(first, min(job + self.reserve(worker, step_s), last) + 1)
        self.asked_above[worker] = max([self.asked_above[worker], *jobs])
        return jobs

    def follows(self, worker: str, job: int, next_job: int) -> bool:
        """Whether the worker can come to this job: the data of all jobs before it is here, from the one that it has
        asked for or the next that it has not done. With a gap it would wait for one job at the run's end, or get no
        data for it, and leave that of a later one untrained. next_job: the first that it has not done.
        """
        first = max(self.asked.get(worker, 0), next_job)
        return self.in_rounds or all(between in self.held[worker] for between in range(first, job))

    def beyond(self, worker: str, job: int) -> list[int]:
        """Return the leases of jobs to which the worker will not come: there was no data for this one, nor is there
        for one between. It would end, and leave theirs untrained."""
        held = self.held[worker]
        gap = next(after for after in count(job + 1) if after not in held)
        return [] if self.in_rounds else [lease.lease for later, lease in held.items() if later > gap]

    def spare(self, worker: str) -> tuple[int, ...]:
        """Return the numbers of the leases for which the worker has not asked. None of one that has asked for nothing
        yet: its next incarnation begins with the first of them."""
        held, asked = self.held[worker], self.asked.get(worker)
        return () if asked is None or self.in_rounds else tuple(v.lease for job, v in held.items() if job > asked)

    def give_back(self, worker: str, numbers: Collection[int]) -> tuple[int, ...]:
        """Give those of these leases that the worker holds back to the global server. Returns their numbers."""
        back, asked = self.drop(worker, numbers), self.asked.get(worker, 0)
        # Only what it has asked for can be trained there: its reserve never left this server.
        self.given_back[worker] |= {lease.lease: lease for lease in back if lease.job <= asked}
        return tuple(lease.lease for lease in back)

    def drop(self, worker: str, numbers: Collection[int]) -> list[Lease]:
        """Hold those of these leases that the worker holds no more. Returns them."""
        found = [lease for lease in self.held[worker].values() if lease.lease in numbers]
        for lease in found:
            del self.held[worker][lease.job]
        return found

    def start_over(self, dropped: Collection[int]) -> None:
        """Give all leases back but those of rounds, and forget what workers have asked for. Nobody has those again of
        whose training a part is `dropped` here: others train them anew, whatever their worker sends."""
        self.contained = {n: f for n, f in self.contained.items() if not self.in_rounds and n not in dropped}
        for worker in self.held:
            if not self.in_rounds:
                self.give_back(worker, self.of(worker))
                self.given_back[worker] = {n: v for n, v in self.given_back[worker].items() if n not in dropped}
            self.forget(worker)

    def contain(
        self, worker: str, numbers: Collection[int], fragment: int, fragments: int
    ) -> tuple[list[int], list[Lease]]:
        """Note that a fragment contains the training of those of these leases that the worker holds, or may hold
        again, as a shard took it before it knew that they went back. Returns them, and what is `finished` now."""
        mine = [n for n in dict.fromkeys(numbers) if n in self.of(worker) or n in self.given_back[worker]]
        for number in mine:
            self.contained.setdefault(number, set()).add(fragment)
        return mine, self.finished(worker, mine, fragments)

    def finished(self, worker: str, numbers: Collection[int], fragments: int) -> list[Lease]:
        """Hold those of these leases no more that all `fragments` contain: they are trained. Returns them."""
        trained = self.drop(worker, [n for n in numbers if len(self.contained.get(n, ())) == fragments])
        for lease in trained:
            del self.contained[lease.lease]
        return trained

    def recall(self, worker: str) -> tuple[int, ...]:
        """Give back the worker's leases for which it has not asked. Returns their numbers."""
        self.asked_above[worker] = min(self.asked_above[worker], self.asked.get(worker, 0))
        return self.give_back(worker, self.spare(worker))

    def forget(self, worker: str) -> None:
        """Forget what the worker has asked for, as it has gone, or is to begin again.

        A reserve is asked for in order again: who leaves, as a job finds no data, would keep those of later ones.
        """
        self.asked.pop(worker, None)
        self.asked_above[worker] = 0

    def reclaim(self, worker: str, numbers: Collection[int]) -> tuple[int, ...]:
        """Hold leases again that had gone back. Returns the numbers of those that nobody is there to train."""
        back = [self.given_back[worker].pop(number) for number in numbers if number in self.given_back[worker]]
        self.held[worker] |= {lease.job: lease for lease in back}
        if back:  # this incarnation had asked for them
            self.asked[worker] = max(self.asked.get(worker, 0), *(lease.job for lease in back))
        return tuple(number for number in numbers if number not in self.of(worker))

    def state(self) -> dict[str, Any]:
        """Return plain JSON data, from which `load` restores all but `asked_above`."""
        tables = {"leases": self.held, "given_back": self.given_back}
        kept = {
            name: [list(astuple(lease)) for leases in table.values() for lease in leases.values()]
            for name, table in tables.items()
        }
        contained = [[number, sorted(within)] for number, within in sorted(self.contained.items())]
        return {**kept, "asked": dict(self.asked), "contained": contained, "back": list(self.back)}

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        for kind, table, key in (("leases", self.held, "job"), ("given_back", self.given_back, "lease")):
            for of_worker in table.values():
                of_worker.clear()
            for lease in (Lease(*saved) for saved in state[kind]):
                if lease.worker in table:  # else no member any more
                    table[lease.worker][getattr(lease, key)] = lease
        self.asked, self.back = dict(state["asked"]), list(state["back"])
        self.contained = {number: set(fragments) for number, fragments in state["contained"]}
