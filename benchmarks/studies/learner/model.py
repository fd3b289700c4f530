"""A byte-level language model so small that one core trains sixteen of them, in torch.

It has Llama's parameters under their canonical names, all in one flat vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from geotrain.config import Architecture
from geotrain.parameters.parameter_map import canonical_parameters

TOKENS = 2048  # that are evaluated at once, so that their logits stay in a core's cache


def small_architecture(hidden: int, layers: int, heads: int, ffn: int, positions: int) -> Architecture:
    """A Llama over bytes with these sizes; `positions` is the longest sequence."""
    return Architecture(
        "llama", 256, hidden, ffn, layers, heads, heads, hidden // heads, 1e-5, 10000.0, rope_scaling=(),
        max_positions=positions, tied_embeddings=True, qk_norm=False, qkv_bias=False, sliding_window=None,
        init_std=0.02,
    )  # fmt: skip


class SmallLM:
    """A model whose weights and gradient are two flat fp32 vectors; `masters` names the weights' parts (views)."""

    def __init__(self, architecture: Architecture, start: Tensor) -> None:
        """Copy the weights from `start`."""
        self.a, self.flat, self.gradient = architecture, start.clone(), torch.zeros_like(start)
        self.parameters = canonical_parameters(architecture)
        self.sizes = [p.numel for p in self.parameters]
        self.masters = {p.name: part for p, part in zip(self.parameters, self.flat.split(self.sizes), strict=True)}
        half = architecture.head_dim // 2
        frequencies = architecture.rope_theta ** (-torch.arange(half) / half)
        angles = torch.arange(architecture.max_positions)[:, None] * frequencies
        self._cosine, self._sine = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), -1)

    def backward(self, tokens: Tensor) -> float:
        """Fill `gradient` and return the loss: mean nats a byte of tokens, int64 [batch, length + 1]."""
        with _denormals_as_zero():
            weights = self.flat.detach().requires_grad_()
            loss = self._total(weights, tokens) / tokens[:, 1:].numel()
            (self.gradient,) = torch.autograd.grad(loss, weights)
        return loss.item()

    @torch.no_grad()
    def evaluate(self, weights: Tensor, tokens: Tensor) -> float:
        """Compute the loss of other weights (1-D, fp32) on tokens."""
        rows = max(1, TOKENS // (tokens.shape[1] - 1))
        with _denormals_as_zero():
            total = sum(self._total(weights, part).item() for part in tokens.split(rows))
        return total / tokens[:, 1:].numel()

    def _total(self, weights: Tensor, tokens: Tensor) -> Tensor:
        """Sum the cross entropy of all tokens but each row's first."""
        a, length = self.a, tokens.shape[1] - 1
        parts = zip(self.parameters, weights.split(self.sizes), strict=True)
        w = {p.name.removesuffix(".weight"): part.view(p.shape) for p, part in parts}
        cosine, sine = self._cosine[:length], self._sine[:length]

        def rotated(x: Tensor) -> Tensor:
            return x * cosine + x.roll(a.head_dim // 2, -1) * sine

        x = F.embedding(tokens[:, :-1], w["model.embed_tokens"])
        for i in range(a.layers):
            at = f"model.layers.{i}."
            h = F.rms_norm(x, (a.hidden_size,), w[f"{at}input_layernorm"], a.norm_eps)
            q, k, v = (
                F.linear(h, w[f"{at}self_attn.{name}_proj"]).unflatten(-1, (a.heads, -1)).transpose(1, 2)
                for name in "qkv"
            )
            mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), w[f"{at}self_attn.o_proj"])
            h = F.rms_norm(x, (a.hidden_size,), w[f"{at}post_attention_layernorm"], a.norm_eps)
            gated = F.silu(F.linear(h, w[f"{at}mlp.gate_proj"])) * F.linear(h, w[f"{at}mlp.up_proj"])
            x = x + F.linear(gated, w[f"{at}mlp.down_proj"])
        x = F.rms_norm(x, (a.hidden_size,), w["model.norm"], a.norm_eps)
        logits = F.linear(x, w["model.embed_tokens"])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


@contextmanager
def _denormals_as_zero() -> Iterator[None]:
    """Treat numbers below 1.2e-38 as zero within the block. They take a core a hundred times as long as others and
    change no result that matters; at high learning rates attention is full of them, and steps took twice as long."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
