"""Qwen2 with experts (arXiv 2407.10671): beside the chosen ones every token passes a shared expert, weighed by a
sigmoid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from geotrain.families import reading
from geotrain.families.architecture import Architecture, Experts
from geotrain.families.qwen3_moe import Qwen3Moe
from geotrain.families.weights import Weight, routed_experts, shared_expert


class Qwen2Moe(Qwen3Moe):
    model_type = "qwen2_moe"
    transformers_class = "Qwen2MoeForCausalLM"
    per_token = 4
    qk_norm: ClassVar[Literal["head", "projection"] | None] = None

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        return replace(super().architecture(config), qkv_bias=reading.flag(config, "qkv_bias", True))

    def experts(self, config: Mapping[str, Any]) -> Experts:
        size = reading.whole(config, "shared_expert_intermediate_size")
        return replace(super().experts(config), shared_ffn_size=size, shared_gate=True)

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        shared = {"shared_expert_intermediate_size": a.mixture.shared_ffn_size}
        return {**super().config_keys(a), "qkv_bias": a.qkv_bias, **shared}

    def mlp(self, a: Architecture, layer: int) -> Iterator[Weight]:
        yield from routed_experts(a)
        yield from shared_expert(a, "mlp.shared_expert")

    def divided(self, a: Architecture) -> dict[str, int]:
        return {**super().divided(a), "shared_expert_intermediate_size": a.mixture.shared_ffn_size}
