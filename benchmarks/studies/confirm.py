"""Measure the claims once more with a larger model: 5.1 M parameters, 20 M tokens, in HALoS's environment.

    python -m benchmarks.studies.confirm                20 M tokens a method: hours, one core each
    python -m benchmarks.studies.confirm --size 0.4m    a size between: 8 M tokens, a quarter of an hour a method
    python -m benchmarks.studies.confirm --methods data-parallel-muon region-momentum-2bit-muon --tokens 100e6
    python -m benchmarks.studies.confirm --tokens 200e3 --search-tokens 50e3 --results /tmp/look.jsonl      a look

Settings are those of the small model's search, but for the inner learning rate: each method's is found anew, in runs
of a part of the tokens with a warm-up of as many as the whole run has, by factors of two. Finished runs are kept in
the results file (JSON lines), which is committed, and not done again. A run that was ended, in whatever way, goes on
when the same is called again in the same checkout, from what it kept in `--state` some five minutes before at most;
the row is the same to the last bit on the same machine. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.common import command_line, record
from benchmarks.studies.claims.kept import drop
from benchmarks.studies.claims.markdown import number
from benchmarks.studies.claims.methods import METHODS, ONE_WORKER_2BIT, OURS, OURS_2BIT, SYNCHRONOUS, Settings, muon
from benchmarks.studies.claims.report import plain, plot_curves, replace_block, table, time_to
from benchmarks.studies.claims.runs import Job, Results, run
from benchmarks.studies.claims.search import RUNGS, SEED, best, ladders, rates, settings_found
from benchmarks.studies.learner.training import Point, Study
from geotrain.common.files import whole_file

COMPARED = (SYNCHRONOUS, "diloco-fair", "halos", OURS)
RESULTS = ROOT / "benchmarks/data/confirm.jsonl"
SIZES = {
    "5m": {"hidden": 384, "layers": 3, "heads": 6, "ffn": 928, "batch": 8, "length": 128},
    "1m": {"hidden": 192, "layers": 2, "heads": 6, "ffn": 576, "batch": 8, "length": 128},
    "0.4m": {"hidden": 128, "layers": 2, "heads": 4, "ffn": 312, "batch": 4, "length": 128},
}
# By size: bytes of text of each method, and of a run that a learning rate is chosen by.
TOKENS = {"5m": (20e6, 2e6), "1m": (20e6, 1e6), "0.4m": (8e6, 2e6)}
WARMUP = 0.05  # of the whole run's tokens
UNITS = {"test": "nats", "end_s": "virtual s", "time_to_target_s": "virtual s"}  # of a method, in results.csv


def both(method: str) -> tuple[str, str]:
    """Its names with AdamW and with Muon."""
    return method, muon(method)


def main() -> None:
    arguments = parse_arguments()
    if arguments.docs and arguments.size == "5m":
        sys.exit("--docs: docs/evidence.md has no table of --size 5m")
    size = SIZES[arguments.size]
    tokens, search_tokens = TOKENS[arguments.size]
    tokens, search_tokens = arguments.tokens or tokens, arguments.search_tokens or search_tokens
    steps, folder = steps_of(size, tokens), Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    results = Results(Path(arguments.results))

    def complete(jobs: list[Job]) -> list[dict[str, Any]]:
        states = Path(arguments.state)
        rows = results.complete(jobs, arguments.jobs, partial(run_told, states))
        for job in jobs:
            drop(states, job.key)
        return rows

    def trial(method: str, settings: Settings) -> Job:
        tried = steps_of(size, search_tokens)
        warmup = min(0.5, WARMUP * steps / tried)  # as many steps: a shorter one harms where the whole run's does not
        return Job(method, settings, SEED, tried, size, points=4, warmup_share=warmup)

    rate = Study.hidden / size["hidden"]  # of the small model's: where the search begins
    starts = {m: {**s, "lr": rate * s["lr"]} for m, s in settings_found(tuple(arguments.methods)).items()}
    trials = ladders(starts, RUNGS, trial, complete)
    if arguments.search_only:
        print(json.dumps(plain({m: rates(mine) for m, mine in trials.items()})))
        return

    def whole(method: str, settings: Settings) -> Job:
        return Job(method, settings, 0, steps, size, arguments.points)

    found = {m: best(mine)["settings"] for m, mine in trials.items()}
    runs = ladders(found, arguments.whole_rates, whole, complete)
    rows = [best(mine) for mine in runs.values()]
    report = summary(rows, {m: rates(mine) for m, mine in trials.items()}, {m: rates(r) for m, r in runs.items()})
    text = markdown(report)
    name = "confirm" if arguments.size == "5m" else f"confirm-{arguments.size}"
    with whole_file(folder / f"{name}.md") as file:
        file.write(text)
    plot_curves(
        rows, {m: METHODS[m].title for m in arguments.methods}, report["target_loss"], folder / "curves.png",
        f"{rows[0]['numel'] / 1e6:.1f} M parameters, {report['tokens'] / 1e6:.3g} M tokens, HALoS's environment",
    )  # fmt: skip
    if arguments.docs:
        replace_block(ROOT / "docs/evidence.md", name, f"{text}\n![Test loss of the larger model]({name}.png)")
        shutil.copy(folder / "curves.png", ROOT / f"docs/{name}.png")
        note = f"{report['parameters'] / 1e6:.1f} M parameters, {report['tokens'] / 1e6:g} M tokens, one seed"
        record(name, figures(report), lambda metric: UNITS.get(metric.rpartition(".")[2], ""), note)
    print(json.dumps(plain(report)))


def steps_of(size: dict[str, Any], tokens: float) -> int:
    return max(1, round(tokens / tokens_of_a_step(size)))


def tokens_of_a_step(size: dict[str, Any]) -> int:
    return int(size["batch"] * size["length"])


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__, recorded=False)
    parser.add_argument("--methods", nargs="+", default=list(COMPARED), choices=list(METHODS))
    parser.add_argument("--size", default="5m", choices=list(SIZES), help="parameters")
    parser.add_argument("--tokens", type=float, help="bytes of text, of each method; default: by size")
    parser.add_argument("--search-tokens", type=float, help="of a run that chooses a learning rate")
    parser.add_argument("--whole-rates", type=int, default=1, help="rates tried in whole runs; 2: half of it, too")
    parser.add_argument("--search-only", action="store_true", help="find the learning rates, and stop")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--points", type=int, default=48, help="evaluations of a run")
    parser.add_argument("--results", default=str(RESULTS), help="JSON lines")
    parser.add_argument("--state", default=str(ROOT / "build/confirm"), help="folder for runs that are under way")
    parser.add_argument("--docs", action="store_true", help="renew docs/evidence.md, its picture and results.csv")
    parser.add_argument("--out", default=str(ROOT / "runs/confirm"), help="folder for table and plot")
    return parser.parse_args()


def run_told(states: Path, job: Job) -> dict[str, Any]:
    """`run`, with a line a point on the screen."""

    def tell(point: Point) -> None:
        name = f"{job.method}, rate {job.settings['lr']:.4g}"
        share = f"{100 * point.committed_share:.1f} % of the tokens"
        print(f"{name}: {share}, {point.time_s:.0f} virtual s, test {point.test:.4f}", flush=True)

    return run(job, tell, states)


def summary(
    rows: list[dict[str, Any]], tried: dict[str, dict[float, float]], whole: dict[str, dict[float, float]]
) -> dict[str, Any]:
    """target_loss: fair DiLoCo's last, in its better optimizer, if it is among the methods; else the worst last loss.
    speedup: of ours, with Muon if that is among them. tried, whole: by method, rate → loss on the selection
    slice, of the trials and of runs of full length. A method that came to nothing has no losses,
    and says why in `failed`."""
    by_method = {row["method"]: row for row in rows}
    losses = {m: row["test"] for m, row in by_method.items()}
    known = {m: loss for m, loss in losses.items() if loss is not None}
    fair = [known[m] for m in ("diloco-fair", muon("diloco-fair")) if m in known]
    target = min(fair, default=max(known.values(), default=None))
    times = {m: time_to(row, target) for m, row in by_method.items()}
    ours = muon(OURS_2BIT) if muon(OURS_2BIT) in by_method else OURS
    ours_s = times.get(ours)
    return {
        "parameters": rows[0]["numel"],
        "tokens": rows[0]["steps"] * tokens_of_a_step(rows[0]["size"]),
        "target_loss": target,
        "ours": ours,
        "speedup": {m: s / ours_s for m, s in times.items() if m != ours and s and ours_s},
        "gaps": {
            m: {reference: known[m] / known[reference] - 1 for reference in both(SYNCHRONOUS) if reference in known}
            for m in (OURS, muon(OURS_2BIT), muon(ONE_WORKER_2BIT))
            if m in known
        },
        "methods": {
            m: {
                "failed": row.get("failed"),
                "lr": row["settings"]["lr"],
                "tried": tried[m],
                "whole": whole[m],
                "test": row["test"],
                "end_s": row["seconds"],
                "time_to_target_s": times[m],
                "hardware": row["hardware"],
                **speed(row),
            }
            for m, row in by_method.items()
        },
    }


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """Figures of a summary for results.csv."""
    methods = {m: {name: r[name] for name in UNITS} for m, r in report["methods"].items()}
    return {**methods, "over_ours": report["speedup"], "gap": report["gaps"]}


def speed(row: dict[str, Any]) -> dict[str, float]:
    """Speed of the machine: trained tokens a second, and GFLOP/s at 6 a parameter and token."""
    tokens = (row["committed_steps"] or 0) * tokens_of_a_step(row["size"])
    return {
        "wall_s": row["wall_s"],
        "cpu_s": row["cpu_s"],
        "tokens_per_s": tokens / row["wall_s"],
        "gflops_per_cpu_s": 6 * row["numel"] * tokens / row["cpu_s"] / 1e9,
    }


def markdown(report: dict[str, Any]) -> str:
    def told(losses: dict[float, float]) -> str:
        return ", ".join(f"{rate:.5f}: {number(loss, 3)}" for rate, loss in sorted(losses.items()))

    rows = [
        (
            METHODS[m].title,
            number(r["time_to_target_s"], 0),
            "1" if m == report["ours"] else number(report["speedup"].get(m), 2),
            r["failed"] or number(r["test"], 4),
            number(r["end_s"], 0),
            number(r["lr"], 5),
            told(r["tried"]) + (f"; of whole runs {told(r['whole'])}" if len(r["whole"]) > 1 else ""),
            f"{number(r['tokens_per_s'], 0)}, {number(r['gflops_per_cpu_s'], 0)}",
        )
        for m, r in report["methods"].items()
    ]
    header = (
        "method", "s to target", "over ours", "test loss", "end, s", "rate", "rates tried: loss of a shorter run",
        "tokens/s, GFLOP/s of the core that trained it",
    )  # fmt: skip
    intro = (
        f"{report['parameters']:,} parameters, {report['tokens'] / 1e6:.1f} M tokens, one seed. "
        f"Target: {number(report['target_loss'], 4)} nats a byte."
    )
    gaps = [
        f"{METHODS[m].title} ends {number(100 * gap, 1, '+')} % from {METHODS[reference].title}"
        for m, of in report["gaps"].items()
        for reference, gap in of.items()
    ]
    if gaps:
        intro += f" At equal tokens: {'; '.join(gaps)}."
    return f"{intro}\n\n{table(rows, header)}\n"


if __name__ == "__main__":
    main()
