"""Which optimizer a rank takes; how many steps it took, wherever it counts them: a resumed one goes on from there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from geotrain.inner.build import build_adamw
from geotrain.inner.runtime import platform
from geotrain.optimizers.updates import AdamWUpdate, set_step_count, step_count
from geotrain.parallelism.optimizer_settings import AdamWSettings


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


class WithoutExtensions(torch.optim.Optimizer):
    """As apex's FusedAdam where apex was installed without its CUDA extensions."""

    def __init__(self, params: Any, **_: Any) -> None:
        super().__init__(params, {"lr": 7.0, "left_behind": True})
        raise RuntimeError("apex.optimizers.FusedAdam requires cuda extensions")


class Works(torch.optim.AdamW):
    """As DeepSpeed's."""

    def __init__(self, params: Any, adam_w_mode: bool, **options: Any) -> None:
        assert adam_w_mode
        super().__init__(params, **options)


@pytest.mark.parametrize(("deepspeeds", "taken"), [(Works, Works), (WithoutExtensions, torch.optim.AdamW)])
def test_a_fused_optimizer_that_does_not_work_makes_room_for_the_next(monkeypatch, deepspeeds, taken):
    monkeypatch.setattr(platform, "HAS_CUDA", True)
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", SimpleNamespace(FusedAdam=WithoutExtensions))
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", SimpleNamespace(FusedAdam=deepspeeds))
    settings = AdamWSettings(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    group = {"params": [nn.Parameter(torch.ones(3))], "lr": 0.1, "weight_decay": 0.0, "sums_over_tp": True}
    made = build_adamw([group], settings, on_cpu=False)
    assert type(made) is taken
    assert made.param_groups[0]["lr"] == 0.1 and made.param_groups[0]["sums_over_tp"]
    assert "left_behind" not in made.param_groups[0]
