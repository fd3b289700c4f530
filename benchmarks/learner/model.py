"""A byte-level language model so small that one core trains sixteen of them, for studies of the outer loop.

It has Llama's parameters under their canonical names, all in one flat vector. This file states it in torch; where a C
compiler is found, `compiled.py` computes the same faster, and the torch version serves as the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.learner.compiled import CompiledLM, library, products, torch_sgemm
from geotrain.config import Architecture
from geotrain.parameters.parameter_map import Parameter, canonical_parameters

EVALUATED = 256  # samples that are evaluated at once, because their logits need memory
# They lie side by side in the flat vector, and are multiplied as one matrix.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def small_architecture(hidden: int, layers: int, heads: int, ffn: int, positions: int) -> Architecture:
    return Architecture(
        "llama", 256, hidden, ffn, layers, heads, heads, hidden // heads, 1e-5, 10000.0, rope_scaling=(),
        max_positions=positions, tied_embeddings=True, qk_norm=False, qkv_bias=False, sliding_window=None,
        init_std=0.02,
    )  # fmt: skip


class SmallLM:
    """Weights and gradient are two flat fp32 vectors; `masters` names the weights' parts (views)."""

    def __init__(
        self,
        architecture: Architecture,
        start: Tensor,
        compiled: bool = True,
        device: str = "cpu",
        gradient: Tensor | None = None,
    ) -> None:
        """compiled: use the compiled functions, if there are any and the model is on a CPU. device: on other devices
        than a CPU, torch computes in bf16 from fp32 weights. gradient: the vector to write it to, if several models
        that step one after another share one."""
        flat = start.to(device, copy=True)
        self._around(architecture, flat, torch.zeros_like(flat) if gradient is None else gradient, compiled, device)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.a, self.flat, self.gradient, self.compiled, self.device

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._around(*state)

    def _around(
        self, architecture: Architecture, flat: Tensor, gradient: Tensor, compiled: bool, device: str
    ) -> None:
        """All that is not the two vectors."""
        self.a, self.flat, self.gradient, self.compiled, self.device = architecture, flat, gradient, compiled, device
        self.parameters = canonical_parameters(architecture)
        self.masters: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        self._place()
        cosine, sine = _rotary_angles(architecture)
        self._angles = cosine.to(device), sine.to(device)
        # Where large matrices need BLAS and torch has none, torch's own way is faster than the compiled one.
        fast = products(architecture.hidden_size) == "compiled" or torch_sgemm() is not None
        loaded = library() if compiled and device == "cpu" and fast else None
        self._compiled = CompiledLM(loaded, architecture, self._angles) if loaded else None

    @property
    def products(self) -> str:
        """What multiplies its matrices: "compiled", "library" (`compiled.products`), or torch."""
        return products(self.a.hidden_size) if self._compiled else "torch"

    def decays(self) -> Tensor:
        """1 where weight decay applies."""
        return torch.cat([torch.full((p.numel,), float(p.decays)) for p in self.parameters])

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean negative log likelihood in nats a byte; tokens int64 [batch, length + 1]."""
        w, a = self._leaves, self.a
        x = F.embedding(tokens[:, :-1], w["model.embed_tokens.weight"])
        cosine, sine = (t[: x.shape[1]] for t in self._angles)
        for i in range(a.layers):
            at = f"model.layers.{i}."
            h = _norm(x, w[at + "input_layernorm.weight"], a.norm_eps)
            q, k, v = F.linear(h, w[at + "self_attn.q_proj.weight"]).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (a.heads, a.head_dim)).transpose(1, 2) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(
                _rotate(q, cosine, sine), _rotate(k, cosine, sine), v, is_causal=True
            )
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), w[at + "self_attn.o_proj.weight"])
            h = _norm(x, w[at + "post_attention_layernorm.weight"], a.norm_eps)
            gate, up = F.linear(h, w[at + "mlp.gate_proj.weight"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w[at + "mlp.down_proj.weight"])
        x = _norm(x, w["model.norm.weight"], a.norm_eps)
        logits = F.linear(x, w["model.embed_tokens.weight"])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def backward(self, tokens: Tensor) -> float:
        """Fill `gradient`; returns the loss."""
        with _denormals_as_zero():
            if self._compiled is not None:
                return self._compiled.loss(self.flat, tokens, self.gradient)
            self.gradient.zero_()
            with self._precision():
                loss = self.loss(tokens.to(self.device))
            loss.backward()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, weights: Tensor, tokens: Tensor) -> float:
        """The loss of other weights (1-D, fp32) on tokens."""
        with _denormals_as_zero(), self._precision():
            if self._compiled is not None:
                return self._compiled.loss(weights, tokens)
            mine = self.flat.clone()
            self.flat.copy_(weights)
            losses = [float(self.loss(part.to(self.device))) * len(part) for part in tokens.split(EVALUATED)]
            self.flat.copy_(mine)
            return sum(losses) / len(tokens)

    def _precision(self) -> torch.autocast:
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.device != "cpu")

    def _place(self) -> None:
        """Makes autograd's leaves and their gradients views of the flat vectors, so that an optimizer step is a few
        operations on one tensor."""
        offset = 0
        fused: dict[str, tuple[str, ...]] = {names[0]: names for names in FUSED}
        members = {name for names in FUSED for name in names[1:]}
        spans: dict[str, tuple[Parameter, int]] = {}
        for p in self.parameters:
            self.masters[p.name] = self.flat[offset : offset + p.numel]
            spans[p.name] = (p, offset)
            offset += p.numel
        for name, (p, begin) in spans.items():
            short = name.split(".")[-2]
            if short in members:
                continue
            rows = p.shape[0] * len(fused.get(short, (short,)))
            shape = (rows, *p.shape[1:])
            numel = p.numel // p.shape[0] * rows
            leaf = self.flat[begin : begin + numel].view(shape).detach().requires_grad_()
            leaf.grad = self.gradient[begin : begin + numel].view(shape)
            self._leaves[name] = leaf


@contextmanager
def _denormals_as_zero() -> Iterator[None]:
    """Treats numbers below 1.2e-38 as zero within the block. They take a core a hundred times as long as others and
    change no result that matters; at high learning rates attention is full of them, and steps took twice as long."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _rotary_angles(a: Architecture) -> tuple[Tensor, Tensor]:
    half = a.head_dim // 2
    frequencies = a.rope_theta ** (-torch.arange(half) / half)
    angles = torch.arange(a.max_positions)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
