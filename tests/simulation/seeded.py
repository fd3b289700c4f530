"""Seeds the faults of `tests/mutants` that servers and their links can have, one at a time, and plays lives until one
is broken: `python -m tests.simulation.seeded [-k NAME] [--lives N]`. The last line is one JSON object."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.mutants.__main__ import LIBRARIES, Fork, Told, outcomes
from tests.mutants.faults import Fault, read_faults

SIMULATED = "geotrain/net", "geotrain/outer"
HUNG_S = 900.0  # a life that never ends in real time, too


class Lives(Fork):
    """Lives of one fault in a fork, `tests` being the seeds; the first that is broken is told."""

    def judge(self, told: Told) -> int:
        import torch

        from tests.simulation.lives import live, violations

        torch.set_num_threads(1)
        for seed in self.tests:
            try:
                broken = violations(live(int(seed)))
            except Exception as error:
                broken = [repr(error)]
            if broken:
                told.write(f"life {seed}: {broken[0]}")
                return 1
        return 0


def simulated(fault: Fault) -> bool:
    """Whether a life goes through the fault's place, and what it breaks is not beyond it."""
    return fault.file.startswith(SIMULATED) and not fault.beyond


def run(faults: list[Fault], lives: int, at_once: int) -> dict[str, float]:
    """Print which faults are found. Returns how many there are, and were found, the share, and the seconds."""
    begin_s, found = time.monotonic(), 0
    for library in LIBRARIES:
        importlib.import_module(library)
    seeds = tuple(map(str, range(lives)))
    with tempfile.TemporaryDirectory() as folder:
        forks = [partial(Lives, seeds, f, HUNG_S, Path(folder) / f"{i}.told") for i, f in enumerate(faults)]
        for fork, outcome in outcomes(forks, at_once):
            assert fork.fault is not None
            found += bool(outcome.noticed)
            verdict, why = ("found", outcome.noticed) if outcome.noticed else ("missed", fork.fault.breaks)
            print(f"{verdict:6} {outcome.seconds:6.1f} s  {fork.fault.name}: {why}", flush=True)
    seconds = round(time.monotonic() - begin_s, 1)
    return {
        "faults": len(faults),
        "found": found,
        "share": round(found / len(faults), 3),
        "lives": lives,
        "seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.seeded", description=__doc__)
    parser.add_argument(
        "-k", nargs="*", default=[""], metavar="NAME", help="only faults with one of these in the name"
    )
    parser.add_argument("--lives", type=int, default=100, help="at most so many for each fault")
    parser.add_argument("-n", type=int, default=2, metavar="FORKS", help="at a time")
    asked = parser.parse_args()
    asked_for = [f for f in read_faults() if simulated(f) and any(name in f.name for name in asked.k)]
    faults = list({(f.file, f.mutated()): f for f in asked_for}.values())  # some are there twice, for other tests
    figures = run(faults, asked.lives, asked.n)
    print(json.dumps(figures))
    return 0 if figures["share"] >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
