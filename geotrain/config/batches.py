"""The places of the run's inner steps among its samples, where the batch grows at the run's beginning. Arithmetic
alone."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

Ramp = tuple[int, int, int]  # the first batch, its increment, samples after which the batch is whole


@dataclass(frozen=True)
class BatchSchedule:
    """Maps the run's inner steps, counted from 0 over all workers, to the samples that they train.

    A step has its place whoever trains it, so that leases, restarts and schedules agree on it.
    batch: samples of a step. ramp: Megatron-core's `--rampup-batch-size`: the batch begins at the first number and
    grows by the second, in equal shares of the third, each up to the end of the step in which the share ends.
    """

    batch: int
    ramp: Ramp | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batches that steps have, in the order in which they come."""
        return tuple(size for _, _, size in _stages(self.batch, self.ramp))

    def first_sample(self, step: int) -> int:
        """Return the sample with which this step begins."""
        stages = _stages(self.batch, self.ramp)
        begin, first, size = stages[bisect_right(stages, step, key=lambda stage: stage[1]) - 1]
        return begin + (step - first) * size

    def step_at(self, sample: int) -> int:
        """Return the step that trains this sample."""
        stages = _stages(self.batch, self.ramp)
        begin, first, size = stages[bisect_right(stages, sample, key=lambda stage: stage[0]) - 1]
        return first + (sample - begin) // size

    def after(self, sample: int, steps: int = 1) -> int:
        """Return the sample with which the step begins that comes so many after that of `sample`."""
        return self.first_sample(self.step_at(sample) + steps)

    def steps(self, start: int, samples: int) -> list[range] | None:
        """Return the samples of each step of a lease; None: they are no whole number of steps."""
        begin, end = self.step_at(start), self.step_at(start + samples)
        starts = [self.first_sample(step) for step in range(begin, end + 1)]
        whole = start >= 0 and samples >= 0 and (starts[0], starts[-1]) == (start, start + samples)
        return [range(*ends) for ends in pairwise(starts)] if whole else None


@lru_cache
def _stages(batch: int, ramp: Ramp | None) -> tuple[tuple[int, int, int], ...]:
    """List the stages: the first sample, the first step, the batch."""
    stages, begin, first = list[tuple[int, int, int]](), 0, 0
    size, increment, samples = ramp or (batch, 1, 0)
    increments = (batch - size) // increment
    for stage in range(increments):
        # The fewest steps that reach the share's end, (stage + 1) · samples / increments, in whole numbers.
        steps = max(0, -((begin * increments - (stage + 1) * samples) // (size * increments)))
        if steps:
            stages.append((begin, first, size))
        begin, first, size = begin + steps * size, first + steps, size + increment
    return (*stages, (begin, first, batch))
