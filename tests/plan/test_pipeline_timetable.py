"""The pipeline's timetable against what is known of it."""

from __future__ import annotations

from itertools import product

import pytest

from geotrain.plan.model.pipeline import Stages, pipeline_seconds, timetable


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 1), (2, 6), (4, 2), (4, 16), (8, 40)])
def test_equal_stages_with_free_transfers_take_the_published_time(p: int, m: int) -> None:
    """(m + p − 1) · t: Narayanan et al., arXiv 2104.04473, section 2.2."""
    stages = Stages((1.0,) * p, (2.0,) * p, (0.0,) * (p - 1))
    assert timetable(stages, m) == pytest.approx(3.0 * (m + p - 1))


def by_hand(stages: Stages, m: int) -> float:
    """The same timetable, all stages advanced together until nothing changes (a fixed point over every event)."""
    p = len(stages.forward_s)
    programs: list[list[tuple[float, list[tuple[str, int, int]]]]] = []
    for s in range(p):
        f, b = stages.forward_s[s], stages.backward_s[s]
        up, down = s > 0, s < p - 1
        warm = min(p - s - 1, m)
        program: list[tuple[float, list[tuple[str, int, int]]]] = []
        arrivals, departures = iter(range(m)), iter(range(m))
        for _ in range(warm):
            program.append((0.0, [("F", s - 1, next(arrivals))] if up else []))
            program.append((f, [("F", s, next(departures))] if down else []))
        if m > warm:
            program.append((0.0, [("F", s - 1, next(arrivals))] if up else []))
        for i in range(m - warm):
            program.append((f, ([("F", s, next(departures)), ("B", s, i)]) if down else []))
            back = [("B", s - 1, i)] if up else []
            coming = next(arrivals, None)
            program.append((b, back + ([("F", s - 1, coming)] if up and coming is not None else [])))
        for i in range(m - warm, m):
            program.append((0.0, [("B", s, i)] if down else []))
            program.append((b, [("B", s - 1, i)] if up else []))
        programs.append(program)
    begin = {(s, k): 0.0 for s, program in enumerate(programs) for k in range(len(program))}
    while True:
        reached = {t: [] for program in programs for _, ts in program for t in ts}  # type: ignore[var-annotated]
        for s, program in enumerate(programs):
            for k, (work, transfers) in enumerate(program):
                for t in transfers:
                    reached[t].append(begin[s, k] + work)
        assert all(len(ends) == 2 for ends in reached.values())
        after, last = {}, 0.0
        for s, program in enumerate(programs):
            now = 0.0
            for k, (work, transfers) in enumerate(program):
                after[s, k] = now
                now = max([now + work, *(max(reached[t]) + stages.edge_s[t[1]] for t in transfers)])
            last = max(last, now)
        if after == begin:
            return last
        begin = after


@pytest.mark.parametrize(("p", "m"), list(product((2, 3, 4), (1, 2, 5, 9))))
def test_unequal_stages_and_dear_transfers(p: int, m: int) -> None:
    stages = Stages(
        tuple(1.0 + 0.5 * s for s in range(p)),
        tuple(2.0 - 0.25 * s for s in range(p)),
        tuple(0.125 + 2.0 * s for s in range(p - 1)),
    )
    assert timetable(stages, m) == pytest.approx(by_hand(stages, m))


def test_many_micro_batches_go_on_as_few_do() -> None:
    stages = Stages((1.0, 1.5, 0.5), (2.0, 2.5, 1.0), (0.75, 3.0))
    assert pipeline_seconds(stages, 100) == pytest.approx(timetable(stages, 100), rel=1e-9)
    slow_edge = Stages((1.0,) * 4, (2.0,) * 4, (1.0, 5.0, 1.0))
    assert pipeline_seconds(slow_edge, 64) == pytest.approx(timetable(slow_edge, 64), rel=1e-9)
