"""Qwen3 with experts (arXiv 2505.09388): an MLP of every layer is one of many, chosen for each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from geotrain.families import reading
from geotrain.families.architecture import Architecture, UnsupportedModelError
from geotrain.families.qwen3 import Qwen3
from geotrain.families.weights import Weight, expert_settings, routed_experts


class Qwen3Moe(Qwen3):
    model_type = "qwen3_moe"
    transformers_class = "Qwen3MoeForCausalLM"
    only: ClassVar[Mapping[str, Any]] = {**Qwen3.only, "decoder_sparse_step": 1}
    ffn_key = "moe_intermediate_size"
    per_token: ClassVar[int] = 8  # transformers' default of num_experts_per_tok

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        if config.get("mlp_only_layers"):
            raise UnsupportedModelError(
                f"model config: mlp_only_layers = {config['mlp_only_layers']!r} is not supported: every layer has "
                "experts"
            )
        count_key = "num_experts" if "num_experts" in config else "num_local_experts"
        experts = reading.experts(config, count_key, per_token=self.per_token, normalized=False)
        return replace(super().architecture(config), experts=experts)

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        assert a.experts is not None
        return {
            "num_experts_per_tok": a.experts.per_token,
            "router_aux_loss_coef": a.experts.aux_loss,
            "norm_topk_prob": a.experts.normalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def mlp(self, a: Architecture, layer: int) -> Iterator[Weight]:
        return routed_experts(a)

    def megatron(self, a: Architecture) -> dict[str, Any]:
        return expert_settings(a)
