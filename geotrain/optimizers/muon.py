"""Muon's matrices in what DeepSpeed makes of the parameters: which this rank owns, and shards that cut none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from geotrain.config import Architecture
from geotrain.optimizers.updates import OwnedMatrix
from geotrain.parallelism.local_parameters import LocalParameter
from geotrain.parallelism.whole_matrices import Packing, local_matrices
from geotrain.parameters.parameter_map import canonical_parameters


def owned_matrices(
    placed: Iterable[tuple[nn.Parameter, LocalParameter]],
    architecture: Architecture,
    optimizer: Any,
    partitioned: bool,
) -> list[tuple[Tensor, OwnedMatrix]]:
    """Find the matrices that this rank's optimizer steps, each with the optimizer's tensor that holds it.

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
    """Order parameters as packed, with parameters that fill the gaps; DeepSpeed cuts the sequence into equal shards.

    The model gets the fillers as well, since DeepSpeed looks up the names of all that it flattens; no forward uses
    them.
    """
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
