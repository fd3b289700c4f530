"""What is run and compared: in the published environment, and in harsher ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from claims_methods import DATA, METHODS, OURS, SYNCHRONOUS, Settings, whole_steps
from claims_report import Compared, Row, mean, summary
from claims_runs import Job
from claims_search import TRIALS
from claims_worlds import WORLDS

from geotrain.simulate.spec import load_environment

TARGET = "diloco"  # its final loss
HARSH_METHODS = (TARGET, "diloco-fair", "async-local-sgd", "halos", "halos-tuned", OURS)
RIVALS = {
    "ours_over_diloco": TARGET,
    "ours_over_fair_diloco": "diloco-fair",
    "ours_over_async_local_sgd": "async-local-sgd",
    "ours_over_halos": "halos",
    "ours_over_halos_tuned": "halos-tuned",
}
OUR_TIME_SEED = 0


@dataclass(frozen=True)
class Plan:
    """steps, harsh_steps, search_steps: inner steps of all workers; of a run in the published environment, in a
    harsher world (and, beside these, in the published one), of the search. trials: settings tried for each method
    (0: those found before)."""

    steps: int
    harsh_steps: int
    search_steps: int
    trials: int
    seeds: int
    harsh_seeds: int
    size: dict[str, int]

    def costs(self, methods: Sequence[str], harsh: bool = True) -> list[tuple[str, int, int]]:
        """(stage, runs, steps of a run); at most so many where a stage depends on what another one finds."""
        many = len(methods)
        rivals = sum(m in methods for m in RIVALS.values() if m != TARGET)
        harsh_many = sum(m in methods for m in HARSH_METHODS)
        worlds = len(WORLDS) * self.harsh_seeds * harsh
        return [
            ("search", many * self.trials, self.search_steps),
            ("published environment", many * self.seeds, self.steps),
            ("  ending at our time, at most", many - 1, self.steps),
            ("  twice as long, at most", rivals * self.seeds, 2 * self.steps),
            ("harsher worlds", harsh_many * worlds, self.harsh_steps),
            ("  twice as long, at most", rivals * worlds, 2 * self.harsh_steps),
        ]

    def told(self, methods: Sequence[str], search_only: bool, harsh: bool) -> str:
        """What is ahead, for people; rows that are there already are not run again."""
        stages = self.costs(methods, harsh)[: 1 if search_only else None]
        lines = [f"{stage}: {runs} runs of {steps:,} steps" for stage, runs, steps in stages if runs]
        total = sum(runs * steps for _, runs, steps in stages)
        return "\n".join([*lines, f"together at most {sum(r for _, r, _ in stages)} runs, {total:,} steps"])


REDUCED = Plan(9216, 4096, 7680, 0, seeds=3, harsh_seeds=1, size={"length": 32})
FULL = Plan(15360, 6144, 7680, TRIALS, seeds=3, harsh_seeds=3, size={"length": 32})


class Study:
    """complete: runs jobs, or knows their rows already. rows: those of the published environment."""

    def __init__(self, plan: Plan, settings: dict[str, Settings], complete: Callable[[list[Job]], list[Row]]) -> None:
        self.plan, self.settings, self.complete = plan, settings, complete
        self.rows: list[Row] = []

    def published(self) -> dict[str, Any]:
        """The published environment: equal tokens, time to DiLoCo's final loss of that seed, loss at our time."""
        methods = tuple(self.settings)
        compared = self._compare(("published",), methods, self.plan.seeds, self.plan.steps)["published"]
        self.rows = [row for rows in compared.rows.values() for row in rows]
        summaries = {m: summary(rows) for m, rows in compared.rows.items()}
        return {
            "setting": {
                **asdict(self.plan),
                "settings": self.settings,
                "parameters": self.rows[0]["numel"],
                "text": self.rows[0]["text"],
            },
            "target_loss": mean(compared.targets),
            "time_to_target_s": {m: mean(compared.times_s(m)) for m in methods},
            "loss_at_equal_tokens": {m: s["loss"] for m, s in summaries.items()},
            "loss_at_our_time": self._losses_at_our_time(compared),
            "speedup": compared.speedups(RIVALS, OURS),
            "loss_gap_to_synchronous": compared.gap(OURS, SYNCHRONOUS),
            "with_a_schedule_twice_as_long": compared.longer_runs(),
            "methods": summaries,
        }

    def harsh(self) -> dict[str, Any]:
        """Each harsher world, and the published one as their control: the same speed-ups, to DiLoCo's final loss in
        that world and seed."""
        methods = tuple(m for m in HARSH_METHODS if m in self.settings)
        worlds = self._compare(tuple(WORLDS), methods, self.plan.harsh_seeds, self.plan.harsh_steps)
        found = {}
        for world, compared in worlds.items():
            summaries = {m: summary(rows) for m, rows in compared.rows.items()}
            found[world] = {
                "target_loss": mean(compared.targets),
                "speedup": compared.speedups(RIVALS, OURS),
                "time_to_target_s": {m: mean(compared.times_s(m)) for m in methods},
                "loss_at_equal_tokens": {m: s["loss"]["mean"] for m, s in summaries.items()},
                "with_a_schedule_twice_as_long": compared.longer_runs(),
                "end_s": {m: s["end_s"] for m, s in summaries.items()},
                "failed": {m: s["failed"] for m, s in summaries.items() if s["failed"]},
            }
        return found

    # -- inside

    def _job(self, method: str, world: str, seed: int, steps: int, until: float | None = None) -> Job:
        return Job(method, self.settings[method], world, seed, steps, self.plan.size, until=until)

    def _compare(self, worlds: Sequence[str], methods: Sequence[str], seeds: int, steps: int) -> dict[str, Compared]:
        """Every method in every world with every seed; then rivals that missed the target once more, with twice the
        tokens and a schedule as long, until they reach it. Two passes of the pool."""
        jobs = [self._job(m, w, seed, steps) for seed in range(seeds) for w in worlds for m in methods]
        rows = self.complete(jobs)
        found = {
            w: Compared({m: [r for r in rows if (r["method"], r["world"]) == (m, w)] for m in methods})
            for w in worlds
        }
        missed = [
            (w, m, seed)
            for w, compared in found.items()
            for m in RIVALS.values()
            if m in methods
            for seed in compared.missed(m)
        ]
        longer = self.complete([self._job(m, w, s, 2 * steps, found[w].targets[s]) for w, m, s in missed])
        for (w, m, seed), row in zip(missed, longer, strict=True):
            found[w].longer[m, seed] = row
        return found

    def _losses_at_our_time(self, compared: Compared) -> dict[str, float | None]:
        """What every method ends at when its whole schedule fits into our mean time, with one seed. None: not even
        one round does."""
        environment = load_environment(DATA)
        end_s = summary(compared.rows[OURS])["end_s"]
        jobs: dict[str, Job] = {}
        for m, rows in compared.rows.items():
            mine = summary(rows)
            if m == OURS or not end_s or not mine["end_s"]:
                continue
            steps = int(mine["steps"] * end_s / mine["end_s"])
            outer = METHODS[m].outer(self.settings[m], environment, max(steps, 1))
            if steps := whole_steps(outer, environment, steps):
                jobs[m] = self._job(m, "published", OUR_TIME_SEED, steps)
        rows = self.complete(list(jobs.values()))
        losses = {m: row["test"] for m, row in zip(jobs, rows, strict=True)}
        losses[OURS] = compared.rows[OURS][OUR_TIME_SEED]["test"]
        return {m: losses.get(m) for m in compared.rows}
