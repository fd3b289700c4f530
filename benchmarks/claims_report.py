"""From rows to claims: times to a target, confidence intervals, speed-ups, tables and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geotrain.files import whole_file

Row = dict[str, Any]
# Two-sided 95 % of Student's t by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def time_to(row: Row, target: float) -> float | None:
    """Virtual seconds until the test loss reaches the target, between two points linearly; None: never."""
    before: Sequence[float] | None = None
    for point in row["curve"]:
        if point[2] <= target:
            if before is None:
                return float(point[0])
            share = (before[2] - target) / (before[2] - point[2])
            return float(before[0] + share * (point[0] - before[0]))
        before = point
    return None


def loss_at(row: Row, seconds: float) -> float | None:
    """The test loss at that virtual time; None before the first point."""
    before: Sequence[float] | None = None
    for point in row["curve"]:
        if point[0] >= seconds:
            if before is None:
                return None
            share = (seconds - before[0]) / (point[0] - before[0]) if point[0] > before[0] else 1.0
            return float(before[2] + share * (point[2] - before[2]))
        before = point
    return float(row["curve"][-1][2])


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and 95 % confidence half-width (Student's t)."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return {"mean": mean, "half_width": math.nan, "n": n}
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return {"mean": mean, "half_width": STUDENT.get(n - 1, 1.96) * deviation / math.sqrt(n), "n": n}


def speedup(slow: Sequence[float | None], fast: Sequence[float | None]) -> dict[str, Any]:
    """Ratio of times, seed by seed, as a geometric mean with its interval. `reached`: seeds in which both did."""
    logs = [math.log(s / f) for s, f in zip(slow, fast, strict=True) if s and f]
    if not logs:
        return {"mean": None, "low": None, "high": None, "reached": 0}
    spread = interval(logs)
    half = 0.0 if math.isnan(spread["half_width"]) else spread["half_width"]
    return {
        "mean": math.exp(spread["mean"]),
        "low": math.exp(spread["mean"] - half),
        "high": math.exp(spread["mean"] + half),
        "reached": len(logs),
    }


def summary(rows: Sequence[Row], targets: Sequence[float]) -> dict[str, Any]:
    """Of one method's rows, one a seed; each seed has its own target."""
    times = [time_to(row, target) for row, target in zip(rows, targets, strict=True)]
    reached = [t for t in times if t is not None]
    return {
        "loss": interval([row["test"] for row in rows]),
        "time_to_target_s": interval(reached) if len(reached) == len(rows) else None,
        "times_s": times,
        "end_s": interval([row["seconds"] for row in rows])["mean"],
        "utilization": interval([row["utilization"] for row in rows])["mean"],
        "wide_gigabytes": interval([row["wide_bytes"] / 1e9 for row in rows])["mean"],
    }


def plain(value: Any) -> Any:
    """For JSON: figures of four digits, no NaN."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return None if math.isnan(value) or math.isinf(value) else float(f"{value:.5g}")
    return value


def plot_curves(rows: Sequence[Row], titles: dict[str, str], target: float, path: Path, title: str) -> None:
    """Test loss over virtual time and over tokens, a line a method: the mean of its seeds, and each seed thinly."""
    from matplotlib import pyplot

    figure, (by_time, by_tokens) = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    colours = pyplot.colormaps["tab10"]
    for i, method in enumerate(titles):
        mine = [row for row in rows if row["method"] == method]
        for n, row in enumerate(mine):
            label = titles[method] if n == 0 else None
            kwargs: dict[str, Any] = {"color": colours(i), "lw": 1.4, "alpha": 0.9 if n == 0 else 0.35}
            by_time.plot([p[0] for p in row["curve"]], [p[2] for p in row["curve"]], label=label, **kwargs)
            by_tokens.plot([p[1] for p in row["curve"]], [p[2] for p in row["curve"]], label=label, **kwargs)
    by_time.set_xscale("log")
    low = min(row["test"] for row in rows)
    by_time.set_ylim(low - 0.05, low + 1.2)
    by_time.set_xlabel("virtual seconds")
    by_time.set_ylabel("test loss, nats a byte")
    by_tokens.set_xlabel("share of the run's tokens")
    for axes in (by_time, by_tokens):
        axes.axhline(target, color="grey", lw=0.8, ls="--")
        axes.grid(alpha=0.25)
    figure.suptitle(title)
    handles, labels = by_tokens.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def replace_block(path: Path, name: str, text: str) -> None:
    """The lines of a Markdown file between `<!-- name: begin -->` and `<!-- name: end -->`; all others stay.

    Raises ValueError when the file has no such lines."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = path.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{path}: a line {begin!r}, and after it a line {end!r}, are needed")
    with whole_file(path) as file:
        file.write(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")
