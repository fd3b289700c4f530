"""The memory estimate against engines that run."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from geotrain.config import AccoConfig, ConfigError, ParallelConfig, architecture_from_hf
from geotrain.parallelism.acco_forms import scratch_bytes
from geotrain.parallelism.memory import activation_bytes, memory_per_rank
from geotrain.parallelism.whole_matrices import shard_size
from geotrain.parameters.parameter_map import parameter_count
from tests.support.expert_models import DEEPSEEK, QWEN_MOE
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
from tests.support.live_memory import PeakBytes

WIDE = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 512, "head_dim": 32, "num_hidden_layers": 2}
LATENT = {
    "moe_intermediate_size": 320,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "v_head_dim": 48,
    "qk_rope_head_dim": 32,
}
LLAMA_WIDE = {**LLAMA, **WIDE}
BF16 = {"bf16": {"enabled": True}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 5e-3}}}
CASES: list[tuple[dict[str, Any], ParallelConfig, dict[str, Any]]] = [
    ({**QWEN, **WIDE}, ParallelConfig(), deepspeed_block(0)),
    ({**LLAMA, **WIDE}, ParallelConfig(tensor=2), deepspeed_block(1)),
    ({**QWEN, **WIDE}, ParallelConfig(tensor=2, sequence=True), deepspeed_block(2)),
    ({**LLAMA, **WIDE}, ParallelConfig(), deepspeed_block(1, **BF16)),
    (
        {**QWEN, **WIDE},
        ParallelConfig(pipeline=2),
        deepspeed_block(1, **BF16, data_types={"grad_accum_dtype": "fp32"}),
    ),
    ({**QWEN, **WIDE}, ParallelConfig(), deepspeed_block(0, **MUON)),
    ({**LLAMA, **WIDE}, ParallelConfig(), deepspeed_block(1, **BF16, **MUON)),
    (
        {**QWEN, **WIDE},
        ParallelConfig(tensor=2),
        deepspeed_block(1, **BF16, **MUON, data_types={"grad_accum_dtype": "fp32"}),
    ),
    ({**QWEN_MOE, **WIDE, "moe_intermediate_size": 320}, ParallelConfig(expert=2), deepspeed_block(1, **BF16)),
    ({**QWEN_MOE, **WIDE, "moe_intermediate_size": 320}, ParallelConfig(expert=2), deepspeed_block(1, **MUON)),
    ({**DEEPSEEK, **WIDE, **LATENT}, ParallelConfig(expert=2), deepspeed_block(1)),
    ({**LLAMA, **WIDE}, ParallelConfig(context=2), deepspeed_block(1)),
    ({**QWEN, **WIDE}, ParallelConfig(context=2), deepspeed_block(0)),
]
SPARSE = {**QWEN_MOE, **WIDE, "moe_intermediate_size": 320}
FOUR: list[tuple[dict[str, Any], ParallelConfig, dict[str, Any]]] = [  # two ranks have the same experts
    (SPARSE, ParallelConfig(expert=2), deepspeed_block(1)),
    (SPARSE, ParallelConfig(expert=2, context=2), deepspeed_block(1, **MUON)),
]


def kept_bytes(engine: Any, tokens: torch.Tensor, weights: set[int]) -> int:
    """Bytes of the storages, other than weights, that autograd keeps of a forward."""
    from geotrain.inner.runtime import platform

    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), platform.megatron_runtime():
        engine._losses(engine.module, tokens)
    return sum(storage.nbytes() for address, storage in kept.items() if address not in weights)


def measure(cases: list[tuple[dict[str, Any], ParallelConfig, dict[str, Any]]]) -> list[dict[str, int]]:
    """Bytes of weights, of the optimizer's state, and of what autograd keeps of one micro-batch."""
    from geotrain.checkpoint.saving import Checkpoints
    from geotrain.inner.model.router_bias import biased_routers

    measured = []
    for model, parallel, block in cases:
        engine = start(model, parallel, block)
        batches = micro_batches(engine, 0)
        engine.train_step(batches, 0)
        weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in engine.module.parameters()}
        tensors = {id(t): t for g in engine.optimizer.param_groups for t in g["params"]}
        masters = [] if block["zero_optimization"]["stage"] == 0 else list(tensors.values())
        state = [
            t for s in engine.basic_optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()
        ]
        with closing(Checkpoints(engine, "nowhere", 1)) as checkpoints:
            copied, _ = checkpoints._saved(every_shard=True)
        measured.append(
            {
                "checkpoint": sum(tensor.nbytes for tensor in copied.values()),
                "parameters": sum(p.numel() for n, p in engine.module.named_parameters() if "shard_gap" not in n)
                + sum(router.expert_bias.numel() for _, router in biased_routers(engine.module)),
                "weights": sum(weights.values()),
                "optimizer": sum(t.nbytes for t in [*masters, *state]),
                "activations": kept_bytes(engine, batches[0], set(weights)) if parallel.pipeline == 1 else 0,
            }
        )
        stop(engine)
    return measured


def unfused_bytes(model: dict[str, Any], parallel: ParallelConfig, tokens: int) -> float:
    """Bytes that torch's CPU kernels keep beyond CUDA's: normalized inputs of norms, and a tensor of SwiGLU."""
    a = architecture(model)
    whole = a.hidden_size / (parallel.tensor if parallel.sequence else 1)
    heads = (a.heads + a.kv_heads) * a.head_dim if a.qk_norm else 0
    latents = a.latent.query_rank + a.latent.key_value_rank if a.latent else 0
    between = sum(a.active_ffn_size(a.has_experts(i)) for i in range(a.layers))
    normed = a.layers * (2 * whole + latents) + whole
    return 4 * tokens * (normed + (a.layers * heads + between) / parallel.tensor)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (4, FOUR)])
