"""The model against transformers, and bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inner_worlds import (
    LLAMA,
    QWEN,
    SEQUENCE,
    VOCABULARY,
    canonical_weights,
    deepspeed_block,
    run_world,
    start,
    stop,
    train,
)

from geotrain.config import ParallelConfig


def logits_and_loss() -> list[tuple[torch.Tensor, torch.Tensor, float, float]]:
    """For each model: Megatron's logits and transformers'; the engine's loss and transformers'."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from geotrain.inner import platform

    results = []
    for config in (LLAMA, QWEN):
        engine = start(config, ParallelConfig(), deepspeed_block(0))
        options = {key: value for key, value in config.items() if key != "model_type"}
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **options))
        missing, unexpected = theirs.load_state_dict(canonical_weights(engine.architecture), strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        theirs.tie_weights()
        tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
        with torch.no_grad(), platform.megatron_runtime():
            ours = engine.module(tokens, None, None)
        with torch.no_grad():
            expected = theirs.eval()(tokens).logits
        loss = torch.nn.functional.cross_entropy(expected[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        results.append((ours, expected, engine.evaluate([tokens]), float(loss)))
        stop(engine)
    return results


def test_logits_and_loss_equal_transformers() -> None:
    (results,) = run_world(1, logits_and_loss)
    for ours, expected, loss, expected_loss in results:
        assert expected.std() > 0.1
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        assert loss == pytest.approx(expected_loss, rel=1e-5)


BF16: list[tuple[int, int, int, dict[str, Any]]] = [
    (2, 1, 1, {}),
    (2, 1, 1, {"data_types": {"grad_accum_dtype": "fp32"}}),
    (1, 2, 1, {"data_types": {"grad_accum_dtype": "fp32"}}),
    (1, 1, 1, {"data_types": {"grad_accum_dtype": "fp32"}}),
    (1, 1, 2, {"data_types": {"grad_accum_dtype": "fp32"}}),
    (1, 2, 1, {}),
]


def train_in_bf16() -> list[list[tuple[float, float]]]:
    curves = []
    for tensor, pipeline, stage, more in BF16:
        engine = start(
            QWEN,
            ParallelConfig(tensor=tensor, pipeline=pipeline),
            deepspeed_block(stage, bf16={"enabled": True}, **more),
        )
        assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
        assert {s.master.dtype for s in engine.shards()} == {torch.float32}
        curves.append(train(engine, range(20)))
        stop(engine)
    return curves


def in_fp32() -> list[tuple[float, float]]:
    engine = start(QWEN, ParallelConfig(), deepspeed_block(0))
    curve = train(engine, range(20))
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
