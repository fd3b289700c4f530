"""The search: for every method the same number of trials, chosen by the loss on the selection slice."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.studies.claims.methods import METHODS, Settings
from benchmarks.studies.claims.report import Row, plain
from benchmarks.studies.claims.runs import Job
from geotrain.common.files import whole_file

TUNED = ROOT / "benchmarks/data/claims_tuned.json"
SEED = 1000  # of the runs that settings are chosen by; never one of the seeds that are compared
TRIALS = 8  # of each method
START_LR, RUNGS = 1.6e-2, 5
FINAL_RUNGS = 2  # rates tried at the study's own length: what was found, and half of it, since longer runs want less

Complete = Callable[[list[Job]], list[Row]]
JobOf = Callable[[str, Settings], Job]


def search(
    methods: Sequence[str],
    steps: int,
    trials: int,
    final_steps: int,
    size: dict[str, Any],
    complete: Complete,
    final_seeds: int = 1,
) -> dict[str, Any]:
    """Search each method's settings, and return what the file of settings keeps. complete: runs jobs and gives their
    rows.

    First the published outer settings on a ladder of inner learning rates; then draws of the outer settings at the
    best rate, up to `trials` of so many steps in all; at last the best settings in runs as long as those that are
    compared, with their rate and half of it, by more windows of the selection slice, in the mean of `final_seeds`
    seeds. A method that is like another shares all but that with it. The methods walk together, so that every pass of
    the pool has work for all processes.
    """

    def job(method: str, settings: Settings, length: int = steps, seed: int = SEED) -> Job:
        return Job(method, settings, seed, length, size, points=4)

    own = list(dict.fromkeys(METHODS[m].like or m for m in methods))
    rows = ladders({m: {**METHODS[m].published(), "lr": START_LR} for m in own}, min(RUNGS, trials), job, complete)
    bracketed = {m: is_bracketed(rates(rows[m])) for m in own}
    drawn = {m: _drawn(m, best(mine)["settings"]["lr"], trials - len(mine)) for m, mine in rows.items()}
    for row in complete([job(m, settings) for m, mine in drawn.items() for settings in mine]):
        rows[row["method"]].append(row)
    source = {m: METHODS[m].like or m for m in methods}
    starts = {m: best(rows[of])["settings"] for m, of in source.items()}
    final = ladders(starts, FINAL_RUNGS, lambda m, settings: job(m, settings, final_steps), complete)
    more = range(SEED + 1, SEED + final_seeds)
    again = iter(
        complete(
            [job(m, r["settings"], final_steps, seed) for m, rows in final.items() for r in rows for seed in more]
        )
    )
    final = {m: [_mean([row, *islice(again, len(more))]) for row in rows] for m, rows in final.items()}
    return {
        m: {
            "steps": steps,
            "bracketed": bracketed[of],
            "settings": best(final[m], "final_selection")["settings"],
            "tried": _told(rows[of]),
            "final_steps": final_steps,
            "final_seeds": final_seeds,
            "final": _told(final[m], "final_selection"),
        }
        for m, of in source.items()
    }


def ladders(starts: dict[str, Settings], rungs: int, job: JobOf, complete: Complete) -> dict[str, list[Row]]:
    """Rows of each method with inner learning rates by factors of two from its start towards the better side, until
    the best lies between two others or so many are tried."""
    rows: dict[str, list[Row]] = {m: [] for m in starts}

    def ahead(method: str) -> float | None:
        return next_rung(rates(rows[method]), rungs, starts[method]["lr"])

    while due := {m: lr for m in starts if (lr := ahead(m)) is not None}:
        for row in complete([job(m, {**starts[m], "lr": lr}) for m, lr in due.items()]):
            rows[row["method"]].append(row)
    return rows


def next_rung(tried: dict[float, float], rungs: int = RUNGS, start: float = START_LR) -> float | None:
    """The inner learning rate to try next: a factor of 2 beside the best of those tried (rate → loss). None: the best
    has a worse one on either side, or there are so many rungs."""
    if not tried:
        return start
    if len(tried) >= rungs:
        return None
    if min(tried.values()) == inf:
        return min(tried) / 2
    middle = min(tried, key=lambda lr: tried[lr])
    return next((lr for lr in (middle / 2, middle * 2) if lr not in tried), None)


def is_bracketed(tried: dict[float, float]) -> bool:
    middle = min(tried, key=lambda lr: tried[lr])
    return middle / 2 in tried and middle * 2 in tried


def merge(path: Path, found: dict[str, Any]) -> None:
    """Keeps what the file says of other methods."""
    kept = json.loads(path.read_text())["methods"] if path.exists() else {}
    merged = {m: of for m, of in ({**kept, **found}).items() if m in METHODS}
    with whole_file(path) as file:
        file.write(json.dumps(plain({"methods": merged}), indent=1) + "\n")


def settings_found(methods: Sequence[str], path: Path = TUNED) -> dict[str, Settings]:
    """Read what the search found. Raises SystemExit when it has not been run to its end for all of them, with the
    same budget."""
    found = _ended(path)
    missing = [m for m in methods if m not in found]
    sizes = ("tried", "final"), ("steps", "final_steps")
    budgets = {
        (*(len(of[k]) for k in sizes[0]), *(of[k] for k in sizes[1])) for m, of in found.items() if m in methods
    }
    if missing or len(budgets) > 1:
        why = f"has no settings of {', '.join(missing)}" if missing else "has searches of unequal budgets"
        raise SystemExit(f"{path} {why}: run `python -m benchmarks.studies.claims --search-only` first")
    return {m: found[m]["settings"] for m in methods}


def with_settings(methods: Sequence[str], path: Path = TUNED) -> list[str]:
    """Those of the methods that the search has settings of."""
    found = _ended(path)
    return [m for m in methods if m in found]


def _ended(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())["methods"] if path.exists() else {}
    return {m: of for m, of in found.items() if "final" in of}


def rates(rows: list[Row]) -> dict[float, float]:
    """Inner learning rate → loss on the selection slice; infinite of runs that came to nothing."""
    return {row["settings"]["lr"]: _loss(row) for row in rows}


def _drawn(method: str, lr: float, count: int) -> list[Settings]:
    found = []
    for draw in METHODS[method].draws(count, SEED):
        scale = draw.pop("lr_scale", 1.0)
        found.append({"lr": float(f"{scale * lr:.4g}"), **draw})
    return found


def _mean(seeds: list[Row]) -> Row:
    """The first of the rows with the mean of all their final losses on the selection slice."""
    losses = [_loss(row, "final_selection") for row in seeds]
    return {**seeds[0], "final_selection": sum(losses) / len(losses)}


def _told(rows: list[Row], loss: str = "selection") -> list[dict[str, Any]]:
    return [{"settings": r["settings"], "selection": r[loss]} for r in rows]


def _loss(row: Row, loss: str = "selection") -> float:
    return inf if row[loss] is None else row[loss]


def best(rows: list[Row], loss: str = "selection") -> Row:
    """By the loss on the selection slice. loss: of which windows."""
    return min(rows, key=lambda row: _loss(row, loss))
