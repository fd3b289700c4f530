"""Qwen3 with experts (arXiv 2505.09388): an MLP of every layer is one of many, chosen for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from geotrain.families import reading
from geotrain.families.architecture import Architecture, Experts
from geotrain.families.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    model_type = "qwen3_moe"
    transformers_class = "Qwen3MoeForCausalLM"
    only: ClassVar[Mapping[str, Any]] = {**Qwen3.only, "decoder_sparse_step": 1, "mlp_only_layers": []}
    idle = Qwen3.idle | {"intermediate_size"}  # of layers without experts
    usual_head_dim: ClassVar[int | None] = None
    ffn_key = "moe_intermediate_size"
    per_token: ClassVar[int] = 8  # transformers' default of num_experts_per_tok

    def experts(self, config: Mapping[str, Any]) -> Experts:
        return reading.experts(config, self.count_key, per_token=self.per_token, normalized=False)

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        return {"norm_topk_prob": a.mixture.normalized, "decoder_sparse_step": 1, "mlp_only_layers": []}
