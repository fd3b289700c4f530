"""The bias that balances experts without a loss (Wang et al., arXiv 2408.15664; DeepSeek-V3, section 2.1.2).

It is added to an expert's score for the choice alone, and no gradient reaches it: after each step it rises by a fixed
rate where an expert got fewer of the batch's tokens than the mean, and falls where it got more. It is one canonical
parameter a layer, which the outer loop averages, a checkpoint holds and an export has, as any other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from geotrain.inner.runtime import platform

with platform.quiet_imports():
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias
    from megatron.core.transformer.moe.router import TopKRouter

_WIDE = ("expert_bias", "local_tokens_per_expert")  # Megatron-core's names


def biased_routers(model: nn.Module) -> Iterator[tuple[str, TopKRouter]]:
    """Find the rank's routers that have such a bias, `expert_bias`, fp32 [experts]; yields (name, router)."""
    for name, module in model.named_modules():
        if isinstance(module, TopKRouter) and module.enable_expert_bias:
            yield name, module


def keep_counts_wide(model: nn.Module) -> None:
    """Make biases and counts plain attributes: DeepSpeed would convert buffers to bf16, which counts to 256 only."""
    for _, router in biased_routers(model):
        for name in _WIDE:
            setattr(router, name, router._buffers.pop(name))


@torch.no_grad()
def update_biases(model: nn.Module) -> None:
    """Move all biases by the counts of a step's micro-batches, and begin to count anew.

    Every rank must call it. Ranks of a tensor and data-parallel group, which have the same layers, agree bit for bit.
    """
    routers = [router for _, router in biased_routers(model)]
    if not routers:
        return
    counts = torch.stack([router.local_tokens_per_expert for router in routers])
    biases = torch.stack([router.expert_bias for router in routers])
    moved = get_updated_expert_bias(counts, biases, routers[0].config.moe_router_bias_update_rate)
    for router, bias in zip(routers, moved, strict=True):
        router.expert_bias.copy_(bias)  # in place: a shard is a view of it
        router.local_tokens_per_expert.zero_()
