"""Granite 3: a Llama whose embeddings, attention, residuals and logits have multipliers of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from geotrain.families import reading
from geotrain.families.architecture import Architecture, Multipliers
from geotrain.families.family import Family

KEYS = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"


class Granite(Family):
    model_type = "granite"
    transformers_class = "GraniteForCausalLM"

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """Read the model. Raises UnsupportedModelError."""
        embedding, attention, residual, logits = (reading.number(config, key, 1.0, 1e-9) for key in KEYS)
        multipliers = Multipliers(embedding, attention, residual, logits)
        return replace(super().architecture(config), multipliers=multipliers)

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        m = a.multipliers
        return dict(zip(KEYS, (m.embedding, m.attention, m.residual, m.logits_divisor), strict=True)) if m else {}
