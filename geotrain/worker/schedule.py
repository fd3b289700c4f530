"""Maps a worker's inner step to the run's learning-rate schedule. Pure arithmetic."""

from __future__ import annotations

from geotrain.config import RunConfig
from geotrain.outer.messages import Lease


def schedule_step(run: RunConfig, workers: int, lease: Lease, step: int) -> float:
    """The run's step, counted from 0, that inner step `step` of a lease stands for. Where the batch grows it counts
    samples, as Megatron's schedule does: whole batches and their fractions.

    workers: of the run. Where all of them train side by side, in the rounds of a synchronous run and in everybody's
    first job, their leases lie one after another in the data, but begin together: all begin where the first one does,
    and each step moves the schedule on by as many steps as there are workers. With the lease's own place each worker
    would pass through another part of the schedule, the later ones with no warm-up, and DiLoCo's loss differed by up
    to 3 % from that of one schedule for all (docs/log.md). Elsewhere workers are spread over the data anyway, and the
    lease's place is the run's progress. With DyLU rounds have no fixed length, so leases keep their own places.
    """
    begin = run.batches.step_at(lease.start)
    round_steps = workers * run.outer.local_steps
    first = lease.job == 1 and begin < round_steps
    if run.outer.scale_local_steps or not (run.outer.rule.synchronous or first):
        at = begin + step
    else:
        at = begin // round_steps * round_steps + step * workers
    whole, rest = divmod(run.batches.first_sample(at), run.samples_per_step)
    return whole + rest / run.samples_per_step if rest else whole
