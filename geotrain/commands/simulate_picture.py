"""A report as a picture: who waits, and which link is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MOST_BARS = 40


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars of each worker's utilization and each link's."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    workers = list(report["workers"].items())[:MOST_BARS]
    _bars(
        axes[0],
        [name for name, _ in workers],
        [w["utilization"] for _, w in workers],
        "workers: share of time at work",
    )
    links = list(report["links"].items())[:MOST_BARS]
    labels = [f"{name}  {link['gigabytes']:.3g} GB" for name, link in links]
    _bars(axes[1], labels, [link["busy"] for _, link in links], "links: share of time busy")
    rule, hours = report["outer"]["rule"]["name"], report["hours"]
    figure.suptitle(f"{report['run']}: {rule}, {hours:.3g} h (compute bound {report['compute_bound_hours']:.3g} h)")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bars(axes: Any, labels: list[str], values: list[float], title: str) -> None:
    axes.barh(range(len(values)), values, color="tab:blue")
    axes.set_yticks(range(len(values)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
