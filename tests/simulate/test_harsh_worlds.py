"""The harsher worlds of the study: who notices which trouble."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from benchmarks.studies.claims.exchange import world_for
from benchmarks.studies.claims.methods import METHODS
from benchmarks.studies.claims.worlds import WORLDS
from benchmarks.studies.environments import HALOS, Environment, load_environment, one_block
from geotrain.simulate.world import VirtualWorld, timing_task

pytestmark = pytest.mark.long("benchmarks/studies", "geotrain/simulate", "geotrain/outer/rules")

ENVIRONMENT = load_environment(HALOS)
STEPS = 3072
BOUND_S = STEPS / sum(1 / w.step_s for w in ENVIRONMENT.world.workers)
SYNC = ("diloco", "diloco-dylu", "diloco-fair")


@cache
def played(method: str, name: str) -> VirtualWorld:
    setting = WORLDS[name](ENVIRONMENT, BOUND_S)
    outer = METHODS[method].base
    task = timing_task(outer, one_block(ENVIRONMENT.numel), STEPS, 1)
    world = VirtualWorld(world_for(method, outer, setting.environment), task)
    world.run()
    return world


def seconds(method: str, name: str) -> float:
    return played(method, name).report()["seconds"]


@pytest.mark.parametrize(
    ("name", "slower"),
    [
        ("latency-100ms", (*SYNC, "async-local-sgd", "halos")),  # ours does not wait for answers
        ("shared-uplink", (*SYNC, "async-local-sgd", "halos", "region-momentum")),
        ("region-cut-off", (*SYNC, "halos")),  # in the others, somebody else trains the data
        ("workers-dying", (*SYNC, "async-local-sgd", "halos", "region-momentum")),
        ("late-join", ("diloco-dylu", "diloco-fair", "halos", "region-momentum")),  # equal rounds wait for others
        ("non-iid", ()),
    ],
)
def test_who_needs_longer(name, slower):
    methods = (*SYNC, "async-local-sgd", "halos", "region-momentum")
    ratio = {method: seconds(method, name) / seconds(method, "published") for method in methods}
    assert {method for method in methods if ratio[method] > 1.005} == set(slower), ratio


def test_who_is_cut_off_begins_later():
    def third_job_s(worker: str, name: str) -> float:
        return played("async-local-sgd", name).workers[worker].job_starts_s[2]

    assert third_job_s("worker-1-0", "region-cut-off") > third_job_s("worker-1-0", "published") + 3
    assert third_job_s("worker-2-0", "region-cut-off") == third_job_s("worker-2-0", "published")


@pytest.mark.parametrize("method", ["diloco-fair", "async-local-sgd", "halos", "region-momentum"])
def test_the_home_region_is_not_behind_the_shared_uplink(method):
    def first_job_s(worker: str, name: str) -> float:
        return played(method, name).workers[worker].job_starts_s[0]

    home = ENVIRONMENT.world.home
    assert home == "region-0"
    assert first_job_s("worker-0-0", "shared-uplink") == pytest.approx(
        first_job_s("worker-0-0", "published"), abs=0.1
    )
    assert first_job_s("worker-1-0", "shared-uplink") > first_job_s("worker-1-0", "published") + 3


def test_regions_with_their_own_text_differ_in_nothing_else():
    setting = WORLDS["non-iid"](ENVIRONMENT, BOUND_S)
    assert setting.environment == ENVIRONMENT and len(set(setting.quarter_of.values())) == 4


def test_a_ring_stands_still_while_any_region_is_cut_off():
    def cut(spans: dict[int, tuple[tuple[float, float], ...]]) -> Environment:
        regions = tuple(
            replace(r, link=replace(r.link, outages=spans.get(i, ())))
            for i, r in enumerate(ENVIRONMENT.world.regions)
        )
        return replace(ENVIRONMENT, world=replace(ENVIRONMENT.world, regions=regions))

    environment = cut({0: ((5.0, 7.0), (20.0, 30.0)), 2: ((6.0, 9.0),), 3: ((30.0, 31.0),)})
    outer = METHODS["diloco"].base
    for region in world_for("diloco", outer, environment).regions:
        assert region.link.outages == ((5.0, 9.0), (20.0, 31.0))
    with pytest.raises(ValueError, match="no outages and no deaths"):
        world_for("data-parallel", outer, environment)
