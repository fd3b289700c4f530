"""What is to be measured on a GPU, what is hoped for, and the page that tells of it. Nothing is measured here."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """Of all figures whose dotted names fit `metric`, as fnmatch has it. least, most: bounds that each must keep;
    None: none. needs_gpus: fewer say nothing about it."""

    metric: str
    what: str
    unit: str = "ratio"
    least: float | None = None
    most: float | None = None
    needs_gpus: int = 1

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    @property
    def bounds(self) -> str:
        told = [f"≥ {self.least:g}"] if self.least is not None else []
        told += [f"≤ {self.most:g}"] if self.most is not None else []
        return " and ".join(told) or "–"


GOALS = (
    Goal("tests.failed", "tests marked gpu that failed", "count", most=0),
    Goal("tests.passed", "tests marked gpu that passed", "count", least=1),
    Goal("kernels.*", "update kernels over a copy on the device that touches the same bytes", least=0.85),
    Goal("codecs.*", "codecs' kernels over a copy on the device that touches the same bytes", least=0.85),
    Goal("outer_loop.exposed", "share of a worker's time that the outer loop costs", most=0.01),
    Goal("step.memory_over_estimate", "a rank's peak memory over `geotrain dry-run`'s", least=0.9, most=1.1),
    Goal("step.tflops_per_rank", "arithmetic of training, each rank", "Tflop/s"),
    Goal("step.tokens_per_s", "tokens of all ranks, ZeRO-1", "tokens/s"),
    Goal("step.acco_speedup", "ACCO over NCCL, over ZeRO-1", least=1.0, needs_gpus=2),
)


def goal_of(metric: str) -> Goal | None:
    """The goal of a figure; None: it is only recorded."""
    return next((goal for goal in GOALS if fnmatch.fnmatch(metric, goal.metric)), None)


def unit(metric: str) -> str:
    goal = goal_of(metric)
    return goal.unit if goal else {"s": "s", "bytes": "bytes"}.get(metric.rpartition("_")[2], "count")


def verdict(metric: str, value: float, gpus: int) -> str:
    """gpus: with which it was measured; a figure of a CPU meets no goal and misses none."""
    goal = goal_of(metric)
    if goal is None or goal.bounds == "–" or gpus < goal.needs_gpus:
        return "–"
    return "met" if goal.met(value) else "MISSED"


def plan() -> str:
    """The goals, as a table in Markdown."""
    rows = [f"| `{g.metric}` | {g.what} | {g.unit} | {g.bounds} | {g.needs_gpus} |" for g in GOALS]
    return "\n".join(["| figure | what | unit | goal | GPUs, at least |", "|---|---|---|---|---|", *rows])


def page(results: Mapping[str, float], gpus: int, where: str) -> str:
    """The figures, as a page in Markdown. where: date, machine and versions, in words."""
    rows = [
        f"| `{metric}` | {value:.4g} | {unit(metric)} | {goal.bounds if (goal := goal_of(metric)) else '–'} | "
        f"{verdict(metric, value, gpus)} |"
        for metric, value in results.items()
    ]
    seen = {goal for metric in results if (goal := goal_of(metric))}
    missing = [f"- `{goal.metric}`: {goal.what}" for goal in GOALS if goal not in seen]
    parts = [
        f"# Measured on {f'{gpus} GPU' + 's' * (gpus > 1) if gpus else 'a CPU'}",
        f"Written by `python -m benchmarks.gpu`. {where}.",
        *([] if gpus else ["Nothing here says anything about a GPU: sizes are tiny, and no goal is judged."]),
        "\n".join(["| figure | value | unit | goal | |", "|---|---|---|---|---|", *rows]),
        *(["Not measured:\n\n" + "\n".join(missing)] if missing else []),
    ]
    return "\n\n".join(parts) + "\n"
