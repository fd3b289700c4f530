"""Model families beside transformers: the same logits, and training as plain PyTorch has it."""

from __future__ import annotations

import math
from typing import Any

import torch

from geotrain.config import ParallelConfig
from tests.support.families import (
    DEEPSEEK,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    GRANITE_4,
    LATENT_YARN,
    LINEAR,
    LLAMA_3,
    MISTRAL,
    MIXTRAL,
    NEMOTRON_3,
    NEMOTRON_H,
    OLMO2,
    OLMO3,
    PREDICTING,
    QWEN2,
    QWEN2_MOE,
    QWEN3_NEXT,
    QWEN_MOE,
    SMOLLM3,
    YARN,
    biased_gates,
    losses,
    move_biases,
    transformers_model,
)
from tests.support.inner_worlds import (
    LLAMA,
    QWEN,
    assemble,
    batch,
    canonical_weights,
    deepspeed_block,
    pushed,
    run_world,
    start,
    stop,
    train,
    write,
)
from tests.support.real_models import MODELS


def reference_curve(model: Any, config: dict[str, Any], steps: range) -> list[tuple[float, float]]:
    """Plain PyTorch over micro-batches of four sequences: AdamW, clipping, the schedule by formula."""
    decays = {name: p.dim() > 1 and not name.endswith("_bias") for name, p in model.named_parameters()}
    matrices, norms = ([p for name, p in model.named_parameters() if decays[name] is kind] for kind in (True, False))
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
        for tokens in batch(step).split(4):
            main, balance = losses(model, config, tokens)
            ((main + balance) / 2).backward()
            mean += main.item() / 2
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        move_biases(model, config)
        curve.append((mean, norm.item()))
    return curve


SMOLLM3_YARN = {**SMOLLM3, "rope_scaling": YARN["rope_scaling"], "hidden_size": 30, "head_dim": 8}  # 30 is not 4 · 8
DENSE = (
    *(LLAMA, QWEN, LLAMA_3, YARN, LINEAR, QWEN2, MISTRAL),
    *(SMOLLM3, {**SMOLLM3, "no_rope_layers": [1] * 4}, GRANITE, SMOLLM3_YARN),
    *(OLMO2, OLMO3, GEMMA2, GEMMA3, NEMOTRON_H),
)
SPARSE = (
    GPT_OSS,
    QWEN_MOE,
    {**QWEN_MOE, "norm_topk_prob": False},
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_NEXT,
    GRANITE_4,
    NEMOTRON_3,
    DEEPSEEK,
    PREDICTING,
    {
        **DEEPSEEK,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "rope_scaling": LATENT_YARN,
        "rms_norm_eps": 1e-2,
    },  # as Moonlight
)
STEPS = range(5)  # the last two after the warmup


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
    for config in (*DENSE, *SPARSE):
        parallel = ParallelConfig(dispatcher="allgather") if config in SPARSE else ParallelConfig()
        engine = start(config, parallel, deepspeed_block(0, micro=4))
        weights = with_biases(canonical_weights(engine.architecture))
        write(engine, weights)
        theirs = transformers_model(config, weights)
        tokens = batch(7)[:4]
        with torch.no_grad(), platform.megatron_runtime():
            logits = engine.module(tokens, None, None), theirs(tokens).logits
            loss = engine.evaluate([tokens]), float(losses(theirs, config, tokens)[0])
        for router in biased_gates(theirs):
            router.counts = 0
        curve = train(engine, STEPS), reference_curve(theirs, config, STEPS)
        ours = {
            name: w for name, w in assemble(engine.architecture, [pushed(engine)]).items() if "correction" in name
        }
        moved = {
            name: (weights[name], found, theirs.state_dict()[name.replace("backbone", "model")])
            for name, found in ours.items()
        }
        results.append({"logits": logits, "loss": loss, "curve": curve, "biases": moved})
        stop(engine)
    return results


def real_models() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Logits of each of them, and transformers'."""
    from geotrain.inner.runtime import platform

    found = {}
    for name, config in MODELS.items():
        engine = start(config, ParallelConfig(), deepspeed_block(0))
        weights, tokens = canonical_weights(engine.architecture), batch(7)[:2]
        write(engine, weights)
        with torch.no_grad(), platform.megatron_runtime():
            found[name] = engine.module(tokens, None, None), transformers_model(config, weights)(tokens).logits
        stop(engine)
    return found


def test_real_models_are_built_as_transformers_has_them() -> None:
    for name, logits in run_world(1, real_models)[0].items():
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4, msg=name)


def test_they_are_the_models_of_transformers_and_train_as_plain_pytorch() -> None:
    (results,) = run_world(1, beside_transformers)
    ours = [result["logits"][0] for result in results]
    for plain, variants in ((0, (2, 4, 6, 9)), (1, (3,)), (8, (7,)), (17, (18,))):
        assert all((ours[plain] - ours[i]).abs().max() > 1e-3 for i in variants), "the variant has an effect"
    for result in results:
        assert result["logits"][1].std() > 0.1
        torch.testing.assert_close(*result["logits"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(*result["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(*result["curve"], rtol=1e-4, atol=1e-5)
        assert max(norm for _, norm in result["curve"][0]) > 0.5, "clipping must be active"
    assert [len(result["biases"]) for result in results] == [0] * 23 + [1, 1, 3, 1]
    for result in results:
        for before, ours, expected in result["biases"].values():
            torch.testing.assert_close(ours, expected)
            assert (ours - before).abs().max() > 0.039, "two steps at least went the same way"
