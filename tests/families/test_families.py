"""Promises of every model family: its names and shapes for ever, and one way to say them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from geotrain.config import ParallelConfig
from geotrain.families import FAMILIES, UnsupportedModelError, architecture_from_hf, family_of
from geotrain.monitor.utilization import training_flops_per_token
from geotrain.parallelism.local_parameters import local_parameters
from geotrain.parallelism.memory import activation_bytes
from geotrain.parameters.parameter_map import active_parameter_count, canonical_parameters, digest
from geotrain.plan.model.division import divide
from geotrain.plan.model.work import stage_flops, token_flops
from tests.support.families import MAMBA, PREDICTING
from tests.support.real_models import REFUSED

BASE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MIXTURE = {"num_experts_per_tok": 2, "num_experts": 4}
SPARSE = {**MIXTURE, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_routed_experts": 8,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 20,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
DELTA = {
    "norm_topk_prob": True, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "full_attention_interval": 2,
}  # fmt: skip
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
DIGESTS = {
    "llama": "99187fc9993c8f11", "qwen2": "1fbeb3c3ef5aac3f", "qwen3": "6d37c0e627b50cb3",
    "mistral": "99187fc9993c8f11", "smollm3": "d33c4dac3934fd51", "granite": "99187fc9993c8f11",
    "granitemoehybrid": "4698b62ba2702baa", "nemotron_h": "290f73e854bdbbd4", "olmo2": "f99546801190bf4f",
    "olmo3": "f99546801190bf4f", "gemma2": "57f1955e0885022d", "gemma3_text": "5942a3f48873455b",
    "qwen3_moe": "b3986efd1bb62d41", "mixtral": "39d738d3bc1390ee", "gpt_oss": "d360ad7b4bd93c52",
    "qwen2_moe": "fac4502f6a7b986d", "qwen3_next": "df15f0436927c6c9", "deepseek_v3": "daee3ca4ca6547aa",
}  # fmt: skip


def test_all_are_here() -> None:
    assert list(FAMILIES) == list(DIGESTS)


@pytest.mark.parametrize("model_type", DIGESTS)
def test_names_and_shapes_never_change(model_type: str) -> None:
    """Checkpoints, snapshots and the servers of running runs know elements by them."""
    config: dict[str, Any] = {**BASE, **OWN.get(model_type, {}), "model_type": model_type}
    assert digest(canonical_parameters(architecture_from_hf(config))) == DIGESTS[model_type]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_with_the_reason(name: str) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=re.escape(reason)):
        architecture_from_hf(config)


def test_what_predicts_further_tokens_is_a_layer_more() -> None:
    stated = {key: value for key, value in PREDICTING.items() if key != "mtp_loss_factor"}
    a, plain = (architecture_from_hf({**stated, "num_nextn_predict_layers": count}) for count in (2, 0))
    assert (a.layers, a.decoder_layers, a.predicting_loss) == (4, 2, 0.3) and a.residual_std == plain.residual_std
    family, h = family_of(a.model_type), a.hidden_size
    assert family.hf_config(a)["mtp_loss_factor"] == 0.3 and family.divided(a)["hidden_size"] == h
    held = {place.name: place for place in local_parameters(a, ParallelConfig(), 0, 0)}
    assert held["decoder.layers.3.eh_proj.weight"].is_hidden_matrix
    stds = {p.name: p.init_std for p in canonical_parameters(a)}
    assert stds["model.layers.2.eh_proj.weight"] == a.init_std
    # A projection of twice the width, and the head once more, which `full` does not compute again.
    one, other = token_flops(a, 16, 1), token_flops(a, 16, 3)
    assert other.layer - one.layer == 4 * h * h + one.head
    forward, backward = stage_flops(a, 16, range(2, 4), "full")
    assert forward == 2 * other.layer + one.head and backward == 3 * forward - 3 * one.head
    attention = 6 * a.layers * a.heads * (a.query_dim + a.value_dim) * 16
    parameters = active_parameter_count(a) - (1 - a.predicting) * a.vocab_size * h
    assert training_flops_per_token(a, 16) == 6 * parameters + attention
    cut = ParallelConfig(pipeline=2, stage_layers=(1, 3))
    kept = [activation_bytes(each, cut, 16, 4, "none", 0, 1) for each in (a, plain)]
    assert kept[0] == kept[1]  # of the first stage
    layers = [np.arange(14.0)] * 4
    cuts = [divide(layers, [13] * 4, behind) for behind in (0, 4, 11)]
    assert [cut and cut[-1] for cut in cuts] == [3, 5, None]
