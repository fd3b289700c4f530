"""DeepSeek-V3 (arXiv 2412.19437), and what has its shape, as Moonlight: latent attention; dense layers first, then
such with shared experts and routed ones, which a sigmoid scores and whose load a bias balances that counts move; at
last such that predict further tokens (section 2.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from geotrain.families import reading
from geotrain.families.architecture import Architecture, Experts, LatentAttention, UnsupportedModelError
from geotrain.families.family import Family
from geotrain.families.weights import (
    PROJECTIONS,
    Weight,
    expert_settings,
    gated_mlp,
    matrix,
    norm,
    routed_experts,
    shared_expert,
)


class DeepseekV3(Family):
    """DeepSeek-V3, with keys of config.json that transformers does not know.

    aux_loss_alpha: coefficient of each sequence's balancing loss (equation 17). router_bias_update_rate: by which a
    step moves the bias of each expert (γ of section 2.1.2). mtp_loss_factor: coefficient of the losses of layers that
    predict further tokens (λ of equation 25), of which there are num_nextn_predict_layers.
    """

    model_type = "deepseek_v3"
    transformers_class = "DeepseekV3ForCausalLM"
    only: ClassVar[Mapping[str, Any]] = {
        **Family.only,
        "rope_interleave": True,
        "seq_aux": True,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
    idle = frozenset({"ep_size"})
    ffn_key, count_key, loss_key = "moe_intermediate_size", "n_routed_experts", "aux_loss_alpha"
    positions = 4096

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        # transformers would repeat keys by the ratio of the heads.
        reading.must_be(config, {"num_key_value_heads": reading.whole(config, "num_attention_heads")})
        made = super().architecture(config)
        rope = dict(made.rope_scaling)
        if rope.get("rope_type") == "yarn" and not (
            rope.get("mscale") and rope.get("mscale") == rope.get("mscale_all_dim") and "attention_factor" not in rope
        ):
            raise UnsupportedModelError(
                f"model config: mscale = {rope.get('mscale')!r} and mscale_all_dim = {rope.get('mscale_all_dim')!r} "
                "are not supported with latent attention; they must be equal, without attention_factor"
            )
        latent = LatentAttention(
            # Without the key transformers would take a rank of its own; null: there is no latent of queries.
            query_rank=0 if reading.need(config, "q_lora_rank") is None else reading.whole(config, "q_lora_rank"),
            key_value_rank=reading.whole(config, "kv_lora_rank"),
            plain_dim=reading.whole(config, "qk_nope_head_dim"),
            value_dim=reading.whole(config, "v_head_dim"),
        )
        reading.must_be(config, {"qk_head_dim": made.head_dim + latent.plain_dim})
        further = reading.whole(config, "num_nextn_predict_layers", 0, least=0, most=made.layers)
        if further:
            reading.must_be(config, {"tie_word_embeddings": False})
        factor = reading.number(config, "mtp_loss_factor", 0.3)
        return replace(made, latent=latent, layers=made.layers + further, predicting=further, predicting_loss=factor)

    def head_dim(self, config: Mapping[str, Any], hidden: int, heads: int) -> int:
        rotated = reading.whole(config, "qk_rope_head_dim")
        reading.must_be(config, {"head_dim": rotated})  # transformers would take it for what is rotated
        return rotated

    def experts(self, config: Mapping[str, Any]) -> Experts:
        dense, layers = reading.whole(config, "first_k_dense_replace", 3, least=0), self.layers(config)
        shared = reading.whole(config, "n_shared_experts", 1) * reading.whole(config, "moe_intermediate_size")
        if dense >= layers:
            raise UnsupportedModelError(
                f"model config: first_k_dense_replace = {dense} of num_hidden_layers = {layers} leaves no layer for "
                "experts; lower it"
            )
        return replace(biased_experts(config), shared_ffn_size=shared, dense_layers=dense)

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        experts, latent = a.mixture, a.latent
        assert latent is not None
        return {
            **routing_keys(a),
            "q_lora_rank": latent.query_rank or None,
            "kv_lora_rank": latent.key_value_rank,
            "qk_nope_head_dim": latent.plain_dim,
            "qk_rope_head_dim": a.head_dim,
            "v_head_dim": latent.value_dim,
            "n_shared_experts": experts.shared_ffn_size // a.ffn_size,
            "first_k_dense_replace": experts.dense_layers,
            "rope_interleave": True,
            "num_nextn_predict_layers": a.predicting,
            **({"mtp_loss_factor": a.predicting_loss} if a.predicting else {}),
        }

    def layer(self, a: Architecture, layer: int) -> Iterator[Weight]:
        if layer < a.decoder_layers:
            yield from super().layer(a, layer)
            return
        for name in ("enorm.weight", "hnorm.weight"):  # of embeddings, and of what the layer before gives
            yield norm(a, name, a.hidden_size, name)
        yield matrix("eh_proj.weight", a.hidden_size, 2 * a.hidden_size, "eh_proj.weight", a.init_std)
        yield from super().layer(a, layer)
        yield norm(a, "shared_head.norm.weight", a.hidden_size, "final_layernorm.weight")

    def attention(self, a: Architecture, layer: int) -> Iterator[Weight]:
        """List the weights of latent attention.

        The projections to latents are whole on every tensor rank, as Megatron-core has them with Transformer Engine:
        each rank then has the rotated part of the keys, which all heads share.
        """
        latent, h, std = a.latent, a.hidden_size, a.init_std
        assert latent is not None
        here, there, queries = "self_attn", "self_attention", a.heads * a.query_dim
        ranks = latent.query_rank, latent.key_value_rank
        if latent.query_rank:
            yield _copied(f"{here}.q_a_proj.weight", ranks[0], h, f"{there}.linear_q_down_proj.weight", std)
            yield norm(a, f"{here}.q_a_layernorm.weight", ranks[0], f"{there}.q_layernorm.weight")
            yield matrix(f"{here}.q_b_proj.weight", queries, ranks[0], f"{there}.linear_q_up_proj.weight", std)
        else:
            yield matrix(f"{here}.q_proj.weight", queries, h, f"{there}.linear_q_proj.weight", std)
        down, up = f"{there}.linear_kv_down_proj.weight", f"{there}.linear_kv_up_proj.weight"
        yield _copied(f"{here}.kv_a_proj_with_mqa.weight", ranks[1] + a.head_dim, h, down, std)
        yield norm(a, f"{here}.kv_a_layernorm.weight", ranks[1], f"{there}.kv_layernorm.weight")
        made = a.heads * (latent.plain_dim + latent.value_dim)
        yield matrix(f"{here}.kv_b_proj.weight", made, ranks[1], up, std)
        values, out = a.heads * latent.value_dim, f"{there}.linear_proj.weight"
        yield matrix(f"{here}.o_proj.weight", h, values, out, a.residual_std, "columns")

    def mlp(self, a: Architecture, layer: int) -> Iterator[Weight]:
        if not a.has_experts(layer):
            yield from gated_mlp(a, a.mixture.dense_ffn_size)
            return
        yield from with_bias(a, "mlp")

    def divided(self, a: Architecture) -> dict[str, int]:
        dense = {"intermediate_size": a.mixture.dense_ffn_size} if a.mixture.dense_layers else {}
        return {**super().divided(a), **dense, **({"hidden_size": a.hidden_size} if a.predicting else {})}

    def megatron(self, a: Architecture) -> dict[str, Any]:
        latent = a.latent
        assert latent is not None
        rope = dict(a.rope_scaling)
        return {
            **routing_settings(a),
            "multi_latent_attention": True,
            "q_lora_rank": latent.query_rank or None,
            "kv_lora_rank": latent.key_value_rank,
            "qk_head_dim": latent.plain_dim,
            "qk_pos_emb_head_dim": a.head_dim,
            "v_head_dim": latent.value_dim,
            "rope_type": "rope",  # scaled frequencies are written into it; these two scale the softmax
            "rotary_base": a.rope_theta,
            "rotary_scaling_factor": rope.get("factor", 1.0),
            "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
        }


def biased_experts(config: Mapping[str, Any]) -> Experts:
    """Read experts of such a router, and the size of layers without. Raises UnsupportedModelError."""
    experts = reading.experts(config, "n_routed_experts", 8, True, "aux_loss_alpha", 0.0)
    groups, chosen = reading.whole(config, "n_group", 8), reading.whole(config, "topk_group", 4)
    if experts.count % groups or experts.count < 2 * groups or chosen > groups:
        raise UnsupportedModelError(
            f"model config: n_group = {groups} must divide n_routed_experts = {experts.count} into groups of two "
            f"or more, and be no less than topk_group = {chosen}"
        )
    # transformers scores a group by its best two experts, Megatron-core by as many as are chosen of each group.
    if chosen < groups and experts.per_token // chosen != 2:
        raise UnsupportedModelError(
            f"model config: num_experts_per_tok = {experts.per_token} is not supported with topk_group = "
            f"{chosen} of n_group = {groups}; it must be twice topk_group, or n_group be 1"
        )
    scaling = reading.number(config, "routed_scaling_factor", 2.5)
    rate = reading.number(config, "router_bias_update_rate", 0.001)
    routing = ("groups", groups), ("chosen_groups", chosen), ("scaling", scaling), ("bias_rate", rate)
    return replace(experts, dense_ffn_size=reading.whole(config, "intermediate_size"), routing=routing)


def routing_keys(a: Architecture) -> dict[str, Any]:
    """State such experts in an exported config.json."""
    routing = dict(a.mixture.routing)
    return {
        "intermediate_size": a.mixture.dense_ffn_size,
        "n_group": int(routing["groups"]),
        "topk_group": int(routing["chosen_groups"]),
        "routed_scaling_factor": routing["scaling"],
        "router_bias_update_rate": routing["bias_rate"],
        "norm_topk_prob": True,
    }


def with_bias(a: Architecture, name: str, names: tuple[str, ...] = PROJECTIONS) -> Iterator[Weight]:
    """List the weights of such experts, and of the MLP that every token passes."""
    router, *experts = routed_experts(a, name, names)
    yield router
    bias, within = f"{name}.gate.e_score_correction_bias", "mlp.router.expert_bias"
    yield Weight(bias, (a.mixture.count,), within, "zeros", "whole", decays=False, untrained=True)
    yield from experts
    yield from shared_expert(a, f"{name}.shared_experts", names)


def routing_settings(a: Architecture) -> dict[str, Any]:
    """Set the fields of Megatron-core's TransformerConfig for such experts."""
    routing = dict(a.mixture.routing)
    limited = routing["chosen_groups"] < routing["groups"]
    return {
        **expert_settings(a),
        "ffn_hidden_size": a.mixture.dense_ffn_size,
        "moe_layer_freq": [int(a.has_experts(layer)) for layer in range(a.decoder_layers)],
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_load_balancing_type": "seq_aux_loss" if a.mixture.aux_loss else "none",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": routing["bias_rate"],
        "moe_router_topk_scaling_factor": routing["scaling"],
        "moe_router_num_groups": int(routing["groups"]) if limited else None,
        "moe_router_group_topk": int(routing["chosen_groups"]) if limited else None,
    }


def _copied(name: str, rows: int, columns: int, within: str, std: float) -> Weight:
    return replace(matrix(name, rows, columns, within, std, "whole"), summed="sequence")
