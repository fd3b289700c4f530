"""The tables of `benchmarks.rivals`, and the units of its figures."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.common import hardware, others_share, units_by_ending
from benchmarks.rivals.links import described
from benchmarks.rivals.methods import TITLES
from benchmarks.rivals.task import BATCH, LENGTH, LOCAL_STEPS, REGIONS
from benchmarks.studies.claims.report import table

NONE = "–"
COLUMNS = (  # figure, title, digits, factor
    ("utilization", "utilization", 3, 1.0),
    ("busy", "of what its processor time allows", 2, 1.0),
    ("standing_still", "standing still, %", 1, 100.0),
    ("processor_ms", "processor ms a step", 1, 1.0),
    ("bytes_per_token", "bytes a token", 0, 1.0),
    ("loss", "loss", 4, 1.0),
    ("seconds_to_loss", "s to the worst loss", 1, 1.0),
)
UNITS = {
    "seconds_to_loss": "s", "utilization": "ratio", "standing_still": "ratio", "bytes_per_token": "bytes/token",
    "loss_ratio": "ratio", "busy": "ratio", "rival_loss": "ratio", "loss": "nats/token", "_ms": "ms",
    "others_share": "ratio",
}  # fmt: skip


def unit(metric: str) -> str:
    """The unit of a metric, for `benchmarks.common.report`."""
    return units_by_ending(UNITS, "s")(metric.removesuffix("_low").removesuffix("_high"))


def markdown(results: dict[str, Any], options: argparse.Namespace) -> str:
    """One table a link, and one of what faults cost."""
    mine = {method: of for method, of in results.items() if method in TITLES}
    tokens = options.rounds * LOCAL_STEPS * BATCH * LENGTH * len(REGIONS)
    parts = [
        f"{tokens:,} tokens, {options.seeds} order(s) of the data; {hardware()}; others took "
        f"{100 * (others_share() or 0.0):.0f} % of the processors meanwhile."
    ]
    for name in options.links:
        rows = [(TITLES[method], *cells(of, f"{name}_link")) for method, of in mine.items()]
        parts += [described(name, results["step_ms"]), table(rows, ("", *(title for _, title, _, _ in COLUMNS)))]
    rows = [(TITLES[m], *(fault_cell(of.get(what)) for what in ("kill", "cut"))) for m, of in mine.items()]
    if faulted := [row for row in rows if row[1:] != (NONE, NONE)]:
        header = ("seconds lost", "a region killed: by it, by the other", "the link cut for 20 s: by each region")
        parts += ["Faults:", table(faulted, header)]
    faults = [(m, at, part["fault"]) for m, of in mine.items() for at, part in of.items() if "fault" in part]
    told = [f"- {TITLES[m]}, {at}: `{fault}`" for m, at, fault in faults]
    return "\n\n".join([*parts, *(["Did not run:\n\n" + "\n".join(told)] if told else [])]) + "\n"


def cells(of: dict[str, Any], at: str) -> list[str]:
    """One method's figures over one link, with their intervals where there are any. A loss that was found without a
    slow link stands here, too."""
    part = of.get(at, {})
    figures = {**({"loss": of["no_link"]["loss"]} if "loss" in of.get("no_link", {}) else {}), **part}
    return [cell(figures, *column) for column in COLUMNS]


def cell(figures: dict[str, Any], key: str, title: str, digits: int, factor: float) -> str:
    if key not in figures:
        return NONE
    text = f"{factor * figures[key]:,.{digits}f}"
    if f"{key}_low" in figures:
        low, high = (f"{factor * figures[f'{key}_{end}']:,.{digits}f}" for end in ("low", "high"))
        text += f" [{low}, {high}]"
    return text


def fault_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return NONE
    if "fault" in found:
        return "see below"
    lost = {region: found[f"lost_s.{region}"] for region in REGIONS}
    first, second = REGIONS
    if "back_s" in found:
        return f"{lost[second]:.1f} (trains again after {found['back_s']:.1f}), {lost[first]:.1f}"
    return f"{lost[first]:.1f}, {lost[second]:.1f}"
