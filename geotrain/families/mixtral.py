"""Mixtral (arXiv 2401.04088): Mistral with experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from geotrain.families import reading
from geotrain.families.architecture import Architecture
from geotrain.families.mistral import Mistral
from geotrain.families.weights import Weight, expert_settings, routed_experts


class Mixtral(Mistral):
    model_type = "mixtral"
    transformers_class = "MixtralForCausalLM"
    only: ClassVar[Mapping[str, Any]] = {**Mistral.only, "router_jitter_noise": 0.0}
    window = None

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        count_key = "num_experts" if "num_experts" in config else "num_local_experts"
        experts = replace(reading.experts(config, count_key, per_token=2, normalized=True), normalized=True)
        return replace(super().architecture(config), experts=experts)

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        assert a.experts is not None
        keys = {"num_experts_per_tok": a.experts.per_token, "router_aux_loss_coef": a.experts.aux_loss}
        return {**super().config_keys(a), **keys}

    def mlp(self, a: Architecture, layer: int) -> Iterator[Weight]:
        return routed_experts(a, "block_sparse_moe", ("w1", "w3", "w2"))

    def megatron(self, a: Architecture) -> dict[str, Any]:
        return expert_settings(a)
