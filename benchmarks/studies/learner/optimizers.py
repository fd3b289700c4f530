"""The small model's inner optimizers on stacked fp32 vectors: the product's AdamW and Muon, after clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import cos, pi, sqrt

import torch
from torch import Tensor

from benchmarks.studies.learner.model import denormals_as_zero
from geotrain import kernels
from geotrain.optimizers.updates import normalize_rows
from geotrain.parameters.parameter_map import Parameter


@dataclass(frozen=True)
class InnerSettings:
    """AdamW as HALoS uses it: weight decay on matrices, cosine to a tenth after a warm-up, clipped gradients.

    muon: the momentum of Muon on hidden matrices, at AdamW's rate and weight decay; None: AdamW steps all.
    momentum_share: ν, where what is orthogonalized is ν·momentum + (1−ν)·gradient (Ma and Yarats, arXiv 1810.06801),
    so that a slow momentum leaves room for the newest gradient; MT-DAO (arXiv 2510.05361) has it in workers that
    seldom exchange. None: Nesterov's, which is the momentum's own decay. normalize_rows: as the product's.
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
    normalize_rows: bool = False

    def rate(self, progress: float) -> float:
        """Learning rate at that share of the run's samples."""
        if progress < self.warmup_share:
            return self.lr * progress / self.warmup_share
        x = min(1.0, (progress - self.warmup_share) / (1 - self.warmup_share))
        cosine = 0.5 * (1 + cos(pi * x))
        return self.lr * (self.final_share + (1 - self.final_share) * cosine)


@dataclass
class Stacked:
    """Weights and moments of several models, a model a row: fp32 [workers, parameters]; steps: taken by each, fp64.

    Of Muon's matrices m is the momentum, and v is unused.
    """

    weights: Tensor
    m: Tensor
    v: Tensor
    steps: Tensor

    @staticmethod
    def of(start: Tensor, workers: int) -> Stacked:
        """So many models that begin with `start`, 1-D."""
        weights = start.expand(workers, -1).clone()
        steps = torch.zeros(workers, dtype=torch.float64, device=start.device)
        return Stacked(weights, torch.zeros_like(weights), torch.zeros_like(weights), steps)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.weights, self.m, self.v, self.steps

    def rows(self, rows: Tensor) -> Stacked:
        """A copy of these rows."""
        return Stacked(*(tensor[rows] for tensor in self.tensors))

    def put(self, rows: Tensor, those: Stacked) -> None:
        for mine, theirs in zip(self.tensors, those.tensors, strict=True):
            mine[rows] = theirs


class StackedOptimizer:
    """Steps stacked models by the product's AdamW and Muon, in tensor operations: on a GPU all of a step is captured
    once, so that no rate and no count may be a number of the host. Each model's gradient is clipped by its norm."""

    def __init__(self, settings: InnerSettings, parameters: Sequence[Parameter]) -> None:
        self.settings = settings
        self._spans: list[tuple[slice, float]] = []  # of AdamW, and their weight decay
        self._matrices: dict[tuple[int, ...], list[slice]] = {}
        begin = 0
        # Neighbours that decay alike are one span.
        for (hidden, decays), run in groupby(parameters, lambda p: (_hidden(p, settings), p.decays)):
            first = begin
            for p in run:
                if hidden:
                    self._matrices.setdefault(p.shape, []).append(slice(begin, begin + p.numel))
                begin += p.numel
            if not hidden:
                self._spans.append((slice(first, begin), settings.weight_decay if decays else 0.0))

    @torch.no_grad()
    @denormals_as_zero()
    def step(self, models: Stacked, gradients: Tensor, rates: Tensor) -> None:
        """Step the models in place, and their gradients are scratch. rates: fp64 [workers]."""
        s = self.settings
        models.steps += 1
        count = models.steps
        gradients *= (s.clip / gradients.norm(dim=1, keepdim=True)).clamp_max(1.0)

        def column(x: Tensor) -> Tensor:
            return x.float()[:, None]

        root = (1 - s.betas[1] ** count).sqrt()
        pace, eps = column(rates * root / (1 - s.betas[0] ** count)), column(s.eps * root)
        for span, decay in self._spans:
            w, m, v, g = models.weights[:, span], models.m[:, span], models.v[:, span], gradients[:, span]
            m.lerp_(g, 1 - s.betas[0])
            v.lerp_(g.square(), 1 - s.betas[1])
            w *= column(1 - rates * decay)
            w -= pace * m / (v.sqrt() + eps)
        if s.muon is None:
            return
        share = s.muon if s.momentum_share is None else s.momentum_share
        for shape, spans in self._matrices.items():
            updates = []
            for span in spans:
                m, g = models.m[:, span], gradients[:, span]
                m.lerp_(g, 1 - s.muon)
                updates.append(g.lerp(m, share))
            flat = kernels.orthogonalize(torch.stack(updates).view(-1, *shape))
            flat = normalize_rows(flat) if s.normalize_rows else flat
            moves = flat.view(len(spans), len(gradients), -1).mul_(column(0.2 * sqrt(max(shape)) * rates))
            for span, move in zip(spans, moves, strict=True):
                w = models.weights[:, span]
                w *= column(1 - rates * s.weight_decay)
                w -= move


def _hidden(p: Parameter, settings: InnerSettings) -> bool:
    """Whether Muon takes the parameter: each matrix of a layer under its canonical name, so that q, k and v are
    three. No embedding, head or norm is among them."""
    return settings.muon is not None and p.layer is not None and len(p.shape) == 2
