"""Granite 4: Granite 3 with experts beside an MLP that every token passes, or that MLP alone; in most layers Mamba-2
in place of attention, which then rotates nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

from geotrain.families import reading
from geotrain.families.architecture import Architecture, Experts, Recurrence, UnsupportedModelError
from geotrain.families.family import Family
from geotrain.families.granite import Granite
from geotrain.families.states import mamba, rows_of, unlimited_steps
from geotrain.families.weights import Weight, grouped_attention, matrix

KINDS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*"}
SHARED = "shared_intermediate_size"


class GraniteMoeHybrid(Granite):
    model_type = "granitemoehybrid"
    transformers_class = "GraniteMoeHybridForCausalLM"
    only: ClassVar[Mapping[str, Any]] = {
        **Family.only,
        "mamba_proj_bias": False,
        "norm_topk_prob": True,
        "normalization_function": "rmsnorm",
    }
    # Without experts, what is said of them; without Mamba-2, what is said of it.
    idle = frozenset({
        *("init_method", "mamba_chunk_size", "num_experts_per_tok", "router_aux_loss_coef"),
        *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias"),
        *("mamba_expand", "rope_theta", "rope_scaling", "rope_parameters"),
    })  # fmt: skip
    count_key = "num_local_experts"

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """Read the model. Raises UnsupportedModelError."""
        unlimited_steps(config)
        read = super().architecture(config)
        if read.experts is None:
            read = replace(read, ffn_size=reading.whole(config, SHARED, 1024))
        if config.get("position_embedding_type") != "rope":
            read = replace(read, unrotated=tuple(range(read.layers)))
        types = reading.need(config, "layer_types")
        if not isinstance(types, list) or len(types) != read.layers or any(kind not in KINDS for kind in types):
            raise UnsupportedModelError(
                f"model config: layer_types = {types!r:.80} must be one of {' and '.join(map(repr, KINDS))} for each "
                f"of num_hidden_layers = {read.layers} layers"
            )
        pattern = tuple(KINDS[kind] + ("E" if read.experts else "-") for kind in types)
        return replace(read, pattern=pattern, net=_net(config, read.hidden_size) if "M" in "".join(pattern) else None)

    def experts(self, config: Mapping[str, Any]) -> Experts | None:
        if reading.need(config, self.count_key) == 0:
            return None
        read = reading.experts(config, self.count_key, per_token=2, normalized=True)
        return replace(read, shared_ffn_size=reading.whole(config, SHARED, 1024))

    def rope(
        self, config: Mapping[str, Any], positions: int
    ) -> tuple[float, tuple[tuple[str, Any], ...], float | None]:
        if config.get("position_embedding_type") == "rope":
            return super().rope(config, positions)
        return self.theta, (), None

    def full_layers(self, config: Mapping[str, Any], layers: int, window: int | None) -> tuple[int, ...]:
        return ()

    def config_keys(self, a: Architecture) -> dict[str, Any]:
        # transformers checks these sizes, Mamba-2 or not.
        net = a.net or Recurrence("Mamba-2 layers", 1, 1, 1, a.hidden_size, 4, True)
        shared = a.experts.shared_ffn_size if a.experts else a.ffn_size
        kinds = [next(kind for kind, letter in KINDS.items() if letter == a.letters(i)[0]) for i in range(a.layers)]
        return {
            **super().config_keys(a),
            **({} if a.experts else {self.count_key: 0, "num_experts_per_tok": 0}),
            SHARED: shared,
            "layer_types": kinds,
            "position_embedding_type": None if a.unrotated else "rope",
            "mamba_n_heads": net.value_heads,
            "mamba_d_head": net.value_dim,
            "mamba_n_groups": net.key_heads,
            "mamba_d_state": net.key_dim,
            "mamba_d_conv": net.kernel,
            "mamba_conv_bias": net.biased,
            "mamba_expand": net.values // a.hidden_size,
        }

    def attention(self, a: Architecture, layer: int) -> Iterator[Weight]:
        return grouped_attention(a) if a.attends(layer) else mamba(a, "mamba")

    def mlp(self, a: Architecture, layer: int) -> Iterator[Weight]:
        if a.experts is None:
            yield from _fused_mlp(a, a.ffn_size, "shared_mlp", "mlp")
            return
        count, name = a.experts.count, "block_sparse_moe"
        router = matrix(f"{name}.router.layer.weight", count, a.hidden_size, "mlp.router.weight", a.init_std, "whole")
        yield replace(router, summed="sequence")
        parts = tuple(_fused_mlp(a, a.ffn_size, name, "mlp.experts.local_experts.{expert}"))
        for expert in range(count):
            for part in parts:
                one = part.whole or part.shape
                yield replace(part, expert=expert, whole=(count, *one), offset=expert * prod(one) + part.offset)
        yield from _fused_mlp(a, a.experts.shared_ffn_size, "shared_mlp", "mlp.shared_experts")

    def divided(self, a: Architecture) -> dict[str, int]:
        found = super().divided(a)
        if a.experts is None:
            return {SHARED if key == self.ffn_key else key: size for key, size in found.items()} | _heads(a)
        return {**found, SHARED: a.experts.shared_ffn_size, **_heads(a)}


def _net(config: Mapping[str, Any], hidden: int) -> Recurrence:
    heads, expand = reading.whole(config, "mamba_n_heads", 128), reading.whole(config, "mamba_expand", 2)
    usual = config.get("mamba_d_head") in (None, "auto")
    head_dim = max(expand * hidden // heads, 1) if usual else reading.whole(config, "mamba_d_head")
    groups = reading.whole(config, "mamba_n_groups", 1)
    if heads * head_dim != expand * hidden or heads % groups:
        raise UnsupportedModelError(
            f"model config: mamba_n_heads = {heads} of mamba_d_head = {head_dim} must be mamba_expand = {expand} "
            f"times hidden_size = {hidden}, and mamba_n_groups = {groups} divide them"
        )
    kernel, biased = reading.whole(config, "mamba_d_conv", 4), reading.flag(config, "mamba_conv_bias", True)
    return Recurrence(
        "Mamba-2 layers", groups, heads, reading.whole(config, "mamba_d_state", 256), head_dim, kernel, biased
    )


def _heads(a: Architecture) -> dict[str, int]:
    return {"mamba_n_groups": a.net.key_heads} if a.net else {}


def _fused_mlp(a: Architecture, size: int, name: str, within: str) -> Iterator[Weight]:
    h, out = a.hidden_size, f"{within}.linear_fc2.weight"
    fused = matrix(f"{name}.input_linear.weight", 2 * size, h, f"{within}.linear_fc1.weight", a.init_std)
    yield from rows_of(fused, (size, size))
    yield matrix(f"{name}.output_linear.weight", h, size, out, a.residual_std, "columns")
