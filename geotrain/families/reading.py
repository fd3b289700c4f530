"""Reads a parsed Hugging Face `config.json`: gives values of the right kind, or raises an UnsupportedModelError that
names the key, its value and what is supported. A key whose value is null is one that is not there, unless said."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from geotrain.families.architecture import Architecture, Experts, UnsupportedModelError

# Rotary embeddings whose frequencies do not depend on a sequence's length, each with the keys that it needs.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
MOST = 2**31 - 1  # of any size; beyond it, indices of Megatron-core and transformers overflow
MOST_LAYERS = 10_000  # what follows from a model is counted layer by layer
_HUGE = 1e30
MOST_EXPERTS = 1_024  # each has three matrices in each layer, which are counted one by one
_ROPE_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_LENGTH = "original_max_position_embeddings"
# Keys of transformers that change nothing of what a model computes: how it was saved, is run, generates, or is loaded
# for other tasks. Exports leave them out. So do those that begin with "_".
_IDLE = {
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "pretraining_tp",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "torchscript", "use_bfloat16",
    "gradient_checkpointing", "chunk_size_feed_forward", "id2label", "label2id", "num_labels", "problem_type",
    "tokenizer_class", "is_decoder", "tie_encoder_decoder", "pruned_heads", "max_length", "max_sequence_length",
    "do_sample", "temperature", "top_k", "top_p", "repetition_penalty",
}  # fmt: skip
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Noted(Mapping[str, Any]):
    """A config that notes which of its keys were asked for. asked: these, there or not."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.asked = config, set[str]()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return self.config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.config)

    def __len__(self) -> int:
        return len(self.config)

    def refuse_the_rest(self, idle: Container[str]) -> None:
        """Refuse every key that nobody asked for: what is trained and exported would not have it. idle: keys that are
        left out beside `_IDLE`."""
        unread = []
        for key, value in self.config.items():
            if key not in self.asked and value is not None and not (key in _IDLE or key in idle or key[:1] == "_"):
                near = get_close_matches(key, sorted(self.asked), 1)
                unread.append(f"{key} = {value!r:.60}" + (f" (did you mean {near[0]!r}?)" if near else ""))
        if unread:
            raise UnsupportedModelError(
                f"model config: {'; '.join(unread)}: GeoTrain does not read this for model_type "
                f"{self.config['model_type']!r}; leave out what the model is right without"
            )


