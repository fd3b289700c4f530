"""The claims, measured: every method through the production's state machines, in virtual time.

    python benchmarks/claims.py             a reduced setting, about half an hour on 2 cores
    python benchmarks/claims.py --full      longer runs, a larger search, more seeds: hours
    python benchmarks/claims.py --steps 512 --seeds 1 --no-harsh     a look

Rows are kept in the results file (JSON lines) and never run twice: an interrupted study goes on where it was.
The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from claims_goodput import goodput_table
from claims_markdown import markdown
from claims_methods import LADDER, METHODS, OURS, ROOT, Settings
from claims_report import Row, loss_at, plain, plot_curves, replace_block, speedup, summary
from claims_runs import DATA, Job, Results
from claims_worlds import WORLDS
from common import record

from geotrain.files import whole_file

TUNED = ROOT / "benchmarks/data/claims_tuned.json"
SEARCH_SEED = 1000  # of the runs that settings are chosen by; never one of the seeds that are compared
HARSH_METHODS = ("diloco", "diloco-fair", "async-local-sgd", "halos", OURS)
RIVALS = {
    "ours_over_diloco": "diloco",
    "ours_over_fair_diloco": "diloco-fair",
    "ours_over_async_local_sgd": "async-local-sgd",
    "ours_over_halos": "halos",
}


@dataclass(frozen=True)
class Plan:
    """steps, harsh_steps, search_steps: inner steps of all workers; of a run in the published environment, in a
    harsher world, of the search. trials: settings tried for each method (0: those of TUNED). extended_seeds: with
    which a rival that does not get to the target is given a schedule twice as long."""

    steps: int
    harsh_steps: int
    search_steps: int
    trials: int
    seeds: int
    harsh_seeds: int
    extended_seeds: int
    size: dict[str, int]


REDUCED = Plan(15360, 6144, 0, 0, seeds=3, harsh_seeds=1, extended_seeds=3, size={"length": 32})
FULL = Plan(61440, 15360, 15360, 12, seeds=3, harsh_seeds=2, extended_seeds=3, size={"length": 32})


def main() -> None:
    arguments = parse_arguments()
    plan = FULL if arguments.full else REDUCED
    for name in ("steps", "harsh_steps", "search_steps", "trials", "seeds", "harsh_seeds"):
        if getattr(arguments, name) is not None:
            plan = replace(plan, **{name: getattr(arguments, name)})
    results = Results(
        Path(arguments.results or ROOT / f"runs/claims-{'full' if arguments.full else 'reduced'}.jsonl")
    )
    study = Study(plan, results, arguments.jobs, tuple(arguments.methods))
    if arguments.search_only:
        return
    report = study.published()
    if arguments.harsh:
        report["harsh"] = study.harsh()
    report["goodput"] = goodput_table(reduced=not arguments.full)
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(report, {m: METHODS[m].title for m in study.methods})
    for name, content in (("claims.md", text), ("claims.json", json.dumps(plain(report), indent=1) + "\n")):
        with whole_file(folder / name) as file:
            file.write(content)
    study.plot(report, folder)
    if arguments.docs:
        picture = "![Test loss over virtual time and over tokens](evidence.png)"
        replace_block(ROOT / "docs/evidence.md", "claims", f"{text}\n{picture}")
        study.plot(report, ROOT / "docs")
        shutil.copy(folder / "claims.json", DATA.with_name("claims.json"))
    figures = {name: found["mean"] for name, found in report["speedup"].items()}
    figures |= {"loss_gap_to_synchronous": report["loss_gap_to_synchronous"], "goodput": report["goodput"]["ours"]}
    record("claims", figures, lambda _: "", "full" if arguments.full else "reduced")
    print(json.dumps(plain(report)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="longer runs, a larger search, more seeds (hours)")
    parser.add_argument("--search-only", action="store_true", help="find the settings, and stop")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--steps", type=int, help="inner steps of all workers together")
    parser.add_argument("--harsh-steps", type=int, help="the same of a run in a harsher world")
    parser.add_argument("--search-steps", type=int, help="of a run of the search")
    parser.add_argument("--trials", type=int, help="settings tried for each method; 0: those found before")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--harsh-seeds", type=int)
    parser.add_argument("--no-harsh", dest="harsh", action="store_false")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--results", help="JSON lines; default runs/claims-*.jsonl")
    parser.add_argument("--docs", action="store_true", help="renew docs/evidence.md and what is committed beside it")
    parser.add_argument("--out", default=str(ROOT / "runs/claims"), help="folder for tables and plots")
    return parser.parse_args()


class Study:
    def __init__(self, plan: Plan, results: Results, processes: int, methods: tuple[str, ...]) -> None:
        self.plan, self.results, self.processes, self.methods = plan, results, processes, methods
        self.rows: list[Row] = []
        self.settings = self._search() if plan.trials else settings_found(methods)

    def published(self) -> dict[str, Any]:
        """The published environment: equal tokens, time to DiLoCo's final loss of that seed, loss at our time."""
        jobs = [
            Job(m, self.settings[m], "published", seed, self.plan.steps, self.plan.size)
            for seed in range(self.plan.seeds)
            for m in self.methods
        ]
        self.rows = self.results.complete(jobs, self.processes)
        by_method = {m: [row for row in self.rows if row["method"] == m] for m in self.methods}
        targets = _targets(by_method)
        summaries = {m: summary(rows, targets) for m, rows in by_method.items()}
        late = [m for m in RIVALS.values() if m in self.methods and summaries[m]["time_to_target_s"] is None]
        extended = self._extended(late, targets)
        times = {m: _sooner(summaries[m]["times_s"], extended.get(m, {}).get("times_s", [])) for m in self.methods}
        end_s = summaries[OURS]["end_s"]
        sync = summaries.get("data-parallel")
        ours = summaries[OURS]["loss"]["mean"]
        return {
            "setting": {
                **self.plan.__dict__,
                "settings": self.settings,
                "parameters": self.rows[0].get("numel"),
                "text": self.rows[0]["text"],
            },
            "cpu_s": sum(row["cpu_s"] for row in self.results.rows.values()),
            "target_loss": sum(targets) / len(targets),
            "time_to_target_s": {m: _mean(times[m]) for m in self.methods},
            "loss_at_equal_tokens": {m: summaries[m]["loss"] for m in self.methods},
            "loss_at_our_time": {m: _mean([loss_at(r, end_s) for r in rows]) for m, rows in by_method.items()},
            "speedup": {
                name: speedup(times[rival], times[OURS]) for name, rival in RIVALS.items() if rival in self.methods
            },
            "loss_gap_to_synchronous": ours / sync["loss"]["mean"] - 1 if sync else None,
            "with_a_schedule_twice_as_long": {m: s["loss"] for m, s in extended.items()},
            "methods": summaries,
        }

    def harsh(self) -> dict[str, Any]:
        """Each harsher world: the same speed-ups, to DiLoCo's final loss in that world and seed."""
        methods = [m for m in HARSH_METHODS if m in self.methods]
        jobs = [
            Job(m, self.settings[m], world, seed, self.plan.harsh_steps, self.plan.size)
            for seed in range(self.plan.harsh_seeds)
            for world in WORLDS
            if world != "published"
            for m in methods
        ]
        rows = self.results.complete(jobs, self.processes)
        found = {}
        for world in dict.fromkeys(job.world for job in jobs):
            by_method = {m: [r for r in rows if (r["method"], r["world"]) == (m, world)] for m in methods}
            targets = _targets(by_method)
            times = {m: summary(mine, targets)["times_s"] for m, mine in by_method.items()}
            found[world] = {
                "target_loss": sum(targets) / len(targets),
                "speedup": {
                    name: speedup(times[rival], times[OURS])["mean"]
                    for name, rival in RIVALS.items()
                    if rival in methods
                },
                "time_to_target_s": {m: _mean(times[m]) for m in methods},
                "loss_at_equal_tokens": {m: _mean([r["test"] for r in by_method[m]]) for m in methods},
                "end_s": {m: _mean([r["seconds"] for r in by_method[m]]) for m in methods},
            }
        return found

    def plot(self, report: dict[str, Any], folder: Path) -> None:
        titles = {m: METHODS[m].title for m in self.methods}
        plot_curves(self.rows, titles, report["target_loss"], folder / "evidence.png", "HALoS's environment")

    # -- inside

    def _search(self) -> dict[str, Settings]:
        """For each method the settings with the best loss on the selection slice, of equally many: the published
        ones with each learning rate of the ladder, then draws at the best of these rates."""
        searched = [m for m in self.methods if METHODS[m].settings_of is None]
        ladder = {m: [{**METHODS[m].published(), "lr": lr} for lr in LADDER[: self.plan.trials]] for m in searched}
        first = self._tried(ladder)
        drawn = {
            m: [
                {"lr": best["settings"]["lr"], **d}
                for d in METHODS[m].draws(self.plan.trials - len(LADDER), SEARCH_SEED)
            ]
            for m, best in ((m, _best(rows)) for m, rows in first.items())
        }
        second = self._tried(drawn)
        found = {}
        for m in searched:
            rows = first[m] + second[m]
            found[m] = {
                "settings": _best(rows)["settings"],
                "tried": [{"settings": r["settings"], "selection": r["selection"]} for r in rows],
            }
        TUNED.write_text(json.dumps(plain({"steps": self.plan.search_steps, "methods": found}), indent=1) + "\n")
        return settings_found(self.methods)

    def _tried(self, candidates: dict[str, list[Settings]]) -> dict[str, list[Row]]:
        """One pass of the pool over all methods' candidates."""
        jobs = {
            m: [
                Job(m, s, "published", SEARCH_SEED, self.plan.search_steps, self.plan.size, points=4)
                for s in settings
            ]
            for m, settings in candidates.items()
        }
        self.results.complete([job for mine in jobs.values() for job in mine], self.processes)
        return {m: self.results.complete(mine, self.processes) for m, mine in jobs.items()}

    def _extended(self, methods: list[str], targets: list[float]) -> dict[str, Any]:
        """Methods that did not get there, once more with twice the tokens and a schedule as long."""
        if not methods:
            return {}
        seeds = min(self.plan.extended_seeds, self.plan.seeds)
        jobs = [
            Job(m, self.settings[m], "published", seed, 2 * self.plan.steps, self.plan.size)
            for seed in range(seeds)
            for m in methods
        ]
        rows = self.results.complete(jobs, self.processes)
        return {m: summary([row for row in rows if row["method"] == m], targets[:seeds]) for m in methods}


def settings_found(methods: tuple[str, ...]) -> dict[str, Settings]:
    """What the search found."""
    found = json.loads(TUNED.read_text())["methods"]
    return {m: found[METHODS[m].settings_of or m]["settings"] for m in methods}


def _best(rows: list[Row]) -> Row:
    return min(rows, key=lambda row: row["selection"])


def _targets(by_method: dict[str, list[Row]]) -> list[float]:
    """Seed by seed what DiLoCo ends at."""
    return [row["test"] for row in by_method["diloco"]]


def _sooner(times: list[float | None], extended: list[float | None]) -> list[float | None]:
    """Seed by seed, the time of the run itself, or else of the extended one where there is one."""
    more = extended + [None] * (len(times) - len(extended))
    return [other if own is None else own for own, other in zip(times, more, strict=True)]


def _mean(values: list[float | None]) -> float | None:
    """Of those that are known; None when there is none."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


if __name__ == "__main__":
    main()
