"""The memory estimate: activations and scratch against engines that run, large models against sums by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from geotrain.config import ConfigError, ParallelConfig, architecture_from_hf
from geotrain.parallelism.memory import activation_bytes, memory_per_rank, score_bytes
from geotrain.parameters.parameter_map import parameter_count
from tests.support.families import GEMMA2, GPT_OSS, GRANITE_4, NEMOTRON_H, OLMO2, PREDICTING, QWEN3_NEXT, QWEN_MOE
from tests.support.inner_worlds import (
    LLAMA,
    QWEN,
    architecture,
    deepspeed_block,
    micro_batches,
    run_world,
    start,
    stop,
)

ROOT = Path(__file__).parents[2]
WIDE = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 512, "head_dim": 32, "num_hidden_layers": 2}
RANKS = {"q_lora_rank": 96, "kv_lora_rank": 64}
LATENT = {**RANKS, "moe_intermediate_size": 320, "v_head_dim": 48, "qk_rope_head_dim": 32}
NETS = {
    "layer_types": ["linear_attention", "full_attention"],
    "moe_intermediate_size": 320,
    "shared_expert_intermediate_size": 320,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 48,
}
STATES = {"mamba_d_head": 64, "mamba_d_state": 32, "shared_intermediate_size": 320}
BF16 = {"bf16": {"enabled": True}}
SPARSE = {**QWEN_MOE, **WIDE, "moe_intermediate_size": 320}
Case = tuple[dict[str, Any], ParallelConfig, int]  # model, layout, ZeRO stage
TWO: list[Case] = [
    ({**QWEN, **WIDE}, ParallelConfig(), 0),
    ({**LLAMA, **WIDE}, ParallelConfig(tensor=2), 1),
    ({**QWEN, **WIDE}, ParallelConfig(tensor=2, sequence=True), 2),
    (SPARSE, ParallelConfig(expert=2), 1),
    (SPARSE, ParallelConfig(tensor=2, sequence=True), 1),
    ({**PREDICTING, **WIDE, **LATENT}, ParallelConfig(expert=2), 1),
    ({**PREDICTING, **WIDE, **LATENT}, ParallelConfig(tensor=2, sequence=True), 1),
    ({**LLAMA, **WIDE}, ParallelConfig(context=2), 1),
    ({**QWEN, **WIDE}, ParallelConfig(context=2), 0),
    ({**OLMO2, **WIDE}, ParallelConfig(tensor=2), 1),
    ({**GEMMA2, **WIDE, "sliding_window": 64}, ParallelConfig(tensor=2, sequence=True), 1),
    ({**GPT_OSS, **WIDE, "sliding_window": 64, "intermediate_size": 256}, ParallelConfig(expert=2), 1),
    ({**QWEN3_NEXT, **WIDE, **NETS}, ParallelConfig(expert=2), 1),
    ({**QWEN3_NEXT, **WIDE, **NETS}, ParallelConfig(tensor=2, sequence=True), 1),
    ({**GRANITE_4, **WIDE, **STATES, "intermediate_size": 320}, ParallelConfig(expert=2), 1),
    (
        {**NEMOTRON_H, **WIDE, "mamba_head_dim": 48, "num_hidden_layers": 4},
        ParallelConfig(tensor=2, sequence=True),
        1,
    ),
]
FOUR: list[Case] = [  # two ranks have the same experts
    (SPARSE, ParallelConfig(expert=2), 1),
    (SPARSE, ParallelConfig(expert=2, context=2), 1),
]


def kept_bytes(cases: list[Case]) -> list[int]:
    """Bytes of the storages, other than weights, that autograd keeps of one micro-batch's forward."""
    from geotrain.inner.runtime import platform

    measured = []
    for model, parallel, stage in cases:
        engine = start(model, parallel, deepspeed_block(stage))
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, torch.UntypedStorage] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), platform.megatron_runtime():
            engine._losses(engine.module, micro_batches(engine, 0)[0])
        weights = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
        measured.append(sum(storage.nbytes() for address, storage in kept.items() if address not in weights))
        stop(engine)
    return measured


