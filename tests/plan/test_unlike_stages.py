"""Pipelines whose stages stand on unlike kinds of accelerators and hold unlike numbers of layers, against every
division, tried one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from geotrain.commands import dry_run
from geotrain.config import ClusterConfig, ParallelConfig, RunConfig, parse
from geotrain.launch.run_rules import misfits
from geotrain.plan.choice import effective
from geotrain.plan.grouping import form_workers
from geotrain.plan.inventory import Pins
from geotrain.plan.layouts import Refusals, evaluated
from geotrain.plan.model.division import divide_within
from geotrain.plan.planner import Plan
from geotrain.plan.spanning import mixed_layouts
from tests.support.plan_cases import MODEL, holds, inventory, planned, small_run, task

SLOW = {"tflops": 40.0}


def every_division(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise((0, *inner, layers)))


@pytest.mark.parametrize("seed", range(24))
def test_layers_are_divided_in_the_best_way_that_fits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, stages = int(rng.integers(4, 10)), int(rng.integers(1, 5))
    speeds, each_s = rng.choice([1.0, 2.0, 3.3], stages), rng.choice([1.0, 1.5], layers)
    fixed, grows = rng.random(stages), rng.random(stages)
    rooms = fixed + grows * rng.integers(1, layers, stages) + 1e-9
    sums = [np.array([0.0, *np.cumsum(each_s)]) / speed for speed in speeds]

    def needs(held: tuple[int, ...]) -> list[tuple[float, float]]:
        return list(zip(fixed + grows * held, rooms, strict=True))

    def cost(held: tuple[int, ...]) -> tuple[float, float]:
        ends = [0, *itertools.accumulate(held)]
        took = [sums[s][ends[s + 1]] - sums[s][ends[s]] for s in range(stages)]
        return round(max(took), 9), round(sum(took), 4)

    fitting = [held for held in every_division(layers, stages) if all(need <= room for need, room in needs(held))]
    found = divide_within(sums, needs)
    assert (found is None) == (not fitting)
    if found is not None:
        assert found in fitting and cost(found) == min(map(cost, fitting))


@pytest.mark.parametrize(
    ("slow", "best_of"), [(SLOW, 0.995), ({**SLOW, "memory_gb": 5.0}, 0.995), ({**SLOW, "memory_gb": 0.5}, None)]
)
def test_a_worker_of_unlike_stages_is_the_fastest_of_all(slow: dict[str, Any], best_of: float | None) -> None:
    """Every division of the layers, in both orders of the kinds, by the cost model."""
    run = small_run(model={"config": {**MODEL, "num_hidden_layers": 8}})
    asked = task(run, inventory({"a": [(4, "d"), (4, "s")]}, s=slow))
    hosts, best = asked.hosts["a"], float("inf")
    for tp, width, order, micro in itertools.product((1, 2, 4), (1, 2, 4), (1, -1), (1, 2, 4)):
        if width < tp:
            continue
        pipeline = 8 // width
        for layers in every_division(8, pipeline):
            unlike = layers if len(set(layers)) > 1 else None
            parallel = ParallelConfig(tensor=tp, pipeline=pipeline, sequence=tp > 1, stage_layers=unlike)
            found = evaluated(asked, hosts[::order], 4, parallel, micro, Refusals())
            best = min(best, found.step.step_s if found else best)
    found = mixed_layouts(asked, hosts, Refusals())
    assert bool(found) == (best_of is not None) == (best < float("inf"))
    if best_of is not None:
        assert found[0].step.step_s >= best - 1e-9 >= best_of * found[0].step.step_s


def kinds(plan: Plan) -> set[tuple[str, ...]]:
    return {tuple(sorted({host.kind for host in w.layout.hosts})) for w in plan.workers.values()}


@pytest.mark.parametrize(
    ("slow", "wish", "pins", "found"),
    [
        (SLOW, {"tokens": 1e8}, Pins(), {("d", "s")}),  # of two workers the loss would be higher
        (SLOW, {"tokens": 1e11}, Pins(), {("d",), ("s",)}),  # here it hardly is, and two train faster
        ({**SLOW, "memory_gb": 0.5}, {"tokens": 1e8}, Pins(), {("d",)}),  # not one layer fits
        ({**SLOW, "memory_gb": 5.0}, {"tokens": 1e8}, Pins(), {("d", "s")}),  # the whole model does not, a part does
        (SLOW, {"tokens": 1e8}, Pins(pipeline=1), {("d",)}),
        ({**SLOW, "usd_per_hour": 9.0}, {"tokens": 1e8, "objective": "cost"}, Pins(), {("d",)}),
    ],
)
def test_kinds_are_mixed_where_that_is_better(
    slow: dict[str, Any], wish: dict[str, Any], pins: Pins, found: set[tuple[str, ...]]
) -> None:
    plan = planned(small_run(), inventory({"a": [(4, "d")] * 2 + [(4, "s")] * 2}, s=slow), pins, **wish)
    holds(plan)
    assert kinds(plan) == found
    assert not list(misfits(plan.run, plan.cluster))
    if wish.get("objective") != "cost":
        mine = effective(plan.task, plan.wish, tuple(plan.workers.values()))
        for groups in form_workers(plan.task, Refusals()):
            every = [w for group in groups for w in group[0]]
            for some in itertools.chain(*(itertools.combinations(every, n + 1) for n in range(len(every)))):
                assert mine >= effective(plan.task, plan.wish, some) * (1 - 1e-12), (
                    "of every subset of every division"
                )
    if found == {("d", "s")}:
        (worker,) = plan.workers.values()
        run = parse(RunConfig, plan.run.model_dump(by_alias=True, mode="json"), "run.json")
        cluster = parse(ClusterConfig, plan.cluster.model_dump(by_alias=True, mode="json"), "cluster.json")
        ((_, launched),) = cluster.workers
        assert launched.parallel == worker.layout.parallel and launched.parallel.stage_layers is not None
        assert plan.prediction.workers["a-0"].step_s == worker.layout.step.step_s
        # Layouts are found before the outer loop's settings, with those of the run file.
        (needs,) = dry_run.needs(run.model_copy(update={"outer": plan.task.base.outer}), cluster).workers
        assert sum(needs.memory.values()) == worker.layout.memory_bytes and "layers)" in needs.layout