def need(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise UnsupportedModelError(f"model config: key {key!r} is missing")
    return config[key]


def whole(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
    value = need(config, key) if default is None else default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UnsupportedModelError(
            f"model config: {key} = {value!r} must be a whole number from {least} to {most:,}"
        )
    return value


def number(config: Mapping[str, Any], key: str, default: float, least: float = 0, most: float = _HUGE) -> float:
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        bound = f"from {least:g} to {most:g}" if most < _HUGE else f"{least:g} or more"
        raise UnsupportedModelError(f"model config: {key} = {value!r} must be a number, {bound}")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, bool):
        raise UnsupportedModelError(f"model config: {key} = {value!r} must be true or false")
    return value


def special_ids(config: Mapping[str, Any], vocab_size: int) -> dict[str, int | list[int] | None]:
    """Read the ids of the bos, eos and pad tokens, by key; None where none is stated. There may be several eos."""
    found = {key: config.get(key) for key in SPECIAL_IDS}
    for key, value in found.items():
        for each in value if isinstance(value, list) and key == "eos_token_id" else [value]:
            if each is not None and (type(each) is not int or not 0 <= each < vocab_size):
                raise UnsupportedModelError(
                    f"model config: {key} = {value!r} is no id below vocab_size = {vocab_size}; leave it out: "
                    "exports take the tokenizer's"
                )
    return found


def must_be(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a key that is there with another value than this one, which is also what its absence means."""
    for key, value in wanted.items():
        if config.get(key) not in (None, value):
            raise UnsupportedModelError(f"model config: {key} = {config[key]!r} is not supported; only {value!r}")


def rope(config: Mapping[str, Any], theta: float, positions: int) -> tuple[float, tuple[tuple[str, Any], ...]]:
    """Read the rotary embedding: its base, and its scaling for `Architecture.rope_scaling`.

    transformers 5 writes `rope_parameters`; older files have `rope_scaling`, and `rope_theta` beside it. What is
    stated twice must be the same, since each version takes another of them. theta: where the config is silent.
    positions: original length of YaRN's that does not state one.
    """
    found: list[tuple[tuple[str, Any], ...]] = []
    bases = {"rope_theta": number(config, "rope_theta", theta, 1)} if config.get("rope_theta") is not None else {}
    for key in ("rope_parameters", "rope_scaling"):
        stated = config.get(key)
        if not isinstance(stated, dict | None):
            raise UnsupportedModelError(f"model config: {key} = {stated!r} must be an object")
        if stated:
            found.append(_scaling(stated, positions))
            if stated.get("rope_theta") is not None:
                bases[f"{key}.rope_theta"] = number(stated, "rope_theta", theta, 1)
    if len(set(found)) > 1 or len(set(bases.values())) > 1:
        differing = " and ".join(f"{key} = {value:g}" for key, value in bases.items()) if len(set(found)) == 1 else ""
        raise UnsupportedModelError(
            f"model config: {differing or 'rope_parameters and rope_scaling'} differ; state one of them"
        )
    return next(iter(bases.values()), theta), found[0] if found else ()


def _scaling(rope: Mapping[str, Any], positions: int) -> tuple[tuple[str, Any], ...]:
    given = {key: value for key, value in rope.items() if value is not None and key != "rope_theta"}
    kinds = [given.pop(key) for key in ("rope_type", "type") if key in given]
    kind = kinds[0] if kinds else "default"
    if not isinstance(kind, str) or kind not in ROPE_KEYS or kinds[1:] not in ([], [kind]):
        raise UnsupportedModelError(
            f"model config: rope type {' and '.join(map(repr, kinds))} is not supported; supported: "
            f"{', '.join(ROPE_KEYS)}"
        )
    if kind == "yarn":  # transformers takes the longest sequence of a config that does not state the original one
        given.setdefault(_LENGTH, positions)
    for key in ROPE_KEYS[kind]:
        if key not in given:
            raise UnsupportedModelError(f"model config: rope type {kind!r} needs the key {key!r}")
    known = {*ROPE_KEYS[kind], *((_LENGTH, *_ROPE_OPTIONS) if kind == "yarn" else ())}
    for key in given:
        if key not in known:
            raise UnsupportedModelError(f"model config: {key} does not belong to rope type {kind!r}; leave it out")
        if key == "truncate":
            flag(given, key, True)
        elif key == _LENGTH:
            whole(given, key)
        else:
            given[key] = number(given, key, 0.0, 1 if key == "factor" else 0)
    if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        raise UnsupportedModelError(
            f"model config: low_freq_factor = {given['low_freq_factor']} must be less than high_freq_factor = "
            f"{given['high_freq_factor']}"
        )
    return () if kind == "default" else (("rope_type", kind), *sorted(given.items()))


def rope_by_kind(
    config: Mapping[str, Any], theta: float, local_theta: float, positions: int
) -> tuple[float, tuple[tuple[str, Any], ...], float]:
    """Read two rotary embeddings: that of layers that see all tokens, as `rope` does, and the base of the plain one
    of layers with a window. transformers 5 writes both into `rope_parameters`."""
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not all(isinstance(each, dict | None) for each in nested.values()):
        raise UnsupportedModelError(
            f"model config: rope_parameters = {nested!r:.80} must have an object for full_attention and one for "
            "sliding_attention"
        )
    local, key = nested.get("sliding_attention") or {}, "rope_local_base_freq"
    must_be(local, {"rope_type": "default"})
    stated = [(config, key), (local, "rope_theta")]
    bases = {number(each, name, local_theta, 1) for each, name in stated if name in each} or {local_theta}
    if len(bases) > 1:
        raise UnsupportedModelError(f"model config: {key} and rope_parameters differ; state one of them")
    full = {name: config.get(name) for name in ("rope_theta", "rope_scaling")}
    return *rope({**full, "rope_parameters": nested.get("full_attention")}, theta, positions), bases.pop()


def full_layers(config: Mapping[str, Any], layers: int, window: int | None, every: int | None) -> tuple[int, ...]:
    """Read which layers see all tokens although others have a window. every: the last of so many layers does, where
    the config is silent; None: all layers are alike."""
    kinds = "sliding_attention", "full_attention"
    if every is None or window is None:
        usual = [kinds[window is None]] * layers
    else:
        usual = [kinds[(layer + 1) % every == 0] for layer in range(layers)]
    types = usual if config.get("layer_types") is None else config["layer_types"]
    if every is None and types != usual:
        raise UnsupportedModelError(
            f"model config: layer_types = {types!r:.80} must be {usual[0]!r}, num_hidden_layers = {layers} times; "
            "leave it out"
        )
    if not isinstance(types, list) or len(types) != layers or any(kind not in kinds for kind in types):
        raise UnsupportedModelError(
            f"model config: layer_types = {types!r:.80} must be one of {' and '.join(map(repr, kinds))} for each of "
            f"num_hidden_layers = {layers} layers"
        )
    return () if window is None else tuple(i for i, kind in enumerate(types) if kind == kinds[1])


def kinds_of_layers(a: Architecture) -> dict[str, Any]:
    """State windows and rotary embeddings of a model whose layers differ in them, for an exported config.json."""
    full, local = {"rope_type": "default", "rope_theta": a.rope_theta, **dict(a.rope_scaling)}, a.local_theta
    plain = {"rope_type": "default", "rope_theta": local}
    return {
        "sliding_window": a.sliding_window,
        "layer_types": [("sliding" if a.window_of(i) else "full") + "_attention" for i in range(a.layers)],
        **({"rope_parameters": {"full_attention": full, "sliding_attention": plain}} if local else {}),
    }


def sliding_window(config: Mapping[str, Any], default: int | None) -> int | None:
    window = config.get("sliding_window", default)
    return None if window is None else whole(config, "sliding_window", default)


def experts(
    config: Mapping[str, Any],
    count_key: str,
    per_token: int,
    normalized: bool,
    loss_key: str = "router_aux_loss_coef",
    aux_loss: float = 0.001,
) -> Experts:
    """Read the experts. count_key: of their number, for which transformers' other names may stand. loss_key: of the
    coefficient of the balancing loss. per_token, normalized, aux_loss: what holds where the config is silent."""
    named = {key for key in (count_key, "num_experts", "num_local_experts") if key in config} or {count_key}
    count, *others = {whole(config, key, most=MOST_EXPERTS) for key in named}
    chosen, scaled = whole(config, "num_experts_per_tok", per_token), flag(config, "norm_topk_prob", normalized)
    if count < 2 or chosen > count or others or (scaled and chosen == 1):
        raise UnsupportedModelError(
            f"model config: num_experts_per_tok = {chosen} of {count} experts is not supported; there must be at "
            "least two experts, and no more chosen than there are, whichever key says it; and two or more where "
            "their weights are scaled to a sum of 1, since one alone would train no router"
        )
    loss, z_loss = number(config, loss_key, aux_loss), number(config, "router_z_loss_coef", 0.0)
    return Experts(count, chosen, scaled, loss, z_loss)
