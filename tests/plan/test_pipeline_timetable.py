"""The pipeline's timetable against what is known of it."""

from __future__ import annotations

import pytest

from geotrain.plan.model.pipeline import Stages, pipeline_seconds, timetable


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 1), (2, 6), (4, 2), (4, 16), (8, 40)])
def test_equal_stages_with_free_transfers_take_the_published_time(p: int, m: int) -> None:
    """(m + p − 1) · t: Narayanan et al., arXiv 2104.04473, section 2.2."""
    stages = Stages((1.0,) * p, (2.0,) * p, (0.0,) * (p - 1))
    assert timetable(stages, m) == pytest.approx(3.0 * (m + p - 1))


def test_many_micro_batches_go_on_as_few_do() -> None:
    stages = Stages((1.0, 1.5, 0.5), (2.0, 2.5, 1.0), (0.75, 3.0))
    assert pipeline_seconds(stages, 100) == pytest.approx(timetable(stages, 100), rel=1e-9)
    slow_edge = Stages((1.0,) * 4, (2.0,) * 4, (1.0, 5.0, 1.0))
    assert pipeline_seconds(slow_edge, 64) == pytest.approx(timetable(slow_edge, 64), rel=1e-9)
