"""SmolLM3: a Llama in which some layers do not rotate queries and keys (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from geotrain.families import reading
from geotrain.families.architecture import Architecture, UnsupportedModelError
from geotrain.families.family import Family


class SmolLM3(Family):
    model_type = "smollm3"
    transformers_class = "SmolLM3ForCausalLM"
    idle = frozenset({"max_window_layers", "sliding_window", "no_rope_layer_interval", "transformers.js_config"})
    positions = 32768
    theta = 2000000.0
    tied = True

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """Read the model. Raises UnsupportedModelError."""
        reading.need(config, "num_key_value_heads")  # transformers would take 4, and the others' default is none
        read = super().architecture(config)
        every = reading.whole(config, "no_rope_layer_interval", 4)
        rotated = config.get("no_rope_layers")
        if rotated is None:
            rotated = [int((layer + 1) % every != 0) for layer in range(read.layers)]
        if not isinstance(rotated, list) or len(rotated) != read.layers or not set(rotated) <= {0, 1}:
            raise UnsupportedModelError(
                f"model config: no_rope_layers = {rotated!r:.80} must be a 0, not rotated, or a 1 for each of "
                f"{read.layers} layers"
            )
        return replace(read, unrotated=tuple(layer for layer, rotates in enumerate(rotated) if not rotates))

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        return {
            "no_rope_layers": [int(layer not in a.unrotated) for layer in range(a.layers)],
            "use_sliding_window": False,
        }
