"""Nemotron-H (arXiv 2504.03624): each layer is Mamba-2, attention that rotates nothing, an MLP of
squared ReLU, or, in Nemotron 3, experts of it behind DeepSeek-V3's router."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from geotrain.families import reading
from geotrain.families.architecture import Architecture, Experts, Recurrence, UnsupportedModelError
from geotrain.families.deepseek_v3 import (
    biased_experts,
    routing_keys,
    routing_settings,
    with_bias,
)
from geotrain.families.family import Family
from geotrain.families.states import mamba, unlimited_steps
from geotrain.families.weights import Weight, gated_mlp, grouped_attention, norm

ROUTING = "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"
UNGATED = "up_proj", "down_proj"
KINDS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
SHARED = "moe_shared_expert_intermediate_size"
EXPERTS = "n_routed_experts", "moe_intermediate_size", SHARED, "num_experts_per_tok", *ROUTING
PATTERNS = "hybrid_override_pattern", "layers_block_type", "layer_types"
NUMBERS = {  # of its Recurrence, with transformers' defaults
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}


class NemotronH(Family):
    model_type = "nemotron_h"
    transformers_class = "NemotronHForCausalLM"
    trunk = "backbone"
    only: ClassVar[Mapping[str, Any]] = {
        **Family.only,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "hidden_dropout": 0.0,
        "use_bias": False,
        "mamba_proj_bias": False,
        "sliding_window": None,
        "residual_in_fp32": False,
        "moe_latent_size": None,
        "n_shared_experts": 1,
    }
    idle = frozenset({
        *("chunk_size", "expand", "rescale_prenorm_residual", "num_logits_to_keep", "use_mamba_kernels"),
        *("rope_theta", "num_mtp_layers", "num_nextn_predict_layers"),
        *("mamba_ssm_cache_dtype", "time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
        *("rope_scaling", "rope_parameters", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        *("moe_shared_expert_overlap", *EXPERTS),  # of layers that there are not
    })  # fmt: skip
    positions = 4096
    eps = 1e-5
    usual_head_dim = 128
    count_key, loss_key = "n_routed_experts", "aux_loss_alpha"

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """Read the model. Raises UnsupportedModelError."""
        unlimited_steps(config)
        reading.need(config, "num_key_value_heads")  # transformers would take 8
        read = super().architecture(config)
        eps = reading.number(config, "layer_norm_epsilon", self.eps)
        # transformers knows neither of these names, and takes the others' defaults.
        reading.must_be(config, {"rms_norm_eps": eps, "attention_head_dim": read.head_dim})
        heads, head_dim, groups, state_dim, kernel = (
            reading.whole(config, key, usual) for key, usual in NUMBERS.items()
        )
        if heads % groups:
            raise UnsupportedModelError(
                f"model config: mamba_num_heads = {heads} is not a multiple of n_groups = {groups}"
            )
        net = Recurrence(
            "Mamba-2 layers", groups, heads, state_dim, head_dim, kernel, reading.flag(config, "use_conv_bias", True)
        )
        if read.experts:
            read = replace(read, ffn_size=reading.whole(config, "moe_intermediate_size"))
        every = tuple(range(read.layers))
        return replace(read, norm_eps=eps, activation="relu2", unrotated=every, pattern=_pattern(config), net=net)

    def experts(self, config: Mapping[str, Any]) -> Experts | None:
        if "E" not in _pattern(config):
            return None
        for key in EXPERTS:  # of which transformers' defaults are no model's, and unlike DeepSeek-V3's
            reading.need(config, key)
        return replace(biased_experts(config), shared_ffn_size=reading.whole(config, SHARED))

    def layers(self, config: Mapping[str, Any]) -> int:
        count = len(_pattern(config))
        reading.must_be(config, {"num_hidden_layers": count})
        return count

    def rope(
        self, config: Mapping[str, Any], positions: int
    ) -> tuple[float, tuple[tuple[str, Any], ...], float | None]:
        return self.theta, (), None

    def full_layers(self, config: Mapping[str, Any], layers: int, window: int | None) -> tuple[int, ...]:
        return ()

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        net, more = _net(a), dict[str, Any]()
        if a.experts:
            more = {**routing_keys(a), "moe_intermediate_size": a.ffn_size, SHARED: a.experts.shared_ffn_size}
        return {
            **more,
            **dict(
                zip(NUMBERS, (net.value_heads, net.value_dim, net.key_heads, net.key_dim, net.kernel), strict=True)
            ),
            "use_conv_bias": net.biased,
            "layer_norm_epsilon": a.norm_eps,
            "hybrid_override_pattern": "".join(a.pattern),
        }

    def layer(self, a: Architecture, layer: int) -> Iterator[Weight]:
        letter = a.letters(layer)
        where = "pre_mlp_layernorm" if letter in "-E" else "input_layernorm"
        yield norm(a, "norm.weight", a.hidden_size, f"{where}.weight")
        if letter == "M":
            yield from mamba(a, "mixer")
        elif letter == "*":
            for weight in grouped_attention(a):
                yield replace(weight, name=weight.name.replace("self_attn", "mixer"))
        elif letter == "E":
            yield from with_bias(a, "mixer", UNGATED)
        else:
            size = a.experts.dense_ffn_size if a.experts else a.ffn_size
            yield from gated_mlp(a, size, "mixer", names=UNGATED)

    def embedding(self, a: Architecture) -> Weight:
        return replace(super().embedding(a), name="backbone.embeddings.weight")

    def final_norm(self, a: Architecture) -> Weight:
        return replace(super().final_norm(a), name="backbone.norm_f.weight")

    def divided(self, a: Architecture) -> dict[str, int]:
        found = {**super().divided(a), "n_groups": _net(a).key_heads}
        if a.experts is None:
            return found
        sizes = a.experts.dense_ffn_size, a.ffn_size, a.experts.shared_ffn_size
        return {**found, **dict(zip(("intermediate_size", "moe_intermediate_size", SHARED), sizes, strict=True))}

    def megatron(self, a: Architecture) -> dict[str, Any]:
        return routing_settings(a) if a.experts else {}


def _pattern(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Read what each layer is, by letters or, as transformers 5 writes it, by words."""
    key = next((key for key in PATTERNS if config.get(key) is not None), PATTERNS[0])
    kinds = reading.need(config, key)
    found = tuple(kinds if isinstance(kinds, str) else (KINDS.get(kind, "?") for kind in kinds))
    if not found or not set(found) <= {*KINDS.values()}:
        raise UnsupportedModelError(f"model config: {key} = {kinds!r:.80} must say M, *, - or E of each layer")
    return found


def _net(a: Architecture) -> Recurrence:
    assert a.net is not None
    return a.net
