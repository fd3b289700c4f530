"""A model's shape in numbers: what the planner, memory, layouts and servers ask of any family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class UnsupportedModelError(ValueError):
    """The Hugging Face config describes a model that GeoTrain does not build. Says which key and why."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: every layer has `count` MLPs, and a router that chooses `per_token` of them for a token.

    normalized: whether a token's weights of its chosen experts are scaled to a sum of 1. aux_loss: coefficient of
    the load-balancing loss (Fedus et al., arXiv 2101.03961, equation 4) of each layer and micro-batch. z_loss: that
    of the router's z loss (Zoph et al., arXiv 2202.08906, equation 5).
    """

    count: int
    per_token: int
    normalized: bool
    aux_loss: float
    z_loss: float


@dataclass(frozen=True)
class Architecture:
    """The shape of a model with rotary embeddings, as its Hugging Face config states it.

    model_type: its family's name. ffn_size: of the MLP, or of each expert. experts: None where layers have one MLP.

    rope_scaling: the rotary embedding as `rope_parameters` has it, without `rope_theta`, in (key, value) pairs; empty
    for the plain one. qkv_bias: whether the projections to q, k and v have a bias. sliding_window: so many tokens,
    itself the last of them, are seen by a token; None: all before it.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, Any], ...]
    max_positions: int
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    sliding_window: int | None
    init_std: float
    experts: Experts | None = None

    @property
    def residual_std(self) -> float:
        """Of the initial weights of a layer's two projections that write to the residual stream (GPT-2's)."""
        return self.init_std / (2 * self.layers) ** 0.5

    @property
    def active_mlps(self) -> int:
        """MLPs that a token passes in a layer."""
        return 1 if self.experts is None else self.experts.per_token
