"""From rows to claims: what benchmarks/claims.py makes of curves; and the settings that it compares with."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import claims  # noqa: E402
from claims_methods import METHODS, updates_of_a_region  # noqa: E402
from claims_report import loss_at, replace_block, speedup, summary, time_to  # noqa: E402

from geotrain.simulate.spec import load_environment  # noqa: E402

ENVIRONMENT = load_environment(ROOT / "benchmarks/data/halos_environment.json")


def row(*points: tuple[float, float]) -> dict:
    """(virtual seconds, test loss) points of a finished run."""
    curve = [[s, (i + 1) / len(points), loss] for i, (s, loss) in enumerate(points)]
    return {"curve": curve, "test": curve[-1][2], "seconds": curve[-1][0], "utilization": 0.5, "wide_bytes": 3e9}


def test_times_and_losses_between_points():
    one = row((10, 4.0), (20, 3.0), (40, 2.0))
    assert time_to(one, 2.5) == 30 and time_to(one, 4.5) == 10 and time_to(one, 1.9) is None
    assert loss_at(one, 15) == 3.5 and loss_at(one, 5) is None and loss_at(one, 100) == 2.0


def test_speedups_are_geometric_means_over_the_seeds_that_reached_it():
    found = speedup([20.0, 80.0, None], [10.0, 10.0, 10.0])
    assert found["mean"] == pytest.approx(4.0) and found["reached"] == 2
    assert found["low"] < 2 and found["high"] > 8  # two seeds that differ so much say little
    assert speedup([None], [1.0])["mean"] is None


def test_a_seed_that_was_late_takes_the_longer_runs_time():
    assert claims._sooner([5.0, None, None], [7.0, 8.0]) == [5.0, 8.0, None]
    late = summary([row((10, 3.0)), row((10, 2.0))], targets=[2.5, 2.0])
    assert late["times_s"] == [None, 10.0] and late["time_to_target_s"] is None


def test_only_the_block_of_a_page_is_renewed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("mine\n<!-- x: begin -->\nold\n<!-- x: end -->\nalso mine\n")
    replace_block(page, "x", "new")
    assert page.read_text() == "mine\n<!-- x: begin -->\n\nnew\n\n<!-- x: end -->\nalso mine\n"
    with pytest.raises(ValueError, match="y: begin"):
        replace_block(page, "y", "new")


def test_every_method_was_given_the_same_budget():
    found = json.loads(claims.TUNED.read_text())["methods"]
    assert set(found) == {m for m, method in METHODS.items() if method.settings_of is None}
    assert len({len(of["tried"]) for of in found.values()}) == 1
    for name, of in found.items():
        assert len({json.dumps(t["settings"], sort_keys=True) for t in of["tried"]}) == len(of["tried"])
        assert of["settings"] == min(of["tried"], key=lambda t: t["selection"])["settings"]
        METHODS[name].outer(of["settings"], ENVIRONMENT, 6144)  # a run file would take them


def test_the_momentum_of_a_region_spans_a_share_of_the_runs_tokens():
    per_job = sum(max(1, math.ceil(4 * 0.238391 * 0.907 / w.step_s)) for w in ENVIRONMENT.world.workers) / 16
    updates = updates_of_a_region(4, ENVIRONMENT, 15360)
    assert updates == pytest.approx(15360 / per_job / 4, rel=0.05)
    settings = {"lr": 0.01, "momentum_share": 0.2, "local_steps": 4}
    outer = METHODS["region-momentum"].outer(settings, ENVIRONMENT, 15360)
    assert outer.momentum_decay ** (0.2 * updates) == pytest.approx(1 / math.e)
