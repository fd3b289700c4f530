"""A model's shape, read from its Hugging Face config."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

Family = Literal["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral"]
# Rotary embeddings whose frequencies do not depend on a sequence's length, each with the keys that it needs.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
MOST = 2**31 - 1  # of any size; beyond it, indices of Megatron-core and transformers overflow
MOST_LAYERS = 10_000  # what follows from a model is counted layer by layer
MOST_EXPERTS = 1_024  # each has three matrices in each layer, which are counted one by one
# The Hugging Face names of a layer's experts: their block, and in it gate, up and down.
_EXPERT_NAMES = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}
_WINDOWED = {"mistral": 4096, "mixtral": None}  # their attention may have a window; transformers' defaults of it
_ROPE_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


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

    ffn_size: of the MLP, or of each expert. experts: None where each layer has one MLP.

    rope_scaling: the rotary embedding as `rope_parameters` has it, without `rope_theta`, in (key, value) pairs; empty
    for the plain one. qkv_bias: whether the projections to q, k and v have a bias. sliding_window: so many tokens,
    itself the last of them, are seen by a token; None: all before it.
    """

    model_type: Family
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
    def mlps(self) -> tuple[tuple[str, str, str], ...]:
        """Within a layer, the names of the gate, up and down matrices of its MLP, or of each expert's in turn."""
        if self.experts is None:
            return (("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),)
        block, names = _EXPERT_NAMES[self.model_type]
        return tuple(
            tuple(f"{block}.experts.{i}.{name}.weight" for name in names)  # type: ignore[misc]
            for i in range(self.experts.count)
        )

    @property
    def router(self) -> str | None:
        """Within a layer, the name of the router's matrix, [experts, hidden_size]; None without experts."""
        return None if self.experts is None else f"{_EXPERT_NAMES[self.model_type][0]}.gate.weight"

    @property
    def active_mlps(self) -> int:
        """MLPs that a token passes in a layer."""
        return 1 if self.experts is None else self.experts.per_token


class UnsupportedModelError(ValueError):
    """The Hugging Face config describes a model that GeoTrain does not build. Says which key and why."""


def architecture_from_hf(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `config.json` (already parsed).

    Whatever would make transformers compute something else than we do is refused, so that an exported checkpoint is
    the model that was trained. Raises UnsupportedModelError naming the key, its value and what is supported.
    """

    model_type = _need(config, "model_type")
    if model_type not in get_args(Family):
        raise UnsupportedModelError(
            f"model config: model_type {model_type!r} is not supported; supported: {', '.join(get_args(Family))}"
        )
    # transformers 5 writes `rope_parameters`; older files have `rope_scaling`, and `rope_theta` beside it.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UnsupportedModelError(f"model config: the rope parameters {rope!r} must be an object")
    for key, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        *((("use_sliding_window", False),) if model_type not in _WINDOWED else ()),
        *((("decoder_sparse_step", 1),) if model_type == "qwen3_moe" else ()),
        *((("router_jitter_noise", 0.0),) if model_type == "mixtral" else ()),
    ):
        if config.get(key, wanted) != wanted:
            raise UnsupportedModelError(f"model config: {key} = {config[key]!r} is not supported; only {wanted!r}")
    dropout = config.get("attention_dropout", 0.0)
    if dropout:
        raise UnsupportedModelError(f"model config: attention_dropout = {dropout!r} is not supported; only 0.0")
    if model_type == "qwen3_moe" and config.get("mlp_only_layers"):
        raise UnsupportedModelError(
            f"model config: mlp_only_layers = {config['mlp_only_layers']!r} is not supported: every layer has experts"
        )
    heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    # Without a number, each head has its own keys and values.
    kv_heads = _whole(config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"model config: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        )
    if not config.get("head_dim") and hidden % heads:
        raise UnsupportedModelError(
            f"model config: hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}; set head_dim"
        )
    return Architecture(
        model_type=model_type,
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=hidden,
        ffn_size=_whole(config, "moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size"),
        layers=_whole(config, "num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_whole(config, "head_dim") if config.get("head_dim") else hidden // heads,
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_theta=_number(rope if rope.get("rope_theta") else config, "rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope, config),
        max_positions=_whole(config, "max_position_embeddings", 2048),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        qkv_bias=model_type == "qwen2",
        sliding_window=_sliding_window(config, _WINDOWED[model_type]) if model_type in _WINDOWED else None,
        init_std=_number(config, "initializer_range", 0.02),
        experts=_experts(config, model_type) if model_type in _EXPERT_NAMES else None,
    )


def _need(config: dict[str, Any], key: str) -> Any:
    if key not in config:
        raise UnsupportedModelError(f"model config: key {key!r} is missing")
    return config[key]


def _whole(config: dict[str, Any], key: str, default: int | None = None, most: int = MOST) -> int:
    value = config.get(key, default) if default is not None else _need(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UnsupportedModelError(f"model config: {key} = {value!r} must be a whole number from 1 to {most:,}")
    return value


def _number(config: dict[str, Any], key: str, default: float) -> float:
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UnsupportedModelError(f"model config: {key} = {value!r} must be a number, 0 or more")
    return float(value)


def _rope_scaling(rope: dict[str, Any], config: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What `Architecture.rope_scaling` holds. Raises UnsupportedModelError."""
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise UnsupportedModelError(
            f"model config: rope type {kind!r} is not supported; supported: {', '.join(ROPE_KEYS)}"
        )
    if kind == "default":
        return ()
    given = {key: value for key, value in rope.items() if value is not None}
    if kind == "yarn":  # transformers takes the longest sequence of a config that does not state the original one
        given.setdefault("original_max_position_embeddings", _whole(config, "max_position_embeddings", 2048))
    known = {*ROPE_KEYS[kind], "original_max_position_embeddings", *(_ROPE_OPTIONS if kind == "yarn" else ())}
    for key in ROPE_KEYS[kind]:
        if key not in given:
            raise UnsupportedModelError(f"model config: rope type {kind!r} needs the key {key!r}")
    for key in given:
        if key not in {*known, "rope_type", "type", "rope_theta"}:
            raise UnsupportedModelError(f"model config: {key} does not belong to rope type {kind!r}; leave it out")
        if key in known - {"truncate"}:
            _number(given, key, 0.0)
    return (("rope_type", kind), *sorted((key, given[key]) for key in known if key in given))


def _experts(config: dict[str, Any], model_type: str) -> Experts:
    """Defaults are those of transformers' classes. Raises UnsupportedModelError."""
    count = _whole(config, "num_experts" if "num_experts" in config else "num_local_experts", most=MOST_EXPERTS)
    chosen = _whole(config, "num_experts_per_tok", 8 if model_type == "qwen3_moe" else 2)
    if count < 2 or chosen > count:
        raise UnsupportedModelError(
            f"model config: num_experts_per_tok = {chosen} of {count} experts is not supported; there must be "
            "at least two experts, and no more chosen than there are"
        )
    normalized = config.get("norm_topk_prob", False) if model_type == "qwen3_moe" else True
    aux_loss = _number(config, "router_aux_loss_coef", 0.001)
    return Experts(count, chosen, bool(normalized), aux_loss, _number(config, "router_z_loss_coef", 0.0))


def _sliding_window(config: dict[str, Any], default: int | None) -> int | None:
    window = config.get("sliding_window", default)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UnsupportedModelError(f"model config: sliding_window = {window!r} must be a positive integer or null")
    return window
