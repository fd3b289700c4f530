"""The outer loop's closed form against the simulator, which plays the production's own state machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from geotrain.config import OuterConfig, parse
from geotrain.parameters.parameter_map import Parameter, ParameterMap
from geotrain.plan.model.network import Line
from geotrain.plan.model.rounds import ExchangePace, WorkerTiming, pace, server_times
from geotrain.plan.model.server_rates import MEASURED, ServerRates
from geotrain.plan.model.sizes import Sizes
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import RegionSpec, WorkerSpec, WorldSpec
from geotrain.simulate.world import VirtualWorld, timing_task

LAYERS, LAYER_NUMEL, JOBS = 12, 20_000_000, 40
STEPS_S = {"a": (1.0, 1.25), "b": (1.0,), "c": (2.0, 2.0, 2.0)}  # region → its workers' step times


def layout(outer: OuterConfig) -> ParameterMap:
    parameters = [Parameter(f"layer.{i}", (LAYER_NUMEL,), i, "normal") for i in range(LAYERS)]
    ends = (Parameter("embedding", (1,), None, "normal"), Parameter("head", (1,), None, "normal"))
    return ParameterMap([ends[0], *parameters, ends[1]], outer.fragments.layers_per_fragment)


def world(outer: OuterConfig, wide: LinkSpec, local: LinkSpec, rates: ServerRates | None = None) -> VirtualWorld:
    regions = tuple(
        RegionSpec(name, tuple(WorkerSpec(f"{name}-{i}", s) for i, s in enumerate(steps)), wide, local)
        for name, steps in STEPS_S.items()
    )
    count = JOBS * outer.local_steps * sum(len(s) for s in STEPS_S.values())
    played = VirtualWorld(WorldSpec(regions), timing_task(outer, layout(outer), count, 1, rates))
    played.run()
    return played


def closed_form(
    outer: OuterConfig, wide: LinkSpec, local: LinkSpec, rates: ServerRates | None = None
) -> ExchangePace:
    workers = [WorkerTiming(f"{name}-{i}", name, s) for name, steps in STEPS_S.items() for i, s in enumerate(steps)]
    lines = [Line((), spec.gbps, spec.latency_s) for spec in (wide, local)]
    sizes = Sizes(outer, tuple(f.numel for f in layout(outer).fragments))
    servers = rates and server_times(outer, sizes, dict.fromkeys(STEPS_S, 1.0), 1.0, rates)
    to_global, to_region = ({name: line for name in STEPS_S} for line in lines)
    return pace(outer, sizes, workers, to_global, to_region, servers)


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
    (
        {
            "local_steps": 16,
            "fragments": {"layers_per_fragment": 3},
            "overlap": {"steps": 8, "late": "continue", "adopt": "rebase"},
            "rule": {"name": "region_momentum", "answers": "wait"},
        },
        FAST,
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
    check_sent(played, expected)


def check_sent(played: VirtualWorld, expected: ExchangePace) -> None:
    """Compare what regions send up in a round with what they sent."""
    usage = played.report()["links"]
    for name, region in expected.regions.items():
        sent = next(u["sent_bytes"] for way, u in usage.items() if way.startswith(name) and "up" in way)
        assert region.up_bytes / region.round_s == pytest.approx(sent / played.clock.now, rel=0.15), (name, usage)


SLOW = replace(
    MEASURED,
    of_parameter={stage: 5 * ns for stage, ns in MEASURED.of_parameter.items()},
    of_byte={stage: 5 * ns for stage, ns in MEASURED.of_byte.items()},
)  # a second and more for an update


@pytest.mark.parametrize("case", [0, 2, 3, 5])
def test_servers_that_take_their_time(case: int) -> None:
    """Below the load at which their queues matter, and far above it, where they set the pace."""
    settings, wide, local = CASES[case]
    for rates, steps in ((MEASURED, settings["local_steps"] * 8), (SLOW, settings["local_steps"])):
        within = 0.06 if rates is MEASURED else 0.15
        outer = parse(OuterConfig, settings | {"local_steps": steps}, "test")
        played, free = world(outer, wide, local, rates), closed_form(outer, wide, local)
        expected = closed_form(outer, wide, local, rates)
        for name, worker in played.workers.items():
            starts = worker.job_starts_s
            first = len(starts) // 3
            job_s = (starts[-1] - starts[first]) / (len(starts) - 1 - first)
            assert expected.workers[name].job_s == pytest.approx(job_s, rel=within), (name, steps)
        if rates is SLOW:
            check_sent(played, expected)
            assert all(w.job_s > 1.5 * free.workers[name].job_s for name, w in expected.workers.items())
        for name, busy_s in played.report()["servers"].items():
            found = expected.global_busy if name == "global" else expected.regions[name].server_busy
            assert found == pytest.approx(busy_s / played.clock.now, rel=0.15, abs=0.02), (name, steps)
