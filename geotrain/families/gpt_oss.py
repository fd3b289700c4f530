"""GPT-OSS (arXiv 2508.10925): experts with biases and clamped gates, stacked in one parameter; scores that take a
share of attention and give nothing; every other layer sees a window only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from geotrain.families import reading
from geotrain.families.architecture import Architecture, Experts, UnsupportedModelError
from geotrain.families.family import Family
from geotrain.families.weights import Weight, expert_settings, grouped_attention, matrix


class GptOss(Family):
    model_type = "gpt_oss"
    transformers_class = "GptOssForCausalLM"
    only: ClassVar[Mapping[str, Any]] = {
        **Family.only,
        "attention_bias": True,
        "norm_topk_prob": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    idle = frozenset({"initial_context_length", "experts_per_token"})
    positions = 131072
    eps = 1e-5
    theta = 150000.0
    usual_head_dim = 64
    count_key = "num_local_experts"
    qkv_bias = True
    full_every = 2

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """Read the model. Raises UnsupportedModelError."""
        if not (config.get("rope_scaling") or config.get("rope_parameters")):
            raise UnsupportedModelError(
                "model config: a gpt_oss needs rope_scaling or rope_parameters: without, versions of transformers "
                "take scales of their own; state one, if only rope_parameters = {'rope_type': 'default'}"
            )
        reading.need(config, "num_key_value_heads")  # transformers would take 8
        return replace(super().architecture(config), activation="clamped", sinks=True)

    def sliding_window(self, config: Mapping[str, Any]) -> int:
        return reading.whole(config, "sliding_window", 128)

    def experts(self, config: Mapping[str, Any]) -> Experts:
        return reading.experts(config, self.count_key, per_token=4, normalized=True)

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        return {**reading.kinds_of_layers(a), "attention_bias": True, "swiglu_limit": 7.0}

    def attention(self, a: Architecture, layer: int) -> Iterator[Weight]:
        yield from grouped_attention(a)
        yield _bias("self_attn.o_proj.bias", a.hidden_size, "self_attention.linear_proj.bias")
        sinks = Weight("self_attn.sinks", (a.heads,), "self_attention.core_attention.sinks", "normal", "rows")
        yield replace(sinks, init_std=a.init_std, decays=False)

    def mlp(self, a: Architecture, layer: int) -> Iterator[Weight]:
        count, h, f, std = a.mixture.count, a.hidden_size, a.ffn_size, a.init_std
        router = matrix("mlp.router.weight", count, h, "mlp.router.weight", std, "whole")
        yield from (replace(router, summed="sequence"), _bias("mlp.router.bias", count, "mlp.router.bias"))
        name, within = "mlp.experts", "mlp.experts.local_experts.{expert}.linear_fc"
        parts = (  # inputs × outputs, gates and what they open in turn: columns of tensor ranks have pairs of them
            matrix(f"{name}.gate_up_proj", h, 2 * f, f"{within}1.weight", std, "columns"),
            replace(_bias(f"{name}.gate_up_proj_bias", 2 * f, f"{within}1.bias"), cut="rows", summed="never"),
            matrix(f"{name}.down_proj", f, h, f"{within}2.weight", a.residual_std),
            replace(_bias(f"{name}.down_proj_bias", h, f"{within}2.bias"), summed="always"),
        )
        for part in parts:
            for expert in range(count):
                yield replace(part, expert=expert, whole=(count, *part.shape), offset=expert * part.numel)

    def megatron(self, a: Architecture) -> dict[str, Any]:
        return {**expert_settings(a), "add_bias_linear": True}


def _bias(name: str, size: int, within: str) -> Weight:
    return Weight(name, (size,), within, "zeros", "whole", decays=False, summed="sequence")
