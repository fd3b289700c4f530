"""Every sample is handed out, and committed, exactly once, whatever dies."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.outer.messages import Finished, Lease, LeaseRequest, Refused
from geotrain.outer.server.lease_requests import patience_s
from geotrain.outer.server.leases import LeaseTable
from geotrain.outer.server.region_leases import RegionLeases
from tests.support.outer_world import config

RAMP = 1, 1, 30  # ten steps of one sample, five of two, four of three; then sixteen of four: 35 steps


def test_what_a_copy_contains_is_not_handed_out_again() -> None:
    table = LeaseTable(12, 4, 1, fragments=2, may_go_back=True)
    first, second = (table.grant(LeaseRequest("a", job)) for job in (1, 2))
    assert isinstance(first, Lease) and isinstance(second, Lease)
    for version, lease in ((4, first), (5, second)):
        assert [table.contain((lease.lease,), fragment, version) for fragment in (0, 1)] == [0, 4]
    assert table.go_back({0: 4}) == 4 and table.pool == [(4, 4)] and table.committed_samples == 4


@given(st.lists(st.sampled_from(["grant", "commit", "die"]), max_size=40), st.integers(0, 40))
def test_after_a_rollback_nothing_is_trained_that_came_since(events, at):
    """What the older table had committed stays so; what the newer one had handed out beside it is set aside."""
    table, saved, committed, handed, open_leases = LeaseTable(192, 4, 3), None, set(), set(), []
    for number, what in enumerate(events):
        if number == at:
            saved = json.loads(json.dumps(table.state())), set(committed)
        if what == "grant":
            lease = table.grant(LeaseRequest("a", number + 1))
            assert isinstance(lease, Lease)
            open_leases.append(lease)
            handed |= {*range(lease.start, lease.start + lease.samples)}
        elif open_leases:
            lease = open_leases.pop(0)
            samples = {*range(lease.start, lease.start + lease.samples)}
            if what == "commit":
                table.contain((lease.lease,), 0)
                committed |= samples
            else:
                table.release((lease.lease,))
                handed -= samples
    older = LeaseTable(192, 4, 3)
    before, done = saved or (table.state(), set(committed))
    older.load(json.loads(json.dumps(before)))
    skipped = older.skip_to(table)
    aside = {n for start, size in older.aside for n in range(start, start + size)}
    assert aside == handed - done and skipped == len(aside) == older.set_aside_samples
    left, job = set(), 1000
    while isinstance(lease := older.grant(LeaseRequest("b", job)), Lease):
        assert lease.lease >= table.next_lease
        left |= {*range(lease.start, lease.start + lease.samples)}
        older.contain((lease.lease,), 0)
        job += 1
    assert left == {*range(192)} - done - aside and older.finished


def test_jobs_of_unlike_speeds_come_to_end_together():
    """Whenever they began, also after a restart, and where a clock was set."""
    settings: Any = {"local_steps": 32, "scale_local_steps": True, "together": True}
    table, speeds, now_s = LeaseTable(10_000, 1, **settings), {"fast": 1.0, "slow": 1.5, "like": 1.02}, 1000.0
    ends_s, jobs, clock_s = {"fast": now_s, "slow": now_s + 9.0, "like": now_s + 17.0}, Counter[str](), 0.0
    lengths = defaultdict[str, list[int]](list)
    for event in range(120):
        worker = min(ends_s, key=lambda name: ends_s[name])  # it begins its next job, and asks for the one after
        now_s, jobs[worker] = ends_s[worker], jobs[worker] + 1
        clock_s = 1e6 if event >= 60 else 0.0
        lease = table.grant(LeaseRequest(worker, jobs[worker] + 1, speeds[worker], clock_s + now_s))
        assert isinstance(lease, Lease)
        lengths[worker].append(lease.steps)
        steps = lengths[worker][-2] if jobs[worker] > 1 else 32
        ends_s[worker] = now_s + steps * speeds[worker]
        late_s = max(ends_s.values()) - min(ends_s.values())
        if 30 < event < 60 or event > 80:
            assert late_s < 2.0 or late_s > 28.0, "they end within a step and a half, or one has begun its next"
        saved = table.state()
        table = LeaseTable(10_000, 1, **settings)
        table.load(json.loads(json.dumps(saved)))
    assert set(lengths["fast"]) == {32} and max(max(each) for each in lengths.values()) <= 48


@pytest.mark.parametrize("samples", range(150, 330, 20))
@pytest.mark.parametrize("speeds", [(1.0, 1.03), (1.0, 1.03, 1.06, 1.1)])
def test_the_last_jobs_of_all_end_together_and_none_is_a_short_one(speeds: tuple[float, ...], samples: int) -> None:
    table = LeaseTable(samples * len(speeds), 1, 32, scale_local_steps=True, together=True)
    names = [f"w{i}" for i in range(len(speeds))]
    ends_s, jobs = {name: 1000.0 + 3.0 * i for i, name in enumerate(names)}, Counter[str]()
    steps: dict[str, list[Lease]] = {name: [] for name in names}
    step_s = dict(zip(names, speeds, strict=True))
    for name in names:
        first = table.grant(LeaseRequest(name, 1))
        assert isinstance(first, Lease)
        steps[name].append(first)
    working = set(names)
    while working:
        worker = min(working, key=lambda name: ends_s[name])  # it begins its next job, and asks for the one after
        now_s, jobs[worker] = ends_s[worker], jobs[worker] + 1
        if jobs[worker] > 1:
            table.contain((steps[worker][jobs[worker] - 2].lease,), 0)
        if jobs[worker] > len(steps[worker]):
            working.discard(worker)
            continue
        lease = table.grant(LeaseRequest(worker, jobs[worker] + 1, step_s[worker], now_s))
        if isinstance(lease, Lease):
            steps[worker].append(lease)
        ends_s[worker] = now_s + steps[worker][jobs[worker] - 1].steps * step_s[worker]
    assert table.finished and len({len(leases) for leases in steps.values()}) == 1
    lengths = [lease.steps for leases in steps.values() for lease in leases]
    assert min(lengths) >= 16 and max(lengths) <= 48
    assert max(ends_s.values()) - min(ends_s.values()) < 8.0


def test_a_lease_that_came_back_is_committed_once_and_the_run_waits_for_those_that_are_out() -> None:
    table = LeaseTable(8, 1, local_steps=4)
    for worker in "ab":
        assert isinstance(table.grant(LeaseRequest(worker, 1)), Lease)
    assert not table.finished
    table.release((1,))
    assert [table.gone((1,)), table.contain((1,), 0), table.contain((1,), 0)] == [(), 4, 0]
    assert not table.finished and table.contain((2,), 0) == 4 and table.finished


def test_a_lease_is_had_again_while_it_is_whole_in_the_pool() -> None:
    table = LeaseTable(20, 1, local_steps=4)
    for job in (1, 2):
        assert isinstance(table.grant(LeaseRequest("a", job)), Lease)
    table.release((1, 2))
    table.local_steps = 2
    assert table.grant(LeaseRequest("b", 1)) == Lease("b", 1, 3, 0, 2, 2)
    assert table.gone((1, 2, 3, 9)) == (1,) and table.contain((1,), 0) == 0
    table.take_back((1, 2))
    assert list(table.open) == [3, 2] and table.pool == [(2, 2)] and table.gone((1, 2)) == (1,)
    table.release((2, 3))
    assert table.gone((1, 2, 3)) == ()
    assert isinstance(table.grant(LeaseRequest("a", 2)), Lease)  # it would have two leases for one job
    assert table.gone((2,)) == (2,)


def test_an_automatic_reserve_lasts_a_minute_and_is_a_fiftieth_of_the_run_at_most() -> None:
    leases = RegionLeases(("a",), config(lease_reserve="auto", local_steps=2), in_rounds=False)
    steps_s = 0.0, 1e-3, 4.0, 10.0, 60.0
    for jobs, wanted in (
        (0.0, [0] * 5),
        (75.0, [0, 1, 1, 1, 1]),
        (150.0, [0, 3, 3, 3, 1]),
        (500.0, [0, 10, 8, 3, 1]),
    ):
        leases.jobs_each = jobs
        assert [leases.reserve("a", step_s) for step_s in steps_s] == wanted
    leases.jobs_each = 500.0
    assert list(leases.ask("a", 1, 9, 10.0)) == [2, 3, 4] and list(leases.ask("a", 2, 9, 10.0)) == [5]


def test_who_holds_leases_may_be_silent_for_ten_times_what_they_take_and_half_an_hour_at_least() -> None:
    short, long = Lease("a", 1, 1, 0, 2, 2), Lease("a", 2, 2, 2, 20, 20, validate=1)
    told = [patience_s(held, step_s, 5) for held in ([], [short], [short, long]) for step_s in (0.0, 1.0, 100.0)]
    assert told == [math.inf] * 4 + [1800.0, 2000.0, math.inf, 1800.0, 25_000.0]


def test_rounds_with_scaled_steps_hand_out_every_sample_once():
    """DyLU in a synchronous run: the slow worker takes fewer steps, and no two places overlap."""
    coordinator = LeaseTable(60, 2, 4, scale_local_steps=True, rounds=("fast", "slow"))
    trained, steps = [], []
    for job in range(1, 20):
        for worker, step_s in (("slow", 0.4), ("fast", 0.1)):
            state = json.loads(json.dumps(coordinator.state()))
            coordinator = LeaseTable(60, 2, 4, scale_local_steps=True, rounds=("fast", "slow"))
            coordinator.load(state)
            lease = coordinator.grant(LeaseRequest(worker, job, step_s))
            if isinstance(lease, Lease):
                trained += range(lease.start, lease.start + lease.samples)
                steps.append((worker, lease.steps))
    assert steps[:2] == [("slow", 4), ("fast", 4)]  # the fast one had not told its speed when the round was laid out
    assert steps[2:4] == [("slow", 1), ("fast", 4)]
    assert len(set(trained)) == len(trained) == 56  # 16, then 10 a round; the last 4 do not make a round


def test_a_speed_that_changes_moves_everyones_share():
    coordinator = LeaseTable(10_000, 1, 8, scale_local_steps=True)

    def steps(worker: str, job: int, step_s: float) -> int:
        lease = coordinator.grant(LeaseRequest(worker, job, step_s))
        assert isinstance(lease, Lease)
        return lease.steps

    assert [steps("a", 1, 0.1), steps("b", 1, 0.4)] == [8, 2]
    assert [steps("a", 2, 0.2), steps("b", 2, 0.4)] == [8, 4]  # the fastest slowed down
    assert [steps("b", 3, 0.1), steps("a", 3, 0.2)] == [8, 4]


def test_while_the_batch_grows_whole_steps_are_skipped_and_jobs_keep_their_number_of_steps():
    table = LeaseTable(96, 4, 4, ramp=RAMP)
    table.skip_samples([(11, 11), (24, 25)])  # a step of two, and two steps of three
    leases = [table.grant(LeaseRequest("a", job)) for job in range(1, 12)]
    given = [(lease.start, lease.samples, lease.steps) for lease in leases if isinstance(lease, Lease)]
    assert given[:5] == [(0, 4, 4), (4, 4, 4), (8, 2, 2), (12, 8, 4), (20, 3, 1)]
    assert sum(samples for _, samples, _ in given) == 96 - 2 - 3 and given[5] == (26, 14, 4)

    rounds = LeaseTable(96, 4, 3, rounds=("a", "b"), ramp=RAMP)
    places = [rounds.grant(LeaseRequest(worker, job)) for job in (1, 2, 3) for worker in "ba"]
    assert [(p.start, p.samples, p.steps) for p in places] == [
        (3, 3, 3), (0, 3, 3), (9, 5, 3), (6, 3, 3), (20, 9, 3), (14, 6, 3),
    ]  # fmt: skip
    rounds.fail([places[4].lease])
    rounds.fail([places[4].lease])  # twice: other samples, as many steps
    again = rounds.grant(LeaseRequest("b", 3))
    assert (again.start, again.samples, again.steps) == (29, 11, 3)


def test_bad_requests():
    with pytest.raises(ValueError, match="train_samples = 10 is not a multiple of a step's 4 samples"):
        LeaseTable(10, 4, 1)
    with pytest.raises(ValueError, match="train_samples = 95 is not the end of a step; use 92"):
        LeaseTable(95, 4, 1, ramp=RAMP)
    with pytest.raises(Refused, match="'c' is not one of this synchronous run's: a, b"):
        LeaseTable(100, 2, 3, rounds=("a", "b")).grant(LeaseRequest("c", 1))


def test_what_fails_twice_is_set_aside_by_the_samples_that_both_had_and_no_more_than_a_share() -> None:
    table = LeaseTable(400, 1, local_steps=4)
    granted = [table.grant(LeaseRequest("a", job)) for job in range(1, 12)]
    assert table.fail([1, 2]) == [] and table.pool == [(0, 4), (4, 4)]
    table.local_steps = 3  # as other workers' leases may be cut
    assert [table.grant(LeaseRequest("b", job)).samples for job in (1, 2)] == [3, 1]
    assert table.fail([12]) == [(0, 3)] and table.set_aside_samples == 3
    assert table.fail([lease.lease for lease in granted[2:]]) == []
    table.local_steps = 36
    for job in range(12, 21):  # all of it fails again: up to a twentieth of the run is set aside
        assert isinstance(table.grant(LeaseRequest("a", job)), Lease)
    table.local_steps = 4
    table.fail(list(table.open))
    assert table.set_aside_samples == 20 and sum(size for _, size in table.pool) == 44 - 20
    assert table.gone((1,)) == (1,) and table.contain((1,), 0) == 0 and table.set_aside_samples == 20
    state = json.loads(json.dumps(table.state()))
    back = LeaseTable(400, 1, local_steps=4)
    back.load(state)
    assert back.state() == table.state() and back.set_aside_samples == 20


def test_what_spoils_the_last_round_is_set_aside_for_what_its_worker_had_before_which_counts_once() -> None:
    table = LeaseTable(16, 2, local_steps=2, rounds=("a", "b"))

    def lease(worker: str, job: int) -> Lease:
        return table.grant(LeaseRequest(worker, job))  # type: ignore[return-value]

    assert table.contain([lease("a", 1).lease, lease("b", 1).lease], 0) == 8
    bad = lease("a", 2).lease
    assert table.fail([bad]) == [] and table.fail([bad]) == [(8, 4)]
    again, other = lease("a", 2), lease("b", 2)
    assert [(each.start, each.samples) for each in (again, other)] == [(0, 4), (12, 4)]
    assert table.fail([again.lease]) == table.fail([again.lease]) == []  # its worker is to blame, not the data
    assert table.contain([again.lease, other.lease], 0) == 4
    assert table.finished and table.committed_samples + table.set_aside_samples == 16


def test_skipped_samples_are_left_out_in_whole_steps_and_come_back_when_they_are_skipped_no_more() -> None:
    table = LeaseTable(24, 2, local_steps=4)
    table.skip_samples([(5, 6), (22, 23)])
    leases = [table.grant(LeaseRequest("a", job)) for job in (1, 2)]
    assert [(lease.start, lease.samples) for lease in leases] == [(0, 4), (8, 8)]
    table.skip_samples([(17, 17)])
    assert table.pool == [(4, 4)] and table.skip == [(16, 2)]
    rest = [table.grant(LeaseRequest("a", job)) for job in (3, 4, 5)]
    assert [(lease.start, lease.samples) for lease in rest[:2]] == [(4, 4), (18, 6)] and isinstance(rest[2], Finished)
    assert table.contain(tuple(table.open), 0) == 22 and table.finished and table.set_aside_samples == 2


def test_a_reserve_asked_for_beyond_a_job_without_data_does_not_dismiss_its_worker():
    table = LeaseTable(16, 4, 2)
    mine, other = (table.grant(LeaseRequest(worker, 1)) for worker in "ab")
    assert isinstance(table.grant(LeaseRequest("a", 2)), Finished)
    assert [table.grant(LeaseRequest("a", job)) for job in (3, 4, 5)] == [None] * 3  # its region's reserve
    assert isinstance(table.grant(LeaseRequest("a", 2)), Finished)
    assert table.contain((mine.lease,), 0) and table.grant(LeaseRequest("a", 3)) is None
    table.release((other.lease,))
    again = table.grant(LeaseRequest("a", 3))
    assert isinstance(again, Lease)
    assert isinstance(table.grant(LeaseRequest("a", 4)), Finished)  # so that it sends what it has of job 3
    assert table.grant(LeaseRequest("a", 5)) is None
    table.contain((again.lease,), 0)
    assert isinstance(table.grant(LeaseRequest("a", 5)), Finished)
