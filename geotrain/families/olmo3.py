"""OLMo 3: an OLMo 2 in which three of four layers see a window only, with the plain rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geotrain.families import reading
from geotrain.families.architecture import Architecture, UnsupportedModelError
from geotrain.families.olmo2 import Olmo2


class Olmo3(Olmo2):
    model_type = "olmo3"
    transformers_class = "Olmo3ForCausalLM"
    full_every = 4

    def sliding_window(self, config: Mapping[str, Any]) -> int:
        return reading.whole(config, "sliding_window", 4096)

    def rope(self, config: Mapping[str, Any], positions: int) -> tuple[float, tuple[tuple[str, Any], ...], float]:
        # Without `rope_parameters` transformers 5 has this base for layers with a window, whatever `rope_theta` is.
        theta, scaling, local = reading.rope_by_kind(config, self.theta, self.theta, positions)
        if theta != local:
            raise UnsupportedModelError(
                f"model config: rope_theta = {theta:g} of layers that see all tokens, {local:g} of those with a "
                "window: versions of transformers disagree on such a model; state the same in rope_parameters' "
                "full_attention and sliding_attention"
            )
        return theta, scaling, local

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        return reading.kinds_of_layers(a)
