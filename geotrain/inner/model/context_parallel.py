"""Context parallelism: ranks that share each sequence.

Everything in a model but attention treats tokens one by one, so that a rank needs only its own part. Of attention
there are two forms. As a ring (arXiv 2310.01889) it is Transformer Engine's, which passes keys and values round. In
the form of DeepSpeed-Ulysses (arXiv 2309.14509) the ranks exchange heads for tokens around it by an all-to-all:
inside, each rank has all tokens of its share of the heads; outside, all heads of its share of the tokens. So windows,
the boundaries of documents and grouped queries are what they are on one rank, and whichever attention serves there,
serves here. The mean of the parts' losses is the sequence's, and the mean of their gradients its gradient: to the
optimizer these ranks are data-parallel ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Parts:
    """The division of a sequence's tokens among context ranks, and this rank's place in it.

    exchange: "heads": the rank-th of `size` equal parts. "ring": of twice as many, the rank-th from either end, since
    causal attention gives a late token more to do: so the ranks of a ring, each of which computes for its own tokens,
    have equally much. Megatron-core and Transformer Engine count on this.
    """

    rank: int
    size: int
    exchange: str

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """Select this rank's part of a tensor whose dimension `dim` are a sequence's tokens; a view where it can be
        one.

        The tokens are a multiple of the parts.
        """
        if self.exchange == "heads":
            return tensor.chunk(self.size, dim)[self.rank]
        parts = tensor.chunk(2 * self.size, dim)
        return torch.cat((parts[self.rank], parts[-1 - self.rank]), dim)

    def inputs_and_labels(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Split samples [batch, length + 1] into inputs and labels, one token ahead; both [batch, length / size]."""
        return self.of(samples[:, :-1], 1), self.of(samples[:, 1:], 1)


def use_own_positions(rotary: nn.Module, parts: Parts) -> None:
    """Let Megatron-core's rotary embedding give the positions of this rank's part.

    By itself it would give those of a ring, whichever exchange there is.
    """
    rotary.cp_group = None  # type: ignore[assignment]  # it gives all positions without one
    rotary.register_forward_hook(lambda module, args, positions: parts.of(positions, 0))


class ContextAttention(nn.Module):
    """A core attention between two exchanges, in place of Megatron-core's, whose constructor it imitates."""

    def __init__(self, around: Callable[..., nn.Module], config: Any, pg_collection: Any, **settings: Any) -> None:
        """Build the attention of this rank's share of the heads.

        around: builds the core attention that computes them. config: Megatron-core's. pg_collection: its process
        groups, of which `cp` is used. settings: what else it builds attention with.
        """
        super().__init__()
        self.group: dist.ProcessGroup = pg_collection.cp
        config, size = copy.copy(config), config.context_parallel_size
        config.num_attention_heads //= size
        config.num_query_groups //= size
        config.context_parallel_size = 1  # what is inside knows nothing of this
        self.inner = around(config=config, pg_collection=pg_collection, **settings)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *masks: Any, **more: Any) -> Tensor:
        """Attend; returns this part's output, [sequence / ranks, batch, heads · head_dim].

        query: [sequence / ranks, batch, heads, head_dim]. key, value: the same of `groups` heads. heads and groups
        are multiples of the number of ranks. masks, more: for the core attention; they are of the whole sequence.
        """
        out = self.inner(*heads_for_tokens((query, key, value), self.group), *masks, **more)
        return tokens_for_heads(out, self.group)


def heads_for_tokens(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Sequence[Tensor]:
    """Exchange this rank's tokens of all heads for all ranks' tokens of its share of the heads, in one collective.

    tensors: each [tokens, batch, heads, head_dim]; returns [ranks · tokens, batch, heads / ranks, head_dim] of each.
    """
    ranks = group.size()
    by_rank = [t.unflatten(2, (ranks, -1)).movedim(2, 0) for t in tensors]  # [ranks, tokens, batch, heads, head_dim]
    whole = _AllToAll.apply(torch.cat(by_rank, dim=3), group).flatten(0, 1)
    return whole.split([t.shape[3] for t in by_rank], dim=2)


def tokens_for_heads(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undo `heads_for_tokens`: [ranks · tokens, batch, width] to [tokens, batch, ranks · width]."""
    by_rank = _AllToAll.apply(tensor.unflatten(0, (group.size(), -1)), group)  # [ranks, tokens, batch, width]
    return by_rank.movedim(0, 2).flatten(2)


class _AllToAll(torch.autograd.Function):
    """Sends part i of a tensor's first dimension to rank i; part i of the result comes from it.

    Its transpose, and so its backward, is itself.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = tensor.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.group), None
