"""The simulator counts a server's time as the formula says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.studies.environments import one_block
from geotrain.config import OuterConfig
from geotrain.plan.model import servers
from geotrain.plan.model.server_rates import ServerRates
from geotrain.plan.model.servers import merge_s, place_of, send_s
from geotrain.plan.model.sizes import Sizes
from geotrain.simulate.links import LinkSpec
from geotrain.simulate.spec import RegionSpec, WorkerSpec, WorldSpec
from geotrain.simulate.world import VirtualWorld, timing_task

NUMEL, STEPS, H, STEP_S = 10**8, 64, 8, 1.0
OUTER = OuterConfig.model_validate(
    {"local_steps": H, "rule": {"name": "region_momentum", "updates_per_send": 2}, "up": {"name": "int4"},
     "down": {"name": "int4"}, "local": {"name": "bf16"}}
)  # fmt: skip
RATES = ServerRates(
    "none", "made up", {"decode_and_norm": 1, "rule": 2, "answer": 3, "up_encode": 4, "merge": 5},
    {"frames_in": 1, "journal_write": 2, "journal_flush": 3, "frames_out": 4, "between": 5, "tls": 6}, 1.0,
)  # fmt: skip
SIZES = Sizes(OUTER, (NUMEL,))


def simulated(
    workers: int, rates: ServerRates | None, share: float = 1.0, encrypted: bool = False, **stops: Any
) -> dict[str, Any]:
    """One region, over links that take no time. stops: of each worker, as `WorkerSpec` has them."""
    fast = LinkSpec(gbps=1e9)
    members = tuple(WorkerSpec(f"w{i}", STEP_S, **stops) for i in range(workers))
    region = RegionSpec("eu", members, fast, fast, share)
    task = timing_task(OUTER, one_block(NUMEL), STEPS * workers, 1, rates)
    return VirtualWorld(WorldSpec((region,), share=share, encrypted=encrypted), task).run()


def update_s(rates: ServerRates) -> float:
    return servers.update_s(place_of("region", OUTER, 1), SIZES.local.up[0], NUMEL, SIZES.local.down[0], rates)


def test_a_servers_time_is_the_formulas() -> None:
    found = simulated(1, RATES)
    of_send = send_s(NUMEL, SIZES.wide.up[0], RATES)
    of_merge = merge_s(place_of("region", OUTER, 1), NUMEL, SIZES.wide.down[0], RATES)
    of_top = servers.update_s(place_of("global", OUTER, 1), SIZES.wide.up[0], NUMEL, SIZES.wide.down[0], RATES)
    updates, sends = STEPS // H, STEPS // H // 2
    merges = sends + 1  # the first weights, too
    expected = updates * update_s(RATES) + sends * of_send + merges * of_merge
    assert found["servers"]["eu"] == pytest.approx(expected)
    assert found["servers"]["global"] == pytest.approx(sends * of_top)
    assert found["seconds"] > STEPS * STEP_S + updates * update_s(RATES)  # its worker waits for each answer


def test_workers_wait_for_each_other_at_a_slow_server_and_not_at_one_that_takes_no_time() -> None:
    free = simulated(4, None)
    assert free["servers"] == {"global": 0.0, "eu": 0.0}
    assert free["seconds"] == pytest.approx(STEPS * STEP_S, rel=1e-3)
    slow = replace(RATES, of_parameter={stage: 20 * ns for stage, ns in RATES.of_parameter.items()})
    # Eight rounds of four updates, one after another, take longer than the workers' steps.
    assert simulated(4, slow)["seconds"] > 32 * update_s(slow) > STEPS * STEP_S


def test_shards_work_side_by_side_and_encryption_costs_each_byte() -> None:
    alone, shared, coded = (simulated(1, RATES, *more) for more in ((), (0.25,), (1.0, True)))
    for name, busy_s in alone["servers"].items():
        assert shared["servers"][name] == pytest.approx(busy_s / 4)
    updates, sends = STEPS // H, STEPS // H // 2
    size = SIZES.wide.up[0], SIZES.wide.down[0]
    each = RATES.of_byte["tls"] / 1e9
    more_s = each * (updates * (SIZES.local.up[0] + SIZES.local.down[0]) + sends * size[0] + (sends + 1) * size[1])
    assert coded["servers"]["eu"] - alone["servers"]["eu"] == pytest.approx(more_s)
    assert coded["servers"]["global"] - alone["servers"]["global"] == pytest.approx(each * sends * sum(size))


@pytest.mark.parametrize(
    ("stops", "each_s"),
    [
        ({"settle_s": 0.25}, 0.25),  # once: the delta leaves and its answer is adopted after the same step
        ({"refresh_s": 0.5}, 0.5),
        ({"settle_s": 0.25, "refresh_s": 0.5, "refreshes_all": True}, 0.75),
    ],
)
def test_exchanges_stop_a_worker(stops: dict[str, Any], each_s: float) -> None:
    jobs = STEPS // H
    more_s = simulated(1, None, **stops)["seconds"] - simulated(1, None)["seconds"]
    assert more_s == pytest.approx(jobs * each_s, rel=0.13)  # and when the first weights come
    assert more_s >= jobs * each_s - 1e-9
