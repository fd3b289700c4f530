"""The outer loop's closed form against the simulator, which plays the production's own state machines."""

from __future__ import annotations

from typing import Any

import pytest

from geotrain.config import OuterConfig, parse
from geotrain.layout import Layout, Parameter
from geotrain.plan.model.network import Line
from geotrain.plan.model.rounds import ExchangePace, WorkerTiming, pace, payloads
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import RegionSpec, WorkerSpec, WorldSpec
from geotrain.simulate.world import VirtualWorld, timing_task

LAYERS, LAYER_NUMEL, JOBS = 12, 20_000_000, 40
STEPS_S = {"a": (1.0, 1.25), "b": (1.0,), "c": (2.0, 2.0, 2.0)}  # region → its workers' step times


def layout(outer: OuterConfig) -> Layout:
    parameters = [Parameter(f"layer.{i}", (LAYER_NUMEL,), i, "normal") for i in range(LAYERS)]
    ends = (Parameter("embedding", (1,), None, "normal"), Parameter("head", (1,), None, "normal"))
    return Layout([ends[0], *parameters, ends[1]], outer.fragments.layers_per_fragment)


def world(outer: OuterConfig, wide: LinkSpec, local: LinkSpec) -> VirtualWorld:
    regions = tuple(
        RegionSpec(name, tuple(WorkerSpec(f"{name}-{i}", s) for i, s in enumerate(steps)), wide, local)
        for name, steps in STEPS_S.items()
    )
    count = JOBS * outer.local_steps * sum(len(s) for s in STEPS_S.values())
    played = VirtualWorld(WorldSpec(regions), timing_task(outer, layout(outer), count, 1))
    played.run()
    return played


def closed_form(outer: OuterConfig, wide: LinkSpec, local: LinkSpec) -> ExchangePace:
    workers = [WorkerTiming(f"{name}-{i}", name, s) for name, steps in STEPS_S.items() for i, s in enumerate(steps)]
    lines = [Line((), spec.gbps, spec.latency_s) for spec in (wide, local)]
    sizes = payloads(outer, [f.numel for f in layout(outer).fragments])
    return pace(outer, sizes, workers, *({name: line for name in STEPS_S} for line in lines))


FAST, NEAR = LinkSpec(10.0, 0.05), LinkSpec(50.0, 0.001)
CASES: list[tuple[dict[str, Any], LinkSpec, LinkSpec]] = [
    ({"local_steps": 4}, FAST, NEAR),
    ({"local_steps": 4}, LinkSpec(0.2, 0.2), NEAR),  # the link sets the rounds
    (
        {"local_steps": 4, "local": {"name": "bf16"}},
        FAST,
        LinkSpec(2.0, 0.01, shared=False),
    ),  # workers wait
    (
        {
            "local_steps": 8,
            "fragments": {"layers_per_fragment": 3},
            "overlap": {"steps": 2, "adopt": "rebase"},
            "rule": {"name": "region_momentum", "updates_per_send": 2},
        },
        FAST,
        LinkSpec(4.0, 0.01, shared=False),
    ),
    ({"local_steps": 8, "levels": 1, "up": {"name": "int4"}, "down": {"name": "int4"}}, FAST, NEAR),
    ({"local_steps": 8, "rule": {"name": "sync"}}, FAST, NEAR),
    ({"local_steps": 8, "rule": {"name": "sync"}, "scale_local_steps": True}, LinkSpec(1.0, 0.1), NEAR),
    (
        {
            "local_steps": 16,
            "rule": {"name": "sync"},
            "fragments": {"layers_per_fragment": 3},
            "overlap": {"steps": 2, "adopt": "mix"},
            "up": {"name": "e3m0"},
            "down": {"name": "e3m0"},
        },
        LinkSpec(0.5, 0.1),
        NEAR,
    ),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_closed_form_is_what_the_simulator_plays(case: int) -> None:
    settings, wide, local = CASES[case]
    outer = parse(OuterConfig, settings, "test")
    played, expected = world(outer, wide, local), closed_form(outer, wide, local)
    for name, worker in played.workers.items():
        starts = worker.job_starts_s
        first = len(starts) // 3
        job_s = (starts[-1] - starts[first]) / (len(starts) - 1 - first)
        assert expected.workers[name].job_s == pytest.approx(job_s, rel=0.06), name
    if not outer.flat:
        versions = played.top.server.fragments[0].version
        per_s = sum(1 / region.round_s for region in expected.regions.values())
        assert versions / played.clock.now == pytest.approx(
            1 / expected.regions["a"].round_s if outer.rule.synchronous else per_s, rel=0.15
        )
    usage = played.report()["links"]
    for name, region in expected.regions.items():
        sent = next(u["sent_bytes"] for way, u in usage.items() if way.startswith(name) and "up" in way)
        assert region.up_bytes / region.round_s == pytest.approx(sent / played.clock.now, rel=0.15), (name, usage)
