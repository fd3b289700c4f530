"""How much bandwidth a method needs to keep its workers computing: Streaming DiLoCo's table (arXiv 2501.18512), from
the production's state machines in virtual time, beside what the paper states; and ours.

    python benchmarks/bandwidth.py [--docs]

Half a minute on one core. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from math import inf

from claims_methods import OURS, ROOT
from claims_report import replace_block, table

from geotrain.config import CodecConfig, FragmentConfig, OuterConfig, OverlapConfig, load_run
from geotrain.simulate.utilization import GRID_GBPS, PUBLISHED_SHAPES, TARGETS, freshness, needed_gbps

Row = tuple[tuple[float, ...], ...]  # of each model, for each target

# Gbit/s for a utilization of 50, 80, 90, 95 and 99 %, as published; 1B, 10B, 100B.
PUBLISHED: dict[str, Row] = {
    "data parallel": (
        (86.8, 152.6, 184.2, 222.3, 569), (104.8, 222.3, 222.3, 268.3, 471.5), (184.2, 323.8, 390.7, 390.7, 471.5)
    ),
    "DiLoCo": ((1.4, 6.2, 13.3, 23.3, 86.8), (1.7, 7.5, 16, 33.9, 104.8), (3.0, 11, 23.3, 49.4, 184.2)),
    "Streaming": ((1.4, 5.2, 9.1, 16, 28.1), (1.7, 5.2, 9.1, 13.3, 19.3), (2.4, 6.2, 9.1, 11, 19.3)),
    "+ overlap": ((1.4, 4.3, 6.2, 9.1, 11), (1.7, 3.6, 5.2, 6.2, 7.5), (1.7, 3.6, 4.3, 5.2, 5.2)),
    "+ FP4": ((0.4, 0.9, 1.7, 2.0, 3.0), (0.4, 0.9, 1.4, 1.4, 1.7), (0.5, 0.9, 1.1, 1.1, 1.4)),
}  # fmt: skip


def synchronous(local_steps: int, streaming: bool = False, tau: int = 0, codec: str = "bf16") -> OuterConfig:
    coded = CodecConfig(name=codec)
    return OuterConfig(
        rule="sync", levels=1, local_steps=local_steps, up=coded, down=coded, local=coded,
        fragments=FragmentConfig(layers_per_fragment=3 if streaming else None),
        overlap=OverlapConfig(steps=tau, adopt="mix" if tau else "replace"),
    )  # fmt: skip


SETTINGS = {
    "data parallel": synchronous(1),
    "DiLoCo": synchronous(100),
    "Streaming": synchronous(100, streaming=True),
    "+ overlap": synchronous(100, streaming=True, tau=1),
    "+ FP4": synchronous(100, streaming=True, tau=1, codec="e3m0"),
}


def ours() -> OuterConfig:
    """A send every hundred steps, as often as the others exchange."""
    outer = load_run(ROOT / f"configs/runs/baselines/{OURS}.json").outer
    return outer.model_copy(update={"local_steps": 25, "updates_per_send": 4})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="renew the table of docs/evidence.md")
    arguments = parser.parse_args()
    found: dict[str, Row] = {}
    for name, outer in SETTINGS.items():
        found[name] = tuple(needed_gbps(outer, model) for model in PUBLISHED_SHAPES)
        print(f"{name}: {found[name]}", flush=True)
    found["ours"] = tuple(needed_gbps(ours(), model) for model in PUBLISHED_SHAPES)
    fresh = tuple(needed_gbps(ours(), model, measure=freshness) for model in PUBLISHED_SHAPES)
    text = markdown(found, fresh)
    print(text)
    if arguments.docs:
        replace_block(ROOT / "docs/evidence.md", "bandwidth", text)
    shapes = [model.name for model in PUBLISHED_SHAPES]
    report = {
        "targets": TARGETS,
        "needed_gbps": {name: dict(zip(shapes, row, strict=True)) for name, row in found.items()},
        "ours_needed_gbps_by_share_of_updates": dict(zip(shapes, fresh, strict=True)),
        "largest_steps_off_the_grid_points_published": max(
            grid_steps(found[name], row) for name, row in PUBLISHED.items()
        ),
    }
    print(json.dumps(report))


def grid_steps(got: Row, published: Row) -> int:
    """The most points of the paper's grid that lie between a figure of ours and theirs."""
    pairs = [(a, b) for mine, theirs in zip(got, published, strict=True) for a, b in zip(mine, theirs, strict=True)]
    return max(abs(nearest(a) - nearest(b)) for a, b in pairs)


def nearest(gbps: float) -> int:
    return min(range(len(GRID_GBPS)), key=lambda i: abs(GRID_GBPS[i] / gbps - 1))


def markdown(found: dict[str, Row], fresh: Row) -> str:
    header = ("Gbit/s for " + "/".join(f"{100 * t:.0f}" for t in TARGETS) + " %", *(m.name for m in PUBLISHED_SHAPES))
    rows = [
        (name, *(f"{told(mine)} ({told(theirs)})" for mine, theirs in zip(found[name], published, strict=True)))
        for name, published in PUBLISHED.items()
    ]
    rows.append(("ours", *(told(mine) for mine in found["ours"])))
    rows.append(("ours, by the share of its updates", *(told(mine) for mine in fresh)))
    return table(rows, header)


def told(row: tuple[float, ...]) -> str:
    least = GRID_GBPS[0]
    return " / ".join("–" if g == inf else f"≤ {g:.1f}" if g == least else f"{g:.3g}" for g in row)


if __name__ == "__main__":
    main()
