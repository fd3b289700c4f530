"""From rows to claims: what benchmarks/claims makes of curves; and the settings that it compares with."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import benchmarks.studies.claims.__main__ as claims
import benchmarks.studies.claims.report as claims_report
import benchmarks.studies.claims.runs as claims_runs
import benchmarks.studies.confirm as confirm
from benchmarks.common import flat
from benchmarks.goals import Goal
from benchmarks.studies.claims.exchange import regional_world, wide_bytes
from benchmarks.studies.claims.markdown import _met, markdown
from benchmarks.studies.claims.methods import (
    METHODS,
    MUON,
    ONE_WORKER,
    ONE_WORKER_2BIT,
    OURS,
    OURS_2BIT,
    SYNCHRONOUS,
    muon,
    updates_of_a_region,
    whole_steps,
)
from benchmarks.studies.claims.report import Compared, plain, plot_curves, replace_block, speedup, summary, time_to
from benchmarks.studies.claims.runs import DIVERGED, NO_ROUND, Job, Results, run
from benchmarks.studies.claims.search import (
    FINAL_RUNGS,
    SEED,
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
from benchmarks.studies.claims.study import (
    FULL,
    GAPS,
    MINE,
    NEEDED,
    REDUCED,
    RIVALS,
    TARGET,
    Study,
    better_optimizers,
)
from benchmarks.studies.environments import HALOS, load_environment
from benchmarks.studies.learner.training import Curve
from benchmarks.studies.learner.training import Study as Small

ENVIRONMENT = load_environment(HALOS)
TARGET_MUON = muon(TARGET)
TINY = {"hidden": 16, "layers": 1, "heads": 2, "ffn": 32, "batch": 1, "length": 16}
SETTINGS = {m: {"lr": 0.01, **method.published()} for m, method in METHODS.items()}


def row(*points: tuple[float, float], **more) -> dict:
    """(virtual seconds, test loss) points of a finished run."""
    curve = [[s, (i + 1) / len(points), loss] for i, (s, loss) in enumerate(points)]
    measured = {"committed_steps": 1000, "utilization": 0.5, "wide_bytes": 3e9, "cpu_s": 1.0, "wall_s": 1.0}
    known = dict.fromkeys(("test", "final", "selection", "final_selection"), curve[-1][2])
    return {"curve": curve, **known, "seconds": curve[-1][0], "numel": 10, "text": "x", **measured, **more}


def failed(**more) -> dict:
    nothing = dict.fromkeys(claims_runs.NOT_WITHOUT_RESULT)
    return row((1, 1.0)) | nothing | {"curve": [], "failed": DIVERGED, **more}


def played(job: Job, loss: float) -> dict:
    """A row for the job: at 10 steps a second, or 100 for ours, the loss falls to this."""
    end_s = job.steps / (100 if job.method == MINE else 10)
    of = {"method": job.method, "settings": job.settings, "seed": job.seed, "steps": job.steps}
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
    goal = Goal("a", least=1.5)
    found = [_met(goal, 1.6, 1.51), _met(goal, 1.6, 1.3), _met(goal, 1.6, None), _met(goal, 1.4, 1.3)]
    assert found == ["yes", "mean only", "mean only", "**no**"]


def test_a_seed_that_was_late_takes_the_longer_runs_time():
    rows = {"diloco": [row((9, 2.5)), row((9, 2.0))], "halos": [row((10, 3.0)), row((10, 2.0))]}
    compared = Compared(rows, "diloco")
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
    assert set(found) <= set(METHODS)
    assert {(len(of["tried"]), of["steps"]) for of in found.values()} == {(TRIALS, FULL.search_steps)}
    ended = {name: of for name, of in found.items() if "final" in of}
    assert {SYNCHRONOUS, muon(SYNCHRONOUS), TARGET_MUON, MINE, muon(ONE_WORKER_2BIT)} <= set(ended)
    assert {(len(of["final"]), of["final_steps"]) for of in ended.values()} == {(FINAL_RUNGS, FULL.steps)}

    def best_tried(name: str) -> float:
        return min(t["selection"] for t in found[name]["tried"] if t["selection"] is not None)

    for rival in RIVALS.values():  # so that the default need not run them with AdamW
        assert muon(rival) not in found or best_tried(muon(rival)) < best_tried(rival)
    for name, of in ended.items():
        assert len({json.dumps(t["settings"], sort_keys=True) for t in of["tried"]}) == len(of["tried"])
        chosen, final = (min(of[k], key=lambda t: t["selection"])["settings"] for k in ("tried", "final"))
        assert of["settings"] == final and {**chosen, "lr": 0} == {**final, "lr": 0}
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
    found = ladders(starts, 5, lambda m, s: Job(m, s, 0, 10), complete)
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

    found = search(tuple(METHODS), 7680, TRIALS, 15360, {}, complete)
    for of in found.values():
        assert [t["settings"]["lr"] for t in of["final"]] == [0.004, 0.002]
        assert len(of["tried"]) == TRIALS and of["bracketed"] and of["settings"]["lr"] == 0.004
        assert len({json.dumps(t["settings"], sort_keys=True) for t in of["tried"]}) == TRIALS

    def searched(method: str) -> set[str]:
        return {key for t in found[method]["tried"] for key in t["settings"]} & {"local_steps", "updates_per_send"}

    both = {"local_steps", "updates_per_send"}
    wanted = {OURS: both, OURS_2BIT: both, "halos-tuned": both}
    wanted |= {key: {"updates_per_send"} for key in (ONE_WORKER, ONE_WORKER_2BIT)}
    assert {m: searched(m) for m in METHODS} == {m: wanted.get(m.removesuffix(MUON), set()) for m in METHODS}
    for m in METHODS:  # the rates of both ladders, too, because the losses are alike here
        if not m.endswith(MUON):
            assert found[m]["tried"] == found[muon(m)]["tried"]
    diverged = search(
        ("halos",), 7680, 3, 15360, {}, lambda jobs: [failed(method="halos", settings=j.settings) for j in jobs]
    )
    assert diverged["halos"]["tried"][0]["selection"] is None


def test_the_last_two_rates_may_be_compared_over_several_seeds():
    """One seed in three prefers half the rate: alone it decides, in the mean of the three it does not."""

    def complete(jobs: list[Job]) -> list[dict]:
        def loss(job: Job) -> float:
            half = job.settings["lr"] == 0.008
            return 1.0 + (0.1 if job.seed != SEED else -0.1) * half if job.steps == 15360 else 1.0

        rows = [played(job, loss(job)) for job in jobs]
        seen.extend((job.seed, job.settings["lr"]) for job in jobs if job.steps == 15360)
        return rows

    for seeds, lr, loss in ((1, 0.008, 0.9), (3, 0.016, 1.0)):
        seen: list[tuple[int, float]] = []
        of = search((OURS,), 7680, 3, 15360, {}, complete, seeds)[OURS]
        assert (of["settings"]["lr"], of["final_seeds"]) == (lr, seeds)
        assert min(t["selection"] for t in of["final"]) == pytest.approx(loss)
        assert sorted(seen) == [(SEED + n, lr) for n in range(seeds) for lr in (0.008, 0.016)]


def test_a_search_of_some_methods_keeps_what_was_found_for_others(tmp_path):
    def of(trials: int) -> dict:
        more = {"final": [{}, {}], "final_steps": 20}
        return {"steps": 10, "settings": {"lr": trials}, "tried": [{}] * trials, **more}

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
    assert "--methods lacks diloco or region-momentum-2bit-muon" in capsys.readouterr().err
    assert claims.parse_arguments(["--methods", "halos", "--search-only"]).methods == ["halos"]
    assert claims.parse_arguments(["--methods", "diloco-muon", MINE]).methods == ["diloco-muon", MINE]


def test_the_default_runs_what_the_figures_compare_and_full_runs_all(tmp_path, capsys):
    assert {m for pair in GAPS.values() for m in pair} | set(map(muon, RIVALS.values())) <= set(NEEDED)
    path = tmp_path / "tuned.json"
    merge(path, {MINE: {"final": []}, TARGET_MUON: {"final": []}, muon("halos"): {}})
    assert claims.parse_arguments(["--tuned", str(path)]).methods == [TARGET_MUON, MINE]
    assert "halos-muon" in capsys.readouterr().out
    default, full = claims.parse_arguments([]), claims.parse_arguments(["--full"])
    assert {m for pair in GAPS.values() for m in pair} <= set(default.methods) <= set(NEEDED)
    assert TARGET_MUON in default.methods and set(full.methods) == set(METHODS)


def test_tuned_halos_is_halos_run_file_with_other_h_and_k():
    assert METHODS["halos-tuned"].base == METHODS["halos"].base
    tuned = METHODS["halos-tuned"].outer({"local_steps": 2}, ENVIRONMENT, 6144)
    assert tuned == METHODS["halos"].base.model_copy(update={"local_steps": 2})


def test_the_momentum_of_a_region_spans_a_share_of_the_runs_tokens():
    per_job = sum(max(1, math.ceil(4 * 0.238391 * 0.907 / w.step_s)) for w in ENVIRONMENT.world.workers) / 16
    outer = METHODS[OURS].outer({"lr": 0.01, "momentum_share": 0.2, "local_steps": 4}, ENVIRONMENT, 15360)
    updates = updates_of_a_region(OURS, outer, ENVIRONMENT, 15360)
    assert updates == pytest.approx(15360 / per_job / 4, rel=0.05)
    decay = METHODS[OURS].momentum_decay(outer, ENVIRONMENT, 15360)
    assert decay is not None and decay ** (0.2 * updates) == pytest.approx(1 / math.e)


def test_a_region_as_one_worker_steps_as_fast_as_its_devices_together():
    """Four devices share a batch four times as large by their speeds, and all-reduce 282 MB of gradient over 100
    Gbit/s: 34 ms. A job is one such step, and an update of one of four regions."""
    method = METHODS[ONE_WORKER]
    world = regional_world(method.base, ENVIRONMENT)
    for whole, region in zip(world.regions, ENVIRONMENT.world.regions, strict=True):
        (worker,) = whole.workers
        compute_s = 4 / sum(1 / w.step_s for w in region.workers)
        assert worker.step_s == pytest.approx(compute_s + 1.5 * 4 * ENVIRONMENT.numel / 12.5e9)
        assert whole.link == region.link
    assert updates_of_a_region(ONE_WORKER, method.base, ENVIRONMENT, 15360) == 15360 / 4 / 4
    found = run(Job(ONE_WORKER, SETTINGS[ONE_WORKER], 0, 3200, TINY, points=1))
    assert found["committed_steps"] == 3200 and 0.7 < found["utilization"] < 0.95


def test_muon_is_another_method_only_inside():
    """The same run file and messages, another optimizer; so another row, and another loss."""
    for name, method in METHODS.items():
        assert method.inner == ("muon" if name.endswith(MUON) else "adamw")
        assert method.base == METHODS[name.removesuffix(MUON)].base
    jobs = [Job(m, SETTINGS[m], 0, 160, TINY, points=1) for m in (OURS, muon(OURS))]
    adamw, with_muon = (run(job) for job in jobs)
    assert adamw["key"] != with_muon["key"] and adamw["test"] != with_muon["test"]
    assert adamw["seconds"] == with_muon["seconds"] and adamw["wide_bytes"] == with_muon["wide_bytes"]


def test_the_better_optimizer_ends_lower_on_average():
    rows = {"diloco": [row((1, 2.0)), row((1, 3.0))], "diloco-muon": [row((1, 2.9)), row((1, 2.0))]}
    rows |= {"halos": [row((1, 2.0)), row((1, 2.0))], "halos-muon": [row((1, 1.0)), failed()]}
    rows |= {MINE: [row((1, 1.0)), row((1, 1.0))]}
    assert better_optimizers(rows) == {"diloco": "diloco-muon", "halos": "halos", OURS_2BIT: MINE}


def test_synchronous_rounds_are_whole():
    steps = {m: whole_steps(METHODS[m].base, ENVIRONMENT, 1700) for m in ("diloco", "data-parallel", "halos")}
    assert steps == {"diloco": 3 * 512, "data-parallel": 106 * 16, "halos": 1700}
    assert whole_steps(METHODS["streaming-diloco"].base, ENVIRONMENT, 1599) == 0


def test_a_row_is_not_used_when_anything_it_follows_from_has_changed(monkeypatch):
    def key(**changes) -> str:
        return replace(Job(OURS, {"lr": 0.01}, 0, 512, TINY), **changes).key

    first = key()
    assert first == key() and first != key(warmup_share=0.5) and first != key(seed=1)
    other = METHODS["halos"]  # another outer block behind the same name
    monkeypatch.setitem(METHODS, OURS, replace(METHODS[OURS], of="halos"))
    assert other.base == METHODS[OURS].base and first != key()
    monkeypatch.undo()
    monkeypatch.setattr(claims_runs, "VERSION", claims_runs.VERSION + 1)
    assert first != key()
    monkeypatch.undo()
    text = replace(claims_runs.carried_text(), digest="another")
    monkeypatch.setattr(claims_runs, "carried_text", lambda: text)
    assert first != key()


def test_only_bytes_between_regions_count():
    """What the global server's region sends itself does not; of a ring's sixteen hops four cross."""
    sent = {"region-0 up": 1, "region-0 down": 1, "region-1 up": 10, "region-3 down": 100, "region-1 local up": 1000}
    links = {name: {"sent_bytes": size} for name, size in sent.items()}
    report = {"links": links, "committed_steps": 3}
    outer = METHODS["data-parallel"].base
    assert wide_bytes("servers", report, outer, ENVIRONMENT) == 110
    handed_in = {"links": {"ring down": {"sent_bytes": 1600}}}
    assert wide_bytes("ring", handed_in, outer, ENVIRONMENT) == 2 * 15 / 16 * 400
    gradient = 4 * ENVIRONMENT.numel
    assert wide_bytes("one-worker", report, outer, ENVIRONMENT) == pytest.approx(3 * 4 * 2 * 15 / 16 * gradient)


def test_runs_are_measured_alike():
    """Data parallelism waits for its all-reduce most of the time; ours does not wait; without a round no result."""
    parallel = run(Job("data-parallel", SETTINGS["data-parallel"], 0, 32, TINY, points=1))
    ours = run(Job(OURS, SETTINGS[OURS], 0, 160, TINY, points=1))
    assert parallel["committed_steps"] == 32 and parallel["utilization"] < 0.02
    assert ours["committed_steps"] == 160 and ours["utilization"] > 10 * parallel["utilization"]
    assert parallel["wide_bytes"] == pytest.approx(2 * 4 * 2 * 15 / 16 * 4 * ENVIRONMENT.numel)
    nothing = run(Job("diloco", SETTINGS["diloco"], 0, 256, TINY, points=1))
    assert nothing["failed"] == NO_ROUND and nothing["test"] is None


def test_a_run_ends_at_the_loss_that_was_asked_for():
    job = Job(OURS, SETTINGS[OURS], 0, 640, TINY, points=8)
    whole = run(job)
    middle = whole["curve"][4][2]
    found = run(replace(job, until=middle))
    assert found["curve"] == whole["curve"][: len(found["curve"])] and len(found["curve"]) <= 5
    assert found["test"] == found["curve"][-1][2] <= middle < found["curve"][-2][2]
    assert found["committed_steps"] < whole["committed_steps"] and found["seconds"] == found["curve"][-1][0]
    assert found["selection"] is found["final"] is None and "failed" not in found
    assert whole["final"] == pytest.approx(whole["test"], rel=0.05) and whole["final"] != whole["test"]
    assert replace(job, until=middle).key != job.key


def test_losses_are_of_640_windows_of_each_slice_and_final_ones_of_more():
    curve = Curve(Small(steps=1, **TINY), points=1)
    assert len(curve.test) == len(curve.selection) == 640
    for part in curve.final:
        assert len(part) == 5120 and len({tuple(window.tolist()) for window in part}) > 4000
    assert not torch.equal(*curve.final)


LOSSES = dict.fromkeys(METHODS, 2.0) | {MINE: 1.5, "data-parallel": 1.6, "data-parallel-muon": 1.4}
LOSSES |= {"diloco": 2.1, "halos": 2.5, "halos-muon": 2.6, "async-local-sgd": 2.7, "async-local-sgd-muon": 2.5}
LOSSES |= {muon(ONE_WORKER_2BIT): 1.45}
BETTER = {m: m if LOSSES[m] <= LOSSES[muon(m)] else muon(m) for m in METHODS if not m.endswith(MUON)}


def studied(failing: tuple[str, ...] = ()) -> tuple[dict, list[Job]]:
    """A report of rows that were made up, and the jobs they were made for."""
    jobs = []

    def complete(asked: list[Job]) -> list[dict]:
        jobs.extend(asked)
        rows = [played(job, LOSSES[job.method] * (0.5 if job.steps > REDUCED.steps else 1)) for job in asked]
        return [failed(**{k: r[k] for k in vars(j) if k in r}) if j.method in failing else r
                for j, r in zip(asked, rows, strict=True)]  # fmt: skip

    study = Study(REDUCED, SETTINGS, complete)
    return study.published(), jobs


def test_a_study_compares_at_equal_tokens_and_at_equal_time():
    """Ours with Muon, its rivals with what suits them better; the target is the lower one of both DiLoCo's losses."""
    report, jobs = studied()
    assert report["target_loss"] == 2.0 and report["setting"]["target"] == "diloco-muon"
    assert set(report["setting"]["rivals"].values()) == {BETTER[m] for m in RIVALS.values()}
    assert report["speedup"]["ours_over_diloco"]["mean"] == pytest.approx(10 * 6 / 5)  # ours passes 2.0 on its way
    assert report["speedup"]["ours_over_halos_tuned"]["reached"] == 3
    assert report["gap_to_data_parallel_same_optimizer"]["mean"] == pytest.approx(1.5 / 1.4 - 1)
    assert report["gap_one_worker_a_region"]["mean"] == pytest.approx(1.45 / 1.4 - 1)
    assert report["gap_to_adamw_data_parallel"]["mean"] == pytest.approx(1.5 / 1.6 - 1)
    assert report["gaps"][OURS][muon(SYNCHRONOUS)]["mean"] == pytest.approx(2.0 / 1.4 - 1)
    ending = {j.method: j.steps for j in jobs if j.steps < REDUCED.steps}
    fitting = {m for m in BETTER if not m.startswith(OURS)} - {"streaming-diloco"}  # of which no round fits
    assert set(ending) == {BETTER[m] for m in fitting}
    assert ending["halos"] == 1536 and ending["diloco-muon"] == 1536 and ending["data-parallel-muon"] == 1536
    assert "streaming-diloco" in report["loss_at_our_time"] and report["loss_at_our_time"]["streaming-diloco"] is None
    assert report["loss_at_our_time"][MINE] == 1.5


