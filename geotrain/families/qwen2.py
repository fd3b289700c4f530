"""Qwen2 (arXiv 2407.10671): the projections to queries, keys and values have biases."""

from collections.abc import Mapping
from typing import Any, ClassVar

from geotrain.families.family import Family


class Qwen2(Family):
    model_type = "qwen2"
    transformers_class = "Qwen2ForCausalLM"
    only: ClassVar[Mapping[str, Any]] = {**Family.only, "use_mrope": False}
    idle = frozenset({"sliding_window", "max_window_layers"})
    positions = 32768
    qkv_bias = True
