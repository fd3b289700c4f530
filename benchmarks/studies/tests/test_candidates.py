"""Published rules and optimizers that benchmarks/studies/candidates.py tries, and its two gaps."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import benchmarks.studies.candidates as candidates
from benchmarks import DATA
from benchmarks.studies.candidates import (
    RECIPE,
    TRIALS,
    IsotropicGlobal,
    IsotropicRegion,
    Matrices,
    RadialGlobal,
    RadialRegion,
    gaps,
    isotropic,
    ramp,
)
from benchmarks.studies.claims import markdown as told_claims
from benchmarks.studies.claims.baseline import best_parallel, best_test
from benchmarks.studies.claims.methods import METHODS
from benchmarks.studies.claims.search import SEED
from benchmarks.studies.claims.study import MINE
from benchmarks.studies.trials import run
from geotrain.config import rule_config
from geotrain.outer.rules import Vectors
from geotrain.outer.rules.region_momentum import MomentumRegion
from geotrain.parameters.parameter_map import Parameter, ParameterMap

TINY = {"hidden": 16, "layers": 1, "heads": 2, "ffn": 32, "length": 16}
STEPS = 160
LAYOUT = ParameterMap([Parameter("embedding", (2, 2), None, "normal"), Parameter("matrix", (2, 2), 0, "normal")])
HIDDEN = slice(4, 8)


def vector(*hidden: float) -> torch.Tensor:
    return torch.tensor([1.0, 0.0, 0.0, 0.0, *hidden])


def test_deltas_that_disagree_move_hidden_matrices_by_their_mean_norm():
    """Two at right angles: their mean is shorter by √2, and the embedding moves by the plain mean."""
    rule, state = RadialGlobal(Matrices(LAYOUT), 1.0), Vectors(torch.zeros(8))
    rule.apply(state, "a", vector(3.0, 0.0, 0.0, 0.0), {"weight": 0.5})
    assert state.x.tolist() == [-0.5, 0, 0, 0, -1.5, 0, 0, 0]
    rule.apply(state, "b", vector(0.0, 3.0, 0.0, 0.0), {"weight": 0.5})
    assert state.x[HIDDEN].tolist() == pytest.approx([-1.5, -1.5 * 2**0.5, 0, 0]) and state.x[0] == -1


@pytest.mark.parametrize(("power", "scale"), [(0.5, 2**0.25), (1.0, 2**0.5)])
def test_deltas_one_by_one_are_scaled_by_their_root_mean_square_over_their_mean(power, scale):
    config, matrices = rule_config("region_momentum"), Matrices(LAYOUT)
    rule, plain = RadialRegion(matrices, 2, power, config, 0.5), MomentumRegion(config, 0.5)
    state, other = Vectors(torch.zeros(8)), Vectors(torch.zeros(8))
    for sign in (1.0, -1.0, 1.0, -1.0):  # the mean is much shorter than each: capped at √n, n = 2
        x, y = state.x.clone(), other.x.clone()
        for each, v in ((rule, state), (plain, other)):
            each.apply(v, "w", vector(sign, 0.0, 0.0, 0.0), {"decay": 0.5, "gain": plain.gain, "weight": 1.0})
        moved, by = (state.x - x), (other.x - y)
        assert moved[0] == pytest.approx(float(by[0]))
    assert moved[HIDDEN].tolist() == pytest.approx((scale * by[HIDDEN]).tolist(), rel=1e-5)


def test_an_isotropic_matrix_has_its_mean_singular_value_in_every_direction():
    matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    u, sigma, v = torch.linalg.svd(matrix, full_matrices=False)
    exact = sigma.mean() * u @ v
    found = isotropic(matrix)
    assert torch.nn.functional.cosine_similarity(found.flatten(), exact.flatten(), dim=0) > 0.97
    assert float(found.norm() / exact.norm()) == pytest.approx(1, abs=0.03)


def test_isotropic_rules_leave_all_but_hidden_matrices_as_they_are():
    delta = vector(4.0, 0.0, 0.0, 1.0)
    top, of_top = IsotropicGlobal(Matrices(LAYOUT)), Vectors(torch.zeros(8))
    top.apply(of_top, "r", delta, {"weight": 1.0})
    config = rule_config("region_momentum", gain=0.0)
    region, of_region = IsotropicRegion(Matrices(LAYOUT), config, 0.9), Vectors(torch.zeros(8))
    region.apply(of_region, "w", delta, {"decay": 0.9, "gain": 0.0, "weight": 1.0})
    for state in (of_top, of_region):
        first, *rest = (-state.x[HIDDEN]).tolist()
        assert state.x[0] == -1 and first < 3.2 and rest[2] > 1.8 and rest[:2] == pytest.approx([0, 0], abs=1e-3)


def test_the_gain_falls_and_merges_become_whole_at_the_end():
    rule = SimpleNamespace(gain=1.0, alpha=0.5)
    for share, gain, alpha in ((0.5, 2.0, 0.5), (0.9, 1.0, 0.75), (1.0, 0.0, 1.0)):
        ramp(0.8)(rule, 2.0, share)
        assert (rule.gain, rule.alpha) == pytest.approx((gain, alpha))


@pytest.fixture(scope="module")
def plain() -> dict[str, dict]:
    return {name: run(TRIALS[name], 0, STEPS, TINY) for name in ("one", RECIPE)}


@pytest.mark.parametrize("name", ["one, gain to 0 and whole merges", "one, RDA 0.5", "one, rows normalized"])
def test_a_trial_trains_with_what_it_tries(name, plain):
    tried = run(TRIALS[name], 0, STEPS, TINY)
    assert tried["loss"] != plain["one"]["loss"] and tried["loss"] == pytest.approx(plain["one"]["loss"], rel=0.2)


def test_half_the_batch_is_twice_the_steps_of_half_the_time(plain):
    """Of the same tokens: all-reduces take what they took, so data parallelism takes nearly twice as long."""
    half, whole = run(TRIALS["data parallel, 32 sequences, rate 0.014"], 0, STEPS, TINY), plain[RECIPE]
    assert (half["versions"], whole["versions"]) == (20, 10)
    assert 1.8 < half["seconds"] / whole["seconds"] < 2
    larger = run(TRIALS["data parallel, 32 sequences, rate 0.014"], 0, STEPS, TINY | {"batch": 2})
    assert larger["versions"] == 20 and larger["loss"] != half["loss"]
    ours = run(TRIALS["one, 8 sequences, rate 0.016"], 0, STEPS, TINY)
    assert ours["seconds"] == pytest.approx(plain["one"]["seconds"], rel=0.15)


def row(name: str, seed: int, last: float, mean: float, versions: int = 960) -> dict:
    means = {share: [mean, mean] for share in ("0.05", "0.1", "0.2", "0.3")}
    at = {"versions": versions, "seconds": 410.0}
    return {"trial": name, "seed": seed, "loss": last, "selection": last, "means": means, **at}


def test_gaps_are_to_the_same_recipe_and_to_the_best_found(tmp_path, monkeypatch, capsys):
    small = "data parallel, 32 sequences, rate 0.014"
    given = [row(small, SEED, 1.9, 1.6, 1920), row("data parallel, 64 sequences, rate 0.02", SEED, 1.8, 1.7)]
    given += [row(small, 0, 1.9, 1.5), row(RECIPE, 0, 2.0, 1.6), row("one", 0, 2.2, 1.8), row("one", 1, 9.0, 9.0)]
    rows = {(r["trial"], r["seed"]): r for r in given}
    best = best_parallel(rows)
    assert best is not None and (best.trial, best.share, best.all_reduces) == (small, "0.05", 1920)
    assert {which: gap["mean"] for which, gap in gaps(rows, "one").items()} == pytest.approx(
        {"last": 0.1, "mean": 0.125, "best": 0.2}
    )
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in given))
    monkeypatch.setattr(candidates, "run", lambda *_: pytest.fail("a run"))
    monkeypatch.setattr(sys, "argv", ["candidates", "--results", str(path), "--trials", "one", "--seeds", "0"])
    candidates.main()
    told = capsys.readouterr().out
    assert "| one | 0, 1 | 5.6000 | 5.4000 | 10.0 | 12.5 | 20.0 | 960 | 410 |" in told
    assert "Best data parallelism found: 32 sequences, rate 0.014, mean of the last 5% of the run, 1,920" in told
    assert json.loads(told.splitlines()[-1])["one"]["best"]["mean"] == pytest.approx(0.2)


def test_claims_are_held_against_the_best_data_parallelism_found(tmp_path, monkeypatch):
    """By means over all seeds of the claims: with one missing nothing is told."""
    report = json.loads((DATA / "claims.json").read_text())
    name, path = "data parallel, 16 sequences, rate 0.01", tmp_path / "rows.jsonl"
    given = [row(name, SEED, 1.5, 1.4), row(name, 0, 1.5, 1.41), row(name, 1, 1.5, 1.42), row(name, 2, 1.5, 1.43)]
    path.write_text("".join(json.dumps(r) + "\n" for r in given))
    monkeypatch.setattr(told_claims, "best_test", lambda seeds: best_test(seeds, path))
    titles = {m: method.title for m, method in METHODS.items()}
    gap = report["loss_at_equal_tokens"][MINE]["mean"] / 1.42 - 1
    (line,) = (
        each for each in told_claims._gaps(report, titles).splitlines() if each.startswith(f"| {titles[MINE]} |")
    )
    assert line.endswith(f" | {gap:+.4f} |")
    path.write_text("".join(json.dumps(r) + "\n" for r in given[:3]))
    assert best_test(range(2), path) == pytest.approx(1.415) and best_test(range(3), path) is None


def test_committed_trials_are_known():
    assert {name for name, _ in candidates.kept()} <= set(TRIALS)
