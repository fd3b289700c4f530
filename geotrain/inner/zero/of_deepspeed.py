"""Weights of DeepSpeed's own sharded optimizers: brings changed ones to all ranks, and no others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from geotrain.inner.zero.buckets import PartGathering, owned_parts


@torch.no_grad()
def update_weights(optimizer: Any, changed: Collection[nn.Parameter]) -> None:
    """Write masters that were overwritten into the weights, and bring these to all ranks.

    Does what `update_lp_params` of DeepSpeed's ZeRO 1 and 2 and BF16_Optimizer does, but sends only the weights of
    these parameters. Every rank must call it with the same ones.
    """
    if hasattr(optimizer, "bf16_groups_flat"):
        parts_of, flats, groups = optimizer.bf16_partitioned_groups, optimizer.bf16_groups_flat, optimizer.bf16_groups
        masters = optimizer.fp32_groups_flat_partition
    else:
        parts_of, masters = optimizer.parallel_partitioned_bit16_groups, optimizer.single_partition_of_fp32_groups
        flats, groups = optimizer.bit16_groups_flat, optimizer.bit16_groups
    wanted = set(changed)
    for i, (parts, master, flat) in enumerate(zip(parts_of, masters, flats, strict=True)):
        group = optimizer.real_dp_process_group[i]
        parts[dist.get_rank(group)].copy_(master)
        # The weights are views of the flat tensor, in an order that DeepSpeed decides.
        begins = {p: p.data.storage_offset() - flat.storage_offset() for p in groups[i] if p in wanted}
        shard = parts[0].numel()
        sent = [x for p, begin in begins.items() for x in owned_parts(flat, begin, begin + p.numel(), shard)]
        if sent and dist.get_world_size(group) > 1:
            PartGathering(sent, group).wait()
