"""Promises of every model family: its names and shapes for ever, and one way to say them."""

from __future__ import annotations

from typing import Any

import pytest

from geotrain.families import FAMILIES, architecture_from_hf
from geotrain.parameters.parameter_map import canonical_parameters, digest

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXTURE = {"num_experts_per_tok": 2, "num_experts": 4}
SPARSE = {**MIXTURE, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "qwen3_moe": SPARSE,
    "mixtral": MIXTURE,
    "qwen2_moe": {**SPARSE, "shared_expert_intermediate_size": 40},
    "deepseek_v3": LATENT,
}
DIGESTS = {
    "llama": "99187fc9993c8f11",
    "qwen2": "1fbeb3c3ef5aac3f",
    "qwen3": "6d37c0e627b50cb3",
    "mistral": "99187fc9993c8f11",
    "smollm3": "d33c4dac3934fd51",
    "granite": "99187fc9993c8f11",
    "qwen3_moe": "b3986efd1bb62d41",
    "mixtral": "39d738d3bc1390ee",
    "qwen2_moe": "fac4502f6a7b986d",
    "deepseek_v3": "daee3ca4ca6547aa",
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_names_and_shapes_never_change(model_type: str) -> None:
    """Checkpoints, snapshots and the servers of running runs know elements by them."""
    config: dict[str, Any] = {**BASE, **OWN.get(model_type, {}), "model_type": model_type}
    assert digest(canonical_parameters(architecture_from_hf(config))) == DIGESTS[model_type]
