"""Bytes that ranks of one layer really send each other, counted at torch's collectives, against the planner."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from geotrain.config import ParallelConfig
from geotrain.plan.model.exchanges import context_exchanges, expert_exchanges
from geotrain.plan.model.work import Work
from tests.support.expert_models import DEEPSEEK, MIXTRAL, QWEN2_MOE, QWEN_MOE
from tests.support.inner_worlds import (
    LLAMA,
    SEQUENCE,
    architecture,
    deepspeed_block,
    micro_batches,
    run_world,
    start,
    stop,
)

RANKS = 4
LLAMA_4 = {**LLAMA, "num_key_value_heads": 4, "num_hidden_layers": 2}
BF16 = {**deepspeed_block(1), "bf16": {"enabled": True}}
WHOLE = deepspeed_block(0)
GATHERED = {"dispatcher": "allgather"}
SHARED = {"tensor": 2, "sequence": True}
Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]  # model, layout, DeepSpeed block, recomputation
CASES: list[Case] = [
    (QWEN_MOE, {"expert": 4}, WHOLE, "none"),
    (QWEN_MOE, {"expert": 2}, BF16, "full"),
    (QWEN_MOE, {"expert": 2, **GATHERED}, BF16, "none"),
    (QWEN_MOE, {"expert": 2, "context": 2}, WHOLE, "full"),
    (MIXTRAL, {"expert": 4, "context": 2, **GATHERED}, WHOLE, "selective"),
    (QWEN2_MOE, {"expert": 2, **SHARED}, BF16, "none"),
    (DEEPSEEK, {"expert": 2, **SHARED, **GATHERED}, WHOLE, "full"),
    (DEEPSEEK, {"expert": 1, **SHARED}, WHOLE, "none"),
    (LLAMA_4, {"context": 4}, BF16, "none"),
    (LLAMA_4, {"context": 2, **SHARED}, WHOLE, "selective"),
]


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Bytes of `Collective.size_bytes` that this rank has to send inside it, by kind and ranks among which."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    groups = {
        "context": parallel_state.get_context_parallel_group(),
        "expert": parallel_state.get_expert_model_parallel_group(),
        "tensor": parallel_state.get_expert_tensor_parallel_group(),
        "tensor and expert": parallel_state.get_expert_tensor_and_model_parallel_group(),
    }
    found: Counter[tuple[str, str]] = Counter()

    def counting(kind: str, real: Any, part: int) -> Any:
        """part: which argument is this rank's part, or all that it divides; a list has its own last."""

        def call(*args: Any, group: Any = None, **more: Any) -> Any:
            for among, known in groups.items():
                if known is group and group.size() > 1:
                    sent = args[part]
                    found[kind, among] += sent.numel() * sent.element_size()
            return real(*args, group=group, **more)

        return call

    def unequal(real: Any) -> Any:
        """The stand-ins for gloo: what they send is what NCCL's would."""

        def call(one: Any, other: Any, group: Any = None) -> Any:
            own = other if isinstance(one, list) else one
            found["ring", "tensor"] += own.numel() * own.element_size() if group is groups["tensor"] else 0
            with mock.patch.object(dist, "all_to_all_single", plain):
                return real(one, other, group=group)

        return call

    from geotrain.inner.runtime import platform

    plain = dist.all_to_all_single
    with (
        mock.patch.object(dist, "all_to_all_single", counting("all-to-all", plain, 1)),
        mock.patch.object(mappings, "dist_all_gather_func", counting("ring", mappings.dist_all_gather_func, 1)),
        mock.patch.object(
            mappings, "dist_reduce_scatter_func", counting("ring", mappings.dist_reduce_scatter_func, 0)
        ),
        mock.patch.object(platform, "_gather_unequal", unequal(platform._gather_unequal)),
        mock.patch.object(platform, "_scatter_unequal", unequal(platform._scatter_unequal)),
    ):
        yield found


def train_one_step() -> list[Counter[tuple[str, str]]]:
    results = []
    for model, layout, block, recompute in CASES:
        engine = start(model, ParallelConfig(**layout), block, recompute)
        with counted() as found:
            engine.train_step(micro_batches(engine, 0), 0)
        results.append(found)
        stop(engine)
    return results


@pytest.mark.slow
def test_the_planner_s_bytes_are_those_that_are_sent() -> None:
    """Over all ranks, since what one sends follows from its tokens' choices; to the byte, counts and weights too."""
    by_rank = run_world(RANKS, train_one_step)
    for i, (model, layout, block, recompute) in enumerate(CASES):
        a, parallel = architecture(model), ParallelConfig(**layout)
        work = Work(a, SEQUENCE, recompute, parallel, block, None)
        steps = block["train_batch_size"] * parallel.replica_ranks // (2 * RANKS)
        expected: Counter[tuple[str, str]] = Counter()
        sparse = sum(map(a.has_experts, range(a.layers)))
        for layers, exchanges in ((a.layers, context_exchanges(work)), (sparse, expert_exchanges(work))):
            for exchange in exchanges.forward + exchanges.backward:
                expected[exchange.kind, exchange.among] += RANKS * steps * layers * exchange.size_bytes
        measured = sum((found[i] for found in by_rank), Counter())
        assert measured == expected, (model["model_type"], parallel, recompute)
        assert sum(expected.values()) > 0