def unfused_bytes(model: dict[str, Any], parallel: ParallelConfig, tokens: int) -> float:
    """Bytes that torch's CPU kernels keep beyond CUDA's: normalized inputs of norms, and a tensor of SwiGLU."""
    a = architecture(model)
    whole = a.hidden_size / (parallel.tensor if parallel.sequence else 1)
    heads = (a.heads + a.kv_heads) * a.head_dim if a.qk_norm else 0
    latents = a.latent.query_rank + a.latent.key_value_rank if a.latent else 0
    letters = "".join(map(a.letters, range(a.layers)))
    between = a.active_ffn_size(False) * letters.count("-") + a.active_ffn_size(True) * letters.count("E")
    between = between if a.activation in ("silu", "gelu_tanh") else 0
    normed = (
        len(letters) * (2 if a.norms == "around" else 1) * whole + a.layers * latents + (1 + 3 * a.predicting) * whole
    )
    return 4 * tokens * (normed + (a.layers * heads + between) / parallel.tensor)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)])
def test_the_estimate_of_activations_is_what_autograd_keeps(ranks: int, cases: list[Case]) -> None:
    """Over all ranks, which have as many tokens as their experts were chosen for."""
    measured = run_world(ranks, kept_bytes, cases)
    for (model, parallel, _), *kept in zip(cases, *measured, strict=True):
        tokens = 2 * 16 // parallel.context
        counted = activation_bytes(architecture(model), parallel, tokens, 4, "none", 0, 1)
        counted += 2 * score_bytes(architecture(model), parallel, deepspeed_block(0), 16)  # of both layers
        expected = counted + unfused_bytes(model, parallel, tokens)
        assert sum(kept) / ranks == pytest.approx(expected, rel=0.04), (model["model_type"], parallel)


def test_a_70b_model() -> None:
    """Llama 3 70B on 64 ranks, TP 8 × PP 4 × DP 2. Weights: 70.6e9 / 32 × 2 bytes, a little more at the ends."""
    a = architecture_from_hf(json.loads((ROOT / "configs/models/llama-70b.json").read_text()))
    assert parameter_count(a) == pytest.approx(70.55e9, rel=1e-3)
    block = deepspeed_block(1, micro=1, train_batch_size=64, **BF16)
    layout = ParallelConfig(tensor=8, pipeline=4, sequence=True)
    memory = memory_per_rank(a, layout, 64, block, 8192)
    assert memory.stage == 0, "the first stage holds most micro-batches"
    assert memory.weights_bytes == pytest.approx(70.55e9 / 32 * 2, rel=0.06)
    assert memory.optimizer_bytes == pytest.approx(6 * memory.parameters, rel=1e-3)
    # Per token and layer, by hand: 4·8192/8 + (3·8192 + 3·1024 + 3·28672)/8 = 18,304 elements.
    assert memory.activations_bytes == 4 * 20 * 18_304 * 2 * 8192
    # Gradients in bf16, and in fp32 those of the half that a step takes; of three buckets what leaves and what comes.
    assert memory.gradients_bytes == pytest.approx((2 + 4 / 2) * memory.parameters, rel=1e-3)
    assert memory.buffers_bytes == 3 * 2 * 2 * 40_000_000
    by_hand = (2 + 4 + 6) * memory.parameters + 480e6 + memory.activations_bytes
    assert memory.total_bytes == pytest.approx(by_hand, rel=1e-3)
    full = memory_per_rank(a, layout, 64, block, 8192, "full")
    assert full.activations_bytes < memory.activations_bytes / 10
    two = memory_per_rank(a, ParallelConfig(tensor=8), 64, deepspeed_block(2, 1, train_batch_size=64, **BF16), 8192)
    assert two.optimizer_bytes == pytest.approx(12 * two.parameters / 8, rel=1e-3)
    assert two.gradients_bytes == pytest.approx(6 * two.parameters / 8, rel=1e-3)


def test_context_ranks_divide_tokens_and_the_optimizer() -> None:
    a, block = architecture({**LLAMA, **WIDE}), deepspeed_block(1, **BF16)
    data, context = (
        memory_per_rank(a, layout, 2, block, 32) for layout in (ParallelConfig(), ParallelConfig(context=2))
    )
    for part in ("weights_bytes", "gradients_bytes", "optimizer_bytes", "buffers_bytes"):
        assert getattr(context, part) == getattr(data, part) > 0
    fused = 2 * a.layers * 32 * a.kv_heads * a.head_dim  # in bf16, of the 32 tokens that are half of two samples
    assert context.activations_bytes == data.activations_bytes / 2 - fused


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        memory_per_rank(architecture(QWEN), ParallelConfig(tensor=3), 4, deepspeed_block(1), 16)
