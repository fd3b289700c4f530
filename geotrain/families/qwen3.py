"""Qwen3 (arXiv 2505.09388): queries and keys are normalized, head by head."""

from geotrain.families.family import Family


class Qwen3(Family):
    model_type = "qwen3"
    transformers_class = "Qwen3ForCausalLM"
    qk_norm = True
