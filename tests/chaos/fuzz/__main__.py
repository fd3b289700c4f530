"""Mutated configs, messages, journals, snapshots and .idx files against the code that reads them in production.

    python -m tests.chaos.fuzz --seconds 60

Every input is one real thing with something wrong. It must be taken, or refused by one of the product's own errors
that says what and where; and what was refused must not have changed any state. Counted for each kind:

    inputs           tried; `refused` of them were refused
    crashes          any other exception
    state_changes    a refusal after which the server's state differs, or a file that was read as something else than
                     what was written
    unclear_errors   an error that does not name the file, key or sender

Messages go: frames → `wire.Reader` → what the header promises → the journal's encoding and back → the state machine.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Protocol

from benchmarks.common import command_line, report, units_by_ending
from tests.chaos.fuzz.files import Configs, Indexes, Journals, Snapshots
from tests.chaos.fuzz.messages import Messages

SHARES = {"messages": 0.6, "configs": 0.1, "journals": 0.1, "snapshots": 0.1, "idx": 0.1}  # of the time


class Target(Protocol):
    """One kind of input. `attempt` returns what became of it: "taken", "refused", "unclear: …" or "changed: …"."""

    def attempt(self, rng: random.Random) -> str: ...


def fuzz(target: Target, seconds: float, rng: random.Random, show: int = 5) -> Counter[str]:
    """Count what becomes of inputs, for so many seconds."""
    counts: Counter[str] = Counter(inputs=0, refused=0, crashes=0, state_changes=0, unclear_errors=0)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        counts["inputs"] += 1
        try:
            outcome, what = target.attempt(rng), ""
        except Exception:
            outcome, what = "crashed", traceback.format_exc()
        kind, _, detail = outcome.partition(": ")
        name = {"unclear": "unclear_errors", "changed": "state_changes", "crashed": "crashes"}.get(kind)
        if name:
            counts[name] += 1
            if counts[name] <= show:
                print(f"{type(target).__name__} {name} {detail}{what}", file=sys.stderr)
        elif kind == "refused":
            counts["refused"] += 1
    return counts


def run(seconds: float, seed: int, folder: Path) -> dict[str, dict[str, int]]:
    targets: dict[str, Target] = {
        "messages": Messages(),
        "configs": Configs(folder / "configs"),
        "journals": Journals(folder / "journals"),
        "snapshots": Snapshots(folder / "snapshots"),
        "idx": Indexes(folder / "idx"),
    }
    rng = random.Random(seed)
    return {name: dict(fuzz(target, seconds * SHARES[name], rng)) for name, target in targets.items()}


def main() -> None:
    parser = command_line(__doc__, quick={"seconds": 20.0})
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kinds = run(options.seconds, options.seed, Path(folder))
    totals = {key: sum(kind[key] for kind in kinds.values()) for key in kinds["messages"]}
    per_minute = round(kinds["messages"]["inputs"] / (options.seconds * SHARES["messages"]) * 60)
    results = {**totals, "messages_per_minute": per_minute, "kinds": kinds}
    report(
        "fuzz", results, options, units_by_ending({"minute": "1/min"}, "count"), f"seed {options.seed}", timed=False
    )


if __name__ == "__main__":
    main()
