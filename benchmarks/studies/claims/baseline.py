"""Data parallelism as well as it could be tuned: its rows, with batch, rate, schedule and mean of weights searched.

`benchmarks.studies.candidates` writes the rows; every study holds its losses against the best of them, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import DATA
from benchmarks.studies.claims.report import Row
from benchmarks.studies.claims.search import SEED

RESULTS = DATA / "candidates.jsonl"
Rows = dict[tuple[str, int], Row]  # (trial, seed) → its row


@dataclass(frozen=True)
class Best:
    """The best data parallelism found. share: of the run, whose weights' mean is taken; None: the last weights.
    all_reduces: of the gradient over all devices, in the whole run."""

    trial: str
    share: str | None
    test: float
    selection: float
    all_reduces: int

    @property
    def told(self) -> str:
        taken = "last weights" if self.share is None else f"mean of the last {float(self.share):.0%} of the run"
        what = self.trial.removeprefix("data parallel, ")
        loss = (self.test + self.selection) / 2
        return f"{what}, {taken}, {self.all_reduces:,} all-reduces of the gradient: {loss:.4f}"


def kept(path: Path = RESULTS) -> Rows:
    lines = path.read_text().splitlines() if path.exists() else []
    return {(row["trial"], row["seed"]): row for row in map(json.loads, lines)}


def losses(row: Row) -> dict[str | None, tuple[float, float]]:
    """Share of the run, whose weights' mean is taken, or None for the last weights → loss of both slices, and of the
    selection slice."""
    return {None: (row["loss"], row["selection"]), **{share: tuple(both) for share, both in row["means"].items()}}


def best_parallel(rows: Rows) -> Best | None:
    """By the selection slice and the search's own seed; None if nothing was searched."""
    found = [
        Best(name, share, 2 * both - selection, selection, rows[name, SEED]["versions"])
        for name, seed in rows
        if name.startswith("data parallel") and seed == SEED
        for share, (both, selection) in losses(rows[name, SEED]).items()
    ]
    return min(found, key=lambda each: each.selection, default=None)


def best_test(seeds: Iterable[int], path: Path = RESULTS) -> float | None:
    """The best one's mean loss on the test slice over these seeds; None unless it ran with all of them."""
    rows, seeds = kept(path), list(seeds)
    best = best_parallel(rows)
    if best is None or any((best.trial, seed) not in rows for seed in seeds):
        return None
    found = [losses(rows[best.trial, seed])[best.share] for seed in seeds]
    return sum(2 * both - selection for both, selection in found) / len(seeds)