def test_rivals_that_miss_the_target_get_a_longer_schedule():
    report, jobs = studied()
    assert {(j.until, j.steps == 2 * REDUCED.steps) for j in jobs} == {(None, False), (2.0, True)}
    longer = {(j.method, j.seed) for j in jobs if j.until}
    assert longer == {(m, seed) for m in ("halos", "async-local-sgd-muon") for seed in range(3)}
    assert report["with_a_schedule_twice_as_long"]["halos"] == {"runs": 3, "reached": 3}
    assert report["speedup"]["ours_over_halos"]["mean"] > 10


def test_a_look_at_few_methods_tells_what_it_can(tmp_path):
    few = {m: SETTINGS[m] for m in (TARGET, MINE)}
    study = Study(REDUCED, few, lambda jobs: [played(job, LOSSES[job.method]) for job in jobs])
    report = study.published()
    assert report["gap_one_worker_a_region"] is None and set(report["speedup"]) == {"ours_over_diloco"}
    text = markdown(report, {m: METHODS[m].title for m in few})
    assert "ours_over_diloco" in text and not any(name in text for name in GAPS)


@pytest.mark.parametrize("failing", [("halos",), ("diloco", "diloco-muon"), (MINE,), tuple(METHODS)], ids=str)
def test_runs_that_diverged_are_told_and_break_nothing(failing, tmp_path):
    report, _ = studied(failing)
    text = markdown(report, {m: METHODS[m].title for m in METHODS})
    assert text.count(DIVERGED) == len(failing)
    json.dumps(plain(report), allow_nan=False)
    rows = [row((1, 2.0), method="halos"), failed(method=OURS, steps=10)]
    plot_curves(rows, {"halos": "a", OURS: "b"}, None, tmp_path / "p.png", "t")
    colours = claims_report.COLOURS
    assert {m.removesuffix("-muon") for m in METHODS} == colours.keys() and len({*colours.values()}) == len(colours)
    assert summary([failed()])["loss"]["mean"] is None
    of = {"steps": 10, "settings": {"lr": 0.01}, "hardware": "a core", "size": {"batch": 4, "length": 32}}
    tried = {OURS: {0.01: math.inf}, "halos": {0.01: 2.0, 0.005: 2.5}}
    told = confirm.summary([failed(method=OURS, **of), row((1, 2.0), method="halos", **of)], tried, tried)
    assert DIVERGED in confirm.markdown(told) and told["speedup"] == {}


