"""The rules that benchmarks/delay.py tries in place of the product's."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.delay import RESULTS, TRIALS, Agreeing, Foreseen, LookAhead, run
from geotrain.config import rule_config
from geotrain.layout import Layout, Parameter
from geotrain.outer.rules import FragmentState

TINY = {"hidden": 16, "layers": 1, "heads": 2, "ffn": 32, "batch": 1, "length": 16}
LAYOUT = Layout([Parameter("a", (2,), None, "normal"), Parameter("b", (2,), None, "normal")])


def test_looking_ahead_moves_by_what_the_others_did_and_sends_none_of_it():
    rule = LookAhead(rule_config("region_momentum", merge_alpha=1.0), 1, 0.9, ahead=0.5, regions=4)
    state = FragmentState(torch.zeros(2))
    rule.start(state)
    rule.take_progress(state)
    rule.on_global_weights(state, torch.tensor([1.0, 1.0]))
    assert state.x.tolist() == [1.0, 1.0]  # of the first answer it is not known how much of it is news
    state.x -= torch.tensor([4.0, 0.0])
    sent, _ = rule.take_progress(state)
    assert sent.tolist() == [4.0, 0.0]
    rule.on_global_weights(state, torch.tensor([0.0, 3.0]))  # a fourth of what was sent, and 2 by the others
    assert state.x.tolist() == [0.0, 4.0]
    assert rule.take_progress(state)[0].tolist() == [0.0, 0.0]


def test_what_was_foreseen_is_taken_back_with_the_next_delta():
    rule, state = Foreseen(1, ahead=0.5), FragmentState(torch.zeros(1))
    for delta, x in ((1.0, -1.5), (1.0, -2.5), (0.0, -2.0), (0.0, -2.0)):
        rule.on_delta(state, "r", torch.tensor([delta]), 1)
        assert state.x.item() == pytest.approx(x)


def test_a_delta_against_the_others_loses_what_points_against_them():
    rule, state = Agreeing(1, LAYOUT), FragmentState(torch.zeros(4))
    rule.on_delta(state, "r", torch.zeros(4), 1)
    rule.on_delta(state, "other", torch.tensor([1.0, 0.0, 1.0, 0.0]), 1)
    before = state.x.clone()
    rule.on_delta(state, "r", torch.tensor([-3.0, 2.0, 3.0, 2.0]), 1)  # against it in a, with it in b
    assert (before - state.x).tolist() == [0.0, 2.0, 3.0, 2.0]


@pytest.mark.parametrize("name", ["look-ahead 0.5", "error-feedback delay correction 0.5", "cosine correction"])
def test_a_trial_trains_with_its_own_rule(name):
    plain, tried = (run(TRIALS[n], 0, 320, TINY) for n in ("one worker a region", name))
    assert plain["seconds"] == tried["seconds"] and plain["loss"] != tried["loss"]
    assert tried["loss"] == pytest.approx(plain["loss"], rel=0.2) and tried["averaged"] != tried["loss"]


def test_committed_trials_are_known():
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    assert {row["trial"] for row in rows} == set(TRIALS)
