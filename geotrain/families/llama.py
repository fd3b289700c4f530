"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geotrain.families.architecture import UnsupportedModelError
from geotrain.families.family import Family


class Llama(Family):
    model_type = "llama"
    transformers_class = "LlamaForCausalLM"

    def head_dim(self, config: Mapping[str, Any], hidden: int, heads: int) -> int:
        if hidden % heads:  # though there is a head_dim: transformers 5 does not load such
            raise UnsupportedModelError(
                f"model config: hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, as "
                "transformers wants it of a llama; change one, or make it a mistral"
            )
        return super().head_dim(config, hidden, heads)
