"""The rules that benchmarks/studies/delay.py tries in place of the product's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import benchmarks.studies.delay as delay
from benchmarks.studies.delay import RESULTS, TRIALS, Agreeing, Foreseen, LookAhead, quasi_hyperbolic, run
from geotrain.config import rule_config
from geotrain.outer.rules import Vectors
from geotrain.outer.rules.region_momentum import MomentumRegion
from geotrain.parameters.parameter_map import Parameter, ParameterMap
from geotrain.simulate.world import VirtualWorld

TINY = {"hidden": 16, "layers": 1, "heads": 2, "ffn": 32, "batch": 1, "length": 16}
SIXTEEN = "16 workers, 2 bits, K 2"
LAYOUT = ParameterMap([Parameter("a", (2,), None, "normal"), Parameter("b", (2,), None, "normal")])


def test_looking_ahead_moves_by_what_the_others_did_and_sends_none_of_it():
    rule = LookAhead(rule_config("region_momentum", merge_alpha=1.0), 1, 0.9, ahead=0.5, regions=4)
    state = Vectors(torch.zeros(2))
    rule.begin(state)
    rule.progress(state, {})
    rule.merge(state, torch.tensor([1.0, 1.0]))
    assert state.x.tolist() == [1.0, 1.0]  # of the first answer it is not known how much of it is news
    state.x -= torch.tensor([4.0, 0.0])
    sent = rule.progress(state, {})
    assert sent.tolist() == [4.0, 0.0]
    rule.merge(state, torch.tensor([0.0, 3.0]))  # a fourth of what was sent, and 2 by the others
    assert state.x.tolist() == [0.0, 4.0]
    assert rule.progress(state, {}).tolist() == [0.0, 0.0]


def test_what_was_foreseen_is_taken_back_with_the_next_delta():
    rule, state = Foreseen(1, ahead=0.5), Vectors(torch.zeros(1))
    for delta, x in ((1.0, -1.5), (1.0, -2.5), (0.0, -2.0), (0.0, -2.0)):
        rule.apply(state, "r", torch.tensor([delta]), {})
        assert state.x.item() == pytest.approx(x)


def test_a_delta_against_the_others_loses_what_points_against_them():
    rule, state = Agreeing(1, LAYOUT), Vectors(torch.zeros(4))
    rule.apply(state, "r", torch.zeros(4), {})
    rule.apply(state, "other", torch.tensor([1.0, 0.0, 1.0, 0.0]), {})
    before = state.x.clone()
    rule.apply(state, "r", torch.tensor([-3.0, 2.0, 3.0, 2.0]), {})  # against it in a, with it in b
    assert (before - state.x).tolist() == [0.0, 2.0, 3.0, 2.0]


def test_quasi_hyperbolic_momentum_is_the_region_rules_own_with_another_split():
    config = rule_config("region_momentum")
    made = quasi_hyperbolic(0.7, 2.0)(config, workers=4, decay=0.9)
    state, m, x = Vectors(torch.zeros(1)), 0.0, 0.0
    for delta in (1.0, -2.0, 0.5):
        made.apply(state, "w", torch.tensor([delta]), {})
        m = 0.9 * m + 0.1 * delta
        x -= 2.0 * (0.7 * m + 0.3 * delta) / 4
        assert state.x.item() == pytest.approx(x)
    # of so many updates that the gain is whole
    product, same = MomentumRegion(config, 4, 0.96), quasi_hyperbolic(0.5, 2.0)(config, 4, 0.96)
    assert (same.gain, same.weight) == (product.gain, product.weight)


@pytest.fixture(scope="module")
def plain() -> dict[str, dict]:
    return {name: run(TRIALS[name], 0, 320, TINY) for name in ("one worker a region", SIXTEEN)}


@pytest.mark.parametrize("name", ["look-ahead 0.5", "error-feedback delay correction 0.5", "cosine correction"])
def test_a_trial_trains_with_its_own_rule(name, plain):
    plain, tried = plain["one worker a region"], run(TRIALS[name], 0, 320, TINY)
    assert plain["seconds"] == tried["seconds"] and plain["loss"] != tried["loss"]
    assert tried["loss"] == pytest.approx(plain["loss"], rel=0.2) and tried["averaged"] != tried["loss"]


@pytest.mark.parametrize(
    "change", ["outer nu 0.7, rate 2", "inner momentum 0.99, nu 0.9", "momenta averaged", "Muon's momentum 0.9"]
)
def test_a_trial_of_sixteen_workers_trains_with_its_own_optimizer(change, plain):
    plain, tried = plain[SIXTEEN], run(TRIALS[f"{SIXTEEN}, {change}"], 0, 320, TINY)
    assert plain["seconds"] == tried["seconds"] and plain["loss"] != tried["loss"]
    assert tried["loss"] == pytest.approx(plain["loss"], rel=0.2)


@pytest.mark.parametrize("cool_down", [(1, 2), (2, 1)], ids=["H 1", "K 1"])
def test_a_cool_down_exchanges_more_often_from_nine_tenths_of_the_run_on(cool_down, plain, monkeypatch):
    """The global server's versions until then are those of the run without; after that there are more of them."""
    seen: list[tuple[float, int]] = []

    class Watched(delay.Averaged):
        def watch(self, world: VirtualWorld) -> None:
            lease_table = world.top.server.lease_table
            seen.append((lease_table.next_start / world.task.train_samples, world.top.server.fragments[0].version))
            super().watch(world)

    monkeypatch.setattr(delay, "Averaged", Watched)
    assert run(TRIALS[SIXTEEN], 0, 320, TINY) == plain[SIXTEEN]
    without, seen = seen, []
    tried = run(replace(TRIALS[SIXTEEN], cool_down=cool_down), 0, 320, TINY)
    before = [step for step in without if step[0] < 0.9]
    assert seen[: len(before)] == before and len(before) > 10
    assert tried["versions"] > plain[SIXTEEN]["versions"] and tried["loss"] != plain[SIXTEEN]["loss"]


def test_committed_trials_are_known():
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    assert {row["trial"] for row in rows} == set(TRIALS)
