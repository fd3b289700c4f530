"""List what is to be measured on a GPU, what is hoped for, and write the page that tells of it. Nothing is measured
here."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.goals import Goal


@dataclass(frozen=True, kw_only=True)
class GpuGoal(Goal):
    """The goal of all figures whose dotted names fit `metric`, as fnmatch has it. needs_gpus: fewer say nothing about
    it."""

    what: str
    unit: str = "ratio"
    needs_gpus: int = 1


GOALS = (
    GpuGoal("tests.failed", most=0, what="tests marked gpu that failed", unit="count"),
    GpuGoal("tests.passed", least=1, what="tests marked gpu that passed", unit="count"),
    GpuGoal("parts.*.exit", most=0, what="a part's exit code; 124: it took too long", unit="count"),
    GpuGoal("engines.*", most=1.0, what="losses and norms of the engine: from the processor's, over what may be"),
    GpuGoal("kernels.*", least=0.85, what="update kernels over a copy on the device that touches the same bytes"),
    GpuGoal("codecs.*.decode_measured*", what="the same with its norm, which the host reads payload and result for"),
    GpuGoal("codecs.*", least=0.85, what="codecs' kernels over a copy on the device that touches the same bytes"),
    GpuGoal("outer_loop.exposed", most=0.01, what="share of a worker's time that the outer loop costs"),
    GpuGoal("two_regions.workers", least=2, what="workers that trained, one a region, sharing a GPU", unit="count"),
    GpuGoal("two_regions.exposed", what="share of their time that regions cost over 1 Gbit/s and 50 ms"),
    GpuGoal("step.memory_over_estimate", least=0.95, most=1.05, what="a rank's peak memory over that of `dry-run`"),
    GpuGoal("step.tflops_per_rank", what="arithmetic of training, each rank", unit="Tflop/s"),
    GpuGoal("step.tokens_per_s", what="tokens of all ranks, ZeRO-1", unit="tokens/s"),
    GpuGoal("step.vs_torch", least=1.0, what="ZeRO-1 on one GPU over a plain PyTorch loop of transformers' model"),
    GpuGoal("step.vs_torchtitan", what="the same over torchtitan's model, compiled, where torchtitan is installed"),
    GpuGoal("learning.*.gap", what="ours: loss over that of data parallelism after as many tokens, less 1"),
    GpuGoal("step.acco_speedup", least=1.0, what="ACCO over NCCL, over ZeRO-1", needs_gpus=2),
)


def goal_of(metric: str) -> GpuGoal | None:
    """The goal of a figure; None: it is only recorded."""
    return next((goal for goal in GOALS if fnmatch.fnmatch(metric, goal.metric)), None)


def unit(metric: str) -> str:
    goal = goal_of(metric)
    return goal.unit if goal else {"s": "s", "bytes": "bytes"}.get(metric.rpartition("_")[2], "count")


def verdict(metric: str, value: float, gpus: int) -> str:
    """gpus: with which it was measured; a figure of a CPU meets no goal and misses none."""
    goal = goal_of(metric)
    if goal is None or str(goal) == "–" or gpus < goal.needs_gpus:
        return "–"
    return "met" if goal.met(value) else "MISSED"


def plan() -> str:
    """The goals, as a table in Markdown."""
    rows = [f"| `{g.metric}` | {g.what} | {g.unit} | {g} | {g.needs_gpus} |" for g in GOALS]
    return "\n".join(["| figure | what | unit | goal | GPUs, at least |", "|---|---|---|---|---|", *rows])


def page(results: Mapping[str, float], gpus: int, where: str) -> str:
    """The figures, as a page in Markdown. where: date, machine and versions, in words."""
    rows = [
        f"| `{metric}` | {value:.4g} | {unit(metric)} | {goal_of(metric) or '–'} | {verdict(metric, value, gpus)} |"
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
