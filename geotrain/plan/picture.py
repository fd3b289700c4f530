"""A plan as a picture: regions, what their workers compute, and the links with what they carry."""

from __future__ import annotations

from math import cos, pi, sin
from pathlib import Path
from typing import Any

from geotrain.common.names import GLOBAL
from geotrain.plan.planner import Plan

BOX_W, ROW_H = 3.4, 0.62
MOST_ROWS = 8  # workers shown of a region


def draw(plan: Plan, path: Path) -> None:
    """Draw the plan into a file (.svg, .png or .pdf, by the name)."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    regions = sorted({region for worker in plan.workers.values() for region in worker.regions})
    regions = [r for r in plan.task.hosts if r in regions]
    radius = max(3.2, 0.95 * len(regions))
    at = {
        region: (
            1.9 * radius * cos(pi / 2 + 2 * pi * i / len(regions)),
            radius * sin(pi / 2 + 2 * pi * i / len(regions)),
        )
        for i, region in enumerate(regions)
    }
    with rc_context({"svg.hashsalt": "geotrain", "font.size": 8, "font.family": "sans-serif"}):
        figure = Figure(figsize=(4.2 + 1.6 * radius, 3.0 + 1.1 * radius))
        axes = figure.add_axes((0, 0, 1, 0.93))
        axes.set_axis_off()
        axes.set_aspect("equal")
        for region in regions:
            _region(axes, plan, region, at[region])
        _links(axes, plan, at)
        xs, ys = [x for x, _ in at.values()], [y for _, y in at.values()]
        axes.set_xlim(min(xs) - 2.4, max(xs) + 2.4)
        axes.set_ylim(min(ys) - 3.4, max(ys) + 1.8)
        p = plan.prediction
        figure.suptitle(
            f"{plan.run.name}: {p.tokens_per_s:,.0f} tokens/s, {p.utilization:.0%} of what these accelerators can do"
        )
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _region(axes: Any, plan: Plan, region: str, centre: tuple[float, float]) -> None:
    from matplotlib.patches import FancyBboxPatch

    rows = []
    for name, worker in plan.workers.items():
        here = [s for s in worker.layout.hosts if s.region == region]
        if here:
            w = plan.prediction.workers[name]
            part = "" if len(worker.regions) == 1 else f", {len(here)} of {len(worker.layout.hosts)} hosts"
            kinds = "+".join(dict.fromkeys(s.kind for s in here))
            rows.append(
                f"{name}: {worker.layout.slots * len(here)} × {kinds}{part}\n"
                f"{w.parallel.text(w.ranks)}, {w.utilization:.0%}"
            )
    left = sum(count for host, count, _ in plan.idle if host.region == region)
    shown = rows[:MOST_ROWS] + ([f"and {len(rows) - MOST_ROWS} more"] if len(rows) > MOST_ROWS else [])
    shown += [f"{left} left idle"] if left else []
    height = ROW_H * len(shown) + 0.5
    x, y = centre
    home = plan.place.region == region
    box = FancyBboxPatch(
        (x - BOX_W / 2, y + 0.5 - height),
        BOX_W,
        height,
        boxstyle="round,pad=0.08",
        facecolor="#fff6e0" if home else "#eef3fa",
        edgecolor="#c08a00" if home else "#5577aa",
        zorder=2,
    )
    axes.add_patch(box)
    title = f"{region} · global server" if home else region
    axes.text(x, y + 0.22, title, ha="center", va="center", weight="bold", zorder=3)
    for i, row in enumerate(shown):
        axes.text(x - BOX_W / 2 + 0.1, y - 0.18 - ROW_H * i, row, ha="left", va="center", fontsize=7, zorder=3)


def _links(axes: Any, plan: Plan, at: dict[str, tuple[float, float]]) -> None:
    carried: dict[frozenset[str], list[str]] = {}
    for link in plan.prediction.links:
        ends = frozenset(plan.place.region if end == GLOBAL else end for end in (link.sender, link.receiver))
        if len(ends) == 2 and ends <= set(at) and (link.receiver == GLOBAL or link.what != "outer loop"):
            gigabytes = link.bytes_per_day / 1e9
            what = "" if link.what == "outer loop" else "pipeline "
            text = f"{what}{gigabytes:,.{0 if gigabytes > 10 else 2}f} GB/day, {link.busy:.0%}"
            carried.setdefault(ends, []).append(text)
    for ends, texts in carried.items():
        (x0, y0), (x1, y1) = (at[end] for end in sorted(ends))
        axes.plot([x0, x1], [y0, y1], color="#888888", lw=1.2, zorder=1)
        axes.text(
            (x0 + x1) / 2,
            (y0 + y1) / 2,
            "\n".join(dict.fromkeys(texts)),
            ha="center",
            va="center",
            fontsize=7,
            zorder=4,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
