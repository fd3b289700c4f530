"""The inner optimizer: AdamW beside torch's own; its steps are counted, and a resumed one goes on from there."""

from __future__ import annotations

import torch
from torch import nn

from geotrain.optimizers.inner_optimizer import InnerOptimizer, step_count
from geotrain.parallelism.optimizer_settings import AdamWSettings

SETTINGS = AdamWSettings(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def pair() -> tuple[InnerOptimizer, torch.optim.AdamW]:
    """The product's and torch's optimizer over equal tensors, of two groups with settings of their own."""
    torch.manual_seed(0)
    values = [torch.randn(3, 5), torch.randn(1 << 16), torch.randn(1)]
    sets = [[nn.Parameter(value.clone()) for value in values] for _ in range(2)]
    own = {"is_matrices": False, "moments": SETTINGS.moments}
    groups = [
        [
            {"params": tensors[:2], "lr": 0.1, "weight_decay": 0.1, **own},
            {"params": tensors[2:], "lr": 0.02, "weight_decay": 0.0, **own},
        ]
        for tensors in sets
    ]
    return InnerOptimizer(groups[0], SETTINGS), torch.optim.AdamW(groups[1], betas=SETTINGS.betas, eps=SETTINGS.eps)


def test_a_tensor_without_a_gradient_stays() -> None:
    optimizer, _ = pair()
    first, second = optimizer.param_groups[0]["params"]
    before = first.detach().clone()
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert torch.equal(first, before) and step_count(optimizer) == 1
