"""The published environments, replayed through the production's state machines, give the published figures."""

from __future__ import annotations

import pytest

from benchmarks import ROOT
from benchmarks.studies.claims.exchange import world_for
from benchmarks.studies.environments import HALOS, load_environment, one_block
from geotrain.config import load_run
from geotrain.simulate.world import VirtualWorld, timing_task

ENVIRONMENT = load_environment(HALOS)

# HALoS (arXiv 2506.04531), Pythia-70M, 12.9 B tokens: hours of an event replay of the published settings.
WHOLE = pytest.mark.long("geotrain/simulate", "geotrain/outer/rules")
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


@pytest.mark.parametrize("method", [pytest.param(m, marks=[] if m == "halos" else WHOLE) for m in HOURS])
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
