"""The model against transformers, and bf16."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from geotrain.config import ParallelConfig
from tests.support.inner_worlds import (
    LLAMA,
    QWEN,
    batch,
    canonical_weights,
    deepspeed_block,
    run_world,
    start,
    stop,
    train,
)
from tests.support.transformers_models import loss_of, transformers_model


def reference_curve(model: Any, steps: range) -> list[tuple[float, float]]:
    """Plain PyTorch: AdamW on matrices with decay, on norms without; clipping; DeepSpeed's schedule by formula."""
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
        loss = loss_of(model, batch(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve


LLAMA_3 = {
    **LLAMA,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
YARN = {**QWEN, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
LINEAR = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 5, "head_dim": 12}
FAMILIES = (LLAMA, QWEN, LLAMA_3, YARN, LINEAR, QWEN2, MISTRAL)


def beside_transformers() -> list[dict[str, Any]]:
    from geotrain.inner.runtime import platform

    results = []
    for config in FAMILIES:
        engine = start(config, ParallelConfig(), deepspeed_block(0))
        theirs = transformers_model(config, canonical_weights(engine.architecture))
        tokens = batch(7)[:2]
        with torch.no_grad(), platform.megatron_runtime():
            ours, expected = engine.module(tokens, None, None), theirs(tokens).logits
            loss, expected_loss = engine.evaluate([tokens]), float(loss_of(theirs, tokens))
        curve, expected_curve = train(engine, range(20)), reference_curve(theirs, range(20))
        results.append({"logits": (ours, expected), "loss": (loss, expected_loss), "curve": (curve, expected_curve)})
        stop(engine)
    return results


def test_it_is_the_model_of_transformers_and_trains_as_plain_pytorch() -> None:
    (results,) = run_world(1, beside_transformers)
    ours = [result["logits"][0] for result in results]
    for plain, variants in ((0, (2, 4, 6)), (1, (3,))):
        assert all((ours[plain] - ours[i]).abs().max() > 1e-3 for i in variants), "the variant has an effect"
    for result in results:
        assert result["logits"][1].std() > 0.1
        torch.testing.assert_close(*result["logits"], rtol=1e-4, atol=1e-4)
        assert result["loss"][0] == pytest.approx(result["loss"][1], rel=1e-5)
        torch.testing.assert_close(*result["curve"], rtol=1e-4, atol=1e-5)
        assert max(norm for _, norm in result["curve"][0]) > 0.5, "clipping must be active"


WIDE = {"data_types": {"grad_accum_dtype": "fp32"}}
BF16: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = [  # tensor, pipeline, zero_optimization, more
    (2, 1, {"stage": 1}, {}),
    (1, 2, {"stage": 1, "overlap_comm": True}, {}),
    (1, 1, {"stage": 1, "offload_optimizer": {"device": "cpu"}}, {}),
    (2, 1, {"stage": 1}, WIDE),
    (1, 2, {"stage": 1}, WIDE),
    (1, 1, {"stage": 2, "overlap_comm": True}, WIDE),
]
STEPS = range(14)


def train_in_bf16() -> list[list[tuple[float, float]]]:
    curves = []
    for tensor, pipeline, zero, more in BF16:
        block = deepspeed_block(0, bf16={"enabled": True}, zero_optimization=dict(zero), **more)
        engine = start(QWEN, ParallelConfig(tensor=tensor, pipeline=pipeline), block)
        assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
        assert {s.master.dtype for s in engine.shards()} == {torch.float32}
        curves.append(train(engine, STEPS))
        stop(engine)
    return curves


def in_fp32() -> list[tuple[float, float]]:
    engine = start(QWEN, ParallelConfig(), deepspeed_block(0))
    curve = train(engine, STEPS)
    stop(engine)
    return curve


@pytest.mark.slow
def test_bf16_follows_fp32() -> None:
    (expected,) = run_world(1, in_fp32)
    for curves in run_world(2, train_in_bf16):
        for layout, curve in zip(BF16, curves, strict=True):
            losses, wanted = [loss for loss, _ in curve], [loss for loss, _ in expected]
            assert curve[0] == pytest.approx(expected[0], rel=0.01), layout
            assert losses == pytest.approx(wanted, rel=0.02), layout
            assert curve[-1][0] < 0.8 * curve[0][0], layout
