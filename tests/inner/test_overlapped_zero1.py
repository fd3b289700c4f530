"""ZeRO-1's own communication: how much travels, when it leaves, and that nothing is used before it has arrived."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from geotrain.config import ParallelConfig
from geotrain.parameters.parameter_map import parameter_count
from tests.support.collectives import delayed, watched
from tests.support.inner_worlds import LLAMA, MUON, deepspeed_block, micro_batches, run_world, start, stop, train

MODEL = {**LLAMA, "hidden_size": 64, "intermediate_size": 160}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
BLOCKS = {"adamw": BF16, "muon": {**BF16, **MUON}}
MICRO_BATCHES = 4


def on_a_rank() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, block in BLOCKS.items():
        engine = start(MODEL, ParallelConfig(), deepspeed_block(1, micro=1, **block))
        train(engine, range(1))
        events: list[tuple[str, float]] = []
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, seen=events: seen.append(("gradient", 0.0)))
            for key, parameter in engine.module.named_parameters()
            if "shard_gap" not in key
        ]
        hooks += [
            layer.register_forward_pre_hook(lambda *_, seen=events: seen.append(("forward", 0.0)))
            for layer in engine.module.decoder.layers[::2]  # attention's, each before its MLP's
        ]
        engine.optimizer.wait_for_weights()
        with watched(events):
            engine.train_step(micro_batches(engine, 1), 1)
            engine.train_step(micro_batches(engine, 2), 2)
            engine.optimizer.wait_for_weights()
        for hook in hooks:
            hook.remove()
        curve = train(engine, range(3, 6))
        engine.optimizer.wait_for_weights()
        largest = [max(float(own.abs().max()) for own in engine.optimizer._reduced)]
        engine.optimizer.begin_step(1)  # a step in which nothing is used
        engine.optimizer.finish_reduction()
        largest.append(max(float(own.abs().max()) for own in engine.optimizer._reduced))
        seen[name] = {
            "largest": largest,
            "events": events,
            "curve": curve,
            "buckets": len(engine.optimizer._forward),
            "parameters": parameter_count(engine.architecture),
        }
        stop(engine)
        engine = start(MODEL, ParallelConfig(), deepspeed_block(1, micro=1, **block))
        with delayed():
            seen[name]["delayed"] = train(engine, range(6))[3:]
            engine.optimizer.wait_for_weights()
        stop(engine)
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(2, on_a_rank)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_step_sends_one_reduction_and_one_gathering(ranks: list[dict[str, Any]], name: str) -> None:
    """In bf16 each rank of two sends half of the gradients and half of the weights: 2 bytes a parameter, where
    DeepSpeed's all-reduce and gathering, counted alike, send 3."""
    for rank in ranks:
        sent = sum(count for _, count in rank[name]["events"]) / 2  # of two steps
        assert sent == pytest.approx(2 * rank[name]["parameters"], rel=0.02)


@pytest.mark.parametrize("name", BLOCKS)
def test_buckets_leave_during_the_last_backward_only(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        events, buckets = [what for what, _ in rank[name]["events"]], rank[name]["buckets"]
        assert buckets >= 6
        gradients = [i for i, what in enumerate(events) if what == "gradient"]
        gradients = gradients[: len(gradients) // 2]  # of the first step
        last_backward = gradients[-len(gradients) // MICRO_BATCHES]
        sent = [i for i, what in enumerate(events) if what == "all_to_all_single"]
        assert sent[0] > last_backward, "gradients of earlier micro-batches are only added up"
        early = [i for i in sent if i < gradients[-1]]
        assert len(early) >= buckets - 2, "all but the first layer's and the embedding's leave before the end"


@pytest.mark.parametrize("name", BLOCKS)
def test_weights_come_during_the_first_forward(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        events = [what for what, _ in rank[name]["events"]]
        step = [i for i, what in enumerate(events) if what == "forward"][-4 * MICRO_BATCHES :]  # of the second step
        gathers = "all_gather_into_tensor", "all_to_all_single"
        during = [what for what in events[step[0] : step[3]] if what in gathers]
        assert during, "some are still to come when the first layer begins"


@pytest.mark.parametrize("name", BLOCKS)
def test_what_no_micro_batch_used_has_no_gradient_of_an_earlier_step(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        before, now = rank[name]["largest"]
        assert before > 0.0 and now == 0.0


@pytest.mark.parametrize("name", BLOCKS)
def test_nothing_is_used_before_it_has_arrived(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank[name]["delayed"] == rank[name]["curve"]
        assert all(torch.tensor(rank[name]["curve"]).isfinite().flatten())
