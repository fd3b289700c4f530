"""The canonical address space: what a model's parameters are called, and where a local piece lies in them.

Canonical names and shapes are those of the Hugging Face checkpoint (`model.layers.3.self_attn.q_proj.weight`),
never those of a parallel layout. Servers, exports and checkpoints speak only of them, so regions may differ in
tensor, pipeline and data parallelism. Everything here is plain data: no tensor is touched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

Init = Literal["normal", "ones"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model under its Hugging Face name and shape.

    layer: index of its transformer layer; None for embeddings, final norm and head.
    init_std: standard deviation of its initial normal distribution (ignored when init is "ones").
    decays: whether weight decay applies (matrices and embeddings; not norms).
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    init: Init
    init_std: float = 0.0
    decays: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Run:
    """`count` rows of `length` consecutive elements, `stride` apart, of one flattened canonical parameter.

    A rank's local tensor, read flat, is a sequence of runs: the first `length` local elements are
    canonical[start : start+length], the next canonical[start+stride : …], and so on.
    """

    parameter: str
    start: int
    length: int
    stride: int = 0
    count: int = 1

    @property
    def numel(self) -> int:
        return self.length * self.count


def clip_runs(runs: Iterable[Run], begin: int, end: int) -> list[Run]:
    """The part of a sequence of runs that covers local elements [begin, end), in order."""
    clipped: list[Run] = []
    position = 0
    for run in runs:
        low, high = max(begin - position, 0), min(end - position, run.numel)
        if low < high:
            clipped.extend(_clip(run, low, high))
        position += run.numel
    return clipped


def _clip(run: Run, low: int, high: int) -> Iterator[Run]:
    first, head = divmod(low, run.length)
    last, tail = divmod(high, run.length)
    if first == last:  # inside one row
        yield Run(run.parameter, run.start + first * run.stride + head, tail - head)
        return
    if head:
        yield Run(run.parameter, run.start + first * run.stride + head, run.length - head)
        first += 1
    if last > first:
        rows = last - first
        stride = run.stride if rows > 1 else 0
        yield Run(run.parameter, run.start + first * run.stride, run.length, stride, rows)
    if tail:
        yield Run(run.parameter, run.start + last * run.stride, tail)


@dataclass(frozen=True)
class Architecture:
    """The shape of a Llama or Qwen3 model, as its Hugging Face config states it."""

    model_type: Literal["llama", "qwen3"]
    vocab_size: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    qk_norm: bool
    init_std: float

    @property
    def parameter_count(self) -> int:
        return sum(p.numel for p in canonical_parameters(self))


class UnsupportedModelError(ValueError):
    """The Hugging Face config describes a model that GeoTrain does not build. Says which key and why."""


def architecture_from_hf(config: dict[str, Any]) -> Architecture:
    """Read a Hugging Face `config.json` (already parsed).

    Raises UnsupportedModelError naming the offending key, its value and what is supported.
    """

    def need(key: str) -> Any:
        if key not in config:
            raise UnsupportedModelError(f"model config: key {key!r} is missing")
        return config[key]

    model_type = need("model_type")
    if model_type not in ("llama", "qwen3"):
        raise UnsupportedModelError(
            f"model config: model_type {model_type!r} is not supported; supported: 'llama', 'qwen3'"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in (None, "default"):
        raise UnsupportedModelError(
            f"model config: rope type {rope_type!r} is not supported; use 'default' (plain rotary embeddings)"
        )
    for key, wanted in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
    ):
        if config.get(key, wanted) != wanted:
            raise UnsupportedModelError(f"model config: {key} = {config[key]!r} is not supported; only {wanted!r}")
    dropout = config.get("attention_dropout", 0.0)
    if dropout:
        raise UnsupportedModelError(f"model config: attention_dropout = {dropout!r} is not supported; only 0.0")
    heads, hidden = int(need("num_attention_heads")), int(need("hidden_size"))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"model config: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        )
    if not config.get("head_dim") and hidden % heads:
        raise UnsupportedModelError(
            f"model config: hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}; set head_dim"
        )
    head_dim = int(config.get("head_dim") or hidden // heads)
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    architecture = Architecture(
        model_type=model_type,
        vocab_size=int(need("vocab_size")),
        hidden_size=hidden,
        ffn_size=int(need("intermediate_size")),
        layers=int(need("num_hidden_layers")),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=model_type == "qwen3",
        init_std=float(config.get("initializer_range", 0.02)),
    )
    for field in ("vocab_size", "hidden_size", "ffn_size", "layers", "heads", "head_dim", "max_positions"):
        if getattr(architecture, field) < 1:
            raise UnsupportedModelError(f"model config: {field} = {getattr(architecture, field)} must be positive")
    return architecture


def canonical_parameters(a: Architecture) -> list[Parameter]:
    """Every parameter once, in Hugging Face order: embedding, layers, final norm, head.

    A tied head is not a parameter of its own. Initialization follows Megatron's and GPT-2's habit: normal
    with `init_std`, and `init_std / sqrt(2 · layers)` for the two projections that write to the residual.
    """
    std, residual_std = a.init_std, a.init_std / (2 * a.layers) ** 0.5
    h, q, kv = a.hidden_size, a.heads * a.head_dim, a.kv_heads * a.head_dim

    def matrix(name: str, rows: int, columns: int, layer: int | None, std: float) -> Parameter:
        return Parameter(name, (rows, columns), layer, "normal", std)

    def norm(name: str, size: int, layer: int | None) -> Parameter:
        return Parameter(name, (size,), layer, "ones", decays=False)

    parameters = [matrix("model.embed_tokens.weight", a.vocab_size, h, None, std)]
    for i in range(a.layers):
        at = f"model.layers.{i}."
        parameters += [
            norm(at + "input_layernorm.weight", h, i),
            matrix(at + "self_attn.q_proj.weight", q, h, i, std),
            matrix(at + "self_attn.k_proj.weight", kv, h, i, std),
            matrix(at + "self_attn.v_proj.weight", kv, h, i, std),
            matrix(at + "self_attn.o_proj.weight", h, q, i, residual_std),
        ]
        if a.qk_norm:
            parameters += [
                norm(at + "self_attn.q_norm.weight", a.head_dim, i),
                norm(at + "self_attn.k_norm.weight", a.head_dim, i),
            ]
        parameters += [
            norm(at + "post_attention_layernorm.weight", h, i),
            matrix(at + "mlp.gate_proj.weight", a.ffn_size, h, i, std),
            matrix(at + "mlp.up_proj.weight", a.ffn_size, h, i, std),
            matrix(at + "mlp.down_proj.weight", h, a.ffn_size, i, residual_std),
        ]
    parameters.append(norm("model.norm.weight", h, None))
    if not a.tied_embeddings:
        parameters.append(matrix("lm_head.weight", a.vocab_size, h, None, std))
    return parameters


def digest(parameters: Sequence[Parameter]) -> str:
    """Hex digest of names and shapes: two processes with the same digest mean the same weights."""
    text = json.dumps([[p.name, list(p.shape)] for p in parameters], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