def test_the_estimate_is_what_engines_use(ranks: int, cases: list[Any]) -> None:
    by_rank = run_world(ranks, measure, cases)
    for i, (model, parallel, block) in enumerate(cases):
        a = architecture(model)
        memory = memory_per_rank(a, parallel, ranks, block, 16)
        measured = by_rank[memory.stage][i]  # stage i of two is rank i
        assert memory.parameters == measured["parameters"]
        assert measured["weights"] == pytest.approx(memory.weights_bytes, rel=1e-3)  # DeepSpeed pads a little
        assert measured["optimizer"] == pytest.approx(memory.optimizer_bytes, rel=1e-3)
        assert measured["checkpoint"] == pytest.approx(memory.checkpoint_bytes, rel=1e-2)
        if parallel.pipeline == 1 and "bf16" not in block:
            tokens = 2 * 16 // parallel.context
            expected = activation_bytes(a, parallel, tokens, 4, "none", 0, 1) + unfused_bytes(model, parallel, tokens)
            kept = measured["activations"]
            if a.experts:  # ranks have as many tokens as their experts were chosen for
                kept = sum(by_rank[rank][i]["activations"] for rank in range(ranks)) / ranks
            assert kept == pytest.approx(expected, rel=0.04), (model["model_type"], parallel)


def test_a_70b_model() -> None:
    """Llama 3 70B on 64 ranks, TP 8 × PP 4 × DP 2. Weights: 70.6e9 / 32 × 2 bytes, a little more at the ends."""
    a = architecture_from_hf(
        {
            "model_type": "llama",
            "vocab_size": 128_256,
            "hidden_size": 8192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        }
    )
    assert parameter_count(a) == pytest.approx(70.55e9, rel=1e-3)
    block = deepspeed_block(1, micro=1, train_batch_size=64, **BF16)
    layout = ParallelConfig(tensor=8, pipeline=4, sequence=True)
    memory = memory_per_rank(a, layout, 64, block, 8192)
    assert memory.stage == 0, "the first stage holds most micro-batches"
    assert memory.weights_bytes == pytest.approx(70.55e9 / 32 * 2, rel=0.06)
    assert memory.optimizer_bytes == pytest.approx(6 * memory.parameters, rel=1e-3)
    # Per token and layer, by hand: 4·8192/8 + (3·8192 + 3·1024 + 3·28672)/8 = 18,304 elements.
    assert memory.activations_bytes == 4 * 20 * 18_304 * 2 * 8192
    assert memory.total_bytes == sum(
        (
            memory.weights_bytes,
            memory.gradients_bytes,
            memory.optimizer_bytes,
            memory.buffers_bytes,
            memory.activations_bytes,
        )
    )
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


# ------------------------------------------------------------------------------ ACCO's scratch, a checkpoint's copy

AT_ONCE = 1 << 14  # elements that are coded at once, in place of 2^26
BF16_SUMS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
SCRATCH = {
    **{(form, "bf16"): deepspeed_block(1, micro=1, **BF16_SUMS) for form in ("int4", "local", "exact")},
    **{(form, "fp32"): deepspeed_block(1, micro=1) for form in ("int4", "local")},
    ("int4", "muon"): deepspeed_block(1, micro=1, **BF16_SUMS, **MUON),
}


def prediction_peaks() -> dict[tuple[str, str], int]:
    """The most that a prediction of a step holds beside what ACCO keeps, in bytes."""
    from geotrain.inner.acco import optimizer
    from geotrain.inner.acco.prediction import WeightPrediction

    peaks = {}
    for (form, kind), block in SCRATCH.items():
        seen: list[int] = []

        def watched(real: Any, seen: list[int] = seen) -> Any:
            def half(*args: Any) -> None:
                with PeakBytes() as held:
                    real(*args)
                seen.append(held.peak)

            return half

        with mock.patch.object(optimizer, "CODED_AT_ONCE", AT_ONCE):
            engine = start(LLAMA_WIDE, ParallelConfig(), block, acco=AccoConfig(prediction=form, synchronous_steps=1))
        engine.train_step(micro_batches(engine, 0), 0)  # makes what is kept: the buffer for codes
        engine.train_step(micro_batches(engine, 1), 1)
        engine.settle()
        halves = {name: watched(getattr(WeightPrediction, name)) for name in ("prepare", "communicate")}
        with mock.patch.multiple(WeightPrediction, **halves):
            engine.train_step(micro_batches(engine, 2), 2)
            engine.settle()
        peaks[form, kind] = max(seen)
        stop(engine)
    return peaks


def test_the_scratch_of_acco_s_codes_is_counted() -> None:
    (peaks,) = run_world(1, prediction_peaks)
    a = architecture(LLAMA_WIDE)
    for form, kind in SCRATCH:
        shard = shard_size(a, ParallelConfig(), 0, 1, kind == "muon", True)
        counted = scratch_bytes(form, shard, 4 if kind == "fp32" else 2, AT_ONCE)
        if kind == "muon":  # orthogonalizing takes more, which is not counted; a piece ends with a matrix
            assert counted > scratch_bytes(form, replace(shard, largest_matrix=0), 2, AT_ONCE)
        else:
            assert peaks[form, kind] == pytest.approx(counted, rel=0.02, abs=2048), (form, kind)
