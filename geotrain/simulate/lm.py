"""A small byte-level language model, small enough to train sixteen of on one core: Llama's shapes under their
canonical names, all parameters in one flat vector. Stated here in torch; where it is compiled (`compiled.py`), torch
only states it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor
from torch.nn import functional as F

from geotrain.canonical import Architecture, Parameter, canonical_parameters
from geotrain.simulate.compiled import LIBRARY, CompiledLM, adamw, library, torch_sgemm

EVALUATED = 256  # samples at once: their logits must fit
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # neighbours in the vector: one matrix each


def small_architecture(hidden: int, layers: int, heads: int, ffn: int, positions: int) -> Architecture:
    return Architecture(
        "llama", 256, hidden, ffn, layers, heads, heads, hidden // heads, 1e-5, 10000.0, positions,
        tied_embeddings=True, qk_norm=False, init_std=0.02,
    )  # fmt: skip


@dataclass(frozen=True)
class InnerSettings:
    """AdamW as HALoS uses it: weight decay on matrices, cosine to a tenth after a warm-up, clipped gradients."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup_share: float = 0.05
    final_share: float = 0.1

    def rate(self, progress: float) -> float:
        """Learning rate at that share of the run's samples."""
        if progress < self.warmup_share:
            return self.lr * progress / self.warmup_share
        x = min(1.0, (progress - self.warmup_share) / (1 - self.warmup_share))
        cosine = 0.5 * (1 + cos(pi * x))
        return self.lr * (self.final_share + (1 - self.final_share) * cosine)


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
        """compiled: where it can be and is faster, on a CPU; device: on others torch computes in bf16, from fp32
        weights. gradient: where it is to lie, when models that step one after another share it."""
        self.a, self.device = architecture, device
        self.parameters = canonical_parameters(architecture)
        self.flat = start.to(device, copy=True)
        self.gradient = torch.zeros_like(self.flat) if gradient is None else gradient
        self.masters: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        self._place()
        cosine, sine = _rotary_angles(architecture)
        self._angles = cosine.to(device), sine.to(device)
        fast = architecture.hidden_size < LIBRARY or torch_sgemm() is not None  # else torch's own products are faster
        loaded = library() if compiled and device == "cpu" and fast else None
        self._compiled = CompiledLM(loaded, architecture, self._angles) if loaded else None

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
        """Leaves are views of the flat vectors, so that one optimizer step is a few operations on one tensor."""
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
    """Numbers below 1.2e-38 cost a core a hundred times as much as others and change no bit of a sum that matters; at
    high learning rates attention is full of them, and a step took twice as long."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class FlatAdamW:
    """AdamW on one flat vector, with global-norm clipping. Its state lives through every exchange."""

    def __init__(self, settings: InnerSettings, decays: Tensor, compiled: bool = True) -> None:
        """decays: 1 where weight decay applies; the state lies where it lies."""
        self.settings, self.decays = settings, decays
        self._loaded = library() if compiled and decays.device.type == "cpu" else None
        self.m, self.v, self.steps = torch.zeros_like(decays), torch.zeros_like(decays), 0

    @torch.no_grad()
    def step(self, weights: Tensor, gradient: Tensor, lr: float) -> None:
        s = self.settings
        self.steps += 1
        rate, scale = lr / (1 - s.betas[0] ** self.steps), 1 / (1 - s.betas[1] ** self.steps)
        if self._loaded is not None:
            vectors = (weights, gradient, self.m, self.v, self.decays)
            adamw(self._loaded, vectors, s.clip, s.betas, s.eps, rate, scale, lr * s.weight_decay)
            return
        norm = float(gradient.norm())
        if norm > s.clip:
            gradient.mul_(s.clip / norm)
        self.m.lerp_(gradient, 1 - s.betas[0])
        self.v.mul_(s.betas[1]).addcmul_(gradient, gradient, value=1 - s.betas[1])
        weights.addcmul_(weights, self.decays, value=-lr * s.weight_decay)
        weights.addcdiv_(self.m, (self.v * scale).sqrt_().add_(s.eps), value=-rate)


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
