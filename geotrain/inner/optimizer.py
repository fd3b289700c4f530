"""The inner AdamW: the fastest that is present, and its state by parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from geotrain.inner import platform
from geotrain.sharing.mapping import LocalParameter

MOMENTS = ("exp_avg", "exp_avg_sq")


def parameter_groups(
    placed: Iterable[tuple[nn.Parameter, LocalParameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Groups for the optimizer: matrices, which decay; norms; norms whose gradient must be summed over tensor ranks.

    The last carry `sums_over_tp`. Empty groups are left out.
    """
    groups = [
        {"params": [], "weight_decay": weight_decay, "sums_over_tp": False},
        {"params": [], "weight_decay": 0.0, "sums_over_tp": False},
        {"params": [], "weight_decay": 0.0, "sums_over_tp": True},
    ]
    for parameter, place in placed:
        groups[0 if place.decays else 2 if place.sums_over_tp else 1]["params"].append(parameter)  # type: ignore[attr-defined]
    return [group for group in groups if group["params"]]


def build_adamw(groups: list[dict[str, Any]], settings: dict[str, Any], on_cpu: bool) -> torch.optim.Optimizer:
    """NVIDIA apex's FusedAdam, DeepSpeed's, or torch's fused AdamW: the first that works.

    on_cpu: the masters are in host memory, where only torch's works.
    """
    if platform.HAS_CUDA and not on_cpu:
        try:
            from apex.optimizers import FusedAdam

            return FusedAdam(groups, adam_w_mode=True, **settings)
        except ImportError:  # not installed, or PyPI's unrelated `apex`
            pass
        try:
            from deepspeed.ops.adam import FusedAdam

            return FusedAdam(groups, adam_w_mode=True, **settings)
        except Exception:  # it compiles its kernel here, which can fail in many ways
            pass
    return torch.optim.AdamW(groups, fused=True, **settings)


def moments(optimizer: torch.optim.Optimizer, master: Tensor) -> dict[str, Tensor]:
    """The moments of one of the optimizer's own tensors; zeros are put in place before the first step."""
    state = optimizer.state[master]
    for name in MOMENTS:
        if name not in state:
            state[name] = torch.zeros_like(master)
    return {name: state[name] for name in MOMENTS}


def step_count(optimizer: torch.optim.Optimizer) -> int:
    """How many steps the optimizer took. torch's counts at each tensor, DeepSpeed's at one tensor of a group, apex's
    at the group: a count that does not go on is the smaller."""
    counts = [group.get("step", 0) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        counts += [optimizer.state.get(tensor, {}).get("step", 0) for tensor in group["params"]]
    return max(map(int, counts), default=0)


def set_step_count(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set the count that bias correction uses; apex keeps it per group, torch and DeepSpeed per tensor."""
    for group in optimizer.param_groups:
        fused = not isinstance(optimizer, torch.optim.AdamW)
        if fused:
            group["step"] = steps
        for tensor in group["params"]:
            moments(optimizer, tensor)  # an optimizer takes a state with a step count for complete
            count = torch.tensor(float(steps), device=tensor.device)
            optimizer.state[tensor]["step"] = steps if fused else count
