"""Gemma 2 (arXiv 2408.00118): norms before and behind attention and MLP, which multiply by 1 + their weight; scaled
embeddings; GELU; scores and logits soft-capped; every other layer sees a window only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from geotrain.families import reading
from geotrain.families.architecture import Architecture, Multipliers, UnsupportedModelError
from geotrain.families.family import Family

CAPS = "attn_logit_softcapping", "final_logit_softcapping"


class Gemma2(Family):
    model_type = "gemma2"
    transformers_class = "Gemma2ForCausalLM"
    only: ClassVar[Mapping[str, Any]] = {
        **Family.only,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
    }
    idle = frozenset({"cache_implementation"})
    positions = 8192
    usual_head_dim = 256
    tied = True
    norms = "around"
    full_every = 2
    caps: ClassVar[tuple[float | None, float | None]] = (50.0, 30.0)  # transformers' defaults

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """Read the model. Raises UnsupportedModelError."""
        read = super().architecture(config)
        if read.hidden_size % read.heads:  # transformers 5 does not load such
            raise UnsupportedModelError(
                f"model config: hidden_size = {read.hidden_size} is not a multiple of num_attention_heads = "
                f"{read.heads}, as transformers wants it of a {self.model_type}; change one"
            )
        reading.need(config, "num_key_value_heads")  # transformers would take 4
        scalar = reading.whole(config, "query_pre_attn_scalar", 256)
        scores, logits = (
            None if config.get(key, usual) is None else reading.number(config, key, usual or 0.0, 1e-9)
            for key, usual in zip(CAPS, self.caps, strict=True)
        )
        return replace(
            read,
            multipliers=Multipliers(read.hidden_size**0.5, scalar**-0.5, rounded=True),
            centered_norms=True,
            activation="gelu_tanh",
            score_cap=scores,
            logit_cap=logits,
        )

    def sliding_window(self, config: Mapping[str, Any]) -> int:
        return reading.whole(config, "sliding_window", 4096)

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        assert a.multipliers is not None
        return {
            **reading.kinds_of_layers(a),
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round(a.multipliers.attention**-2),
            **dict(zip(CAPS, (a.score_cap, a.logit_cap), strict=True)),
        }
