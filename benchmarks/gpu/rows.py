"""Rows of figures, written one by one: what a killed part has measured is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Tell = Callable[[str, float], None]  # (dotted metric, value)


def told_to(rows: Path) -> Tell:
    """A function that appends a figure to the file, as a line of JSON, and prints it."""

    def tell(metric: str, value: float) -> None:
        with rows.open("a") as file:
            file.write(json.dumps({"metric": metric, "value": float(value)}) + "\n")
        print(f"{metric} {value:.4g}", flush=True)

    return tell


def read_rows(rows: Path) -> dict[str, float]:
    """The figures told so far; a last line that a kill cut short is left out."""
    whole = rows.read_text().rpartition("\n")[0] if rows.exists() else ""
    return {row["metric"]: row["value"] for row in map(json.loads, whole.splitlines())}
