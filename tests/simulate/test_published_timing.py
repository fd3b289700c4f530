"""The published environments, replayed through the production's state machines, give the published figures."""

from __future__ import annotations

import pytest

from benchmarks import ROOT
from benchmarks.studies.bandwidth import (
    PUBLISHED,
    PUBLISHED_SHAPES,
    SETTINGS,
    freshness,
    nearest,
    needed_gbps,
    ours,
    utilization,
)
from benchmarks.studies.claims.exchange import world_for
from benchmarks.studies.environments import HALOS, load_environment, one_block
from geotrain.config import load_run
from geotrain.simulate.world import VirtualWorld, timing_task

ENVIRONMENT = load_environment(HALOS)

# HALoS (arXiv 2506.04531), Pythia-70M, 12.9 B tokens: hours of an event replay of the published settings.
HOURS = {
    "data-parallel": 60.2,
    "diloco": 5.22,
    "diloco-dylu": 3.50,
    "async-local-sgd": 1.14,
    "async-local-sgd-h128": 0.83,
    "halos": 0.676,
}


def test_the_environment_is_the_published_one():
    assert ENVIRONMENT.compute_bound_s / 3600 == pytest.approx(0.658, rel=0.002)
    assert ENVIRONMENT.ring_gbps == 0.127


@pytest.mark.parametrize("method", HOURS)
def test_hours_of_the_published_environment(method):
    outer = load_run(ROOT / f"configs/runs/baselines/{method}.json").outer
    workers = 16 if method == "data-parallel" else 1  # data parallelism: one worker whose step is everyone's
    task = timing_task(
        outer,
        one_block(ENVIRONMENT.numel),
        ENVIRONMENT.steps // workers,
        ENVIRONMENT.samples_per_step * workers,
    )
    report = VirtualWorld(world_for(method, outer, ENVIRONMENT), task).run()
    assert report["finished"]
    assert report["hours"] == pytest.approx(HOURS[method], rel=0.02)
    assert report["trained_steps"] * workers == pytest.approx(ENVIRONMENT.steps, rel=0.005)


@pytest.mark.long("benchmarks/studies", "geotrain/simulate", "geotrain/outer/rules")
@pytest.mark.parametrize("row", PUBLISHED)
def test_bandwidth_for_a_utilization(row):
    """Each cell within one point of the paper's grid (±20 %), and nearly all of them on it."""
    exact = 0
    for model, published in zip(PUBLISHED_SHAPES, PUBLISHED[row], strict=True):
        for got, want in zip(needed_gbps(SETTINGS[row], model), published, strict=True):
            assert abs(nearest(got) - nearest(want)) <= 1, (row, model.name, got, want)
            exact += nearest(got) == nearest(want)
    assert exact >= 11, f"{exact} of 15 cells on the very grid point"


@pytest.mark.long("benchmarks/studies", "geotrain/simulate", "geotrain/outer/rules")
def test_a_thin_link_costs_ours_freshness():
    """Its workers never wait: a link shows in how many updates reach the global server."""
    model = PUBLISHED_SHAPES[0]
    assert utilization(ours(), model, 0.1, jobs=40) == pytest.approx(1.0)
    # 100 steps of 0.1 s between sends; a message of 0.5 GB goes up, and one comes down
    assert freshness(ours(), model, 10.0, sends=100) > 0.97
    assert freshness(ours(), model, 0.2, sends=100) == pytest.approx(10 / (2 * 4.1 / 0.2), rel=0.15)
    assert needed_gbps(ours(), model, (0.5,), freshness)[0] == pytest.approx(0.5 * 2 * 4.1 / 10, rel=0.25)
