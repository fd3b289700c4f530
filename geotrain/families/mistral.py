"""Mistral (arXiv 2310.06825): a token may see a window of those before it only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from geotrain.families import reading
from geotrain.families.architecture import Architecture
from geotrain.families.family import Family


class Mistral(Family):
    model_type = "mistral"
    transformers_class = "MistralForCausalLM"
    only: ClassVar[Mapping[str, Any]] = {
        key: value for key, value in Family.only.items() if key != "use_sliding_window"
    }
    idle = frozenset({"use_sliding_window"})
    positions = 131072
    window: ClassVar[int | None] = 4096  # transformers' default

    def sliding_window(self, config: Mapping[str, Any]) -> int | None:
        return reading.sliding_window(config, self.window)

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        return {"sliding_window": a.sliding_window}
