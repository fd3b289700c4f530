"""From rows to claims: what benchmarks/claims.py makes of curves; and the settings that it compares with."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import claims  # noqa: E402
import claims_runs  # noqa: E402
import confirm  # noqa: E402
import gap  # noqa: E402
from claims_markdown import _met, markdown  # noqa: E402
from claims_measures import wide_bytes  # noqa: E402
from claims_methods import METHODS, OURS, updates_of_a_region, whole_steps  # noqa: E402
from claims_report import Compared, plain, plot_curves, replace_block, speedup, summary, time_to  # noqa: E402
from claims_runs import DIVERGED, NO_ROUND, Job, Results, run  # noqa: E402
from claims_search import (  # noqa: E402
    TRIALS,
    TUNED,
    best,
    is_bracketed,
    ladders,
    merge,
    next_rung,
    rates,
    search,
    settings_found,
)
from claims_study import FULL, HARSH_METHODS, REDUCED, RIVALS, Study  # noqa: E402
from claims_worlds import WORLDS  # noqa: E402
from common import flat  # noqa: E402

from geotrain.simulate.learner import Curve  # noqa: E402
from geotrain.simulate.learner import Study as Small  # noqa: E402
from geotrain.simulate.spec import load_environment  # noqa: E402

ENVIRONMENT = load_environment(ROOT / "benchmarks/data/halos_environment.json")
TINY = {"hidden": 16, "layers": 1, "heads": 2, "ffn": 32, "batch": 1, "length": 16}
SETTINGS = {m: {"lr": 0.01, **method.published()} for m, method in METHODS.items()}


def row(*points: tuple[float, float], **more) -> dict:
    """(virtual seconds, test loss) points of a finished run."""
    curve = [[s, (i + 1) / len(points), loss] for i, (s, loss) in enumerate(points)]
    measured = {"committed_steps": 1000, "utilization": 0.5, "wide_bytes": 3e9, "cpu_s": 1.0, "wall_s": 1.0}
    known = {"test": curve[-1][2], "selection": curve[-1][2], "seconds": curve[-1][0], "numel": 10, "text": "x"}
    return {"curve": curve, **known, **measured, **more}


def failed(**more) -> dict:
    nothing = dict.fromkeys(("test", "selection", "utilization", "wide_bytes", "committed_steps"))
    return row((1, 1.0)) | nothing | {"curve": [], "failed": DIVERGED, **more}


def played(job: Job, loss: float) -> dict:
    """A row for the job: at 10 steps a second, or 100 for ours, the loss falls to this."""
    end_s = job.steps / (100 if job.method == OURS else 10)
    of = {"method": job.method, "settings": job.settings, "world": job.world, "seed": job.seed, "steps": job.steps}
    return row((end_s / 2, 2 * loss), (end_s, loss), **of, committed_steps=job.steps)


def test_times_between_points():
    one = row((10, 4.0), (20, 3.0), (40, 2.0))
    assert time_to(one, 2.5) == 30 and time_to(one, 4.5) == 10 and time_to(one, 1.9) is None
    assert time_to(one, None) is None and time_to(failed(), 2.5) is None


def test_speedups_are_geometric_means_over_the_seeds_that_reached_it():
    found = speedup([20.0, 80.0, None], [10.0, 10.0, 10.0])
    assert found["mean"] == pytest.approx(4.0) and found["reached"] == 2
    assert found["low"] < 2 and found["high"] > 8  # two seeds that differ so much say little
    assert speedup([None], [1.0])["mean"] is None
    assert speedup([2.0], [1.0]) == {"mean": pytest.approx(2.0), "low": None, "high": None, "reached": 1}


def test_a_goal_is_met_by_the_whole_interval():
    def reaches(x: float) -> bool:
        return x >= 1.5

    found = [_met(1.6, 1.51, reaches), _met(1.6, 1.3, reaches), _met(1.6, None, reaches), _met(1.4, 1.3, reaches)]
    assert found == ["yes", "mean only", "mean only", "**no**"]


def test_a_seed_that_was_late_takes_the_longer_runs_time():
    rows = {"diloco": [row((9, 2.5)), row((9, 2.0))], "halos": [row((10, 3.0)), row((10, 2.0))]}
    compared = Compared(rows)
    assert compared.missed("halos") == [0] and compared.times_s("halos") == [None, 10.0]
    compared.longer["halos", 0] = row((15, 3.0), (20, 2.0))
    assert compared.times_s("halos") == [17.5, 10.0]


def test_only_the_block_of_a_page_is_renewed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("mine\n<!-- x: begin -->\nold\n<!-- x: end -->\nalso mine\n")
    replace_block(page, "x", "new")
    assert page.read_text() == "mine\n<!-- x: begin -->\n\nnew\n\n<!-- x: end -->\nalso mine\n"
    with pytest.raises(ValueError, match="y: begin"):
        replace_block(page, "y", "new")


def test_the_settings_in_use_were_searched_with_equal_budgets():
    found = json.loads(TUNED.read_text())["methods"]
    assert set(found) == set(METHODS)
    assert len({(len(of["tried"]), of["steps"]) for of in found.values()}) == 1
    for name, of in found.items():
        assert len({json.dumps(t["settings"], sort_keys=True) for t in of["tried"]}) == len(of["tried"])
        assert of["settings"] == min(of["tried"], key=lambda t: t["selection"])["settings"]
        METHODS[name].outer(of["settings"], ENVIRONMENT, 6144)  # a run file would take them


@pytest.mark.parametrize(("optimum", "rungs"), [(0.016, 3), (0.004, 4), (0.064, 5), (0.0005, 5)])
def test_the_ladder_walks_until_the_optimum_lies_between_two_rungs(optimum, rungs):
    tried: dict[float, float] = {}
    while (lr := next_rung(tried)) is not None:
        tried[lr] = abs(math.log(lr / optimum))
    assert len(tried) == rungs and is_bracketed(tried) == (optimum > 0.001)
    assert next_rung({0.016: math.inf, 0.008: math.inf}) == 0.004  # all diverged: lower


def test_ladders_begin_where_each_method_is_told_to():
    def complete(jobs: list[Job]) -> list[dict]:
        return [played(job, 1 + abs(math.log(job.settings["lr"] / 0.004))) for job in jobs]

    starts = {OURS: {"lr": 0.004, "momentum_share": 0.1}, "halos": {"lr": 0.016}}
    found = ladders(starts, 5, lambda m, s: Job(m, s, "published", 0, 10), complete)
    assert [set(rates(rows)) for rows in found.values()] == [
        {0.002, 0.004, 0.008},
        {0.016, 0.008, 0.004, 0.002},
    ]
    assert {best(rows)["settings"]["lr"] for rows in found.values()} == {0.004}
    assert all(row["settings"]["momentum_share"] == 0.1 for row in found[OURS])


def test_every_method_is_searched_with_the_same_number_of_trials():
    """All choices follow the selection slice; a trial that diverged is none."""

    def complete(jobs: list[Job]) -> list[dict]:
        rows = [played(job, 1 + abs(math.log(job.settings["lr"] / 0.004))) for job in jobs]
        return [r | {"test": -r["test"]} if r["settings"]["lr"] != 0.004 else r for r in rows]

    found = search(tuple(METHODS), 7680, TRIALS, {}, complete)
    for of in found.values():
        assert len(of["tried"]) == TRIALS and of["bracketed"] and of["settings"]["lr"] == 0.004
        assert len({json.dumps(t["settings"], sort_keys=True) for t in of["tried"]}) == TRIALS

    def searched(method: str) -> set[str]:
        return {key for t in found[method]["tried"] for key in t["settings"]} & {"local_steps", "updates_per_send"}

    assert searched(OURS) == searched("halos-tuned") == {"local_steps", "updates_per_send"}
    assert not searched("diloco-fair")
    assert not any(searched(m) for m in METHODS if m not in (OURS, "halos-tuned", "diloco-fair"))
    diverged = search(
        ("halos",), 7680, 3, {}, lambda jobs: [failed(method="halos", settings=j.settings) for j in jobs]
    )
    assert diverged["halos"]["tried"][0]["selection"] is None


def test_a_search_of_some_methods_keeps_what_was_found_for_others(tmp_path):
    def of(trials: int) -> dict:
        return {"steps": 10, "settings": {"lr": trials}, "tried": [{}] * trials}

    path = tmp_path / "tuned.json"
    merge(path, {"halos": of(2)})
    merge(path, {OURS: of(2)})
    assert settings_found(("halos", OURS), path) == {"halos": {"lr": 2}, OURS: {"lr": 2}}
    with pytest.raises(SystemExit, match="no settings of diloco"):
        settings_found(("halos", "diloco"), path)
    merge(path, {"diloco": of(3)})
    with pytest.raises(SystemExit, match="unequal budgets"):
        settings_found(("halos", "diloco"), path)


def test_a_report_needs_diloco_and_ours(capsys):
    with pytest.raises(SystemExit):
        claims.parse_arguments(["--methods", "halos", "diloco"])
    assert "--methods lacks region-momentum" in capsys.readouterr().err
    assert claims.parse_arguments(["--methods", "halos", "--search-only"]).methods == ["halos"]


def test_tuned_halos_is_halos_run_file_with_other_h_and_k():
    assert METHODS["halos-tuned"].base == METHODS["halos"].base
    tuned = METHODS["halos-tuned"].outer({"local_steps": 2}, ENVIRONMENT, 6144)
    assert tuned == METHODS["halos"].base.model_copy(update={"local_steps": 2})


def test_the_momentum_of_a_region_spans_a_share_of_the_runs_tokens():
    per_job = sum(max(1, math.ceil(4 * 0.238391 * 0.907 / w.step_s)) for w in ENVIRONMENT.world.workers) / 16
    outer = METHODS[OURS].outer({"lr": 0.01, "momentum_share": 0.2, "local_steps": 4}, ENVIRONMENT, 15360)
    updates = updates_of_a_region(outer, ENVIRONMENT, 15360)
    assert updates == pytest.approx(15360 / per_job / 4, rel=0.05)
    assert outer.momentum_decay ** (0.2 * updates) == pytest.approx(1 / math.e)


def test_synchronous_rounds_are_whole():
    steps = {m: whole_steps(METHODS[m].base, ENVIRONMENT, 1700) for m in ("diloco", "data-parallel", "halos")}
    assert steps == {"diloco": 3 * 512, "data-parallel": 106 * 16, "halos": 1700}
    assert whole_steps(METHODS["streaming-diloco"].base, ENVIRONMENT, 1599) == 0


def test_a_row_is_not_used_when_anything_it_follows_from_has_changed(monkeypatch):
    def key(**changes) -> str:
        return replace(Job(OURS, SETTINGS[OURS], "published", 0, 512, TINY), **changes).key

    first = key()
    assert (
        first == key() and first != key(warmup_share=0.5) and first != key(seed=1) and first != key(world="late-join")
    )
    other = METHODS["halos"]  # another outer block behind the same name
    monkeypatch.setitem(METHODS, OURS, replace(METHODS[OURS], of="halos"))
    assert other.base == METHODS[OURS].base and first != key()
    monkeypatch.undo()
    monkeypatch.setattr(claims_runs, "VERSION", claims_runs.VERSION + 1)
    assert first != key()
    monkeypatch.undo()
    text = replace(claims_runs.standard_library(), digest="another")
    monkeypatch.setattr(claims_runs, "standard_library", lambda: text)
    assert first != key()


def test_only_bytes_between_regions_count():
    """What the global server's region sends itself does not; of a ring's sixteen hops four cross."""
    sent = {"region-0 up": 1, "region-0 down": 1, "region-1 up": 10, "region-3 down": 100, "region-1 local up": 1000}
    links = {name: {"sent_bytes": size} for name, size in sent.items()}
    report = {"links": links, "committed_steps": 3}
    outer = METHODS["data-parallel"].base
    assert wide_bytes("servers", report, outer, ENVIRONMENT) == 110
    assert wide_bytes("ring", {"links": {"ring": {"sent_bytes": 1600}}}, outer, ENVIRONMENT) == 400
    gradient = 4 * ENVIRONMENT.numel
    assert wide_bytes("one-worker", report, outer, ENVIRONMENT) == pytest.approx(3 * 4 * 2 * 15 / 16 * gradient)


def test_runs_are_measured_alike():
    """Data parallelism waits for its all-reduce most of the time; ours does not wait; without a round no result."""
    parallel = run(Job("data-parallel", SETTINGS["data-parallel"], "published", 0, 32, TINY, points=1))
    ours = run(Job(OURS, SETTINGS[OURS], "published", 0, 160, TINY, points=1))
    assert parallel["committed_steps"] == 32 and parallel["utilization"] < 0.02
    assert ours["committed_steps"] == 160 and ours["utilization"] > 10 * parallel["utilization"]
    assert parallel["wide_bytes"] == pytest.approx(2 * 4 * 2 * 15 / 16 * 4 * ENVIRONMENT.numel)
    nothing = run(Job("diloco", SETTINGS["diloco"], "published", 0, 256, TINY, points=1))
    assert nothing["failed"] == NO_ROUND and nothing["test"] is None


def test_a_run_ends_at_the_loss_that_was_asked_for():
    job = Job(OURS, SETTINGS[OURS], "published", 0, 640, TINY, points=8)
    whole = run(job)
    middle = whole["curve"][4][2]
    found = run(replace(job, until=middle))
    assert found["curve"] == whole["curve"][: len(found["curve"])] and len(found["curve"]) <= 5
    assert found["test"] == found["curve"][-1][2] <= middle < found["curve"][-2][2]
    assert found["committed_steps"] < whole["committed_steps"] and found["seconds"] == found["curve"][-1][0]
    assert found["selection"] is None and "failed" not in found
    assert replace(job, until=middle).key != job.key


def test_losses_are_of_640_windows_of_each_slice():
    curve = Curve(Small(steps=1, **TINY), points=1)
    assert len(curve.test) == len(curve.selection) == 640


PLAN = replace(REDUCED, steps=15360, harsh_steps=15360)
LOSSES = dict.fromkeys(METHODS, 2.0) | {OURS: 1.5, "data-parallel": 1.4, "halos": 2.5, "async-local-sgd": 2.5}


def studied(failing: tuple[str, ...] = ()) -> tuple[dict, list[Job]]:
    """A report of rows that were made up, and the jobs they were made for."""
    jobs = []

    def complete(asked: list[Job]) -> list[dict]:
        jobs.extend(asked)
        rows = [played(job, LOSSES[job.method] * (0.5 if job.steps > PLAN.steps else 1)) for job in asked]
        return [failed(**{k: r[k] for k in vars(j) if k in r}) if j.method in failing else r
                for j, r in zip(asked, rows, strict=True)]  # fmt: skip

    study = Study(PLAN, SETTINGS, complete)
    report = study.published() | {"harsh": study.harsh()}
    kept = {"ours": 0.99, "ours_deaths": 1, "ours_lost_share": 0.0, "quorum_syncer": 0.9}
    report["goodput"] = kept | {"quorum_syncer_published": 0.88, "elastic_data_parallel": 0.58, "pause_s": 9.5}
    return report, jobs


def test_a_study_compares_at_equal_tokens_and_at_equal_time():
    report, jobs = studied()
    assert report["speedup"]["ours_over_diloco"]["mean"] == pytest.approx(10 * 6 / 5)  # ours passes 2.0 on its way
    assert report["speedup"]["ours_over_halos_tuned"]["reached"] == 3
    assert report["loss_gap_to_synchronous"]["mean"] == pytest.approx(1.5 / 1.4 - 1)
    ending = {j.method: j.steps for j in jobs if j.steps < PLAN.steps}
    assert set(ending) == set(METHODS) - {OURS, "streaming-diloco"}  # a tenth of the steps: no round of that fits
    assert ending["halos"] == 1536 and ending["diloco"] == 1536 and ending["data-parallel"] == 1536
    assert report["loss_at_our_time"]["streaming-diloco"] is None and report["loss_at_our_time"][OURS] == 1.5


def test_harsher_worlds_have_a_control_and_rivals_that_miss_get_a_longer_schedule():
    report, jobs = studied()
    assert set(report["harsh"]) == set(WORLDS) and "published" in report["harsh"]
    assert set(report["harsh"]["late-join"]["loss_at_equal_tokens"]) == set(HARSH_METHODS)
    longer = {(j.method, j.world) for j in jobs if j.steps == 2 * PLAN.steps}
    assert {(j.until, j.steps == 2 * PLAN.steps) for j in jobs} == {(None, False), (2.0, True)}
    assert report["harsh"]["late-join"]["with_a_schedule_twice_as_long"]["halos"] == {"runs": 1, "reached": 1}
    assert longer == {(m, w) for m in ("halos", "async-local-sgd") for w in WORLDS}
    assert report["harsh"]["late-join"]["speedup"]["ours_over_halos"]["mean"] > 10


@pytest.mark.parametrize("failing", [("halos",), ("diloco",), (OURS,), tuple(METHODS)], ids=str)
def test_runs_that_diverged_are_told_and_break_nothing(failing, tmp_path):
    report, _ = studied(failing)
    text = markdown(report, {m: METHODS[m].title for m in METHODS})
    assert text.count(DIVERGED) == sum((m in METHODS) + len(WORLDS) * (m in HARSH_METHODS) for m in failing)
    json.dumps(plain(report), allow_nan=False)
    rows = [row((1, 2.0), method="halos"), failed(method=OURS, steps=10)]
    plot_curves(rows, {"halos": "a", OURS: "b"}, None, tmp_path / "p.png", "t")
    assert summary([failed()])["loss"]["mean"] is None
    of = {"steps": 10, "settings": {"lr": 0.01}, "hardware": "a core"}
    tried = {OURS: {0.01: math.inf}, "halos": {0.01: 2.0, 0.005: 2.5}}
    told = confirm.summary([failed(method=OURS, **of), row((1, 2.0), method="halos", **of)], tried)
    assert DIVERGED in confirm.markdown(told) and told["speedup"] == {}


def test_the_confirmation_compares_times_to_fair_dilocos_loss():
    of = {"steps": 10, "settings": {"lr": 0.01}, "hardware": "a core"}
    rows = [
        row((100, 3.0), (200, 2.0), method="diloco-fair", **of),
        row((20, 3.0), (40, 2.0), (60, 1.8), method=OURS, **of),
        row((1000, 1.6), method="data-parallel", **of),
    ]
    told = confirm.summary(rows, {r["method"]: {0.01: 2.5} for r in rows})
    assert told["target_loss"] == 2.0 and told["speedup"] == {"diloco-fair": 5.0, "data-parallel": 25.0}
    assert told["loss_gap_to_synchronous"] == pytest.approx(1.8 / 1.6 - 1)
    kept = dict(flat(confirm.figures(told)))
    assert (kept["over_ours.diloco-fair"], kept[f"{OURS}.test"], kept["data-parallel.end_s"]) == (5.0, 1.8, 1000)
    assert "| 5.00 |" in confirm.markdown(told) and "0.01000: 2.500" in confirm.markdown(told)


def test_the_gap_compares_both_methods_at_their_best_rates(monkeypatch, tmp_path):
    def losses(job: Job) -> dict:
        away = abs(math.log2(job.settings["lr"] / (0.016 if job.method == OURS else 0.004)))
        loss = (3.0 if job.method == OURS else 2.0) + away
        return {**asdict(job), "key": job.key, "selection": loss, "test": loss}

    results = Results(tmp_path / "rows.jsonl")
    monkeypatch.setattr(results, "complete", lambda jobs, processes: [losses(job) for job in jobs])
    found = gap.measured(results, 8, 10, 1)
    assert found["gap"] == {"test": 0.5, "selection": 0.5} and found["tokens"] == 8 * 32 * 10
    assert found["lr"] == {"data-parallel": 0.004, OURS: 0.016} and all(found["bracketed"].values())
    assert "| 256 | 10 | 0.0 | 2.0000 (0.004) | 3.0000 (0.016) | 50.0 | 50.0 |" in gap.markdown([found])


def test_a_row_cut_off_by_a_kill_is_dropped_and_the_others_stay(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "a", "test": 1}\n{"key": "b", "te')
    assert set(Results(path).rows) == {"a"}
    assert path.read_text() == '{"key": "a", "test": 1}\n'


def test_what_a_study_costs_is_told():
    stages = PLAN.costs(tuple(METHODS))
    assert (stages[1][1], stages[1][2]) == (3 * len(METHODS), 15360)
    assert stages[4][1:] == (len(HARSH_METHODS) * len(WORLDS), 15360)
    assert len(RIVALS) == 5 and "at most" in PLAN.told(tuple(METHODS), False, True)
    steps = [sum(runs * of_run for _, runs, of_run in plan.costs(tuple(METHODS))) for plan in (REDUCED, FULL)]
    assert 3 * steps[0] < steps[1]
