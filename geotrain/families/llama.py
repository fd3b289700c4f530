"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783)."""

from geotrain.families.family import Family


class Llama(Family):
    model_type = "llama"
    transformers_class = "LlamaForCausalLM"
