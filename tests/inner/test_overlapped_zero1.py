"""ZeRO-1's own communication: how much travels, when it leaves, and that nothing is used before it has arrived."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from geotrain.config import ParallelConfig
from geotrain.layout import parameter_count
from tests.support.inner_worlds import LLAMA, deepspeed_block, micro_batches, run_world, start, stop, train

MODEL = {**LLAMA, "hidden_size": 64, "intermediate_size": 160}
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 5e-3, "weight_decay": 0.1}}}
BLOCKS = {"adamw": BF16, "muon": {**BF16, **MUON}}
MICRO_BATCHES = 4
# What a rank of n sends on average, from a collective's tensors in the order of its arguments: of rings, as NCCL and
# gloo have them.
SENT: dict[str, Callable[[Any, int], float]] = {
    "all_reduce": lambda given, n: 2 * (n - 1) / n * given[0].nbytes,
    "all_to_all_single": lambda given, n: (n - 1) / n * given[1].nbytes,
    "all_gather_into_tensor": lambda given, n: (n - 1) * given[1].nbytes,
    "reduce_scatter_tensor": lambda given, n: (n - 1) / n * given[1].nbytes,
    "broadcast": lambda given, n: given[0].nbytes,
    "reduce": lambda given, n: given[0].nbytes,
}


class Later:
    """A collective that happens when it is waited for: what is used earlier is old."""

    def __init__(self, collective: Callable[[], Any]) -> None:
        self.wait = collective


@contextlib.contextmanager
def replaced(by_name: dict[str, Callable[[Any], Any]]) -> Iterator[None]:
    """torch's collectives of these names, each by what is made of it."""
    from deepspeed.comm import comm

    with contextlib.ExitStack() as stack:
        for name, make in by_name.items():
            stack.enter_context(mock.patch.object(dist, name, make(getattr(dist, name))))
        # DeepSpeed keeps this one under a name of its own.
        gather = by_name["all_gather_into_tensor"](comm.cdb.all_gather_function)
        stack.enter_context(mock.patch.object(comm.cdb, "all_gather_function", gather))
        yield


def watched(seen: list[tuple[str, float]]) -> Any:
    """Every collective of torch is noted with the bytes that it sends."""

    def noted(name: str, real: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            tensors = [given for given in (*args, *kwargs.values()) if isinstance(given, torch.Tensor)]
            seen.append((name, SENT[name](tensors, dist.get_world_size(kwargs.get("group")))))
            return real(*args, **kwargs)

        return collective

    return replaced({name: partial(noted, name) for name in SENT})


def delayed() -> Any:
    def later(real: Any) -> Any:
        def collective(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            if not async_op:
                return real(*args, **kwargs)
            return Later(lambda: real(*args, **kwargs))

        return collective

    return replaced(dict.fromkeys(("all_to_all_single", "all_gather_into_tensor"), later))


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
            for layer in engine.module.decoder.layers
        ]
        engine.optimizer.wait_for_weights()
        with watched(events):
            engine.train_step(micro_batches(engine, 1), 1)
            engine.train_step(micro_batches(engine, 2), 2)
            engine.optimizer.wait_for_weights()
        for hook in hooks:
            hook.remove()
        curve = train(engine, range(3, 6))
        seen[name] = {
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
def test_nothing_is_used_before_it_has_arrived(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert rank[name]["delayed"] == rank[name]["curve"]
        assert all(torch.tensor(rank[name]["curve"]).isfinite().flatten())
