"""Where workers' steps stand in the run's schedule: leases as the global server's coordinator deals them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.config import RunConfig
from geotrain.config.batches import BatchSchedule
from geotrain.config.block import parse
from geotrain.outer.messages import Lease, LeaseRequest
from geotrain.outer.server.leases import LeaseTable
from geotrain.worker.schedule import schedule_step

H, BATCH, JOBS = 4, 2, 3
NAMES = ("a", "b", "c")


def run_of(**outer: Any) -> RunConfig:
    data = {"train_samples": len(NAMES) * H * BATCH * JOBS, "samples_per_step": BATCH}
    raw = {"name": "r", "model": {"weights": "w"}, "data": data, "outer": {"local_steps": H, **outer}}
    return parse(RunConfig, raw, "run")


def book_of(run: RunConfig) -> LeaseTable:
    rounds = NAMES if run.outer.rule.synchronous else None
    return LeaseTable(run.data.train_samples, BATCH, H, run.outer.scale_local_steps, rounds)


def granted(coordinator: LeaseTable, worker: str, job: int) -> Lease:
    lease = coordinator.grant(LeaseRequest(worker, job))
    assert isinstance(lease, Lease)
    return lease


def steps_of(run: RunConfig, lease: Lease) -> list[int]:
    return [schedule_step(run, len(NAMES), lease, step) for step in range(lease.steps)]


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
def test_all_workers_of_a_synchronous_run_pass_through_one_schedule(order: tuple[str, ...]) -> None:
    """That of DiLoCo, where each counts its own steps, over the run's total."""
    run = run_of(rule={"name": "sync"})
    coordinator = book_of(run)
    for job in range(1, JOBS + 1):
        expected = [len(NAMES) * ((job - 1) * H + step) for step in range(H)]
        assert [steps_of(run, granted(coordinator, name, job)) for name in order] == [expected] * len(NAMES)
    assert expected[-1] + len(NAMES) == run.total_steps


def test_first_jobs_of_an_asynchronous_run_begin_together() -> None:
    run = run_of(rule={"name": "region_momentum"})
    coordinator = book_of(run)
    first = [steps_of(run, granted(coordinator, name, 1)) for name in NAMES]
    assert first == [[0, 3, 6, 9]] * len(NAMES)
    assert steps_of(run, granted(coordinator, "b", 2)) == [12, 13, 14, 15]
    assert steps_of(run, granted(coordinator, "d", 1)) == [16, 17, 18, 19]  # joins late: at the rate of the others


def test_a_worker_alone_counts_its_steps() -> None:
    for rule in ("sync", "region_momentum"):
        run = run_of(rule={"name": rule})
        steps = [schedule_step(run, 1, Lease("a", 2, 5, 2 * H, H * BATCH, H), step) for step in range(H)]
        assert steps == [4, 5, 6, 7]


def test_with_scaled_steps_leases_keep_their_own_places() -> None:
    run = run_of(rule={"name": "sync"}, scale_local_steps=True)
    coordinator = book_of(run)
    coordinator.note_speed("a", 1.0)
    coordinator.note_speed("b", 2.0)
    assert [steps_of(run, granted(coordinator, name, 1)) for name in NAMES] == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 6), st.integers(0, 40), st.integers(0, 60))
def test_the_batch_grows_as_megatrons_does(start: int, increment: int, stages: int, share: int, steps: int) -> None:
    from megatron.core import num_microbatches_calculator as megatron

    batch, samples = start + increment * stages, max(1, share) * stages
    ours, consumed = BatchSchedule(batch, (start, increment, samples)), 0
    for step in range(steps):
        size = batch if consumed > samples else start + increment * (consumed * stages // samples)
        if hasattr(megatron, "RampupBatchsizeNumMicroBatchesCalculator"):  # 0.19 has none
            theirs = megatron.RampupBatchsizeNumMicroBatchesCalculator(
                batch, 1, 1, False, 1, start, increment, samples
            )
            theirs.update(consumed, consistency_check=False)
            assert size == theirs.get_current_global_batch_size()
        assert ours.first_sample(step) == consumed and ours.after(consumed) == consumed + size and size in ours.sizes
        assert {ours.step_at(sample) for sample in range(consumed, consumed + size)} == {step}
        consumed += size


@pytest.mark.parametrize("rule", ["sync", "region_momentum"])
def test_while_the_batch_grows_the_rate_goes_by_samples(rule: str) -> None:
    """Six steps of a sample, then of two: the first three workers' jobs have four steps each."""
    run = run_of(rule={"name": rule})
    run = run.model_copy(update={"data": run.data.model_copy(update={"rampup_batch_size": (1, 1, 6)})})
    rounds = NAMES if run.outer.rule.synchronous else None
    table = LeaseTable(run.data.train_samples, BATCH, H, rounds=rounds, ramp=run.data.rampup_batch_size)
    first = [granted(table, name, 1) for name in NAMES]
    assert [(lease.start, lease.samples) for lease in first] == [(0, 4), (4, 6), (10, 8)]
    assert [steps_of(run, lease) for lease in first] == [[0, 1.5, 3, 6]] * 3
    later = steps_of(run, granted(table, "a", 2))
    assert later == ([9, 12, 15, 18] if rounds else [9, 10, 11, 12])
    assert (run.total_steps, run.inner_steps) == (36, 39)
