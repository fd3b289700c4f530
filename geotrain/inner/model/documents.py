"""Attention that stays inside documents, for samples into which several documents are packed.

The boundaries travel through Megatron-core's layers where an attention mask would: as `cu_seqlens`, int32
[documents + 1], the ends of all documents of a micro-batch whose samples are laid one after another, with a 0 before.
A sample's end ends its last document. Every stage of a pipeline makes them of the tokens, which it has anyway.

Positions do not begin anew with a document: rotary embeddings only know distances.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from geotrain.parallelism.checks import attends_without_masks


def cu_seqlens(tokens: Tensor, end_of_document: int) -> Tensor:
    """Find the boundaries in a model's input. tokens: int64 [batch, sequence]; each `end_of_document` ends one."""
    last = tokens == end_of_document
    last[:, -1] = True
    ends = last.flatten().nonzero().flatten() + 1
    return nn.functional.pad(ends, (1, 0)).to(torch.int32)


def inside_documents(boundaries: Tensor, batch: int, length: int) -> Tensor:
    """Build the mask for torch's attention, bool [batch, 1, length, length]: causal, true within one document
    only."""
    places = torch.arange(batch * length, dtype=torch.int32, device=boundaries.device)
    documents = torch.bucketize(places, boundaries[1:], right=True).view(batch, 1, length)
    return (documents[..., None] == documents[..., None, :]).tril()


def suits_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether torch's attention over samples in a row takes these (`attends_without_masks`), where they are: on an
    NVIDIA GPU from Ampere on."""
    if not query.is_cuda or torch.version.hip or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False
    return attends_without_masks(query.shape[-1], value.shape[-1], query.dtype.itemsize)


def attend_in_a_row(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor | None, before: int | None, scale: float | None
) -> Tensor:
    """Attend inside documents and windows by torch's `varlen_attn`, which needs no mask; returns [sequence, batch,
    heads · head_dim].

    query, key, value: [sequence, batch, heads, head_dim]; keys and values of fewer heads serve groups of queries.
    boundaries: None where each sample is one document. before: tokens of a window before a token's own; None: all.
    """
    from torch.nn.attention.varlen import varlen_attn

    length, batch, heads, _ = query.shape
    if boundaries is None:
        boundaries = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=query.device)
    q, k, v = in_a_row(query, key, value)
    near, grouped = (-1 if before is None else before, 0), key.shape[2] != heads
    settings: dict[str, Any] = {"scale": scale, "window_size": near, "enable_gqa": grouped}
    return side_by_side(varlen_attn(q, k, v, boundaries, boundaries, length, length, **settings), batch)


def in_a_row(*tensors: Tensor) -> list[Tensor]:
    """Lay samples in a row: [sequence, batch, heads, head_dim] becomes [batch · sequence, heads, head_dim]."""
    return [x.transpose(0, 1).flatten(0, 1) for x in tensors]


def side_by_side(out: Any, batch: int) -> Tensor:
    """Lay them back: [batch · sequence, heads, head_dim] becomes [sequence, batch, heads · head_dim]."""
    return out.reshape(batch, len(out) // batch, -1).transpose(0, 1).contiguous()


class PackedAttention(nn.Module):
    """Transformer Engine's attention, given boundaries as it wants them: samples in a row ("thd") and cu_seqlens.

    Only what is between the layers' own shapes and Transformer Engine's changes here, so that pipelines and sliding
    windows are as without it.
    """

    def __init__(self, **settings: Any) -> None:
        """Build it with the settings with which Megatron-core builds its attention."""
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        super().__init__()
        self.inner = TEDotProductAttention(**settings)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **more: Any) -> Tensor:
        """Attend inside documents; returns [sequence, batch, heads · head_dim].

        query, key, value: [sequence, batch, heads, head_dim]. attention_mask: the boundaries.
        """
        from megatron.core.packed_seq_params import PackedSeqParams

        length, batch = query.shape[:2]
        more["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=attention_mask,
            cu_seqlens_kv=attention_mask,
            max_seqlen_q=length,  # a bound: the longest itself would have to be waited for
            max_seqlen_kv=length,
        )
        return side_by_side(self.inner(*in_a_row(query, key, value), None, **more), batch)
