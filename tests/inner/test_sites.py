"""One worker in several sites: trains as in one, and sends between them what the planner counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from geotrain.config import ParallelConfig
from geotrain.plan.model.network import LinkTable, RankDevice
from geotrain.plan.model.step import step_time
from geotrain.plan.model.work import Work
from tests.support.collectives import delayed, replaced
from tests.support.families import QWEN_MOE
from tests.support.inner_worlds import (
    LLAMA,
    MUON,
    SEQUENCE,
    architecture,
    deepspeed_block,
    run_world,
    start,
    stop,
    train,
)  # fmt: skip
from tests.support.plan_cases import inventory

CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "fp32": (LLAMA, 1, {}),
    "muon": (LLAMA, 1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, **MUON}),
    "experts": ({**QWEN_MOE, "num_key_value_heads": 4}, 2, {}),
}
PLACES = "aabb"


def on_a_rank() -> dict[Any, Any]:
    crossed = [0]

    def counting(real: Any) -> Any:
        def exchange(*args: Any, **given: Any) -> Any:
            ranks = dist.get_process_group_ranks(given["group"])
            for rank, count in zip(ranks, given["input_split_sizes"], strict=True):
                if PLACES[rank] != PLACES[dist.get_rank()]:
                    crossed[0] += count * given["input"].element_size()
            return real(*args, **given)

        return exchange

    seen, early = dict[Any, Any](), list[int]()  # early: crossed when the last gradient is computed
    for name, (model, expert, more) in CASES.items():
        for sites in (1, 2):
            engine = start(model, ParallelConfig(expert=expert, sites=sites), deepspeed_block(1, micro=1, **more))
            curve = train(engine, range(1))
            engine.optimizer.wait_for_weights()
            crossed[0] = 0
            finish = engine.optimizer.finish_reduction
            engine.optimizer.finish_reduction = lambda finish=finish: (early.append(crossed[0]), finish())
            kinds = {"all_to_all_single": counting, "all_gather_into_tensor": lambda real: real}
            with replaced(kinds):
                curve += train(engine, range(1, 2))
                engine.optimizer.wait_for_weights()
            seen[name, sites] = curve + train(engine, range(2, 6)), crossed[0], early[-1]
            stop(engine)
    engine = start(LLAMA, ParallelConfig(sites=2), deepspeed_block(1, micro=1))
    with delayed():
        seen["later"] = train(engine, range(6))
        engine.optimizer.wait_for_weights()
    stop(engine)
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_world(len(PLACES), on_a_rank)


@pytest.mark.parametrize("name", CASES)
def test_two_sites_train_as_one_does(ranks: list[dict[Any, Any]], name: str) -> None:
    """In fp32 but for the order of a sum; in bf16, sums are rounded once more before they cross."""
    for seen in ranks:
        (flat, *_), (levels, _, early) = seen[name, 1], seen[name, 2]
        assert early > 0, "some gradients cross while others are computed"
        torch.testing.assert_close(levels, flat, rtol=0.01 if name == "muon" else 1e-5, atol=0.0)
        assert seen["later"] == seen["fp32", 2][0], "nothing is used before it has arrived"


@pytest.mark.parametrize("name", ("fp32", "muon"))
def test_between_sites_go_the_planned_bytes(ranks: list[dict[Any, Any]], name: str) -> None:
    """Once (S − 1)/S of the gradients and of the weights, both ways."""
    model, _, more = CASES[name]
    cluster = inventory({place: [(2, "d")] for place in "ab"})
    device, network = cluster.devices["d"], LinkTable(cluster)
    work = Work(architecture(model), SEQUENCE, "none", ParallelConfig(sites=2), deepspeed_block(1, 1, **more), None)
    planned = step_time(work, [RankDevice(place, place, device) for place in PLACES], network).sent_bytes
    for site in "ab":
        sent = sum(seen[name, 2][1] for seen, place in zip(ranks, PLACES, strict=True) if place == site)
        assert sent == pytest.approx(planned[site, "ba"["ab".index(site)]], rel=0.02)
    assert sum(seen[name, 1][1] for seen in ranks) >= sum(planned.values())
