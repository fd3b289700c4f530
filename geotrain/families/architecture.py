"""A model's shape in numbers, the same for any family; planner, memory estimates, layouts and servers ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


class UnsupportedModelError(ValueError):
    """The Hugging Face config describes a model that GeoTrain does not build. Says which key and why."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: layers have `count` MLPs, and a router that chooses `per_token` of them for a token.

    normalized: whether a token's weights of its chosen experts are scaled to a sum of 1. aux_loss: coefficient of
    the load-balancing loss (Fedus et al., arXiv 2101.03961, equation 4) of each layer and micro-batch. z_loss: that
    of the router's z loss (Zoph et al., arXiv 2202.08906, equation 5). shared_ffn_size: of an MLP beside them that
    every token passes; 0: none. shared_gate: whether a token weighs that MLP, by a sigmoid. dense_layers: so many
    layers come first that have one MLP, of dense_ffn_size, and no experts. routing: what else a family says of its
    router, in (name, value) pairs.
    """

    count: int
    per_token: int
    normalized: bool
    aux_loss: float
    z_loss: float
    shared_ffn_size: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    dense_ffn_size: int = 0
    routing: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). In elements:

    query_rank, key_value_rank: of a token's latents, from which its queries, and its keys and values, are made;
    query_rank 0: queries are made of the token itself. plain_dim: of a head's query and key that is not rotated; what
    is rotated is `Architecture.head_dim`. value_dim: of a head's values.
    """

    query_rank: int
    key_value_rank: int
    plain_dim: int
    value_dim: int


@dataclass(frozen=True)
class Recurrence:
    """What layers have in place of attention: a state of key_dim × value_dim a value head, which forgets.

    name: gated delta nets (arXiv 2412.06464), whose states a token corrects; Mamba-2 (arXiv 2405.21060), to whose
    states it adds. A key head, in Mamba-2 a group, serves value_heads / key_heads of them. kernel: so many
    tokens are convolved before, with a bias or not.
    """

    name: Literal["gated delta nets", "Mamba-2 layers"]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    biased: bool = False

    @property
    def keys(self) -> int:
        """Elements of a token's keys, all heads together, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of a token's values, all heads together, and of their gates."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class Multipliers:
    """Factors of embeddings, of the products of queries and keys, and of what layers add to the residual stream; and
    by what logits are divided. rounded: whether that of embeddings is rounded to the type of the weights."""

    embedding: float
    attention: float
    residual: float = 1.0
    logits_divisor: float = 1.0
    rounded: bool = False


@dataclass(frozen=True)
class Architecture:
    """The shape of a model with rotary embeddings, as its Hugging Face config states it.

    model_type: its family's name. ffn_size: of the MLP, or of each expert. experts: None where layers have one MLP.
    head_dim: of a head's query, key and value; with latent attention of what is rotated of query and key.

    rope_scaling: the rotary embedding as `rope_parameters` has it, without `rope_theta`, in (key, value) pairs; empty
    for the plain one. qk_norm: of what queries and keys have a norm each: of a head, or of all of a token's heads
    together. qkv_bias: whether the projections to q, k and v have a bias. sliding_window: so many tokens, itself the
    last of them, are seen by a token; None: all before it. unwindowed: layers, by their numbers, that see all tokens
    although there is a window. local_theta: base of the plain rotary embedding of layers with a window; None: they
    have that of the others. unrotated: layers that do not rotate queries and keys. multipliers: None: 1, but for the
    usual one of attention.

    norms: where attention and MLP have a norm: of what they take, of what they give, or of both. centered_norms:
    whether norms multiply by 1 + their weight. activation: of the gate of MLPs; "clamped": GPT-OSS's, for gates and
    what they open in turn; "relu2": squared ReLU, of MLPs without gates. sinks: whether each head has a score that
    takes a share and gives no value. gated_attention: whether a sigmoid of the token weighs what attention gives.
    rotated_share: of a head's query and key, from its first element on. score_cap, logit_cap: c, where scores of
    attention, or logits, x are c · tanh(x / c); None: they are x. net: what some layers have in place of attention,
    which passes a state from token to token. pattern: each layer's letters (`letters`), where layers differ in more
    than experts. predicting: so many of `layers`, the last ones, are no part of what gives the next token's logits:
    each predicts one token further. predicting_loss: coefficient of the mean of their losses.
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
    qk_norm: Literal["head", "projection"] | None
    qkv_bias: bool
    sliding_window: int | None
    init_std: float
    experts: Experts | None = None
    latent: LatentAttention | None = None
    unrotated: tuple[int, ...] = ()
    multipliers: Multipliers | None = None
    unwindowed: tuple[int, ...] = ()
    local_theta: float | None = None
    norms: Literal["before", "behind", "around"] = "before"
    centered_norms: bool = False
    activation: Literal["silu", "gelu_tanh", "clamped", "relu2"] = "silu"
    sinks: bool = False
    gated_attention: bool = False
    rotated_share: float = 1.0
    net: Recurrence | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    pattern: tuple[str, ...] = ()
    predicting: int = 0
    predicting_loss: float = 0.0

    def letters(self, layer: int) -> str:
        """Write a layer in Megatron-core's letters: what mixes tokens, `*` attention, `+` latent attention, `M`
        Mamba-2 or `G` a gated delta net; then `-` an MLP or `E` experts. One of them may be left out."""
        sparse = self.experts is not None and layer >= self.experts.dense_layers
        usual = ("+" if self.latent else "*") + ("E" if sparse else "-")
        return self.pattern[layer] if self.pattern else usual

    def window_of(self, layer: int) -> int | None:
        """The window of a layer's attention; None: it sees all tokens before."""
        return None if layer in self.unwindowed else self.sliding_window

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return self.letters(layer)[0] in "*+"

    def rotates_locally(self, layer: int) -> bool:
        """Whether a layer rotates queries and keys by `local_theta`."""
        return self.local_theta is not None and self.window_of(layer) is not None

    @property
    def decoder_layers(self) -> int:
        """Layers that give the next token's logits, one after the other."""
        return self.layers - self.predicting

    @property
    def residual_std(self) -> float:
        """Standard deviation of initial weights that write to the residual stream (GPT-2's): two matrices of a
        layer."""
        return self.init_std / (2 * self.decoder_layers) ** 0.5

    @property
    def query_dim(self) -> int:
        """Elements of a head's query, and of its key."""
        return self.head_dim + (self.latent.plain_dim if self.latent else 0)

    @property
    def attention_scale(self) -> float:
        """Factor of the products of queries and keys, without that of a scaled rotary embedding."""
        return self.multipliers.attention if self.multipliers else self.head_dim**-0.5

    @property
    def value_dim(self) -> int:
        """Elements of a head's values."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def mixture(self) -> Experts:
        """The experts of a model that has them."""
        assert self.experts is not None
        return self.experts

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of one MLP."""
        return self.letters(layer)[-1] == "E"

    def active_ffn_size(self, sparse: bool) -> int:
        """Count the elements between the matrices of all MLPs that a token passes in a layer. sparse: with
        experts."""
        if self.experts and sparse:
            return self.ffn_size * self.experts.per_token + self.experts.shared_ffn_size
        return self.experts.dense_ffn_size if self.experts else self.ffn_size
