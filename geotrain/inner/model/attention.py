"""Causal attention by torch, in the place of Megatron-core's core attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from geotrain.inner.model.documents import attend_in_a_row, inside_documents, suits_varlen
from geotrain.inner.runtime import platform

with platform.quiet_imports():
    from megatron.core.transformer.transformer_config import TransformerConfig


class CausalAttention(nn.Module):
    """Causal, grouped-query attention without weights, by torch's scaled_dot_product_attention.

    It takes the place of Megatron-core's own core attention, whose constructor and `forward` it imitates.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        window: int | None = None,
        cap: float | None = None,
        **_: Any,
    ) -> None:
        """Build it as Megatron-core does. window: so many tokens, itself the last of them, are seen by a token; None:
        all before it. cap: of scores x, which become cap · tanh(x / cap)."""
        super().__init__()
        self.scale, self.cap = softmax_scale, cap
        self.grouped = config.num_query_groups != config.num_attention_heads
        self.window = window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor:
        """Attend; returns [sequence, batch, heads · head_dim].

        query: [sequence, batch, heads, head_dim]. key, value: [sequence, batch, groups, head_dim], where each group
        serves heads / groups heads. attention_mask: the boundaries of documents
        (`geotrain.inner.model.documents`), or None. The attention is always causal, within a document where there are
        boundaries, and within the window where the layer has one.
        """
        length, before = len(query), None if self.window is None else self.window - 1
        if before is not None and before + 1 >= length:
            before = None
        if self.cap is None and (attention_mask is not None or before is not None) and suits_varlen(query, value):
            return attend_in_a_row(query, key, value, attention_mask, before, self.scale)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask = None if attention_mask is None else inside_documents(attention_mask, len(q), length)
        if before is not None:
            near = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_().triu_(-before)
            mask = near if mask is None else mask & near
        if self.cap is not None:
            return self._by_scores(q, k, v, mask).permute(2, 0, 1, 3).flatten(2)
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=self.grouped
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _by_scores(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend by all scores, which no fused attention of torch lets anyone change; [batch, heads, sequence,
        head_dim].

        key, value: [batch, groups, sequence, head_dim]. mask: bool, of [batch, 1, sequence, sequence] at most; None:
        causal.
        """
        length, groups = query.shape[2], key.shape[1]
        scale, cap = query.shape[-1] ** -0.5 if self.scale is None else self.scale, self.cap or 1.0
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
        grouped = query.unflatten(1, (groups, -1)).flatten(2, 3)  # a group's heads below each other
        scores = (grouped @ key.transpose(2, 3) * scale).view(*query.shape[:3], length)
        scores = torch.tanh(scores / cap) * cap
        shares = scores.masked_fill_(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
        return (shares.view(*grouped.shape[:3], length) @ value).view(*query.shape[:3], -1)
