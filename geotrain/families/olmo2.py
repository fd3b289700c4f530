"""OLMo 2 (arXiv 2501.00656): norms behind attention and MLP, and of whole queries and keys."""

from __future__ import annotations

from geotrain.families.family import Family


class Olmo2(Family):
    model_type = "olmo2"
    transformers_class = "Olmo2ForCausalLM"
    eps = 1e-5
    theta = 500000.0
    qk_norm = "projection"
    norms = "behind"
