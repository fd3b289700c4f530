"""The gap to data parallelism over batches and lengths of the run; the committed rows of this and of confirm.py."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, fields
from types import SimpleNamespace

import pytest

import benchmarks.studies.claims.runs as claims_runs
import benchmarks.studies.gap as gap
from benchmarks import DATA
from benchmarks.studies.claims.methods import METHODS, OURS, SYNCHRONOUS, muon
from benchmarks.studies.claims.runs import Job, Results
from benchmarks.studies.claims.study import FULL, MINE


@pytest.mark.parametrize(
    ("optimizer", "reference", "ours"), [("adamw", SYNCHRONOUS, OURS), ("muon", muon(SYNCHRONOUS), MINE)]
)
def test_the_gap_compares_both_methods_at_their_best_rates(optimizer, reference, ours, monkeypatch):
    def losses(job: Job) -> dict:
        away = abs(math.log2(job.settings["lr"] / (0.016 if job.method == ours else 0.004)))
        loss = (3.0 if job.method == ours else 2.0) + away
        return {**asdict(job), "key": job.key, "selection": loss, "test": loss}

    monkeypatch.setattr(
        gap, "settings_found", lambda methods: {m: {**METHODS[m].published(), "lr": 0.008} for m in methods}
    )
    monkeypatch.setattr(gap, "candidates", dict)
    found = gap.measured(lambda jobs: [losses(job) for job in jobs], optimizer, 8, 10)
    assert found["gap"] == {"test": 0.5, "selection": 0.5} and found["tokens"] == 8 * 32 * 10
    assert found["lr"] == {reference: 0.004, ours: 0.016} and all(found["bracketed"].values())
    gap.add_best([found])
    assert (
        f"| {gap.OPTIMIZERS[optimizer]} | 256 | 10 | 0.0 | 2.0000 (0.004) | 3.0000 (0.016) |{4 * ' 50.0 |'}"
        in gap.markdown([found])
    )


def test_a_second_gap_is_to_the_best_data_parallelism_at_as_many_tokens(monkeypatch):
    """Another line's, chosen by the selection slice; or of a batch and a mean that were searched, at their tokens."""

    def line(optimizer: str, batch: int, steps: int, test: float, selection: float) -> dict:
        reference, ours = gap.PAIRS[optimizer]
        losses = {reference: test, ours: 1.5 * test}, {reference: selection, ours: 1.5 * selection}
        tokens = batch * gap.LENGTH * steps
        return {"optimizer": optimizer, "batch": batch, "steps": steps, "tokens": tokens, **dict(
            zip(("losses", "selection"), losses, strict=True))}  # fmt: skip

    found = [line("adamw", 4, 800, 1.9, 2.0), line("muon", 8, 400, 2.0, 1.0), line("muon", 4, FULL.steps, 2.0, 2.0)]
    both = {"test": 1.2, "selection": 1.5}
    monkeypatch.setattr(gap, "candidates", dict)
    monkeypatch.setattr(gap, "best_parallel", lambda rows: SimpleNamespace(told="small", **both))
    gap.add_best(found)
    assert [f["gap_to_best"]["test"] for f in found] == pytest.approx([0.425, 0.5, 1.5])
    assert [f["gap_to_best"]["selection"] for f in found] == pytest.approx([2.0, 0.5, 1.0])
    assert (
        found[0]["best"]["told"] == "Muon, 128 sequences, 25 all-reduces"
        and found[2]["best"]["told"] == "Muon, small"
    )


def law(steps: int, last: float, power: float) -> dict:
    gap_there = last * (steps / gap.LONG) ** -power
    return {"steps": steps, "gap": {"test": gap_there + 0.001, "selection": gap_there - 0.001}}


def test_the_gap_is_extrapolated_as_a_power_of_the_steps(monkeypatch):
    """Without noise to the number itself; with noise the interval holds it, as wide as the noise."""
    monkeypatch.setattr(gap, "DRAWS", 40)
    lengths = (3840, 15360, 61440)
    found = [law(steps, 0.01, 0.4) for steps in lengths]
    assert gap.extrapolated(found[:2]) is None
    exact = gap.extrapolated(found, noise=0.0)
    assert [exact[k] for k in ("gap", "low", "high")] == pytest.approx(3 * [0.01], rel=1e-3)
    noisy = gap.extrapolated(found, noise=0.005)
    assert noisy["low"] < 0.008 and noisy["high"] > 0.012
    better = gap.extrapolated(found, noise=0.001)
    assert better["high"] - better["low"] < 0.5 * (noisy["high"] - noisy["low"])


def test_the_document_has_all_that_is_kept_whole_and_nothing_is_run_for_it(monkeypatch, capsys):
    results = Results(gap.RESULTS)
    text = next(iter(results.rows.values()))["text"]
    monkeypatch.setattr(claims_runs, "carried_text", lambda: SimpleNamespace(digest=text))
    monkeypatch.setattr(claims_runs, "run", lambda job: pytest.fail(f"a run of {job}"))
    written = []
    monkeypatch.setattr(gap, "replace_block", lambda path, name, text: written.append((name, text)))
    monkeypatch.setattr(gap, "record", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["gap", "--runs", "4x15360", "--optimizers", "adamw", "--docs"])
    gap.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["gaps"]
    of = {(f["optimizer"], f["batch"], f["steps"]): f for f in told}
    assert {("adamw", 4, 15360), ("adamw", 32, 15360), ("adamw", 4, 122880)} < set(of) and len(of) == len(told)
    assert of["adamw", 4, 15360]["gap"]["test"] == pytest.approx(0.116, abs=0.001)
    ((name, table),) = written
    assert name == "gap" and all(f"{steps:,}" in table for _, _, steps in of)
    assert gap.whole(results, "adamw", 4, 15361) is None


@pytest.mark.parametrize("name", ["confirm", "gap"])
def test_committed_rows_are_still_of_the_jobs_that_they_say(name, monkeypatch):
    """Their keys hold the text of dataclasses: a renamed class or field would have hours of runs done again. Another
    Python has another standard library to train on: the key is that of the row's own text."""
    rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    assert rows
    for r in rows:
        monkeypatch.setattr(claims_runs, "carried_text", lambda digest=r["text"]: SimpleNamespace(digest=digest))
        assert Job(**{f.name: r[f.name] for f in fields(Job) if f.name in r}).key == r["key"]
