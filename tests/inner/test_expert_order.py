"""Tokens are sorted by expert as Megatron-core sorts them, bit for bit, forward and backward."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch

from geotrain.inner.model import replaced
from geotrain.inner.model.expert_order import permuted
from geotrain.inner.runtime import platform

with platform.quiet_imports():
    from megatron.core.transformer.moe import moe_utils, token_dispatcher


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 4, 1), (37, 8, 3), (64, 5, 5), (16, 128, 8)])
@pytest.mark.parametrize("with_probs", [False, True])
def test_it_is_megatron_cores(dtype: torch.dtype, tokens: int, experts: int, chosen: int, with_probs: bool) -> None:
    drawn = torch.Generator().manual_seed(tokens)
    x, scores = torch.randn(tokens, 6, generator=drawn), torch.rand(tokens, experts, generator=drawn)
    scores[:, : experts - chosen] /= 8  # some experts get few tokens, or none
    routes = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, scores.topk(chosen).indices, True)
    found = []
    for permute in (permuted, moe_utils.permute):
        leaves = x.to(dtype).requires_grad_(), (scores * routes).requires_grad_()
        given = leaves[1] if with_probs else None
        result = permute(leaves[0], routes, probs=given, num_out_tokens=tokens * chosen)
        sorted_tokens, sorted_probs, places = result[:3]  # what else 0.19 returns is of fused permutations
        (sorted_tokens.float().square().sum() + (sorted_probs.square().sum() if with_probs else 0.0)).backward()
        found.append([sorted_tokens, sorted_probs, places, *(leaf.grad for leaf in leaves)])
    assert found[0][0].shape == (tokens * chosen, 6) and found[0][3].abs().sum() > 0
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))


def test_the_dispatchers_use_it_where_megatron_cores_waits() -> None:
    """0.16 selects by a mask, whose size the host waits for; later ones sort all, of which they know the size."""
    waits = version("megatron-core").startswith("0.16.")
    assert replaced.token_dispatcher is token_dispatcher and (token_dispatcher.permute is permuted) == waits
