"""Qwen3 (arXiv 2505.09388): queries and keys are normalized, head by head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from geotrain.families.architecture import Architecture
from geotrain.families.family import Family


class Qwen3(Family):
    model_type = "qwen3"
    transformers_class = "Qwen3ForCausalLM"

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        return replace(super().architecture(config), qk_norm=True)
