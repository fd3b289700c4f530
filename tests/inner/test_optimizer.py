"""How many steps an optimizer took, wherever it counts them; a resumed one goes on from there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from geotrain.optimizers.updates import AdamWUpdate, set_step_count, step_count


class CountsAtTheLastTensor(torch.optim.Optimizer):
    """As DeepSpeed's FusedAdam: `group["step"]` stays, and only the tensor that comes last counts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group.setdefault("step", 0)
            for tensor in group["params"]:
                state = self.state[tensor]
                if not state:
                    state.update(
                        {"step": group["step"]} | {name: torch.zeros_like(tensor) for name in AdamWUpdate.moments}
                    )
            state["step"] += 1


class CountsAtTheGroup(CountsAtTheLastTensor):
    """As apex's FusedAdam."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for tensor in group["params"]:
                self.state[tensor].update({name: torch.zeros_like(tensor) for name in AdamWUpdate.moments})


@pytest.mark.parametrize("kind", [torch.optim.AdamW, CountsAtTheLastTensor, CountsAtTheGroup])
def test_steps_are_counted_through_a_resume(kind):
    tensors = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    optimizer = kind([{"params": tensors[:3]}, {"params": tensors[3:]}])
    assert step_count(optimizer) == 0

    def train(steps: int) -> None:
        for _ in range(steps):
            for tensor in tensors:
                tensor.grad = torch.ones_like(tensor)
            optimizer.step()

    train(3)
    assert step_count(optimizer) == 3
    set_step_count(optimizer, 7)
    assert step_count(optimizer) == 7
    train(2)
    assert step_count(optimizer) == 9
    set_step_count(optimizer, 0)
    assert step_count(optimizer) == 0
