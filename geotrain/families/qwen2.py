"""Qwen2 (arXiv 2407.10671): the projections to queries, keys and values have biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from geotrain.families.architecture import Architecture
from geotrain.families.family import Family


class Qwen2(Family):
    model_type = "qwen2"
    transformers_class = "Qwen2ForCausalLM"

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        return replace(super().architecture(config), qkv_bias=True)
