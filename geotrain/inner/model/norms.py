"""Norms by torch, for Megatron-core's places for norms and linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from geotrain.inner.runtime import platform

with platform.quiet_imports():
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(nn.RMSNorm):
    """RMSNorm by torch, with the arguments with which Megatron-core builds norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, device=platform.device(), dtype=config.params_dtype)


class CenteredRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + its weight; in fp32, since in bf16 the sum would lose what a small weight is."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class ProjectionNorm(nn.Module):
    """RMSNorm of all of a token's queries, or keys, together, of which a tensor rank has its heads only."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, keys: bool) -> None:
        """Build it as Megatron-core builds the norm of one head, of hidden_size elements."""
        super().__init__()
        self.size = (config.num_query_groups if keys else config.num_attention_heads) * hidden_size
        self.ranks, self.eps = config.tensor_model_parallel_size, eps
        made: dict[str, Any] = {"device": platform.device(), "dtype": config.params_dtype}
        self.weight = nn.Parameter(torch.empty(self.size // self.ranks, **made))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [sequence, batch, heads of this rank, head_dim]."""
        flat = x.flatten(2).float()
        squares = flat.square().sum(-1, keepdim=True)
        if self.ranks > 1:  # the sum goes to all ranks, and so each of them has a part of its gradient
            squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        normalized = flat * torch.rsqrt(squares / self.size + self.eps)
        return (self.weight * normalized).to(x.dtype).view(x.shape)


def normed_linear(norm: type[RMSNorm]) -> type[RowParallelLinear]:
    """Make a row-parallel linear layer with a norm of this kind behind it."""

    class NormedLinear(RowParallelLinear):
        def __init__(self, *sizes: int, config: TransformerConfig, **settings: Any) -> None:
            super().__init__(*sizes, config=config, **settings)
            self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            """Return the norm of the product, which is whole on every tensor rank, or has a part of the tokens."""
            out, bias = super().forward(x)
            return self.norm(out), bias

    return NormedLinear
