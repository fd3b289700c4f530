"""Reads a parsed Hugging Face `config.json`: gives values of the right kind, or raises an UnsupportedModelError that
names the key, its value and what is supported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from geotrain.families.architecture import Experts, UnsupportedModelError

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
_ROPE_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


def need(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise UnsupportedModelError(f"model config: key {key!r} is missing")
    return config[key]


def whole(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
    value = config.get(key, default) if default is not None else need(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UnsupportedModelError(
            f"model config: {key} = {value!r} must be a whole number from {least} to {most:,}"
        )
    return value


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UnsupportedModelError(f"model config: {key} = {value!r} must be a number, 0 or more")
    return float(value)


def must_be(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a key that is there with another value than this one, which is also what its absence means."""
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise UnsupportedModelError(f"model config: {key} = {config[key]!r} is not supported; only {value!r}")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotary embedding's parameters.

    transformers 5 writes `rope_parameters`; older files have `rope_scaling`, and `rope_theta` beside it.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UnsupportedModelError(f"model config: the rope parameters {rope!r} must be an object")
    return rope


def rope_scaling(config: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Read the scaling of the rotary embedding, for `Architecture.rope_scaling`."""
    rope = rope_parameters(config)
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise UnsupportedModelError(
            f"model config: rope type {kind!r} is not supported; supported: {', '.join(ROPE_KEYS)}"
        )
    if kind == "default":
        return ()
    given = {key: value for key, value in rope.items() if value is not None}
    if kind == "yarn":  # transformers takes the longest sequence of a config that does not state the original one
        given.setdefault("original_max_position_embeddings", whole(config, "max_position_embeddings", 2048))
    known = {*ROPE_KEYS[kind], "original_max_position_embeddings", *(_ROPE_OPTIONS if kind == "yarn" else ())}
    for key in ROPE_KEYS[kind]:
        if key not in given:
            raise UnsupportedModelError(f"model config: rope type {kind!r} needs the key {key!r}")
    for key in given:
        if key not in {*known, "rope_type", "type", "rope_theta"}:
            raise UnsupportedModelError(f"model config: {key} does not belong to rope type {kind!r}; leave it out")
        if key in known - {"truncate"}:
            number(given, key, 0.0)
    return (("rope_type", kind), *sorted((key, given[key]) for key in known if key in given))


def sliding_window(config: Mapping[str, Any], default: int | None) -> int | None:
    window = config.get("sliding_window", default)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UnsupportedModelError(f"model config: sliding_window = {window!r} must be a positive integer or null")
    return window


def experts(config: Mapping[str, Any], per_token: int, normalized: bool, count_key: str = "num_experts") -> Experts:
    """Read the experts. count_key: of their number, if it is there; otherwise it is "num_local_experts". per_token,
    normalized: what holds where the config is silent."""
    count_key = count_key if count_key in config else "num_local_experts"
    count = whole(config, count_key, most=MOST_EXPERTS)
    chosen = whole(config, "num_experts_per_tok", per_token)
    if count < 2 or chosen > count:
        raise UnsupportedModelError(
            f"model config: num_experts_per_tok = {chosen} of {count} experts is not supported; there must be "
            "at least two experts, and no more chosen than there are"
        )
    aux_loss, z_loss = number(config, "router_aux_loss_coef", 0.001), number(config, "router_z_loss_coef", 0.0)
    return Experts(count, chosen, bool(config.get("norm_topk_prob", normalized)), aux_loss, z_loss)
