"""The small model's inner optimizers on flat fp32 vectors: the product's AdamW and Muon, after clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import cos, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from geotrain.optimizers.updates import AdamWUpdate, MatrixUpdate, OwnedMatrix, Step
from geotrain.parallelism.optimizer_settings import MuonSettings
from geotrain.parallelism.whole_matrices import LocalMatrix
from geotrain.parameters.parameter_map import Parameter


@dataclass(frozen=True)
class InnerSettings:
    """AdamW as HALoS uses it: weight decay on matrices, cosine to a tenth after a warm-up, clipped gradients.

    muon: the momentum of Muon on hidden matrices, at AdamW's rate and weight decay; None: AdamW steps all.
    momentum_share: ν, where what is orthogonalized is ν·momentum + (1−ν)·gradient (Ma and Yarats, arXiv 1810.06801),
    so that a slow momentum leaves room for the newest gradient; MT-DAO (arXiv 2510.05361) has it in workers that
    seldom exchange. None: Nesterov's, which is the momentum's own decay.
    """

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup_share: float = 0.05
    final_share: float = 0.1
    muon: float | None = None
    momentum_share: float | None = None

    def rate(self, progress: float) -> float:
        """Learning rate at that share of the run's samples."""
        if progress < self.warmup_share:
            return self.lr * progress / self.warmup_share
        x = min(1.0, (progress - self.warmup_share) / (1 - self.warmup_share))
        cosine = 0.5 * (1 + cos(pi * x))
        return self.lr * (self.final_share + (1 - self.final_share) * cosine)


class QuasiHyperbolicUpdate(MatrixUpdate):
    """Muon whose momentum has a share of its own, in place of Nesterov's."""

    def __init__(self, share: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._share = share

    def _advance(self, w: Tensor, m: Tensor, g: Tensor, rate: float, place: LocalMatrix) -> None:
        m.lerp_(g, 1 - self._settings.momentum)
        direction, longest = self._orthogonalized(g.lerp(m, self._share), place)
        w.mul_(1 - rate * self._group["weight_decay"]).sub_(direction, alpha=rate * 0.2 * sqrt(longest))


class FlatOptimizer:
    """Steps one flat vector of parameters; the gradient is clipped by the norm of all of it.

    m, v: AdamW's moments, 1-D, as long as the weights; of Muon's matrices m is the momentum, and v is unused. steps:
    taken so far. An exchange of weights leaves all three as they are.
    """

    def __init__(self, settings: InnerSettings, parameters: Sequence[Parameter]) -> None:
        numel = sum(p.numel for p in parameters)
        self.clip, self.m, self.v, self.steps = settings.clip, torch.zeros(numel), torch.zeros(numel), 0
        group = {"betas": settings.betas, "eps": settings.eps, "weight_decay": settings.weight_decay}
        self._spans: list[tuple[slice, AdamWUpdate]] = []
        matrices, begin = [], 0
        # Neighbours that decay alike are one span: each call of a kernel costs some microseconds.
        for (hidden, decays), run in groupby(parameters, lambda p: (_hidden(p, settings), p.decays)):
            first = begin
            for p in run:
                if hidden:
                    place = LocalMatrix(((0, p.numel),), *p.shape, None)
                    matrices.append(OwnedMatrix(place, begin))
                begin += p.numel
            if not hidden:
                update = AdamWUpdate(group if decays else group | {"weight_decay": 0.0})
                self._spans.append((slice(first, begin), update))
        self._muon: MatrixUpdate | None = None
        if settings.muon is not None:
            arguments = group, MuonSettings(momentum=settings.muon), matrices, None
            share = settings.momentum_share
            self._muon = MatrixUpdate(*arguments) if share is None else QuasiHyperbolicUpdate(share, *arguments)

    @torch.no_grad()
    def step(self, weights: Tensor, gradient: Tensor, lr: float) -> None:
        """Move the weights in place."""
        self.steps += 1
        norm = float(gradient.norm())
        step = Step(lr, self.steps, self.clip / norm if norm > self.clip else 1.0)
        for span, update in self._spans:
            state = {"exp_avg": self.m[span], "exp_avg_sq": self.v[span]}
            update(weights[span], state, gradient[span], step)
        if self._muon:
            self._muon(weights, {"momentum_buffer": self.m}, gradient, step)


def _hidden(p: Parameter, settings: InnerSettings) -> bool:
    """Whether Muon takes the parameter: each matrix of a layer under its canonical name, so that q, k and v are
    three. No embedding, head or norm is among them."""
    return settings.muon is not None and p.layer is not None and len(p.shape) == 2
