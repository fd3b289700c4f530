"""How replicas share a step's micro-batches, against sums by hand and bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.plan.model.pipeline import Stages, claimed_shares, even_shares, pipeline_seconds


def one_stage(seconds: float) -> Stages:
    return Stages((seconds / 3,), (2 * seconds / 3,), ())


def test_a_slow_replica_takes_fewer() -> None:
    fast, slow = one_stage(1.0), one_stage(4.0)
    even = even_shares((fast, slow), (5, 0))
    assert even.micro_batches == (5, 5)
    assert even.part_s == pytest.approx((20.0, 0.0))
    claimed = claimed_shares((fast, slow), (5, 0))
    assert claimed.micro_batches == (8, 2)
    assert claimed.part_s == pytest.approx((8.0, 0.0))


def test_each_part_is_a_pool_of_its_own() -> None:
    claimed = claimed_shares((one_stage(1.0), one_stage(4.0)), (4, 1))
    assert claimed.micro_batches == (6 + 1, 2 + 1), "whoever is slow takes one of a part of two"
    assert claimed.part_s == pytest.approx((8.0, 4.0))


def test_a_pipeline_fills_anew_for_all_that_it_takes() -> None:
    """Of two stages: two micro-batches at once, (2 + 2 − 1) · t; four at once are (4 + 2 − 1) · t."""
    pair = Stages((0.5, 0.5), (0.5, 0.5), (0.0,))
    assert even_shares((pair, pair), (4, 0)).part_s == pytest.approx((5.0, 0.0))
    assert claimed_shares((pair, pair), (4, 0)).part_s == pytest.approx((6.0, 0.0))
    assert claimed_shares((pair, pair), (1, 0)).part_s == pytest.approx((2.0, 0.0)), "there is only one for each"


@given(
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(0, 5),
)
def test_all_is_done_once_and_nobody_waits_longer_than_for_one_claim(
    seconds: list[float], stages: int, first: int, second: int
) -> None:
    replicas = tuple(Stages((s,) * stages, (2 * s,) * stages, (0.0,) * (stages - 1)) for s in seconds)
    shares = claimed_shares(replicas, (first, second))
    assert sum(shares.micro_batches) == (first + second) * len(replicas)
    assert len(shares.part_s) == 2
    for part, took in zip((first, second), shares.part_s, strict=True):
        if not part:
            assert took == 0.0
            continue
        width = min(stages, part)
        claims = [pipeline_seconds(r, width) for r in replicas]
        full_speed = part * len(replicas) / sum(width / claim for claim in claims)
        assert full_speed <= took * (1 + 1e-9)
        assert took <= full_speed + max(claims) * (1 + 1e-9)
