"""Promises of every model family: its names and shapes for ever, and one way to say them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from geotrain.families import FAMILIES, Family, UnsupportedModelError, architecture_from_hf, family_of
from geotrain.families.deepseek_v3 import DeepseekV3
from geotrain.families.gemma2 import Gemma2
from geotrain.families.gemma3 import Gemma3
from geotrain.families.gpt_oss import GptOss
from geotrain.families.granite import Granite
from geotrain.families.granitemoehybrid import GraniteMoeHybrid
from geotrain.families.llama import Llama
from geotrain.families.mistral import Mistral
from geotrain.families.mixtral import Mixtral
from geotrain.families.nemotron_h import NemotronH
from geotrain.families.olmo2 import Olmo2
from geotrain.families.olmo3 import Olmo3
from geotrain.families.qwen2 import Qwen2
from geotrain.families.qwen2_moe import Qwen2Moe
from geotrain.families.qwen3 import Qwen3
from geotrain.families.qwen3_moe import Qwen3Moe
from geotrain.families.qwen3_next import Qwen3Next
from geotrain.families.smollm3 import SmolLM3
from geotrain.parameters.parameter_map import canonical_parameters, digest
from tests.support.families import MAMBA
from tests.support.real_models import REFUSED

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
DELTA = {
    "norm_topk_prob": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "full_attention_interval": 2,
}
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "qwen3_moe": SPARSE,
    "mixtral": MIXTURE,
    "gpt_oss": {**MIXTURE, "head_dim": 8, "rope_parameters": {"rope_type": "default"}},
    "qwen2_moe": {**SPARSE, "shared_expert_intermediate_size": 40},
    "qwen3_next": {**SPARSE, "shared_expert_intermediate_size": 40, "head_dim": 16, **DELTA},
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["mamba"] * 3 + ["attention"], **MAMBA},
    "nemotron_h": {"hybrid_override_pattern": "M-*-", "head_dim": 8, "mamba_num_heads": 8},
    "deepseek_v3": LATENT,
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
}
DIGESTS: dict[type[Family], str] = {
    Llama: "99187fc9993c8f11",
    Qwen2: "1fbeb3c3ef5aac3f",
    Qwen3: "6d37c0e627b50cb3",
    Mistral: "99187fc9993c8f11",
    SmolLM3: "d33c4dac3934fd51",
    Granite: "99187fc9993c8f11",
    GraniteMoeHybrid: "4698b62ba2702baa",
    NemotronH: "290f73e854bdbbd4",
    Olmo2: "f99546801190bf4f",
    Olmo3: "f99546801190bf4f",
    Gemma2: "57f1955e0885022d",
    Gemma3: "5942a3f48873455b",
    Qwen3Moe: "b3986efd1bb62d41",
    Mixtral: "39d738d3bc1390ee",
    GptOss: "d360ad7b4bd93c52",
    Qwen2Moe: "fac4502f6a7b986d",
    Qwen3Next: "df15f0436927c6c9",
    DeepseekV3: "daee3ca4ca6547aa",
}


def test_all_are_here() -> None:
    assert [type(family_of(model_type)) for model_type in FAMILIES] == list(DIGESTS)


@pytest.mark.parametrize("family", DIGESTS)
def test_names_and_shapes_never_change(family: type[Family]) -> None:
    """Checkpoints, snapshots and the servers of running runs know elements by them."""
    model_type = family.model_type
    config: dict[str, Any] = {**BASE, **OWN.get(model_type, {}), "model_type": model_type}
    assert digest(canonical_parameters(architecture_from_hf(config))) == DIGESTS[family]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_with_the_reason(name: str) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=re.escape(reason)):
        architecture_from_hf(config)