def test_the_confirmation_compares_times_to_fair_dilocos_loss():
    of = {"steps": 10, "settings": {"lr": 0.01}, "hardware": "a core", "size": {"batch": 4, "length": 32}}
    rows = [
        row((100, 3.0), (200, 2.0), method="diloco-fair", **of),
        row((20, 3.0), (40, 2.0), (60, 1.8), method=OURS, **of),
        row((1000, 1.6), method="data-parallel", **of),
    ]
    tried = {r["method"]: {0.01: 2.5} for r in rows}
    told = confirm.summary(rows, tried, tried)
    assert told["target_loss"] == 2.0 and told["speedup"] == {"diloco-fair": 5.0, "data-parallel": 25.0}
    assert told["tokens"] == 10 * 4 * 32
    assert told["gaps"] == {OURS: {SYNCHRONOUS: pytest.approx(1.8 / 1.6 - 1)}}
    with_muon = [
        row((10, 3.0), (20, 1.9), (30, 1.5), method=MINE, **of),
        row((800, 1.4), method=muon(SYNCHRONOUS), **of),
    ]
    tried = {r["method"]: {0.01: 2.5} for r in (*rows, *with_muon)}
    both = confirm.summary([*rows, *with_muon], tried, {m: {0.01: 1.9, 0.005: 2.25} for m in tried})
    assert both["ours"] == MINE and both["speedup"][OURS] == pytest.approx(40 / (10 + 10 / 1.1))
    assert both["gaps"][MINE] == {
        SYNCHRONOUS: pytest.approx(1.5 / 1.6 - 1),
        muon(SYNCHRONOUS): pytest.approx(1.5 / 1.4 - 1),
    }
    assert "+7.1 % from data parallel, fp32 flat ring; Muon" in confirm.markdown(both)
    assert "0.01000: 2.500; of whole runs 0.00500: 2.250, 0.01000: 1.900" in confirm.markdown(both)
    kept = dict(flat(confirm.figures(told)))
    assert (kept["over_ours.diloco-fair"], kept[f"{OURS}.test"], kept["data-parallel.end_s"]) == (5.0, 1.8, 1000)
    assert "| 5.00 |" in confirm.markdown(told) and "0.01000: 2.500" in confirm.markdown(told)


def test_a_row_cut_off_by_a_kill_is_dropped_and_the_others_stay(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "a", "test": 1}\n{"key": "b", "te')
    assert set(Results(path).rows) == {"a"}
    assert path.read_text() == '{"key": "a", "test": 1}\n'
