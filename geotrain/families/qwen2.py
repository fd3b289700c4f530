"""Qwen2 (arXiv 2407.10671): the projections to queries, keys and values have biases."""

from geotrain.families.family import Family


class Qwen2(Family):
    model_type = "qwen2"
    transformers_class = "Qwen2ForCausalLM"
    qkv_bias = True
