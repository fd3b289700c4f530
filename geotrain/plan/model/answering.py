"""What workers are answered with in a run of which it is known how many jobs each has: `outer.rule.answers` = `auto`
is one of the others then, and the outer block is called *settled*."""

from __future__ import annotations

from geotrain.config import OuterConfig, RegionMomentumConfig, RunConfig


def settled(outer: OuterConfig, jobs: float) -> OuterConfig:
    """Return the block with what `auto` is for workers who have so many jobs in the run each."""
    if not isinstance(outer.rule, RegionMomentumConfig):
        return outer
    return outer.model_copy(update={"rule": outer.rule.model_copy(update={"answers": outer.answers(jobs)})})


def settled_outer(run: RunConfig, workers: int) -> OuterConfig:
    """Return the run's outer block, settled for so many workers."""
    return settled(run.outer, run.inner_steps / run.outer.local_steps / max(1, workers))


def waits(outer: OuterConfig) -> bool:
    """Whether answers wait for others' deltas. outer: settled."""
    return isinstance(outer.rule, RegionMomentumConfig) and outer.rule.answers == "wait"


def updates_per_send(outer: OuterConfig) -> int | None:
    """Return K; None where a region sends up what all of its workers have sent. outer: settled."""
    merged = isinstance(outer.rule, RegionMomentumConfig) and outer.rule.answers == "merged"
    return None if merged or waits(outer) else outer.rule.updates_per_send
