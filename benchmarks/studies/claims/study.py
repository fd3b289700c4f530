"""The study: which runs it takes in the published environment, and what is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from benchmarks.studies.claims.methods import (
    METHODS,
    MUON,
    ONE_WORKER,
    ONE_WORKER_2BIT,
    OURS,
    OURS_2BIT,
    SYNCHRONOUS,
    Settings,
    muon,
    whole_steps,
)
from benchmarks.studies.claims.report import Compared, Row, mean, summary
from benchmarks.studies.claims.runs import Job
from benchmarks.studies.claims.search import TRIALS
from benchmarks.studies.environments import HALOS, load_environment

MINE = muon(OURS_2BIT)
TARGET = "diloco"  # the method whose final loss the others are to reach, as all rivals in its better optimizer
RIVALS = {
    "ours_over_diloco": TARGET,
    "ours_over_fair_diloco": "diloco-fair",
    "ours_over_async_local_sgd": "async-local-sgd",
    "ours_over_halos": "halos",
    "ours_over_halos_tuned": "halos-tuned",
}
# Shares by which one method's final loss is above another's, at equal tokens: figure → (method, held against).
GAPS = {
    "gap_to_data_parallel_same_optimizer": (MINE, muon(SYNCHRONOUS)),
    "gap_one_worker_a_region": (muon(ONE_WORKER_2BIT), muon(SYNCHRONOUS)),
    "gap_to_adamw_data_parallel": (MINE, SYNCHRONOUS),
}
# What the figures compare, and ours with AdamW and in four bits beside it. Rivals are better with Muon, as their
# searches say.
NEEDED = (
    *map(muon, RIVALS.values()),
    *(name for m in (SYNCHRONOUS, OURS, ONE_WORKER) for name in (m, muon(m))),
    MINE,
    muon(ONE_WORKER_2BIT),
)
OUR_TIME_SEED = 0


@dataclass(frozen=True)
class Plan:
    """The size of a study. steps, search_steps: inner steps, of all workers together, of a run that is compared,
    and of a run of the search. trials: settings tried for each method; 0: the study takes those found before."""

    steps: int
    search_steps: int
    trials: int
    seeds: int
    size: dict[str, int]


FULL = Plan(15360, 7680, TRIALS, seeds=3, size={"length": 32})
REDUCED = replace(FULL, trials=0)


class Study:
    """complete: returns the rows of jobs, and runs those that have none yet. rows: of equal tokens. better: of each
    rival (and other method) that was run with two optimizers, the one that ended lower."""

    def __init__(self, plan: Plan, settings: dict[str, Settings], complete: Callable[[list[Job]], list[Row]]) -> None:
        self.plan, self.settings, self.complete = plan, settings, complete
        self.rows: list[Row] = []
        self.better: dict[str, str] = {}

    def published(self) -> dict[str, Any]:
        """The published environment: equal tokens, time to DiLoCo's final loss of that seed, loss at our time."""
        methods = tuple(self.settings)
        compared = self._compare(methods)
        self.rows = [row for rows in compared.rows.values() for row in rows]
        summaries = {m: summary(rows) for m, rows in compared.rows.items()}
        return {
            "setting": {
                **asdict(self.plan),
                "settings": self.settings,
                "parameters": self.rows[0]["numel"],
                "text": self.rows[0]["text"],
                "target": compared.target,
                "rivals": self._rivals(),
            },
            "target_loss": mean(compared.targets),
            "time_to_target_s": {m: mean(compared.times_s(m)) for m in methods},
            "loss_at_equal_tokens": {m: s["loss"] for m, s in summaries.items()},
            "loss_at_our_time": self._losses_at_our_time(compared),
            "speedup": compared.speedups(self._rivals(), MINE),
            **{name: compared.gap(*pair) for name, pair in GAPS.items()},
            "gaps": {
                m: {reference: compared.gap(m, reference) for reference in (SYNCHRONOUS, muon(SYNCHRONOUS))}
                for of in (OURS, OURS_2BIT, ONE_WORKER, ONE_WORKER_2BIT)
                for m in (of, muon(of))
                if m in compared.rows
            },
            "with_a_schedule_twice_as_long": compared.longer_runs(),
            "methods": summaries,
        }

    # -- inside

    def _rivals(self) -> dict[str, str]:
        return {name: self.better[m] for name, m in RIVALS.items() if m in self.better}

    def _job(self, method: str, seed: int, steps: int, until: float | None = None) -> Job:
        return Job(method, self.settings[method], seed, steps, self.plan.size, until=until)

    def _compare(self, methods: Sequence[str]) -> Compared:
        """Runs every method with every seed. Rivals that miss the target run once more, with twice the tokens and a
        learning rate's schedule of that length, until they reach it: the pool is used twice."""
        steps = self.plan.steps
        rows = self.complete([self._job(m, seed, steps) for seed in range(self.plan.seeds) for m in methods])
        by_method = {m: [row for row in rows if row["method"] == m] for m in methods}
        self.better = better_optimizers(by_method)
        found = Compared(by_method, self.better[TARGET])
        missed = [(m, seed) for m in self._rivals().values() for seed in found.missed(m)]
        longer = self.complete([self._job(m, seed, 2 * steps, found.targets[seed]) for m, seed in missed])
        found.longer.update(zip(missed, longer, strict=True))
        return found

    def _losses_at_our_time(self, compared: Compared) -> dict[str, float | None]:
        """The final loss of every method that is not ours, in its better optimizer, when it has as much time as ours
        takes on average, with the learning rate's schedule cut to fit, and one seed. None if no round fits."""
        environment = load_environment(HALOS)
        end_s = summary(compared.rows[MINE])["end_s"]
        jobs: dict[str, Job] = {}
        for name, m in self.better.items():
            mine = summary(compared.rows[m])
            if name.startswith(OURS) or not end_s or not mine["end_s"]:
                continue
            steps = int(mine["steps"] * end_s / mine["end_s"])
            outer = METHODS[m].outer(self.settings[m], environment, max(steps, 1))
            if steps := whole_steps(outer, environment, steps):
                jobs[m] = self._job(m, OUR_TIME_SEED, steps)
        rows = self.complete(list(jobs.values()))
        losses = {m: row["final"] for m, row in zip(jobs, rows, strict=True)}
        losses[MINE] = compared.rows[MINE][OUR_TIME_SEED]["final"]
        return {m: losses.get(m) for m in compared.rows}


def better_optimizers(rows: dict[str, list[Row]]) -> dict[str, str]:
    """Choose of each method that was run, with AdamW, Muon or both, the name with the lower mean final loss at equal
    tokens. rows: of each name; a run that came to nothing is worse than any other."""

    def loss(name: str) -> float:
        return sum(inf if row["final"] is None else row["final"] for row in rows[name])

    names = dict.fromkeys(name.removesuffix(MUON) for name in rows)
    return {m: min((name for name in (m, muon(m)) if name in rows), key=loss) for m in names}
