"""Gemma 3 (arXiv 2503.19786), its text model: a Gemma 2 with norms of queries and keys in place of soft caps, and
rotary embeddings of two bases; five of six layers see a window only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from geotrain.families import reading
from geotrain.families.architecture import Architecture
from geotrain.families.gemma2 import Gemma2


class Gemma3(Gemma2):
    model_type = "gemma3_text"
    transformers_class = "Gemma3ForCausalLM"
    positions = 131072
    theta = 1e6
    qk_norm = "head"
    full_every = 6
    caps = None, None

    def full_layers(self, config: Mapping[str, Any], layers: int, window: int | None) -> tuple[int, ...]:
        every = reading.whole(config, "sliding_window_pattern", self.full_every)
        return reading.full_layers(config, layers, window, every)

    def rope(self, config: Mapping[str, Any], positions: int) -> tuple[float, tuple[tuple[str, Any], ...], float]:
        return reading.rope_by_kind(config, self.theta, 10000.0, positions)

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        return {**super().config_keys(a), "rope_local_base_freq": a.local_theta}
