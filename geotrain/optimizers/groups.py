"""Parameter groups: parameters that the optimizer steps alike, cut into buckets that are reduced together."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import nn

from geotrain.optimizers.updates import MOMENTUM
from geotrain.parallelism.local_parameters import LocalParameter
from geotrain.parallelism.optimizer_settings import MuonSettings, OptimizerSettings


def parameter_groups(
    placed: Iterable[tuple[nn.Parameter, LocalParameter]],
    settings: OptimizerSettings,
    experts: str,
    bucket: int | None = None,
    late: Container[str] = (),
) -> list[dict[str, Any]]:
    """Divide this rank's parameters into the optimizer's groups, none of them empty.

    Each group has its `lr`, `weight_decay` and the names of its `moments`. Apart are: norms, which do not decay; what
    is marked `sums_over_tp`, since each tensor rank sees only a part of the tokens or heads, so that gradients must
    be summed; experts that data-parallel ranks divide, marked `moe` and with the name of the ranks that have the
    same; with Muon, at the end, hidden matrices (`is_matrices`).

    experts: DeepSpeed's name of those ranks. bucket: elements of a group that is reduced as one, the matrices'
    apart; None: groups are not cut. late: names of parameters whose gradients other ranks of the replica complete, as
    they do those that are `sums_over_tp`.
    """
    muon = isinstance(settings, MuonSettings)
    groups: dict[tuple[bool, ...], list[dict[str, Any]]] = {}
    room: dict[tuple[bool, ...], int] = {}
    for parameter, place in placed:
        if place.untrained:
            continue
        matrix, waits = muon and place.is_hidden_matrix, place.sums_over_tp or place.name in late
        key = (matrix, place.expert, not place.decays, place.sums_over_tp, waits)
        lr, decay = settings.lr if matrix else settings.rate_of_the_rest, settings.weight_decay * place.decays
        marks: dict[str, Any] = {"sums_over_tp": place.sums_over_tp, "is_matrices": matrix, "late": waits}
        marks["moments"] = (MOMENTUM,) if matrix else settings.moments
        if place.expert:
            marks |= {"moe": True, "name": experts}
        of_kind = groups.setdefault(key, [])
        if not of_kind or (bucket is not None and not matrix and room[key] <= 0):
            of_kind.append({"params": [], "lr": lr, "weight_decay": decay, **marks})
            room[key] = bucket or 0
        of_kind[-1]["params"].append(parameter)
        room[key] -= place.numel
    return [group for _, of_kind in sorted(groups.items(), key=lambda item: item[0]) for group in of_kind]
