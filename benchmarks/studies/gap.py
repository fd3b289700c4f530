"""Measure what the gap to data parallelism at equal tokens follows from: the batch, or the length of the run.

    python -m benchmarks.studies.gap                       a batch eight times as large, and a run eight times as long
    python -m benchmarks.studies.gap --runs 4x3072 8x3072  others: sequences of a worker's step × steps of all
    python -m benchmarks.studies.gap --optimizers muon     with Muon only; default: with AdamW, then with Muon

Both methods have the same inner optimizer. The small model of the claims, its settings but for the inner learning
rate: each method's is found anew by factors of two, until it is bracketed, by the selection slice. One seed. A second
gap is to the best data parallelism found at as many tokens: of any line, or of those whose batch and mean of weights
`candidates` searched. Finished runs are kept in the results file (JSON lines), which is committed, and not done
again. With `--docs` the table has all that are kept. Where there are three lengths of a batch, the gap is
extrapolated to 10,000 steps of each worker. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import curve_fit

from benchmarks import ROOT
from benchmarks.common import command_line, record
from benchmarks.studies.claims.baseline import best_parallel
from benchmarks.studies.claims.baseline import kept as candidates
from benchmarks.studies.claims.markdown import number
from benchmarks.studies.claims.methods import OURS, OURS_2BIT, SYNCHRONOUS, Settings, muon
from benchmarks.studies.claims.report import Row, plain, replace_block, table
from benchmarks.studies.claims.runs import Job, Results
from benchmarks.studies.claims.search import RUNGS, SEED, best, is_bracketed, ladders, rates, settings_found
from benchmarks.studies.claims.study import FULL

LENGTH = FULL.size["length"]  # bytes of a sequence
RESULTS = ROOT / "benchmarks/data/gap.jsonl"
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
# Of each inner optimizer: data parallelism, ours.
PAIRS = {"adamw": (SYNCHRONOUS, OURS), "muon": (muon(SYNCHRONOUS), muon(OURS_2BIT))}
WORKERS = 16
FULL_TOKENS = 4 * LENGTH * FULL.steps
LONG = 10_000 * WORKERS  # steps of all workers that the gap is extrapolated to
# Standard deviation of a gap over seeds: the claims' three, with Muon.
NOISE = 0.005
DRAWS = 300

Complete = Callable[[list[Job]], list[Row]]


def main() -> None:
    arguments = parse_arguments()
    results = Results(Path(arguments.results))
    wanted = {(o, *map(int, name.split("x"))): None for name in arguments.runs for o in arguments.optimizers}
    found = [measured(lambda due: results.complete(due, arguments.jobs), *each) for each in wanted]
    if arguments.docs:
        found += [f for each in kept(results) if each not in wanted and (f := whole(results, *each))]
        found.sort(key=lambda f: (f["optimizer"], f["batch"], f["steps"]))
    add_best(found)
    text = markdown(found)
    print(text)
    if arguments.docs:
        replace_block(ROOT / "docs/evidence.md", "gap", text)
        gaps = {f"{f['optimizer']}.batch_{f['batch']}.steps_{f['steps']}": f["gap"] for f in found}
        record("gap", gaps, lambda _: "", "the small model, one seed")
    print(json.dumps(plain({"gaps": found})))


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__, recorded=False)
    parser.add_argument("--runs", nargs="+", default=["4x15360", "32x15360", "4x122880"], help="batch x steps")
    parser.add_argument("--optimizers", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--results", default=str(RESULTS), help="JSON lines")
    parser.add_argument("--docs", action="store_true", help="renew docs/evidence.md and results.csv")
    return parser.parse_args()


def measured(complete: Complete, optimizer: str, batch: int, steps: int) -> dict[str, Any]:
    """Ours over data parallelism, each at its best rate, by as many windows as the rows of both have losses of.
    complete: gives the rows of jobs. batch: sequences of a step. steps: of all workers."""
    reference, ours = PAIRS[optimizer]

    def trial(method: str, settings: Settings) -> Job:
        return Job(method, settings, "published", SEED, steps, {**FULL.size, "batch": batch}, points=4)

    rows = ladders(settings_found((reference, ours)), RUNGS, trial, complete)
    chosen = {method: best(mine) for method, mine in rows.items()}
    wide = all(row.get("final") for row in chosen.values())
    losses = {
        "test": {method: row["final" if wide else "test"] for method, row in chosen.items()},
        "selection": {method: row["final_selection" if wide else "selection"] for method, row in chosen.items()},
    }
    return {
        "optimizer": optimizer,
        "batch": batch,
        "steps": steps,
        "tokens": batch * LENGTH * steps,
        "gap": {name: _gap(of[ours], of[reference]) for name, of in losses.items()},
        "losses": losses["test"],
        "selection": losses["selection"],
        "lr": {method: row["settings"]["lr"] for method, row in chosen.items()},
        "bracketed": {method: is_bracketed(rates(mine)) for method, mine in rows.items()},
    }


def add_best(found: list[dict[str, Any]]) -> None:
    """Add to each line the best data parallelism found at as many tokens (`best`), chosen by the selection slice, and
    the gap to it (`gap_to_best`)."""
    at: dict[int, list[dict[str, Any]]] = {}
    for f in found:
        reference, _ = PAIRS[f["optimizer"]]
        told = (
            f"{OPTIMIZERS[f['optimizer']]}, {WORKERS * f['batch']} sequences, {f['steps'] // WORKERS:,} all-reduces"
        )
        losses = {"test": f["losses"][reference], "selection": f["selection"][reference]}
        at.setdefault(f["tokens"], []).append({**losses, "told": told})
    if tuned := best_parallel(candidates()):
        searched = {"test": tuned.test, "selection": tuned.selection, "told": f"Muon, {tuned.told}"}
        at.setdefault(FULL_TOKENS, []).append(searched)
    for f in found:
        _, ours = PAIRS[f["optimizer"]]
        f["best"] = min(at[f["tokens"]], key=lambda each: each["selection"])
        mine = {"test": f["losses"][ours], "selection": f["selection"][ours]}
        f["gap_to_best"] = {name: _gap(loss, f["best"][name]) for name, loss in mine.items()}


def kept(results: Results) -> list[tuple[str, int, int]]:
    """Optimizer, batch and steps of what the results file has runs of."""
    optimizer_of = {method: name for name, pair in PAIRS.items() for method in pair}
    rows = results.rows.values()
    return list(dict.fromkeys((optimizer_of[r["method"]], r["size"]["batch"], r["steps"]) for r in rows))


def whole(results: Results, optimizer: str, batch: int, steps: int) -> dict[str, Any] | None:
    """Return what was measured, if that needs no further run."""
    try:
        return measured(lambda due: [results.rows[job.key] for job in due], optimizer, batch, steps)
    except KeyError:
        return None


def _gap(loss: float | None, reference: float | None) -> float | None:
    return loss / reference - 1 if loss and reference else None


def extrapolated(found: Sequence[dict[str, Any]], noise: float = NOISE) -> dict[str, float] | None:
    """The gap at `LONG` steps if it falls as a power of the steps, with the 95 % that the runs' noise leaves: the
    fit is repeated with each gap moved by it. None with fewer than three lengths. What the law itself leaves open,
    beyond the longest run, is not in it.

    found: of one optimizer and batch. noise: standard deviation of a measured gap (the mean of both slices').
    """
    points = [(f["steps"] / LONG, (f["gap"]["test"] + f["gap"]["selection"]) / 2) for f in found]
    if len({x for x, _ in points}) < 3:
        return None
    x, y = (np.array(values) for values in zip(*points, strict=True))

    def law(x: np.ndarray, last: float, power: float) -> np.ndarray:
        return last * x**-power

    def fit(gaps: np.ndarray) -> float:
        (last, _), _ = curve_fit(law, x, gaps, p0=(max(gaps.mean() / 2, 1e-4), 0.5), bounds=((0, 0), (1, 3)))
        return float(last)

    random = np.random.default_rng(0)
    low, high = np.quantile([fit(y + noise * random.standard_normal(len(y))) for _ in range(DRAWS)], (0.025, 0.975))
    return {"gap": fit(y), "low": float(low), "high": float(high), "lengths": len(points)}


def markdown(found: list[dict[str, Any]]) -> str:
    def of(f: dict[str, Any], method: str) -> str:
        edge = "" if f["bracketed"][method] else ", not bracketed"
        return f"{number(f['losses'][method], 4)} ({f['lr'][method]:.3g}{edge})"

    rows = [
        (
            OPTIMIZERS[f["optimizer"]],
            f"{f['batch'] * LENGTH:,}",
            f"{f['steps']:,}",
            f"{f['tokens'] / 1e6:.1f}",
            *(of(f, method) for method in PAIRS[f["optimizer"]]),
            *(number(gap and 100 * gap, 1) for of in ("gap", "gap_to_best") for gap in f[of].values()),
        )
        for f in found
    ]
    header = (
        "optimizer", "bytes of a worker's step", "steps of all workers", "M tokens", "data parallel (rate)",
        "ours (rate)", "gap, %", "by the selection slice, %", "to the best data parallelism, %",
        "by the selection slice, %",
    )  # fmt: skip
    best = {f["tokens"]: f["best"]["told"] for f in found}
    told = [table(rows, header)]
    told += [
        f"Best data parallelism at {tokens / 1e6:.1f} M tokens: {what}." for tokens, what in sorted(best.items())
    ]
    for (optimizer, batch), mine in _series(found).items():
        if law := extrapolated(mine):
            told.append(
                f"{OPTIMIZERS[optimizer]}, {batch * LENGTH:,} bytes: if the gap keeps falling as a power of the "
                f"number of steps, it would be {100 * law['gap']:.1f} % after {LONG // WORKERS:,} steps of each "
                f"worker ({100 * law['low']:.1f} to {100 * law['high']:.1f}; fitted to {law['lengths']} runs, "
                f"each gap with a standard deviation of {100 * NOISE:.1f} points)."
            )
    return "\n\n".join(told) + "\n"


def _series(found: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    series: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for f in found:
        if None not in f["gap"].values():
            series.setdefault((f["optimizer"], f["batch"]), []).append(f)
    return series


if __name__ == "__main__":
    main()
