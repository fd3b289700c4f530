"""The inner optimizer of one rank, and the state that it keeps: moments by tensor, steps by parameter group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from geotrain.optimizers.updates import AdamWUpdate, GroupUpdate, MatrixUpdate, OwnedMatrix, Step, TensorRanks
from geotrain.parallelism.optimizer_settings import AdamWSettings, MuonSettings


class InnerOptimizer(torch.optim.Optimizer):
    """Steps groups with `is_matrices` by Muon (`MatrixUpdate`) and all others by AdamW (`AdamWUpdate`).

    DeepSpeed replaces the parameters of a group by its fp32 partition. Which matrices lie in that is known only
    afterwards: with Muon `bind` must come before the first step. Steps are counted in each group's `step`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], settings: AdamWSettings) -> None:
        """Make it over groups that `parameter_groups` made."""
        super().__init__(list(groups), {"betas": settings.betas, "eps": settings.eps, "step": 0})
        self.settings = settings
        self._matrices: dict[int, MatrixUpdate] = {}  # by the id of the optimizer's tensor

    def bind(self, matrices: Iterable[tuple[Tensor, OwnedMatrix]], ranks: TensorRanks | None) -> None:
        """Set for Muon which matrices lie in which of the optimizer's tensors."""
        assert isinstance(self.settings, MuonSettings)
        of_tensor: dict[int, list[OwnedMatrix]] = {}
        for owner, matrix in matrices:
            of_tensor.setdefault(id(owner), []).append(matrix)
        for group in self.param_groups:
            if group["is_matrices"]:
                for tensor in group["params"]:
                    mine = of_tensor.get(id(tensor), [])
                    self._matrices[id(tensor)] = MatrixUpdate(group, self.settings, mine, ranks)

    def update(self, group: dict[str, Any], tensor: Tensor) -> GroupUpdate:
        """The arithmetic by which one of the group's tensors is stepped."""
        return self._matrices[id(tensor)] if group["is_matrices"] else AdamWUpdate(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step every tensor that has a gradient. closure: not supported, and not called."""
        for group in self.param_groups:
            group["step"] += 1
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                flat = {name: moment.view(-1) for name, moment in moments(self, tensor).items()}
                step = Step(group["lr"], group["step"])
                self.update(group, tensor)(tensor.data.view(-1), flat, tensor.grad.reshape(-1), step)


def moments(optimizer: torch.optim.Optimizer, tensor: Tensor) -> dict[str, Tensor]:
    """The moments of one of the tensors that the optimizer steps, by name.

    Optimizers make them at their first step. Before it, this puts zeros in place, which is what they would begin
    with. A tensor that no gradient trains is in no group, and has none.
    """
    groups = (group for group in optimizer.param_groups if any(tensor is own for own in group["params"]))
    names = next((group["moments"] for group in groups), ())
    state = optimizer.state[tensor]
    for name in names:
        if name not in state:
            state[name] = torch.zeros_like(tensor)
    return {name: state[name] for name in names}


def step_count(optimizer: torch.optim.Optimizer) -> int:
    """Steps that the optimizer has taken."""
    return max(group.get("step", 0) for group in optimizer.param_groups)


def set_step_count(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set the step count from which AdamW's bias correction goes on."""
    for group in optimizer.param_groups:
        group["step"] = steps
