"""Find how much bandwidth a method needs to keep its workers computing: Streaming DiLoCo's table (arXiv 2501.18512),
from the production's state machines in virtual time, beside what the paper states; and ours.

    python -m benchmarks.studies.bandwidth [--docs]

Half a minute on one core. The last line printed is one JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from benchmarks import ROOT
from benchmarks.common import command_line
from benchmarks.studies.claims.methods import OURS
from benchmarks.studies.claims.report import replace_block, table
from geotrain.config import FragmentConfig, OuterConfig, OverlapConfig, codec_config, load_run, rule_config
from geotrain.parameters.parameter_map import Parameter, ParameterMap
from geotrain.simulate.links import LinkSpec, StepShape
from geotrain.simulate.spec import RegionSpec, RingSpec, WorkerSpec, WorldSpec
from geotrain.simulate.world import VirtualWorld, timing_task

GRID_GBPS = tuple(0.1 * 10 ** (4 * i / 49) for i in range(50))  # the paper's: 50 points from 0.1 to 1000
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)

# Bytes on the slowest hop over bytes of the payload. The paper does not state it; this is the one value with which
# all thirty cells of its data-parallel and DiLoCo rows come out (16-bit payload, 13.3 bits a parameter).
RING_FACTOR = 5 / 6
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


@dataclass(frozen=True)
class ModelShape:
    """A model of which nothing is known but its layers, its size and the seconds of an inner step."""

    name: str
    numel: int
    layers: int
    step_s: float

    def parameter_map(self, layers_per_fragment: int | None) -> ParameterMap:
        """Layers of equal size between an embedding and a head that weigh next to nothing."""
        each = self.numel // self.layers
        parameters = [Parameter(f"layer.{i}", (each,), i, "normal") for i in range(self.layers)]
        ends = (Parameter("embedding", (1,), None, "normal"), Parameter("head", (1,), None, "normal"))
        return ParameterMap([ends[0], *parameters, ends[1]], layers_per_fragment)


PUBLISHED_SHAPES = (
    ModelShape("1B", 10**9, 24, 0.1),
    ModelShape("10B", 10**10, 48, 0.8),
    ModelShape("100B", 10**11, 108, 4.9),
)


def synchronous(local_steps: int, streaming: bool = False, tau: int = 0, codec: str = "bf16") -> OuterConfig:
    coded = codec_config(codec)
    return OuterConfig(
        rule=rule_config("sync"), levels=1, local_steps=local_steps, up=coded, down=coded,
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
    return outer.with_rule(updates_per_send=4).model_copy(update={"local_steps": 25})


def main() -> None:
    parser = command_line(__doc__, recorded=False, quick={})
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


def utilization(outer: OuterConfig, model: ModelShape, gbps: float, jobs: int = 5) -> float:
    """Share of its time that a worker computes, measured over the last half of its jobs, when the run has settled.

    Flat synchronous runs exchange over a ring, layer by layer; all others over one link from each of two regions,
    a worker in each, to the global server.
    """
    layout = model.parameter_map(outer.fragments.layers_per_fragment)
    ring = None
    if outer.flat and outer.rule.synchronous:
        layers = tuple(tuple(p.layer for p in f.parameters if p.layer is not None) for f in layout.fragments)
        ring = RingSpec(LinkSpec(gbps), RING_FACTOR, shape=StepShape(model.step_s, layers))
    steps = 2 * jobs * outer.local_steps
    world = VirtualWorld(WorldSpec(_regions(model, gbps), ring=ring), timing_task(outer, layout, steps, 1))
    world.run()
    starts = world.workers["worker-0"].job_starts_s
    first = len(starts) // 2
    return (len(starts) - 1 - first) * outer.local_steps * model.step_s / (starts[-1] - starts[first])


def freshness(outer: OuterConfig, model: ModelShape, gbps: float, sends: int = 200) -> float:
    """The share of its updates that a region really sends; it could send one every H × K steps of its worker.

    This replaces utilization for rules whose workers never wait: over a thin link they send fewer updates, each of
    more steps. sends: updates that each of two regions, of one worker each, could send. The two at the end of a run
    do not count.
    """
    steps = 2 * sends * (outer.rule.updates_per_send or 1) * outer.local_steps
    world = VirtualWorld(
        WorldSpec(_regions(model, gbps)),
        timing_task(outer, model.parameter_map(outer.fragments.layers_per_fragment), steps, 1),
    )
    world.run()
    version = min(fragment.version for fragment in world.top.server.fragments)
    return min(1.0, max(0, version - 2) / (2 * sends - 2))


def needed_gbps(
    outer: OuterConfig,
    model: ModelShape,
    targets: tuple[float, ...] = TARGETS,
    measure: Callable[[OuterConfig, ModelShape, float], float] = utilization,
) -> tuple[float, ...]:
    """The first point of the grid at which `measure` reaches each target; infinity if none does."""
    known: dict[int, float] = {}

    def reached(i: int, target: float) -> bool:
        if i not in known:
            known[i] = measure(outer, model, GRID_GBPS[i])
        return known[i] >= target

    found = []
    for target in targets:
        low, high = 0, len(GRID_GBPS)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if reached(middle, target) else (middle + 1, high)
        found.append(GRID_GBPS[low] if low < len(GRID_GBPS) else float("inf"))
    return tuple(found)


def _regions(model: ModelShape, gbps: float) -> tuple[RegionSpec, ...]:
    """Two regions of one worker each."""
    return tuple(
        RegionSpec(f"region-{i}", (WorkerSpec(f"worker-{i}", model.step_s),), LinkSpec(gbps)) for i in range(2)
    )


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
    return ", ".join("–" if g == inf else f"≤ {g:.1f}" if g == least else f"{g:.3g}" for g in row)


if __name__ == "__main__":
    main()
