"""Steps a flat tensor, with one signature: AdamW element by element, Muon matrix by matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from geotrain import kernels
from geotrain.kernels import AdamStep
from geotrain.parallelism.optimizer_settings import MuonSettings
from geotrain.parallelism.whole_matrices import LocalMatrix

AT_ONCE = 1 << 26  # elements of matrices that are orthogonalized together: bounds the scratch, unless one is larger
MOMENTUM = "momentum_buffer"  # name of Muon's state of an element
_TINY = 1e-8  # least norm of a row by which it is divided
_RMS = 0.2  # of an update at a rate of 1, as AdamW's has in practice (Moonlight, arXiv 2502.16982, section 2.2)


@dataclass(frozen=True)
class Step:
    """Scalars of one optimizer step.

    rate: the learning rate. number: counted from 1. scale: factor of the gradient. commit: whether weights and state
    change; otherwise only the output does. look_ahead: whether the output gets what one more step with the same
    gradient would make of the weights, instead of the weights.
    """

    rate: float
    number: int
    scale: float = 1.0
    commit: bool = True
    look_ahead: bool = False


class AdamWUpdate:
    """Steps elements by AdamW, with the settings that a group of the optimizer holds now."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._group = group

    def __call__(
        self, weights: Tensor, state: Mapping[str, Tensor], gradient: Tensor, step: Step, out: Tensor | None = None
    ) -> None:
        """Step weights and state in place. All tensors are 1-D, contiguous and of one length.

        weights and state: fp32. gradient and out: fp32 or bf16; `out` may be `gradient`, and gets the new weights, or
        those one step ahead (`Step`).
        """
        group = self._group
        beta1, beta2 = group["betas"]
        this = AdamStep(step.rate, beta1, beta2, group["eps"], group["weight_decay"], step.number, step.scale)
        ahead = replace(this, step=step.number + 1) if step.look_ahead else None
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        kernels.adam_step(weights, mean, square, gradient, this, out=out, look_ahead=ahead, commit=step.commit)


@dataclass(frozen=True)
class OwnedMatrix:
    """A matrix in one of the optimizer's tensors. offset: where its local parameter begins there."""

    place: LocalMatrix
    offset: int

    @property
    def segments(self) -> Iterator[tuple[int, int]]:
        """List [begin, end) of its rows in the optimizer's tensor."""
        return ((self.offset + begin, self.offset + end) for begin, end in self.place.segments)


@dataclass(frozen=True)
class TensorRanks:
    """The tensor ranks, each of which holds a part of the same matrices.

    group: for Muon alone: with ACCO another thread uses it than the one that computes, and two threads must not use
    one group at once.
    """

    group: dist.ProcessGroup
    rank: int
    size: int


