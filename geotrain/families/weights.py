"""Weights as a family states them, and the parts of models that families share. Plain data, no tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from geotrain.families.architecture import Architecture

Init = Literal["normal", "ones", "zeros", "log_uniform", "time_steps"]
Cut = Literal["rows", "columns", "whole"]


@dataclass(frozen=True)
class Weight:
    """A parameter under its Hugging Face name and shape, and where Megatron-core's model holds it.

    name, within: inside a layer, both without its prefix.
    init_std: standard deviation of its initial normal distribution (of "normal" only).
    decays: whether weight decay applies (matrices and embeddings; not norms).
    within: Megatron-core's name of the parameter that holds it (local layer specification). Several weights within
        one lie in it in their order. Of experts, `{expert}` stands for the number among those of the rank.
    cut: what tensor parallelism deals out: rows, columns, or nothing, so that every tensor rank has a copy.
    interleaved: its rows are dealt out in so many equal parts, in turn with those of the others within the same
        parameter; None: in as many as there are tensor ranks.
    summed: when each tensor rank computes only a part of its gradient: under sequence parallelism, since each then
        sees a part of the tokens only, or always.
    expert: the number of the expert that it belongs to; None: to none.
    whole, offset: the shape of the parameter of which it is a part, and how many of its elements come before; None:
        it is a parameter itself. The parts of one have its name.
    untrained: it is changed by counts of what the model did, not by gradients, and is kept in fp32 everywhere.
    """

    name: str
    shape: tuple[int, ...]
    within: str
    init: Init
    cut: Cut
    init_std: float = 0.0
    decays: bool = True
    interleaved: int | None = None
    summed: Literal["never", "sequence", "always"] = "never"
    expert: int | None = None
    whole: tuple[int, ...] | None = None
    offset: int = 0
    untrained: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of_layer(self, canonical: int, local: int, trunk: str) -> Weight:
        """Prefix both names by those of a layer: its number in the model, and on its pipeline stage. trunk: before
        the former."""
        name, within = f"{trunk}.layers.{canonical}.{self.name}", f"decoder.layers.{local}.{self.within}"
        return replace(self, name=name, within=within)


def norm(a: Architecture, name: str, size: int, within: str, per_head: bool = False) -> Weight:
    """Describe a norm. per_head: of queries or keys, of which a tensor rank sees its own heads only."""
    init: Init = "zeros" if a.centered_norms else "ones"
    return Weight(name, (size,), within, init, "whole", decays=False, summed="always" if per_head else "sequence")


def matrix(
    name: str, rows: int, columns: int, within: str, std: float, cut: Cut = "rows", interleaved: int | None = None
) -> Weight:
    return Weight(name, (rows, columns), within, "normal", cut, init_std=std, interleaved=interleaved)


def grouped_attention(a: Architecture) -> Iterator[Weight]:
    """List the weights of attention with grouped queries (arXiv 2305.13245).

    Megatron-core's `linear_qkv` has, for each key-value head in turn, the query heads that share it, itself, and its
    values.
    """
    h, q, kv = a.hidden_size, a.heads * a.head_dim, a.kv_heads * a.head_dim
    qkv = "self_attention.linear_qkv"
    for kind, rows in (("q", q), ("k", kv), ("v", kv)):
        name = f"self_attn.{kind}_proj"
        yield matrix(f"{name}.weight", rows, h, f"{qkv}.weight", a.init_std, interleaved=a.kv_heads)
        if a.qkv_bias:
            yield Weight(
                f"{name}.bias", (rows,), f"{qkv}.bias", "zeros", "rows", decays=False, interleaved=a.kv_heads
            )
    yield matrix("self_attn.o_proj.weight", h, q, "self_attention.linear_proj.weight", a.residual_std, "columns")
    for kind, size in (("q", q), ("k", kv)) if a.qk_norm else ():
        within = f"self_attention.{kind}_layernorm.weight"
        whole = norm(a, f"self_attn.{kind}_norm.weight", size, within, per_head=True)
        if a.qk_norm == "head":
            yield replace(whole, shape=(a.head_dim,))
        else:  # each tensor rank has the weights of its own heads
            yield replace(whole, cut="rows", summed="never")


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def gated_mlp(
    a: Architecture, size: int, name: str = "mlp", within: str = "mlp", names: tuple[str, ...] = PROJECTIONS
) -> Iterator[Weight]:
    """List the weights of SwiGLU (arXiv 2002.05202) of `size` elements between. names: of gate, up and down; without
    a gate, of up and down.

    Megatron-core's `linear_fc1` has gate and then up.
    """
    h, (*before, down) = a.hidden_size, names
    for each in before:
        yield matrix(f"{name}.{each}.weight", size, h, f"{within}.linear_fc1.weight", a.init_std)
    yield matrix(f"{name}.{down}.weight", h, size, f"{within}.linear_fc2.weight", a.residual_std, "columns")


def routed_experts(a: Architecture, name: str = "mlp", names: tuple[str, ...] = PROJECTIONS) -> Iterator[Weight]:
    """List the weights of a router, and of the experts' MLPs one after the other."""
    router = matrix(f"{name}.gate.weight", a.mixture.count, a.hidden_size, "mlp.router.weight", a.init_std, "whole")
    yield replace(router, summed="sequence")
    parts = tuple(gated_mlp(a, a.ffn_size, "", "mlp.experts.local_experts.{expert}", names))
    for expert in range(a.mixture.count):
        for part in parts:
            yield replace(part, name=f"{name}.experts.{expert}{part.name}", expert=expert)


def shared_expert(a: Architecture, name: str, names: tuple[str, ...] = PROJECTIONS) -> Iterator[Weight]:
    """List the weights of an MLP that every token passes, and of its gate, if it has one."""
    yield from gated_mlp(a, a.mixture.shared_ffn_size, name, "mlp.shared_experts", names)
    if a.mixture.shared_gate:
        gate = matrix(f"{name}_gate.weight", 1, a.hidden_size, "mlp.shared_experts.gate_weight", a.init_std, "whole")
        yield replace(gate, summed="sequence")


def expert_settings(a: Architecture) -> dict[str, object]:
    """Set the fields of Megatron-core's TransformerConfig for `routed_experts` behind a softmax and
    `shared_expert`."""
    return {
        "num_moe_experts": a.mixture.count,
        "moe_ffn_hidden_size": a.ffn_size,
        "moe_router_topk": a.mixture.per_token,
        "moe_router_pre_softmax": not a.mixture.normalized,  # the softmax of the chosen only has a sum of 1
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if a.mixture.aux_loss else "none",
        "moe_aux_loss_coeff": a.mixture.aux_loss,
        "moe_z_loss_coeff": a.mixture.z_loss or None,
        "moe_shared_expert_intermediate_size": a.mixture.shared_ffn_size or None,
        "moe_shared_expert_gate": a.mixture.shared_gate,
    }
