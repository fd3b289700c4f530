"""Mamba-2 (arXiv 2405.21060) in Megatron-core's place for attention.

Its own mixer is not taken: it wants mamba_ssm, whose kernels run on CUDA only. This one is torch's products of
matrices, by chunks of tokens, everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from geotrain.families.architecture import Recurrence
from geotrain.inner.runtime import platform

with platform.quiet_imports():
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

CHUNK = 128  # tokens whose effects on each other are one product


class Mamba2(nn.Module):
    """A Mamba-2 mixer of this tensor rank's heads, in whole groups."""

    def __init__(self, config: TransformerConfig, net: Recurrence, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        ranks = config.tensor_model_parallel_size
        self.net, self.heads, self.groups = net, net.value_heads // ranks, net.key_heads // ranks
        self.eps = config.layernorm_epsilon
        settings: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        settings |= {"tp_group": pg_collection.tp}
        convolved = net.values + 2 * net.keys
        made = net.values + convolved + net.value_heads
        self.in_proj = ColumnParallelLinear(config.hidden_size, made, gather_output=False, **settings)
        self.out_proj = RowParallelLinear(
            net.values, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **settings
        )

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=platform.device(), dtype=config.params_dtype))

        self.conv1d = parameter(convolved // ranks, 1, net.kernel)
        self.conv1d_bias = parameter(convolved // ranks) if net.biased else None
        self.dt_bias, self.A_log, self.D = (parameter(self.heads) for _ in range(3))
        self.norm = parameter(net.values // ranks)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Return the output, and no bias; both [sequence, batch, hidden]. A sample's tokens see all those before."""
        net, values = self.net, self.heads * self.net.value_dim
        made, _ = self.in_proj(hidden_states)
        gate, mixed, steps = made.transpose(0, 1).split((values, self.conv1d.shape[0], self.heads), -1)
        channels, padding = mixed.transpose(1, 2), net.kernel - 1
        seen = nn.functional.conv1d(channels, self.conv1d, self.conv1d_bias, 1, padding, 1, channels.shape[1])
        # What lies between would be several times as large; computed again in backward, it is not kept.
        out: Tensor = checkpoint(self._mixed, seen[..., : len(made)], gate, steps, use_reentrant=False)
        return self.out_proj(out.to(made.dtype).transpose(0, 1).contiguous())

    def _mixed(self, seen: Tensor, gate: Tensor, steps: Tensor) -> Tensor:
        """Compute what heads give, behind the gate and the norm of each group; fp32, [batch, sequence, values].

        seen: [batch, channels, sequence]. gate: [batch, sequence, values]. steps: [batch, sequence, heads].
        """
        values, state = gate.shape[-1], self.groups * self.net.key_dim
        x, write, read = nn.functional.silu(seen).transpose(1, 2).float().split((values, state, state), -1)
        x = x.unflatten(-1, (self.heads, -1))
        times = nn.functional.softplus(steps.float() + self.dt_bias.float())
        forgets = -self.A_log.float().exp() * times
        out = scan(x * times[..., None], forgets, *(part.unflatten(-1, (self.groups, -1)) for part in (write, read)))
        out = (out + x * self.D.float()[:, None]).flatten(2) * nn.functional.silu(gate.float())
        out = nn.functional.rms_norm(
            grouped := out.unflatten(-1, (self.groups, -1)), grouped.shape[-1:], None, self.eps
        )
        return out.flatten(2) * self.norm.float()


def scan(x: Tensor, forgets: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """Compute, of each head, read_t · state_t, where state_t = exp(forgets_t) · state_(t−1) + write_t · x_t.

    x: fp32, [batch, sequence, heads, head_dim], as is the result. forgets: [batch, sequence, heads]. write, read:
    [batch, sequence, groups, state_dim].
    """
    length, groups = x.shape[1], write.shape[2]
    chunk = min(CHUNK, length)

    def chunks(part: Tensor) -> Tensor:  # [batch, chunks, groups, heads of a group or 1, tokens of a chunk, …]
        filled = nn.functional.pad(part, (*(0, 0) * (part.dim() - 2), 0, -length % chunk))
        return filled.unflatten(1, (-1, chunk)).unflatten(3, (groups, -1)).movedim(2, 4)

    x, forgets, write, read = chunks(x), chunks(forgets).cumsum(-1), chunks(write), chunks(read)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu_(1)
    left = (forgets[..., :, None] - forgets[..., None, :]).masked_fill(later, -torch.inf).exp()
    out = (read @ write.transpose(-1, -2) * left) @ x
    # What a chunk leaves behind, and how much of what was before.
    made = write.transpose(-1, -2) @ (x * (forgets[..., -1:] - forgets).exp()[..., None])
    kept, states = forgets[..., -1].exp()[..., None, None], [torch.zeros_like(made[:, 0])]
    for number in range(made.shape[1] - 1):
        states.append(states[-1] * kept[:, number] + made[:, number])
    out = out + read @ torch.stack(states, 1) * forgets.exp()[..., None]
    return out.movedim(4, 2).flatten(3, 4).flatten(1, 2)[:, :length]
