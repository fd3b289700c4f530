"""Qwen3-Next: three of four layers have a gated delta net in place of attention, which has a gate; experts as
Qwen2-MoE, norms that multiply by 1 + their weight, a quarter of each head rotated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from geotrain.families import reading
from geotrain.families.architecture import Architecture, Recurrence, UnsupportedModelError
from geotrain.families.qwen2_moe import Qwen2Moe
from geotrain.families.states import rows_of
from geotrain.families.weights import Weight, matrix, norm

SHARE = "partial_rotary_factor"
KINDS = "linear_attention", "full_attention"
NUMBERS = {  # of its Recurrence, with transformers' defaults
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


class Qwen3Next(Qwen2Moe):
    model_type = "qwen3_next"
    transformers_class = "Qwen3NextForCausalLM"
    only: ClassVar[Mapping[str, Any]] = {
        **{key: value for key, value in Qwen2Moe.only.items() if key != SHARE},
        "qkv_bias": False,
    }
    usual_head_dim = 256
    per_token = 10
    qk_norm = "head"

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """Read the model. Raises UnsupportedModelError."""
        for key in ("norm_topk_prob", "num_key_value_heads"):  # of which transformers' defaults are others
            reading.need(config, key)
        read = super().architecture(config)
        shares = {
            reading.number(where, SHARE, 0.25, 1e-9, 1.0) for where in (config, _stated(config)) if SHARE in where
        }
        if len(shares) > 1:
            raise UnsupportedModelError(f"model config: {SHARE} of rope_parameters is another; state one of them")
        share = shares.pop() if shares else 0.25
        if (rotated := round(read.head_dim * share)) % 2 or rotated != read.head_dim * share:
            raise UnsupportedModelError(
                f"model config: {SHARE} = {share} of head_dim = {read.head_dim} must be an even number"
            )
        every = reading.whole(config, "full_attention_interval", 4)
        types = config.get("layer_types") or [KINDS[(layer + 1) % every == 0] for layer in range(read.layers)]
        if not isinstance(types, list) or len(types) != read.layers or any(kind not in KINDS for kind in types):
            raise UnsupportedModelError(
                f"model config: layer_types = {types!r:.80} must be one of {' and '.join(map(repr, KINDS))} for each "
                f"of num_hidden_layers = {read.layers} layers"
            )
        key_heads, value_heads, key_dim, value_dim, kernel = (
            reading.whole(config, key, usual) for key, usual in NUMBERS.items()
        )
        if value_heads % key_heads:
            raise UnsupportedModelError(
                f"model config: linear_num_value_heads = {value_heads} is not a multiple of linear_num_key_heads = "
                f"{key_heads}"
            )
        net = Recurrence("gated delta nets", key_heads, value_heads, key_dim, value_dim, kernel)
        pattern = tuple("GE" if kind == KINDS[0] else "*E" for kind in types)
        made = replace(read, qkv_bias=False, centered_norms=True, gated_attention=True, rotated_share=share)
        return replace(made, net=net, pattern=pattern)

    def rope(
        self, config: Mapping[str, Any], positions: int
    ) -> tuple[float, tuple[tuple[str, Any], ...], float | None]:
        plain = {key: value for key, value in _stated(config).items() if key != SHARE}
        return super().rope({**config, "rope_parameters": plain}, positions)

    def full_layers(self, config: Mapping[str, Any], layers: int, window: int | None) -> tuple[int, ...]:
        return ()

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        net = _net(a)
        numbers = net.key_heads, net.value_heads, net.key_dim, net.value_dim, net.kernel
        rope = {"rope_type": "default", "rope_theta": a.rope_theta, **dict(a.rope_scaling)}
        return {
            **{key: value for key, value in super().config_keys(a).items() if key != "qkv_bias"},
            **dict(zip(NUMBERS, numbers, strict=True)),
            "layer_types": [KINDS[a.attends(layer)] for layer in range(a.layers)],
            SHARE: a.rotated_share,
            "rope_parameters": {**rope, SHARE: a.rotated_share},
        }

    def attention(self, a: Architecture, layer: int) -> Iterator[Weight]:
        net, h, std = _net(a), a.hidden_size, a.init_std
        if a.attends(layer):
            for weight in super().attention(a, layer):  # queries and gates head by head
                queries = weight.name == "self_attn.q_proj.weight"
                yield replace(weight, shape=(2 * weight.shape[0], h)) if queries else weight
            return
        here, there, keys, values = "linear_attn", "self_attention", net.keys, net.values
        made = 2 * keys + 2 * values  # a key head's query, key, values and their gates together
        yield matrix(f"{here}.in_proj_qkvz.weight", made, h, f"{there}.in_proj.weight", std)
        yield matrix(f"{here}.in_proj_ba.weight", 2 * net.value_heads, h, f"{there}.in_proj.weight", std)
        shape = 2 * keys + values, 1, net.kernel
        convolution = Weight(f"{here}.conv1d.weight", shape, f"{there}.conv1d", "normal", "rows", std)
        yield from rows_of(convolution, (keys, keys, values))
        for name, init in (("dt_bias", "ones"), ("A_log", "log_uniform")):
            yield Weight(f"{here}.{name}", (net.value_heads,), f"{there}.{name}", init, "rows", decays=False)  # type: ignore[arg-type]
        of_head = norm(a, f"{here}.norm.weight", net.value_dim, f"{there}.norm.weight", per_head=True)
        yield replace(of_head, init="ones")  # the one norm whose weight is a factor itself
        yield matrix(f"{here}.out_proj.weight", h, values, f"{there}.out_proj.weight", a.residual_std, "columns")

    def divided(self, a: Architecture) -> dict[str, int]:
        return {**super().divided(a), "linear_num_key_heads": _net(a).key_heads}

    def megatron(self, a: Architecture) -> dict[str, Any]:
        return {**super().megatron(a), "attention_output_gate": True}


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = config.get("rope_parameters") or {}
    if not isinstance(stated, Mapping):
        raise UnsupportedModelError(f"model config: rope_parameters = {stated!r} must be an object")
    return stated


def _net(a: Architecture) -> Recurrence:
    assert a.net is not None
    return a.net
