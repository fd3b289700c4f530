"""A byte-level language model so small that one core trains sixteen of them, in torch.

It has Llama's parameters under their canonical names, all in one flat vector; several models are rows of one tensor,
and computed at once.
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
        max_positions=positions, tied_embeddings=True, qk_norm=None, qkv_bias=False, sliding_window=None,
        init_std=0.02,
    )  # fmt: skip


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Treat numbers below 1.2e-38 as zero within the block. They take a core a hundred times as long as others and
    change no result that matters; at high learning rates attention is full of them, and steps took twice as long."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class SmallLM:
    """The model as a function of weights that are stacked: fp32 [workers, parameters], a model a row. start: the
    weights that all begin with, fp32 [parameters], on the device that computes."""

    def __init__(self, architecture: Architecture, start: Tensor) -> None:
        self.a, self.start = architecture, start
        self.parameters = canonical_parameters(architecture)
        self.sizes = [p.numel for p in self.parameters]
        half = architecture.head_dim // 2
        frequencies = architecture.rope_theta ** (-torch.arange(half, device=start.device) / half)
        angles = torch.arange(architecture.max_positions, device=start.device)[:, None] * frequencies
        self._cosine, self._sine = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), -1)

    def parts(self, weights: Tensor) -> dict[str, Tensor]:
        """Views of the parameters in one model's weights, 1-D, by their names."""
        return {p.name: part for p, part in zip(self.parameters, weights.split(self.sizes), strict=True)}

    @denormals_as_zero()
    def gradients(self, weights: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute each model's loss, [workers], mean nats a byte of its tokens, int64 [workers, batch, length + 1];
        and the gradients, like the weights."""
        weights = weights.detach().requires_grad_()
        losses = self._totals(weights, tokens) / tokens[0, :, 1:].numel()
        (gradients,) = torch.autograd.grad(losses.sum(), weights)
        return losses.detach(), gradients

    @torch.no_grad()
    @denormals_as_zero()
    def evaluate(self, weights: Tensor, tokens: Tensor) -> float:
        """Compute the loss of one model's weights (1-D, on any device) on tokens, int64 [batch, length + 1]."""
        device = self.start.device
        rows = max(1, (TOKENS if device.type == "cpu" else 64 * TOKENS) // (tokens.shape[1] - 1))
        stacked = weights.to(device)[None]
        totals = [self._totals(stacked, part.to(device)[None]) for part in tokens.split(rows)]
        return float(torch.cat(totals).double().sum()) / tokens[:, 1:].numel()

    def _totals(self, weights: Tensor, tokens: Tensor) -> Tensor:
        """Sum the cross entropy of all tokens but each row's first, of each model by itself."""
        a, (workers, batch, length) = self.a, tokens[..., 1:].shape
        parts = zip(self.parameters, weights.split(self.sizes, 1), strict=True)
        w = {p.name.removesuffix(".weight"): part.view(workers, *p.shape) for p, part in parts}
        cosine, sine = self._cosine[:length], self._sine[:length]

        def rotated(x: Tensor) -> Tensor:
            return x * cosine + x.roll(a.head_dim // 2, -1) * sine

        def normed(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, (a.hidden_size,), None, a.norm_eps) * w[name][:, None]

        def linear(x: Tensor, name: str) -> Tensor:
            return torch.bmm(x, w[name].mT)

        vocabulary = a.vocab_size * torch.arange(workers, device=tokens.device)
        inputs = (tokens[..., :-1] + vocabulary[:, None, None]).flatten(1)
        x = F.embedding(inputs, w["model.embed_tokens"].reshape(-1, a.hidden_size))
        for i in range(a.layers):
            at = f"model.layers.{i}."
            h = normed(x, f"{at}input_layernorm")
            q, k, v = (
                linear(h, f"{at}self_attn.{name}_proj").view(workers * batch, length, a.heads, -1).transpose(1, 2)
                for name in "qkv"
            )
            mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
            x = x + linear(mixed.transpose(1, 2).reshape(x.shape), f"{at}self_attn.o_proj")
            h = normed(x, f"{at}post_attention_layernorm")
            gated = F.silu(linear(h, f"{at}mlp.gate_proj")) * linear(h, f"{at}mlp.up_proj")
            x = x + linear(gated, f"{at}mlp.down_proj")
        logits = linear(normed(x, "model.norm"), "model.embed_tokens")
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[..., 1:].flatten(), reduction="none")
        return losses.view(workers, -1).sum(1)
