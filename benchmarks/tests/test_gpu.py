"""`make gpu`, shortened, on the CPU: everything in it runs, and the page says that it proves nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.gpu.__main__ as gpu
from benchmarks import ROOT
from benchmarks.common import RESULTS
from benchmarks.gpu import engines, learning, parts, titan
from benchmarks.gpu.goals import GOALS, goal_of, page, plan, unit, verdict
from benchmarks.gpu.parts import PARTS, SMALL
from benchmarks.gpu.rows import read_rows, told_to
from tests.support.process_trees import marked, new_mark, until


def test_goals_and_their_verdicts() -> None:
    assert verdict("kernels.merge", 0.85, 1) == "met" and verdict("kernels.merge", 0.84, 1) == "MISSED"
    assert verdict("outer_loop.exposed", 0.01, 1) == "met" and verdict("outer_loop.exposed", 0.011, 1) == "MISSED"
    for ratio, told in ((0.94, "MISSED"), (0.95, "met"), (1.05, "met"), (1.06, "MISSED")):
        assert verdict("step.memory_over_estimate", ratio, 8) == told
    assert verdict("kernels.merge", 0.1, 0) == "–"  # of a CPU
    assert verdict("codecs.int4.decode_measured_vs_copy_bandwidth", 0.1, 1) == "–"  # it ends on the host
    assert [verdict("engines.Muon", apart, 1) for apart in (1.0, 1.1)] == ["met", "MISSED"]
    assert [verdict("parts.step.exit", code, 1) for code in (0, 124)] == ["met", "MISSED"]
    assert [verdict("step.acco_speedup", 0.5, gpus) for gpus in (1, 2)] == ["–", "MISSED"]
    assert verdict("step.tokens_per_s", 1.0, 1) == verdict("step.ranks", 1, 1) == "–"
    assert (unit("step.zero1_step_s"), unit("step.peak_bytes"), unit("step.ranks")) == ("s", "bytes", "count")
    assert goal_of("codecs.int4.encode_vs_copy_bandwidth") == next(g for g in GOALS if g.metric == "codecs.*")


def test_the_plan_and_the_page_name_every_goal() -> None:
    for goal in GOALS:
        assert f"| `{goal.metric}` | {goal.what} |" in plan()
    text = page({"kernels.merge": 0.5, "tests.failed": 0.0}, 2, "a machine")
    assert text.startswith("# Measured on 2 GPUs\n") and "a machine." in text
    assert "| `kernels.merge` | 0.5 | ratio | ≥ 0.85 | MISSED |" in text
    assert text.count("\n- `") == len(GOALS) - 2


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        ((), "there is no GPU here; --small"),
        (("--small", "--record"), "--record is for figures of"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu", *words])
        assert gpu.main() == 2 and told in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu", "--plan"])
    assert gpu.main() == 0 and plan() in capsys.readouterr().out


def test_a_part_that_takes_too_long_ends_with_all_that_it_started_and_its_rows_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    told_to(rows)("kernels.merge", 0.5)
    with rows.open("a") as file:
        file.write('{"metric": "kernels.av')  # as a kill leaves it
    mark = new_mark()
    for name, value in mark.items():
        monkeypatch.setenv(name, value)
    assert gpu.run_part("engines", rows, True, 0.5) == 124
    assert until(lambda: not marked(mark)), "its processes have ended"
    assert read_rows(rows) == {"kernels.merge": 0.5}


def test_a_case_that_fails_is_named_and_the_others_are_compared() -> None:
    told: dict[str, float] = {}
    pair = "two ranks, tied, grouped"
    with pytest.raises(RuntimeError, match="no figure of unknown, two ranks, unknown;"):
        engines.compare(["unknown", "fp32", pair, "two ranks, unknown"], told.__setitem__)
    assert told == {"engines.fp32": 0.0, f"engines.{pair}": 0.0}


def test_the_learning_study_has_curves_of_both_methods_and_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, float] = {}
    parts.learning_study(SMALL, Path(), told.__setitem__)
    for method in ("data_parallel", "ours"):
        curve = [loss for metric, loss in told.items() if metric.startswith(f"learning.tiny.{method}.at_")]
        assert len(curve) >= learning.POINTS // 2 and curve[-1] < curve[0] < 5.6  # nats a byte: ln 256 = 5.55
    last = (told[f"learning.tiny.{method}.final"] for method in ("ours", "data_parallel"))
    assert told["learning.tiny.gap"] == pytest.approx(next(last) / next(last) - 1)
    assert goal_of("learning.tiny.gap") is not None and verdict("learning.50m.gap", 0.5, 1) == "–"
    monkeypatch.setattr(learning, "run", lambda *_, **__: {"failed": "diverged"})
    with pytest.raises(RuntimeError, match="tiny, data-parallel-muon: diverged"):
        learning.compare("tiny", "cpu", told.__setitem__)


def test_a_size_of_the_learning_study_is_some_minutes_of_arithmetic() -> None:
    """Within five minutes at a tenth of what an H100 has in TF32, 495 Tflop/s."""
    for name, of in zip(parts.LEARNERS, (10e6, 25e6, 50e6), strict=True):
        counted = learning.flops(name)
        assert counted.pop("parameters") == pytest.approx(of, rel=0.1)
        assert sum(counted.values()) < 300 * 49.5e12


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything_in_it_runs(tmp_path: Path) -> None:
    rows = RESULTS.read_text()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--page", str(tmp_path / "page.md")]
    command += ["--rows", str(tmp_path / "rows.jsonl"), *(f"{part}:200" for part in PARTS)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=860)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# Measured on a CPU\n") and "says anything about a GPU" in text
    # torch counts its allocations on a GPU only
    there = {"step.vs_torchtitan"} if titan.installed() else set()
    missing = set(re.findall("^- `(.*?)`", text, re.MULTILINE))
    assert missing == {"step.memory_over_estimate", "step.vs_torchtitan"} - there
    for metric in (
        "engines.fp32",
        "parts.step.seconds",
        "kernels.adam_step",
        "codecs.int4.decode_vs_memcpy",
        "step.acco_step_s",
        "outer_loop.exposed",
        "two_regions.exposed",
        "learning.tiny.gap",
    ):
        assert f"| `{metric}` |" in text
    assert "| `tests.skipped` | " in text and "| `tests.skipped` | 0 |" not in text  # they were collected
    assert RESULTS.read_text() == rows
