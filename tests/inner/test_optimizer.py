"""The inner optimizer: AdamW beside torch's own; its steps are counted, and a resumed one goes on from there."""

from __future__ import annotations

import torch
from torch import nn

from geotrain.optimizers.inner_optimizer import InnerOptimizer, moments, set_step_count, step_count
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


def train(steps: int, *optimizers: torch.optim.Optimizer) -> None:
    for step in range(steps):
        for optimizer in optimizers:
            generator = torch.Generator().manual_seed(step)
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    tensor.grad = torch.randn(tensor.shape, generator=generator)
            optimizer.step()


def test_it_steps_as_torchs_adamw() -> None:
    ours, theirs = pair()
    train(20, ours, theirs)
    for group, torchs in zip(ours.param_groups, theirs.param_groups, strict=True):
        for tensor, other in zip(group["params"], torchs["params"], strict=True):
            torch.testing.assert_close(tensor, other, rtol=2e-5, atol=2e-6)
            for name, moment in moments(ours, tensor).items():
                torch.testing.assert_close(moment, theirs.state[other][name], rtol=1e-5, atol=1e-6)


def test_steps_are_counted_through_a_resume() -> None:
    optimizer, _ = pair()
    assert step_count(optimizer) == 0
    train(3, optimizer)
    assert step_count(optimizer) == 3
    set_step_count(optimizer, 7)
    assert step_count(optimizer) == 7
    train(2, optimizer)
    assert step_count(optimizer) == 9
    set_step_count(optimizer, 0)
    assert step_count(optimizer) == 0


def test_a_tensor_without_a_gradient_stays() -> None:
    optimizer, _ = pair()
    first, second = optimizer.param_groups[0]["params"]
    before = first.detach().clone()
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert torch.equal(first, before) and step_count(optimizer) == 1
