"""Models with experts: against transformers, and in layouts that divide the experts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.config import ParallelConfig
from tests.support.checkpoints import load, save
from tests.support.expert_models import (
    DEEPSEEK,
    MIXTRAL,
    QWEN2_MOE,
    QWEN_MOE,
    losses,
    move_biases,
    transformers_experts,
)
from tests.support.inner_worlds import (
    architecture,
    assemble,
    batch,
    canonical_weights,
    deepspeed_block,
    micro_batches,
    pushed,
    run_world,
    start,
    stop,
    train,
    write,
)


def reference_curve(model: Any, config: dict[str, Any], steps: range) -> list[tuple[float, float]]:
    """Plain PyTorch over micro-batches of two sequences: AdamW, clipping, the schedule by formula."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, betas=(0.9, 0.95), eps=1e-8)
    curve = []
    for step in steps:
        warm, progress = math.log(step + 1) / math.log(4), (step - 3) / 36
        ratio = warm if step < 4 else 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * progress)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * ratio
        optimizer.zero_grad()
        mean = 0.0
        for tokens in batch(step).split(2):
            main, balance = losses(model, config, tokens)
            ((main + balance) / 4).backward()
            mean += main.item() / 4
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        move_biases(model, config)
        curve.append((mean, norm.item()))
    return curve


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
VARIANTS = (
    QWEN_MOE,
    {**QWEN_MOE, "norm_topk_prob": False},
    MIXTRAL,
    QWEN2_MOE,
    DEEPSEEK,
    {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_scaling": YARN},  # as Moonlight
)
STEPS = range(5)


def with_biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Where routers have biases, some that change choices."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(weight.shape, generator=generator) * 0.2 if "correction_bias" in name else weight
        for name, weight in weights.items()
    }


def beside_transformers() -> list[dict[str, Any]]:
    from geotrain.inner.runtime import platform

    results = []
    for config in VARIANTS:
        engine = start(config, ParallelConfig(dispatcher="allgather"), deepspeed_block(0))
        weights = with_biases(canonical_weights(engine.architecture))
        write(engine, weights)
        theirs = transformers_experts(config, weights)
        tokens = batch(7)[:2]
        with torch.no_grad(), platform.megatron_runtime():
            logits = engine.module(tokens, None, None), theirs(tokens).logits
        curve = train(engine, STEPS), reference_curve(theirs, config, STEPS)
        ours = {name: w for name, w in assemble(engine.architecture, [pushed(engine)]).items() if "bias" in name}
        moved = {
            name: (weights[name], ours[name], theirs.state_dict()[name]) for name in ours if "correction" in name
        }
        results.append({"logits": logits, "curve": curve, "biases": moved})
        stop(engine)
    return results


