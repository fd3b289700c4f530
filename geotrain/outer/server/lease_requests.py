"""What a worker may ask for, and how long it may hold what it got."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from geotrain.outer.messages import Lease, LeaseRequest, Refused
from geotrain.outer.server.member import MOST_JOBS

SHORTEST_STEP_S, LONGEST_STEP_S = 1e-6, 1e6  # inner steps are neither shorter nor longer, whatever a worker claims
MOST_HELD = 64  # leases that a worker holds untrained, beside its reserve
MOST_HELD_IN_ROUNDS = 4  # the round in training, the one before it, the next, and one to spare
PATIENCE = 10.0  # a worker that sends nothing for so many times what its job should take trains no more
LEAST_PATIENCE_S = 1800.0  # for what a job's steps do not include: a checkpoint, a slow disk, a first compilation


def check_numbers(request: LeaseRequest) -> None:
    """Raise Refused for a job or a speed that no worker has."""
    step_s = request.step_s
    if not 0 < request.job <= MOST_JOBS or (step_s and not SHORTEST_STEP_S <= step_s <= LONGEST_STEP_S):
        raise Refused(f"{request.worker}: no worker comes to job {request.job}, or takes {step_s:g} s a step")


def patience_s(leases: Collection[Lease], step_s: float, validation_steps: int) -> float:
    """Seconds for which a worker with these leases may send nothing before others get them; inf: for ever.

    step_s: of one inner step, as measured; 0: not known. validation_steps: inner steps that cost as much as a
    validation, or more.
    """
    if not leases or not step_s:
        return inf
    steps = max(lease.steps + (validation_steps if lease.validate else 0) for lease in leases)
    return max(LEAST_PATIENCE_S, PATIENCE * steps * step_s)


def check_request(request: LeaseRequest, jobs: Collection[int], last_job: int, most: int) -> None:
    """Raise Refused unless this is what a worker asks for: a job soon after those that it has not trained.

    jobs: for which it holds leases or waits for them. last_job: of its last update; 0: that is not known. most: jobs
    that it may have at once.
    """
    check_numbers(request)
    first = min(jobs, default=last_job + 1)
    if (jobs or last_job) and request.job >= first + most:
        raise Refused(
            f"{request.worker} asks for job {request.job}, but has not trained job {first}: it gets no more than "
            f"{most} ahead. Send their updates first",
            retry_s=5.0,
        )
