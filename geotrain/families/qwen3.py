"""Qwen3 (arXiv 2505.09388): queries and keys are normalized, head by head."""

from typing import ClassVar, Literal

from geotrain.families.family import Family
from geotrain.families.qwen2 import Qwen2


class Qwen3(Family):
    model_type = "qwen3"
    transformers_class = "Qwen3ForCausalLM"
    idle = Qwen2.idle
    positions = 32768
    usual_head_dim: ClassVar[int | None] = 128
    qk_norm: ClassVar[Literal["head", "projection"] | None] = "head"