class MatrixUpdate:
    """Steps the matrices in one of the optimizer's tensors by Muon.

    With gradient G, momentum M, and r × c the shape of what is orthogonalized:

    M = μ·M + (1 − μ)·G ;  U = (1 − μ)·G + μ·M, or M without Nesterov ;  W −= rate·(decay·W + 0.2·√max(r, c)·O(U))

    where O is the Newton–Schulz iteration of `kernels.orthogonalize`.
    """

    def __init__(
        self,
        group: Mapping[str, Any],
        settings: MuonSettings,
        matrices: Iterable[OwnedMatrix],
        ranks: TensorRanks | None,
    ) -> None:
        """Bind the matrices. ranks: None where each rank's part of a matrix counts as one, or is all of it."""
        self._group, self._settings, self._ranks = group, settings, ranks
        self._coefficients = (settings.ns_coefficients,) * settings.ns_steps
        self._batches = list(_batches(sorted(matrices, key=lambda matrix: next(matrix.segments))))

    def __call__(
        self, weights: Tensor, state: Mapping[str, Tensor], gradient: Tensor, step: Step, out: Tensor | None = None
    ) -> None:
        """Step the matrices. Arguments are those of `AdamWUpdate`."""
        momentum = state[MOMENTUM]
        for batch in self._batches:
            g = _gather(gradient, batch).mul_(step.scale)
            m, w = _gather(momentum, batch), _gather(weights, batch)
            self._advance(w, m, g, step.rate, batch[0].place)
            if step.commit:
                _scatter(m, momentum, batch)
                _scatter(w, weights, batch)
            if step.look_ahead:
                self._advance(w, m, g, step.rate, batch[0].place)
            if out is not None:
                _scatter(w, out, batch)

    def _advance(self, w: Tensor, m: Tensor, g: Tensor, rate: float, place: LocalMatrix) -> None:
        """Make one step, in place on weights and momentum; all fp32 [batch, rows, columns]."""
        decay = self._settings.momentum
        m.lerp_(g, 1 - decay)
        update = g.lerp(m, decay) if self._settings.nesterov else m
        direction, longest = self._orthogonalized(update, place)
        w.mul_(1 - rate * self._group["weight_decay"])
        w.add_(direction, alpha=-rate * _RMS * sqrt(longest))

    def _orthogonalized(self, update: Tensor, place: LocalMatrix) -> tuple[Tensor, int]:
        """Compute this rank's part of the directions, and the longer side of the matrices that were
        orthogonalized."""
        ranks = self._ranks
        if ranks is None or place.split is None:
            return self._direction(update), max(place.rows, place.columns)
        parts = [torch.empty_like(update) for _ in range(ranks.size)]
        dist.all_gather(parts, update.contiguous(), group=ranks.group)
        along = 1 if place.split == "rows" else 2
        whole = self._direction(torch.cat(parts, along))
        return whole.chunk(ranks.size, along)[ranks.rank], max(whole.shape[1:])

    def _direction(self, matrices: Tensor) -> Tensor:
        found = kernels.orthogonalize(matrices, self._coefficients)
        return normalize_rows(found) if self._settings.normalize_rows else found


def normalize_rows(matrices: Tensor) -> Tensor:
    """Give all rows of each matrix [batch, rows, columns] the root mean square of their norms, in place, so that the
    matrix keeps its own norm."""
    norms = matrices.norm(dim=-1, keepdim=True)
    return matrices.mul_(norms.square().mean(1, keepdim=True).sqrt() / norms.clamp(min=_TINY))


GroupUpdate = AdamWUpdate | MatrixUpdate


def _batches(matrices: Iterable[OwnedMatrix]) -> Iterator[list[OwnedMatrix]]:
    """Batch the matrices, those of one shape together.

    Tensor ranks make the same batches in the same order, since their parts have the same sizes.
    """
    by_shape: dict[tuple[int, int, str | None], list[OwnedMatrix]] = {}
    for matrix in matrices:
        by_shape.setdefault((matrix.place.rows, matrix.place.columns, matrix.place.split), []).append(matrix)
    for alike in by_shape.values():
        width = max(1, AT_ONCE // alike[0].place.numel)
        for first in range(0, len(alike), width):
            yield alike[first : first + width]


def _gather(flat: Tensor, matrices: Sequence[OwnedMatrix]) -> Tensor:
    """Copy matrices out of `flat`, in fp32 [batch, rows, columns]."""
    parts = [flat[low:high] for matrix in matrices for low, high in matrix.segments]
    place = matrices[0].place
    return torch.cat(parts).float().view(len(matrices), place.rows, place.columns)


def _scatter(values: Tensor, flat: Tensor, matrices: Sequence[OwnedMatrix]) -> None:
    """Copy matrices [batch, rows, columns] back into `flat`, whatever its type."""
    spans = [span for matrix in matrices for span in matrix.segments]
    parts = values.reshape(-1).split([high - low for low, high in spans])
    for (low, high), part in zip(spans, parts, strict=True):
        flat[low:high] = part
