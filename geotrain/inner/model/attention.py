"""Causal attention by torch, in the place of Megatron-core's core attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
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
        sinks: bool = False,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        """Build it as Megatron-core does. window: so many tokens, itself the last of them, are seen by a token; None:
        all before it. cap: of scores x, which become cap · tanh(x / cap). sinks: whether each head has a score
        that takes a share and gives no value. pg_collection: Megatron-core's process groups."""
        super().__init__()
        self.scale, self.cap = softmax_scale, cap
        self.grouped = config.num_query_groups != config.num_attention_heads
        self.window = window
        self.sinks: nn.Parameter | None = None
        if sinks:  # those of all context ranks' heads, which exchange heads for tokens
            heads = config.num_attention_heads // config.tensor_model_parallel_size * pg_collection.cp.size()
            self.context: dist.ProcessGroup = pg_collection.cp
            self.sinks = nn.Parameter(torch.empty(heads, device=platform.device(), dtype=config.params_dtype))

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
        by_scores = self.cap is not None or self.sinks is not None
        if not by_scores and (attention_mask is not None or before is not None) and suits_varlen(query, value):
            return attend_in_a_row(query, key, value, attention_mask, before, self.scale)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask = None if attention_mask is None else inside_documents(attention_mask, len(q), length)
        if before is not None:
            near = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_().triu_(-before)
            mask = near if mask is None else mask & near
        if by_scores:
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
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
        grouped = query.unflatten(1, (groups, -1)).flatten(2, 3)  # a group's heads below each other
        scores = (grouped @ key.transpose(2, 3) * scale).view(*query.shape[:3], length)
        if self.cap is not None:
            scores = torch.tanh(scores / self.cap) * self.cap
        scores = scores.masked_fill_(~mask, -torch.inf)
        if self.sinks is not None:
            mine = self.sinks.chunk(self.context.size())[self.context.rank()].to(scores.dtype)
            scores = torch.cat((scores, mine.view(-1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        shares = scores.softmax(-1, dtype=torch.float32)[..., :length].to(value.dtype).contiguous()
        return (shares.view(*grouped.shape[:3], length) @ value).view(*query.shape[:3], -1)
