"""Sailor's scenarios: its simulator restated, and what the planner reaches in it."""

from __future__ import annotations

from math import log2

import pytest

from benchmarks.planner.sailor import Sailor, inventory, jobs, planned
from benchmarks.planner.spot import absences, measure


def test_the_simulator_by_hand() -> None:
    """A job of one stage has no transfers: ⌈1024 / (32 · 4)⌉ micro-batches of the profile's layers, an update, and
    a ring over 32 in buckets of 500 MB."""
    sailor = Sailor("OPT-350")
    profile = sailor.profiles["A100-40"]
    one_s = profile.compute_s[4, 1][-1]
    size = 4 * sum(runs[0] * runs[1][0] for runs in sailor.model["bytes"]["1"])

    def message_s(size: float) -> float:
        a, b, c = sailor.data["gbytes_per_s"]["us-central1-a A100-40 1"]
        megabytes = log2(size / 1e6)
        return size / 1e9 / (a * megabytes**2 + b * megabytes + c)

    ring_s = 62 * (3 * message_s(5e8 / 32) + message_s((size - 1.5e9) / 32))
    expected = 8 * one_s + profile.update_s[4, 1] + ring_s
    assert sailor.iteration("us-central1-a", "A100-40", 1, 1, 32, 4, 1024) == pytest.approx(expected)
    assert [sailor.fits("A100-40", 1, 1, micro) for micro in (2, 4)] == [True, False], (
        "24 bytes a parameter, all inputs"
    )


@pytest.mark.parametrize("scenario", ["homogeneous", "heterogeneous"])
def test_no_plan_is_beyond_the_bound_nor_below_one_job(scenario: str) -> None:
    sailor = Sailor("OPT-350")
    pool = {key: rows[0] for key, rows in sailor.data["availability"][scenario].items()}
    plan = planned(sailor, inventory(sailor, pool))
    assert plan is not None
    most, least = sailor.bounds(pool)
    every = jobs(sailor, pool)
    assert most >= plan.it_s >= max(it_s for it_s, _ in every)
    assert plan.usd_it >= least and min(usd for _, usd in every) >= least and max(every)[0] <= most
    for worker in plan.workers:
        assert not sailor.out_of_memory(worker.layout)
    cheap = planned(sailor, inventory(sailor, pool), objective="cost", tokens_per_s=0.5 * plan.it_s)
    assert cheap is not None and cheap.it_s >= 0.5 * plan.it_s and cheap.usd_it <= plan.usd_it
    assert planned(sailor, inventory(sailor, pool), objective="cost", tokens_per_s=1.01 * most) is None


def test_spot_hosts_train_nearly_what_a_clairvoyant_could() -> None:
    """Before, a region's spot hosts formed the fewest workers, each of which stopped when one of its hosts went: 0.79
    of the clairvoyant's steps."""
    trace = [(0.0, 2), (10.0, 1), (30.0, 2), (60.0, 2)]
    assert absences(trace, 0, 0.0) == [] and absences(trace, 1, 0.0) == [(10.0, 30.0)]
    assert absences(trace, 1, 20.0) == [(0.0, 10.0), (50.0, 60.0)], "from its middle on, it goes round"
    found = measure()
    assert found["taken_back"] == 12 and found["share"] > 0.9
