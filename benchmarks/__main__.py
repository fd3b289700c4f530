"""Run all benchmarks, one after another, and print one table: each figure, its goal, this machine's, the last one
recorded.

    python -m benchmarks                      within 75 minutes
    python -m benchmarks --quick              a minute each, to see that all of them work and give every figure that
                                              has a goal: none is judged. Left out, unless named: what tests play
    python -m benchmarks --only servers codec

What each prints is kept in build/bench. One that fails, takes too long or lacks a figure is told in the table, and
the others go on; the exit code is 1 then. One that is not ended when its time is over is ended, with all that it has
started: what the others need stays theirs. A time is "busy" where other processes took more than a tenth of the
processors meanwhile; counts are judged all the same. The last line printed is one JSON object: how many figures have
a goal, how many met it, and how many are not judged since others were busy.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import ROOT
from benchmarks.common import BUSY, RESULTS, command_line, flat, processor_s
from benchmarks.goals import PARTS, Goal, Part

LOGS = ROOT / "build/bench"
ALL_MINUTES = 75.0
LONGEST_MINUTES = 30.0  # of one, where others have left it their time
QUICK_MINUTES = 20.0  # of one's short form, on a machine as busy as may be
ALL_QUICK_MINUTES = 45.0
GRACE_S, KILL_S = 20.0, 30.0  # for what is ended to clear up; for what is killed to be gone


@dataclass(frozen=True)
class Outcome:
    """figures: of its last line, by dotted name. fault: why there are none, or "". processor_s: of it and of all that
    it started."""

    figures: dict[str, float]
    fault: str
    seconds: float
    processor_s: float

    @property
    def busy(self) -> bool:
        return self.figures.get("others_share", 0.0) > BUSY


def main() -> int:
    parser = command_line(__doc__, recorded=False, quick={})
    parser.add_argument(
        "--only", nargs="+", default=[], choices=sorted({part.module for part in PARTS}), metavar="NAME"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    parts = chosen(options.only, options.quick)
    table = Table("benchmark", "figure", "goal", "here", "95 %", "last recorded", "met")
    verdicts: list[str] = []
    failed, recorded, begin_s = 0, last_recorded(), time.monotonic()
    for number, part in enumerate(parts):
        print(f"{part.name} …", file=sys.stderr, flush=True)
        passed = (time.monotonic() - begin_s) / 60
        outcome = run(part, options.quick, minutes_of(parts[number:], passed, options.quick))
        failed += bool(outcome.fault) or any(lacks(goal, outcome, options.quick) for goal in part.goals)
        for goal in part.goals:
            verdicts.append(judge(goal, outcome, options.quick))
            table.add_row(*row(part, goal, outcome, recorded), verdicts[-1])
        took = f"{outcome.seconds:.0f} s, {outcome.processor_s:.0f} s of a processor"
        print(f"{part.name}: {outcome.fault or 'done'}, {took}", file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    met, busy = verdicts.count("yes"), verdicts.count("busy")
    judged = {"judged": met + verdicts.count("no"), "met": met, "busy": busy}
    print(json.dumps({"benchmarks": len(parts), "failed": failed, **judged}))
    return int(failed > 0)


def chosen(only: Sequence[str], quick: bool) -> list[Part]:
    """The parts to run: all, or those of the modules in `only`."""
    if only:
        return [part for part in PARTS if part.module in only and (part.quick or not quick)]
    return [part for part in PARTS if not quick or (part.quick and not part.tested)]


def minutes_of(left: Sequence[Part], passed: float, quick: bool = False) -> float:
    """Minutes that the first of the parts that are left may take, so that all end within ALL_MINUTES: what the others
    leave. passed: minutes since the beginning. quick: in its short form, all within ALL_QUICK_MINUTES."""
    if quick:
        return max(0.0, min(QUICK_MINUTES, ALL_QUICK_MINUTES - passed))
    return max(0.0, min(LONGEST_MINUTES, ALL_MINUTES - passed - sum(part.minutes for part in left[1:])))


def run(part: Part, quick: bool, minutes: float) -> Outcome:
    """Its output goes to a file, both streams. Nothing that it has started goes on afterwards."""
    LOGS.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        f"{part.package}.{part.module}",
        *part.arguments,
        *(["--quick"] if quick else part.whole),
    ]
    before, began_s = processor_s(os.getpid()), time.monotonic()
    output = LOGS / f"{part.name}.log"
    env = {**os.environ, **({"OMP_NUM_THREADS": "1"} if quick else {})}  # beside others, threads wait for each other
    with output.open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(60 * minutes)
            fault = f"exit code {code}, see {output.relative_to(ROOT)}" if code else ""
        except subprocess.TimeoutExpired:
            fault = f"not ended within {minutes:.3g} minutes"
        finally:
            end(process, set(before))
    figures = {} if fault else last_line(output)
    if not figures and not fault:
        fault = f"its last line is no JSON object, see {output.relative_to(ROOT)}"
    used_s = sum(processor_s(os.getpid()).values()) - sum(before.values())
    return Outcome(figures, fault, time.monotonic() - began_s, used_s)


def end(process: subprocess.Popen[bytes], stays: set[int]) -> None:
    """End a benchmark, by an interrupt at first, upon which it clears up; then all that is left of what it started.
    stays: process ids from before."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        process.kill()
        process.wait()
    deadline = time.monotonic() + KILL_S
    while (left := processor_s(os.getpid()).keys() - stays - {os.getpid()}) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def last_line(output: Path) -> dict[str, float]:
    """The numbers of the last line, by dotted names; none if that is no JSON object."""
    lines = output.read_text().strip().splitlines()
    try:
        found: Any = json.loads(lines[-1])
    except (ValueError, IndexError):
        return {}
    return {name: float(value) for name, value in flat(found)} if isinstance(found, dict) else {}


def lacks(goal: Goal, outcome: Outcome, quick: bool) -> bool:
    """Whether a figure that the benchmark should give is not there."""
    return goal.metric not in outcome.figures and not (quick and goal.not_quick)


def judge(goal: Goal, outcome: Outcome, quick: bool) -> str:
    """ "yes", "no", or why it is not said."""
    if outcome.fault:
        return outcome.fault
    if lacks(goal, outcome, quick):
        return "not measured"
    if quick and goal.not_quick:
        return goal.not_quick
    if quick or str(goal) == "–":
        return "–"
    return "busy" if outcome.busy and goal.timed else "yes" if goal.met(outcome.figures[goal.metric]) else "no"


def row(part: Part, goal: Goal, outcome: Outcome, recorded: dict[tuple[str, str], tuple[str, str]]) -> Sequence[str]:
    """Cells of a part's row, all but the verdict."""
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
