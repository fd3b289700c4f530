"""What the gap between ours and data parallelism at equal tokens follows from: the batch, or the length of the run.

    python -m benchmarks.gap                        a batch eight times as large, and a run eight times as long
    python -m benchmarks.gap --runs 4x3072 8x3072   others: sequences of a worker's step x steps of all workers
    python -m benchmarks.gap --optimizers muon      with Muon only; default: with AdamW, then with Muon

Both methods have the same inner optimizer. The small model of claims.py, its settings but for the inner learning
rate: each method's is found anew by factors of two, until it is bracketed, by the selection slice. One seed. Finished
runs are kept in the results file (JSON lines), which is committed, and not done again. The last line printed is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.claims.markdown import number
from benchmarks.claims.methods import OURS, OURS_2BIT, SYNCHRONOUS, Settings, muon
from benchmarks.claims.report import Row, plain, replace_block, table
from benchmarks.claims.runs import Job, Results
from benchmarks.claims.search import RUNGS, SEED, best, is_bracketed, ladders, rates, settings_found
from benchmarks.claims.study import FULL
from benchmarks.common import command_line, record

LENGTH = FULL.size["length"]  # bytes of a sequence
RESULTS = ROOT / "benchmarks/data/gap.jsonl"
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
# Of each inner optimizer: data parallelism, ours.
PAIRS = {"adamw": (SYNCHRONOUS, OURS), "muon": (muon(SYNCHRONOUS), muon(OURS_2BIT))}


def main() -> None:
    arguments = parse_arguments()
    results = Results(Path(arguments.results))
    found = [
        measured(results, *map(int, name.split("x")), arguments.jobs, optimizer)
        for name in arguments.runs
        for optimizer in arguments.optimizers
    ]
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


def measured(results: Results, batch: int, steps: int, jobs: int, optimizer: str) -> dict[str, Any]:
    """Ours over data parallelism, each at its best rate. batch: sequences of a step. steps: of all workers."""
    reference, ours = PAIRS[optimizer]

    def trial(method: str, settings: Settings) -> Job:
        return Job(method, settings, "published", SEED, steps, {**FULL.size, "batch": batch}, points=4)

    def complete(due: list[Job]) -> list[Row]:
        return results.complete(due, jobs)

    rows = ladders(settings_found((reference, ours)), RUNGS, trial, complete)
    chosen = {method: best(mine) for method, mine in rows.items()}
    return {
        "optimizer": optimizer,
        "batch": batch,
        "steps": steps,
        "tokens": batch * LENGTH * steps,
        "gap": {s: _gap(chosen[ours][s], chosen[reference][s]) for s in ("test", "selection")},
        "losses": {method: row["test"] for method, row in chosen.items()},
        "lr": {method: row["settings"]["lr"] for method, row in chosen.items()},
        "bracketed": {method: is_bracketed(rates(mine)) for method, mine in rows.items()},
    }


def _gap(loss: float | None, reference: float | None) -> float | None:
    return loss / reference - 1 if loss and reference else None


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
            *(number(gap and 100 * gap, 1) for gap in (f["gap"]["test"], f["gap"]["selection"])),
        )
        for f in found
    ]
    header = (
        "optimizer", "bytes of a worker's step", "steps of all workers", "M tokens", "data parallel (rate)",
        "ours (rate)", "gap, %", "by the selection slice, %",
    )  # fmt: skip
    return f"{table(rows, header)}\n"


if __name__ == "__main__":
    main()
