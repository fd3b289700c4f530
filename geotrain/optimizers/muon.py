"""Muon for hidden matrices and AdamW for the rest, as one optimizer over whatever tensors DeepSpeed gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from geotrain.config import Architecture
from geotrain.optimizers.updates import (
    AdamWUpdate,
    GroupUpdate,
    MatrixUpdate,
    OwnedMatrix,
    Step,
    TensorRanks,
    moments,
)
from geotrain.parallelism.local_parameters import LocalParameter
from geotrain.parallelism.optimizer_settings import MuonSettings
from geotrain.parallelism.whole_matrices import Packing, local_matrices
from geotrain.parameters.parameter_map import canonical_parameters


class Muon(torch.optim.Optimizer):
    """Groups with `is_matrices` are stepped by `MatrixUpdate`, others by `AdamWUpdate`.

    DeepSpeed replaces the parameters of a group by its fp32 partition. Which matrices lie in that is known only
    afterwards: `bind` must come before the first step. As apex's Adam, it counts its steps in each group's `step`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], settings: MuonSettings) -> None:
        """groups: with their own `lr` and `weight_decay`."""
        super().__init__(list(groups), {"betas": settings.betas, "eps": settings.eps, "step": 0})
        self.settings = settings
        self._updates: dict[int, MatrixUpdate] = {}  # by the id of the optimizer's tensor

    def bind(self, matrices: Iterable[tuple[Tensor, OwnedMatrix]], ranks: TensorRanks | None) -> None:
        """matrices: each with that of the optimizer's tensors that it lies in."""
        of_tensor: dict[int, list[OwnedMatrix]] = {}
        for owner, matrix in matrices:
            of_tensor.setdefault(id(owner), []).append(matrix)
        for group in self.param_groups:
            if group["is_matrices"]:
                for tensor in group["params"]:
                    mine = of_tensor.get(id(tensor), [])
                    self._updates[id(tensor)] = MatrixUpdate(group, self.settings, mine, ranks)

    def update(self, group: dict[str, Any], tensor: Tensor) -> GroupUpdate:
        """How one of the group's tensors is stepped."""
        return self._updates[id(tensor)] if group["is_matrices"] else AdamWUpdate(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step of every tensor that has a gradient. closure: not supported, and not called."""
        for group in self.param_groups:
            group["step"] += 1
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                flat = {name: moment.view(-1) for name, moment in moments(self, tensor).items()}
                step = Step(group["lr"], group["step"])
                self.update(group, tensor)(tensor.data.view(-1), flat, tensor.grad.view(-1), step)


def owned_matrices(
    placed: Iterable[tuple[nn.Parameter, LocalParameter]],
    architecture: Architecture,
    optimizer: Any,
    partitioned: bool,
) -> list[tuple[Tensor, OwnedMatrix]]:
    """The matrices that this rank's optimizer steps, each with the optimizer's tensor that holds it.

    optimizer: the engine's, which has linked parameters to its partitions. partitioned: whether there are partitions.
    """
    columns = {p.name: p.shape[-1] for p in canonical_parameters(architecture)}
    found: list[tuple[Tensor, OwnedMatrix]] = []
    for parameter, place in placed:
        if not place.is_hidden_matrix:
            continue
        owner, offset = parameter, 0
        if partitioned:
            link: Any = parameter._hp_mapping  # type: ignore[attr-defined]
            if link is None:
                continue
            (owner,) = optimizer.param_groups[link.param_group_index]["params"]
            offset = link.hp_fragment_address.start
            assert link.hp_fragment_address.numel == parameter.numel(), f"{place.name} is cut by a shard's boundary"
        found += [(owner, OwnedMatrix(matrix, offset)) for matrix in local_matrices(place, columns)]
    return found


def with_gaps(parameters: Sequence[nn.Parameter], packing: Packing, model: nn.Module) -> list[nn.Parameter]:
    """The parameters in the packing's order, with parameters that fill its gaps; DeepSpeed cuts their sequence into
    equal parts. The model gets the fillers as well, since DeepSpeed looks up the names of all that it flattens; no
    forward uses them."""
    like, ordered = parameters[0], []
    for entry in packing.sequence:
        if entry >= 0:
            ordered.append(parameters[entry])
            continue
        filler = nn.Parameter(torch.zeros(-entry, dtype=like.dtype, device=like.device))
        filler.__dict__.update(like.__dict__)  # by its attributes DeepSpeed knows an expert's parameter
        model.register_parameter(f"shard_gap_{len(model._parameters)}", filler)
        ordered.append(filler)
    return ordered
