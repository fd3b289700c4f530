"""Data parallelism as well as it could be tuned: its rows, with batch, rate, schedule and mean of weights searched.

The search of batch, rate and schedule is over; every study holds its losses against the best of its rows, too.
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
    """The best data parallelism found. share: of the run, whose weights' mean is taken; None: the last weights."""

    trial: str
    share: str | None
    test: float
    selection: float


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
        Best(name, share, 2 * both - selection, selection)
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
