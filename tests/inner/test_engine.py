"""The engine in many layouts: each must train exactly as one process does, from the same canonical weights."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from geotrain.config import ParallelConfig
from tests.support.inner_worlds import (
    LLAMA,
    QWEN,
    SEQUENCE,
    architecture,
    assemble,
    canonical_weights,
    deepspeed_block,
    micro_batches,
    pushed,
    run_world,
    start,
    stop,
    train,
)

STEPS = range(20)
QWEN2 = {**LLAMA, "model_type": "qwen2"}  # with biases
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 5}
MODELS = {"llama": LLAMA, "qwen": QWEN, "qwen2": QWEN2, "mistral": MISTRAL}
Layout = tuple[str, int, int, bool, int, str]  # model, tensor, pipeline, sequence, ZeRO stage, recompute


def try_layouts(layouts: list[Layout]) -> list[Any]:
    """On each rank, for each layout: (curve, evaluation, pushed at the start, pushed at the end)."""
    results = []
    for model, tensor, pipeline, sequence, stage, recompute in layouts:
        parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, sequence=sequence)
        engine = start(MODELS[model], parallel, deepspeed_block(stage), recompute)
        before = pushed(engine)
        curve = train(engine, STEPS)
        results.append((curve, engine.evaluate(micro_batches(engine, 0)), before, pushed(engine)))
        stop(engine)
    return results


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Train in one process, without any parallelism."""
    (results,) = run_world(1, try_layouts, [(name, 1, 1, False, 0, "none") for name in MODELS])
    return dict(zip(MODELS, results, strict=True))


TWO: list[Layout] = [
    ("qwen", 2, 1, False, 1, "none"),
    ("qwen", 2, 1, True, 1, "full"),
    ("llama", 2, 1, True, 2, "selective"),
    ("llama", 2, 1, False, 0, "none"),
    ("qwen", 1, 2, False, 1, "none"),
    ("qwen", 1, 2, False, 0, "full"),
    ("llama", 1, 1, False, 0, "none"),
    ("qwen", 1, 1, False, 2, "full"),
    ("qwen2", 2, 1, True, 1, "none"),
    ("mistral", 1, 2, False, 1, "none"),
]
FOUR: list[Layout] = [
    ("qwen", 2, 2, True, 1, "none"),
    ("llama", 2, 2, False, 0, "none"),
    ("qwen", 2, 1, True, 2, "none"),
    ("llama", 1, 2, False, 1, "none"),
    ("qwen2", 2, 2, False, 1, "none"),
]


def reduced_by_one_rank() -> list[int]:
    import torch.distributed as dist

    engine = start(LLAMA, ParallelConfig(), deepspeed_block(0))
    sizes, reduce = [], dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", noted):
        train(engine, range(1))
    stop(engine)
    return sizes


def test_who_has_no_replicas_reduces_no_gradients() -> None:
    (sizes,) = run_world(1, reduced_by_one_rank)
    assert sizes and max(sizes) <= 2 * SEQUENCE, "numbers of a micro-batch's tokens are the most"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layouts"), [(1, [("qwen", 1, 1, False, 1, "none")]), (2, TWO), (4, FOUR)])
def test_every_layout_trains_as_one_process(alone: dict[str, Any], ranks: int, layouts: list[Layout]) -> None:
    by_rank = run_world(ranks, try_layouts, layouts)
    for i, layout in enumerate(layouts):
        model = layout[0]
        curve, evaluation, _, after = alone[model]
        assert curve[-1][0] < 0.8 * curve[0][0]
        assert max(norm for _, norm in curve) > 0.5, "clipping must be active"
        for rank in range(ranks):
            torch.testing.assert_close(by_rank[rank][i][0], curve, rtol=1e-4, atol=1e-5, msg=f"{layout} rank {rank}")
            assert by_rank[rank][i][1] == pytest.approx(evaluation, rel=1e-4), layout
        a = architecture(MODELS[model])
        start_weights = assemble(a, [by_rank[rank][i][2] for rank in range(ranks)])
        for name, weight in canonical_weights(a).items():
            assert torch.equal(start_weights[name], weight.view(-1)), (layout, name)
        ours, theirs = assemble(a, [by_rank[rank][i][3] for rank in range(ranks)]), assemble(a, [after])
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name], weight, rtol=2e-3, atol=2e-4, msg=f"{layout}: {name}")
