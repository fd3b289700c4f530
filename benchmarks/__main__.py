"""All benchmarks, one after another, and one table: each figure, its goal, this machine's, the last one recorded.

    python -m benchmarks                      about an hour
    python -m benchmarks --quick              a minute each, to see that all of them work and give every figure that
                                              has a goal: none is judged
    python -m benchmarks --only servers codec

What each prints is kept in build/bench. One that fails, takes too long or lacks a figure is told in the table, and
the others go on; the exit code is 1 then. A figure is "busy" where other processes took more than a tenth of the
processors meanwhile. The last line printed is one JSON object: how many figures have a goal, and how many met it.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import ROOT
from benchmarks.common import BUSY, RESULTS, command_line, flat
from benchmarks.goals import PARTS, Goal, Part

LOGS = ROOT / "build/bench"
QUICK_MINUTES = 5.0  # that one may take at most; the machine may be slow


@dataclass(frozen=True)
class Outcome:
    """figures: of its last line, by dotted name. fault: why there are none, or ""."""

    figures: dict[str, float]
    fault: str
    seconds: float

    @property
    def busy(self) -> bool:
        return self.figures.get("others_share", 0.0) > BUSY


def main() -> int:
    parser = command_line(__doc__, recorded=False, quick={})
    parser.add_argument(
        "--only", nargs="+", default=[], choices=sorted({part.module for part in PARTS}), metavar="NAME"
    )
    options = parser.parse_args()
    parts = [p for p in PARTS if (not options.only or p.module in options.only) and (p.quick or not options.quick)]
    table = Table("benchmark", "figure", "goal", "here", "95 %", "last recorded", "met")
    judged = met = failed = 0
    recorded = last_recorded()
    for part in parts:
        print(f"{part.name} …", file=sys.stderr, flush=True)
        outcome = run(part, options.quick)
        failed += bool(outcome.fault) or any(goal.metric not in outcome.figures for goal in part.goals)
        for goal in part.goals:
            verdict = judge(goal, outcome, options.quick)
            judged, met = judged + (verdict in ("yes", "no")), met + (verdict == "yes")
            table.add_row(*row(part, goal, outcome, recorded), verdict)
        print(f"{part.name}: {outcome.fault or 'done'}, {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    print(json.dumps({"benchmarks": len(parts), "failed": failed, "judged": judged, "met": met}))
    return int(failed > 0)


def run(part: Part, quick: bool) -> Outcome:
    """Its output goes to a file, both streams."""
    LOGS.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{part.module}", *part.arguments, *(["--quick"] if quick else [])]
    minutes, began_s = QUICK_MINUTES if quick else part.minutes, time.monotonic()
    output = LOGS / f"{part.name}.log"
    fault, figures = "", {}
    with output.open("w") as log:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=60 * minutes,
            ).returncode
            fault = f"exit code {code}, see {output.relative_to(ROOT)}" if code else ""
        except subprocess.TimeoutExpired:
            fault = f"it did not end within {minutes:g} minutes"
    if not fault:
        figures = last_line(output)
        fault = "" if figures else f"its last line is no JSON object, see {output.relative_to(ROOT)}"
    return Outcome(figures, fault, time.monotonic() - began_s)


def last_line(output: Path) -> dict[str, float]:
    """The numbers of the last line, by dotted names; none if that is no JSON object."""
    lines = output.read_text().strip().splitlines()
    try:
        found: Any = json.loads(lines[-1])
    except (ValueError, IndexError):
        return {}
    return {name: float(value) for name, value in flat(found)} if isinstance(found, dict) else {}


def judge(goal: Goal, outcome: Outcome, quick: bool) -> str:
    """ "yes", "no", or why it is not said."""
    if outcome.fault:
        return outcome.fault
    if goal.metric not in outcome.figures:
        return "not measured"
    if quick or str(goal) == "–":
        return "–"
    return "busy" if outcome.busy else "yes" if goal.met(outcome.figures[goal.metric]) else "no"


def row(part: Part, goal: Goal, outcome: Outcome, recorded: dict[tuple[str, str], tuple[str, str]]) -> Sequence[str]:
    """All cells but the verdict."""
    value, mean = outcome.figures.get(goal.metric), goal.metric.removesuffix(".mean")
    stem = f"{goal.metric}_" if mean == goal.metric else f"{mean}."  # a mean over seeds stands beside its ends
    low, high = (outcome.figures.get(f"{stem}{end}") for end in ("low", "high"))
    kept = recorded.get((part.name, goal.metric)) or recorded.get((part.name, mean.rpartition(".")[2]))
    return (
        part.name,
        goal.metric,
        str(goal),
        "" if value is None else f"{value:.4g}",
        "" if low is None or high is None else f"{low:.4g} to {high:.4g}",
        "never" if kept is None else f"{float(kept[0]):.4g} ({kept[1][:10]})",
    )


def last_recorded() -> dict[tuple[str, str], tuple[str, str]]:
    """(benchmark, metric) → (value, date) of the newest row of results.csv."""
    with RESULTS.open(newline="") as file:
        return {(each["benchmark"], each["metric"]): (each["value"], each["date"]) for each in csv.DictReader(file)}


if __name__ == "__main__":
    sys.exit(main())