def test_they_are_the_models_of_transformers_and_train_as_plain_pytorch() -> None:
    (results,) = run_world(1, beside_transformers)
    assert (results[0]["logits"][0] - results[1]["logits"][0]).abs().max() > 1e-3, "normalizing has an effect"
    for result in results:
        assert result["logits"][1].std() > 0.1
        torch.testing.assert_close(*result["logits"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(*result["curve"], rtol=1e-4, atol=1e-5)
        assert max(norm for _, norm in result["curve"][0]) > 0.5, "clipping must be active"
    assert [len(result["biases"]) for result in results] == [0, 0, 0, 0, 1, 1]
    for result in results[4:]:
        for before, ours, expected in result["biases"].values():
            torch.testing.assert_close(ours, expected)
            assert (ours - before).abs().max() > 0.039, "two steps at least went the same way"


Layout = tuple[dict[str, Any], ParallelConfig, dict[str, Any], str]  # the last: recomputation


def layouts_train(layouts: list[Layout]) -> list[Any]:
    """On each rank, for each layout: (curve, evaluation, pushed at the start, pushed at the end)."""
    results = []
    for model, parallel, block, recompute in layouts:
        engine = start(model, parallel, block, recompute)
        before = pushed(engine)
        curve = train(engine, range(20))
        results.append((curve, engine.evaluate(micro_batches(engine, 0)), before, pushed(engine)))
        stop(engine)
    return results


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}}
ALONE = [
    (QWEN_MOE, deepspeed_block(0)),
    (MIXTRAL, deepspeed_block(0)),
    (QWEN2_MOE, deepspeed_block(0)),
    (DEEPSEEK, deepspeed_block(0)),
    (DEEPSEEK, deepspeed_block(0, **MUON)),
]
HALVES = ParallelConfig(expert=2)
OFFLOADED = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
BF16 = {**deepspeed_block(1), "bf16": {"enabled": True}}
Case = tuple[int, ParallelConfig, dict[str, Any], str]  # which of ALONE, layout, DeepSpeed block, recomputation
TWO: list[Case] = [
    (0, HALVES, deepspeed_block(0), "none"),
    (0, HALVES, deepspeed_block(1, **OFFLOADED), "full"),
    (0, HALVES, deepspeed_block(2), "none"),
    (0, HALVES, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, "none"),
    (1, ParallelConfig(expert=2, dispatcher="allgather"), deepspeed_block(1), "none"),
    (3, HALVES, deepspeed_block(1), "full"),
    (3, HALVES, BF16, "none"),
    (4, HALVES, deepspeed_block(1, **MUON), "none"),
]
SHARED = ParallelConfig(expert=2, tensor=2, sequence=True)
FOUR: list[Case] = [
    (0, HALVES, deepspeed_block(1), "none"),
    (1, HALVES, deepspeed_block(0), "none"),
    (1, ParallelConfig(expert=2, pipeline=2), deepspeed_block(1), "none"),
    (2, SHARED, deepspeed_block(0), "none"),
    (3, SHARED, deepspeed_block(1), "none"),
    (3, ParallelConfig(expert=2, pipeline=2), deepspeed_block(1), "none"),  # the first stage has no experts
    (4, SHARED, deepspeed_block(1, **MUON), "none"),
]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    (results,) = run_world(1, layouts_train, [(model, ParallelConfig(), block, "none") for model, block in ALONE])
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)])
def test_divided_experts_train_as_one_process(alone: list[Any], ranks: int, cases: list[Any]) -> None:
    by_rank = run_world(ranks, layouts_train, [(ALONE[i][0], *case) for i, *case in cases])
    for n, (i, parallel, block, _) in enumerate(cases):
        curve, evaluation, _, after = alone[i]
        case = f"{ALONE[i][0]['model_type']} {parallel} {block}"
        assert curve[-1][0] < 0.8 * curve[0][0]
        assert max(norm for _, norm in curve) > 0.5, "clipping must be active"
        if "bf16" in block:
            for results in by_rank:
                assert results[n][0][0] == pytest.approx(curve[0], rel=0.01), case
                assert [loss for loss, _ in results[n][0]] == pytest.approx([loss for loss, _ in curve], rel=0.02)
            continue
        for rank in range(ranks):
            torch.testing.assert_close(by_rank[rank][n][0], curve, rtol=1e-4, atol=1e-5, msg=f"{case} rank {rank}")
            assert by_rank[rank][n][1] == pytest.approx(evaluation, rel=1e-4), case
        a = architecture(ALONE[i][0])
        begun, ended = (assemble(a, [by_rank[rank][n][k] for rank in range(ranks)]) for k in (2, 3))
        for name, weight in canonical_weights(a).items():
            assert torch.equal(begun[name], weight.view(-1)), (case, name)
        for name, weight in assemble(a, [after]).items():
            torch.testing.assert_close(ended[name], weight, rtol=2e-3, atol=2e-4, msg=f"{case}: {name}")


FIRST, THEN = range(5), range(5, 10)


def save_and_resume(folder: str) -> dict[str, Any]:
    """On two ranks: train with divided experts, save, go on; then go on from the checkpoint on other layouts."""
    engine = start(DEEPSEEK, ParallelConfig(expert=2), deepspeed_block(1))
    train(engine, FIRST)
    save(engine, folder, "five", {}, keep=1, with_masters=True)
    curves = {"straight": train(engine, THEN)}
    stop(engine)
    for name, parallel, stage in (
        ("the same", ParallelConfig(expert=2), 1),
        ("whole", ParallelConfig(), 0),
        ("tensor", ParallelConfig(tensor=2, sequence=True), 1),
    ):
        engine = start(DEEPSEEK, parallel, deepspeed_block(stage))
        load(engine, folder, "five")
        curves[name] = train(engine, THEN)
        stop(engine)
    return curves


def test_a_checkpoint_of_divided_experts_resumes_on_every_layout(tmp_path: Path) -> None:
    for curves in run_world(2, save_and_resume, str(tmp_path)):
        straight = curves.pop("straight")
        assert curves["the same"] == straight
        for name, curve in curves.items():
            torch.testing.assert_close(curve, straight, rtol=1e-4, atol=1e-5, msg=name)
