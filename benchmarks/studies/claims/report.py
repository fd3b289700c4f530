"""Turn rows into claims: times to a target, confidence intervals, speed-ups, tables and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import stdev
from typing import Any

from geotrain.common.files import whole_file

Row = dict[str, Any]
# Of a method in every picture, whichever others stand in it; with AdamW its line is dotted.
COLOURS = {
    "data-parallel": "black", "diloco": "tab:blue", "diloco-fair": "tab:cyan", "diloco-dylu": "teal",
    "streaming-diloco": "tab:gray", "async-local-sgd": "tab:green", "async-local-sgd-h128": "tab:olive",
    "halos": "tab:purple", "halos-tuned": "tab:pink", "region-momentum": "tab:orange",
    "region-momentum-2bit": "tab:red", "region-momentum-one-worker": "tab:brown",
    "region-momentum-one-worker-2bit": "gold",
}  # fmt: skip
# Two-sided 95 % of Student's t by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def time_to(row: Row, target: float | None) -> float | None:
    """Virtual seconds until the test loss reaches the target, interpolated between two points; None if it never
    does."""
    before: Sequence[float] | None = None
    for point in row["curve"]:
        if target is not None and point[2] <= target:
            if before is None:
                return float(point[0])
            share = (before[2] - target) / (before[2] - point[2])
            return float(before[0] + share * (point[0] - before[0]))
        before = point
    return None


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are known; None if none is."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def interval(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and 95 % confidence half-width (Student's t) of the n values that are known. With fewer than two, the
    half-width is None."""
    known = [v for v in values if v is not None]
    n, middle = len(known), mean(known)
    if middle is None or n < 2:
        return {"mean": middle, "half_width": None, "n": n}
    return {"mean": middle, "half_width": STUDENT.get(n - 1, 1.96) * stdev(known) / math.sqrt(n), "n": n}


def speedup(slow: Sequence[float | None], fast: Sequence[float | None]) -> dict[str, Any]:
    """Geometric mean of the ratios of times, with its interval. `reached`: number of seeds in which both times are
    known."""
    spread = interval([math.log(s / f) for s, f in zip(slow, fast, strict=True) if s and f])
    middle, half = spread["mean"], spread["half_width"]
    return {
        "mean": None if middle is None else math.exp(middle),
        "low": None if half is None else math.exp(middle - half),
        "high": None if half is None else math.exp(middle + half),
        "reached": spread["n"],
    }


@dataclass
class Compared:
    """The runs of one world. rows: of each method, in the order of the seeds. target: the method whose final loss is
    to be reached. longer: by method and seed, the run with twice the tokens of a rival that missed it."""

    rows: dict[str, list[Row]]
    target: str
    longer: dict[tuple[str, int], Row] = field(default_factory=dict)

    @property
    def targets(self) -> list[float | None]:
        """The target's final losses, in the order of the seeds."""
        return [row["test"] for row in self.rows[self.target]]

    def missed(self, method: str) -> list[int]:
        """The seeds in which the method never reached the target."""
        found = enumerate(zip(self.rows[method], self.targets, strict=True))
        return [seed for seed, (row, target) in found if target is not None and time_to(row, target) is None]

    def times_s(self, method: str) -> list[float | None]:
        """Virtual seconds to the target in each seed: of the run itself, or of the longer one if only that reached
        it."""
        times = []
        for seed, (row, target) in enumerate(zip(self.rows[method], self.targets, strict=True)):
            longer = self.longer.get((method, seed))
            own = time_to(row, target)
            times.append(time_to(longer, target) if own is None and longer else own)
        return times

    def speedups(self, rivals: dict[str, str], ours: str) -> dict[str, dict[str, Any]]:
        """Ratios by which `ours` sooner reaches the target than each rival. rivals: name of a figure → method."""
        mine = self.times_s(ours)
        return {name: speedup(self.times_s(m), mine) for name, m in rivals.items() if m in self.rows}

    def longer_runs(self) -> dict[str, dict[str, int]]:
        """By method: how many there were, and how many of them reached the target."""
        found = {m: {"runs": 0, "reached": 0} for m, _ in self.longer}
        for (m, seed), row in self.longer.items():
            found[m]["runs"] += 1
            found[m]["reached"] += time_to(row, self.targets[seed]) is not None
        return found

    def gap(self, method: str, reference: str) -> dict[str, Any] | None:
        """The share by which the method's final loss is above the reference's, seed by seed."""
        if method not in self.rows or reference not in self.rows:
            return None
        losses = [(a["final"], b["final"]) for a, b in zip(self.rows[method], self.rows[reference], strict=True)]
        return interval([a / b - 1 for a, b in losses if a is not None and b is not None])


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The means of one method's rows, and why those failed that came to nothing."""
    return {
        "loss": interval([row["final"] for row in rows]),
        "end_s": mean([None if "failed" in row else row["seconds"] for row in rows]),
        "steps": mean([row["committed_steps"] for row in rows]),
        "utilization": mean([row["utilization"] for row in rows]),
        "wide_gigabytes": mean([None if row["wide_bytes"] is None else row["wide_bytes"] / 1e9 for row in rows]),
        "failed": [row["failed"] for row in rows if "failed" in row],
    }


def plain(value: Any) -> Any:
    """The value for JSON: numbers with five digits, and None in place of what is not finite."""
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return None if math.isnan(value) or math.isinf(value) else float(f"{value:.5g}")
    return value


def plot_curves(rows: Sequence[Row], titles: dict[str, str], target: float | None, path: Path, title: str) -> None:
    """Test loss over virtual time and over tokens, a line a run, in its method's colour: of the first seed thick, of
    the others thin. Runs without a result are left out."""
    from matplotlib import pyplot

    figure, (by_time, by_tokens) = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for method in titles:
        style = "-" if method.endswith("-muon") else ":"
        colour = COLOURS[method.removesuffix("-muon")]
        mine = [row for row in rows if row["method"] == method and row["curve"]]
        for n, row in enumerate(mine):
            label = titles[method] if n == 0 else None
            kwargs: dict[str, Any] = {"color": colour, "ls": style, "lw": 0.6 if n else 1.6}
            by_time.plot([p[0] for p in row["curve"]], [p[2] for p in row["curve"]], label=label, **kwargs)
            by_tokens.plot([p[1] for p in row["curve"]], [p[2] for p in row["curve"]], label=label, **kwargs)
    by_time.set_xscale("log")
    low = min((row["test"] for row in rows if row["test"] is not None), default=0.0)
    by_time.set_ylim(low - 0.05, low + 1.2)
    by_time.set_xlabel("virtual seconds")
    by_time.set_ylabel("test loss, nats a byte")
    by_tokens.set_xlabel("share of the run's tokens")
    for axes in (by_time, by_tokens):
        if target is not None:
            axes.axhline(target, color="grey", lw=0.9, ls="--", label="the loss that is to be reached")
        axes.grid(alpha=0.25)
    figure.suptitle(title)
    handles, labels = by_tokens.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.16, 1, 1))
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
