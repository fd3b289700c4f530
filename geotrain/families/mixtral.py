"""Mixtral (arXiv 2401.04088): Mistral with experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from geotrain.families import reading
from geotrain.families.architecture import Architecture, Experts
from geotrain.families.mistral import Mistral
from geotrain.families.weights import Weight, routed_experts


class Mixtral(Mistral):
    model_type = "mixtral"
    transformers_class = "MixtralForCausalLM"
    only: ClassVar[Mapping[str, Any]] = {**Mistral.only, "router_jitter_noise": 0.0, "norm_topk_prob": True}
    count_key = "num_local_experts"
    window = None
    eps = 1e-5
    theta = 1e6

    def experts(self, config: Mapping[str, Any]) -> Experts:
        return reading.experts(config, self.count_key, per_token=2, normalized=True)

    def mlp(self, a: Architecture, layer: int) -> Iterator[Weight]:
        return routed_experts(a, "block_sparse_moe", ("w1", "w3", "w2"))
