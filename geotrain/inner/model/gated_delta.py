"""Gated delta nets (arXiv 2412.06464), and attention with a gate, in Megatron-core's place for attention.

The rule itself is Megatron-core's, in torch, or flash-linear-attention's on a GPU that has it. Its layer is not
taken: it wants that package even for the rule in torch, and another order of what a token is projected to.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from geotrain.families.architecture import Recurrence
from geotrain.inner.model.norms import RMSNorm
from geotrain.inner.runtime import platform

with platform.quiet_imports():
    from megatron.core.ssm import gated_delta_net as megatron
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.transformer_config import TransformerConfig


class GatedSelfAttention(SelfAttention):
    """Attention whose projection gives, of each group, its heads' queries and gates in turn, then key and value."""

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        """Return queries, keys, values and gates, each [sequence, batch, heads, head_dim]."""
        made, _ = self.linear_qkv(hidden_states)
        made = made.unflatten(-1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head))
        query, gate = made[:, :, :, :-2].unflatten(3, (-1, 2)).unbind(4)
        query = self.q_layernorm(query).flatten(2, 3)
        return query, self.k_layernorm(made[:, :, :, -2]), made[:, :, :, -1], gate.flatten(2, 3)


class GatedDeltaNet(nn.Module):
    """A gated delta net of this tensor rank's heads."""

    def __init__(self, config: TransformerConfig, net: Recurrence, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        ranks = config.tensor_model_parallel_size
        self.net, self.key_heads, self.value_heads = net, net.key_heads // ranks, net.value_heads // ranks
        settings: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        settings |= {"tp_group": pg_collection.tp}
        made = 2 * (net.keys + net.values + net.value_heads)
        self.in_proj = ColumnParallelLinear(config.hidden_size, made, gather_output=False, **settings)
        self.out_proj = RowParallelLinear(
            net.values, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **settings
        )
        like: dict[str, Any] = {"device": platform.device(), "dtype": config.params_dtype}
        self.conv1d = nn.Parameter(torch.empty((2 * net.keys + net.values) // ranks, 1, net.kernel, **like))
        self.dt_bias, self.A_log = (nn.Parameter(torch.empty(self.value_heads, **like)) for _ in range(2))
        self.norm = RMSNorm(config, net.value_dim, config.layernorm_epsilon)
        fast = platform.HAS_CUDA and megatron.HAVE_FLA and not config.deterministic_mode
        # In torch it would keep a state of each token; computed again in backward, it keeps what it takes.
        again = partial(checkpoint, megatron.torch_chunk_gated_delta_rule, use_reentrant=False)
        self.rule = megatron.chunk_gated_delta_rule if fast else again

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Return the output, and no bias; both [sequence, batch, hidden]. A sample's tokens see all those before."""
        net, heads = self.net, self.key_heads
        served = net.value_heads // net.key_heads
        made, _ = self.in_proj(hidden_states)
        length = len(made)
        made, rates = made.transpose(0, 1).split((made.shape[-1] - 2 * self.value_heads, 2 * self.value_heads), -1)
        sizes = net.key_dim, net.key_dim, served * net.value_dim, served * net.value_dim
        *mixed, gate = made.unflatten(-1, (heads, -1)).split(sizes, -1)
        write, decay = rates.unflatten(-1, (heads, 2, served)).unbind(3)
        channels = torch.cat([part.flatten(2) for part in mixed], -1).transpose(1, 2)
        seen = nn.functional.conv1d(channels, self.conv1d, padding=net.kernel - 1, groups=channels.shape[1])
        seen = nn.functional.silu(seen[..., :length]).transpose(1, 2)
        keys = heads * net.key_dim
        query, key, value = seen.split((keys, keys, seen.shape[-1] - 2 * keys), -1)
        query, key = (_normalized(x.unflatten(-1, (heads, -1))).repeat_interleave(served, 2) for x in (query, key))
        forgets = -self.A_log.float().exp() * nn.functional.softplus(decay.flatten(2).float() + self.dt_bias)
        value = value.unflatten(-1, (self.value_heads, -1)).contiguous()
        out, _ = self.rule(query, key, value, g=forgets, beta=write.flatten(2).sigmoid())
        out = self.norm(out) * nn.functional.silu(gate.reshape(out.shape).float())
        return self.out_proj(out.to(made.dtype).flatten(2).transpose(0, 1).contiguous())


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
