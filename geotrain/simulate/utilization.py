"""How much bandwidth a method needs to keep its workers computing (Streaming DiLoCo, arXiv 2501.18512, table of
simulated compute utilization)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from geotrain.canonical import Parameter
from geotrain.config import OuterConfig
from geotrain.outer.layout import Layout
from geotrain.simulate.links import LinkSpec, StepShape
from geotrain.simulate.spec import RegionSpec, RingSpec, WorkerSpec, WorldSpec
from geotrain.simulate.world import World, timing_task

GRID_GBPS = tuple(0.1 * 10 ** (4 * i / 49) for i in range(50))  # the paper's: 50 points from 0.1 to 1000
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)

# Bytes on the slowest hop over bytes of the payload. The paper does not state it; this is the one value with which
# all thirty cells of its data-parallel and DiLoCo rows come out (16-bit payload, 13.3 bits a parameter).
RING_FACTOR = 5 / 6


@dataclass(frozen=True)
class ModelShape:
    """A model of which only layers, size and the seconds of an inner step are known."""

    name: str
    numel: int
    layers: int
    step_s: float

    def layout(self, layers_per_fragment: int | None) -> Layout:
        """Layers of equal size, and an embedding and a head of no weight."""
        each = self.numel // self.layers
        parameters = [Parameter(f"layer.{i}", (each,), i, "normal") for i in range(self.layers)]
        ends = (Parameter("embedding", (1,), None, "normal"), Parameter("head", (1,), None, "normal"))
        return Layout([ends[0], *parameters, ends[1]], layers_per_fragment)


PUBLISHED_SHAPES = (
    ModelShape("1B", 10**9, 24, 0.1),
    ModelShape("10B", 10**10, 48, 0.8),
    ModelShape("100B", 10**11, 108, 4.9),
)


def utilization(outer: OuterConfig, model: ModelShape, gbps: float, jobs: int = 5) -> float:
    """Share of its time that a worker computes, once the run has settled: of the last half of its jobs.

    Flat synchronous runs exchange over a ring, layer by layer; all others over one link from each of two regions,
    a worker in each, to the global server.
    """
    layout = model.layout(outer.fragments.layers_per_fragment)
    ring = None
    if outer.levels == 1 and outer.rule == "sync":
        layers = tuple(tuple(p.layer for p in f.parameters if p.layer is not None) for f in layout.fragments)
        ring = RingSpec(LinkSpec(gbps), RING_FACTOR, shape=StepShape(model.step_s, layers))
    steps = 2 * jobs * outer.local_steps
    world = World(WorldSpec(_regions(model, gbps), ring=ring), timing_task(outer, layout, steps, 1))
    world.run()
    starts = world.workers["worker-0"].job_starts_s
    first = len(starts) // 2
    return (len(starts) - 1 - first) * outer.local_steps * model.step_s / (starts[-1] - starts[first])


def freshness(outer: OuterConfig, model: ModelShape, gbps: float, sends: int = 200) -> float:
    """Of the updates that a region could send, one every H × K steps of its worker, the share that it does: its
    workers never wait; over a thin link there are fewer updates, each of more steps.

    sends: that each of two regions, a worker in each, could make. The two at the end of a run do not count."""
    steps = 2 * sends * outer.updates_per_send * outer.local_steps
    world = World(
        WorldSpec(_regions(model, gbps)),
        timing_task(outer, model.layout(outer.fragments.layers_per_fragment), steps, 1),
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
    """The first grid point at which each utilization, or what else is measured, is reached; infinity: at none."""
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
    """Two, of one worker each."""
    return tuple(
        RegionSpec(f"region-{i}", (WorkerSpec(f"worker-{i}", model.step_s),), LinkSpec(gbps)) for i in range(2)
    )
