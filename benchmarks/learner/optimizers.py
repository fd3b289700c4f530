"""The small model's inner optimizers, on flat fp32 vectors: AdamW, and Muon on hidden matrices.

Stated in torch; where a C compiler is found, `compiled.py` computes the same faster, and this is its reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import dataclass
from math import cos, pi
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.learner.compiled import AdamWStep, MuonStep, adamw, library, muon
from geotrain.parameters.parameter_map import Parameter


@dataclass(frozen=True)
class InnerSettings:
    """AdamW as HALoS uses it: weight decay on matrices, cosine to a tenth after a warm-up, clipped gradients."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup_share: float = 0.05
    final_share: float = 0.1

    def rate(self, progress: float) -> float:
        """Learning rate at that share of the run's samples."""
        if progress < self.warmup_share:
            return self.lr * progress / self.warmup_share
        x = min(1.0, (progress - self.warmup_share) / (1 - self.warmup_share))
        cosine = 0.5 * (1 + cos(pi * x))
        return self.lr * (self.final_share + (1 - self.final_share) * cosine)


@dataclass(frozen=True)
class MuonSettings(InnerSettings):
    """Muon (Jordan et al., 2024) on hidden matrices, with AdamW's learning rate and weight decay: an update's root
    mean square is brought to AdamW's by 0.2·√max(rows, columns) (Liu et al., arXiv 2502.16982). All other parameters
    are AdamW's, at the same rate."""

    momentum: float = 0.95
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    iterations: int = 5
    scale: float = 0.2

    @property
    def momentum_share(self) -> float:
        """ν: what is orthogonalized is ν·momentum + (1−ν)·gradient. Nesterov's ν is the momentum's own decay."""
        return self.momentum


@dataclass(frozen=True)
class QuasiHyperbolicMuonSettings(MuonSettings):
    """Muon whose momentum has a share ν of its own (Ma and Yarats, arXiv 1810.06801), so that a slow momentum leaves
    room for the newest gradient; MT-DAO (arXiv 2510.05361) has it in workers that seldom exchange."""

    momentum_share: float = 0.9


class Optimizer(Protocol):
    """m, v: moments, 1-D fp32, as long as the weights. steps: taken so far."""

    m: Tensor
    v: Tensor
    steps: int

    def step(self, weights: Tensor, gradient: Tensor, lr: float) -> None:
        """Moves the weights in place; the gradient may be overwritten."""


def optimizer_of(settings: InnerSettings, decays: Tensor, parameters: Sequence[Parameter]) -> Optimizer:
    """The settings' optimizer for a flat vector of these parameters. decays: 1 where weight decay applies."""
    if isinstance(settings, MuonSettings):
        return FlatMuon(settings, decays, hidden_matrices(parameters))
    return FlatAdamW(settings, decays)


def hidden_matrices(parameters: Sequence[Parameter]) -> tuple[tuple[int, int, int], ...]:
    """(first element, rows, columns) in the flat vector of what Muon orthogonalizes: each matrix of a layer, under
    its canonical name, so that q, k and v are three, gate and up two. No embedding, head or norm is among them."""
    found, offset = [], 0
    for p in parameters:
        if p.layer is not None and len(p.shape) == 2:
            found.append((offset, *p.shape))
        offset += p.numel
    return tuple(found)


class FlatAdamW:
    """AdamW on one flat vector, with global-norm clipping. An exchange of weights leaves its state as it is."""

    def __init__(self, settings: InnerSettings, decays: Tensor, compiled: bool = True) -> None:
        """decays: 1 where weight decay applies. The optimizer's state is on the same device."""
        self.settings, self.decays = settings, decays
        self._compiled = compiled and decays.device.type == "cpu"
        self.m, self.v, self.steps = torch.zeros_like(decays), torch.zeros_like(decays), 0

    @property
    def _loaded(self) -> CDLL | None:
        """Not kept, so that the optimizer can be pickled."""
        return library() if self._compiled else None

    @torch.no_grad()
    def step(self, weights: Tensor, gradient: Tensor, lr: float) -> None:
        self.steps += 1
        coefficients = self._coefficients(lr)
        if (loaded := self._loaded) is not None:
            adamw(loaded, (weights, gradient, self.m, self.v, self.decays), coefficients)
            return
        self._clip(gradient)
        self._adamw(slice(None), weights, gradient, coefficients)

    def _coefficients(self, lr: float) -> AdamWStep:
        s = self.settings
        rate, scale = lr / (1 - s.betas[0] ** self.steps), 1 / (1 - s.betas[1] ** self.steps)
        return AdamWStep(s.clip, *s.betas, s.eps, rate, scale, lr * s.weight_decay)

    def _clip(self, gradient: Tensor) -> None:
        norm = float(gradient.norm())
        if norm > self.settings.clip:
            gradient.mul_(self.settings.clip / norm)

    def _adamw(self, part: slice, weights: Tensor, gradient: Tensor, c: AdamWStep) -> None:
        x, g, m, v, decays = (t[part] for t in (weights, gradient, self.m, self.v, self.decays))
        m.lerp_(g, 1 - c.keep1)
        v.mul_(c.keep2).addcmul_(g, g, value=1 - c.keep2)
        x.addcmul_(x, decays, value=-c.shrink)
        x.addcdiv_(m, (v * c.scale2).sqrt_().add_(c.eps), value=-c.rate)


class FlatMuon(FlatAdamW):
    """Muon on the matrices of one flat vector, AdamW on what lies between them; the gradient is clipped by the norm
    of all of it. A matrix's momentum is in m; v is AdamW's alone."""

    settings: MuonSettings

    def __init__(
        self,
        settings: MuonSettings,
        decays: Tensor,
        matrices: Sequence[tuple[int, int, int]],
        compiled: bool = True,
    ) -> None:
        """matrices: (first element, rows, columns), in order. All of a matrix decays."""
        super().__init__(settings, decays, compiled)
        self.matrices = tuple(matrices)
        self._places = torch.tensor(self.matrices, dtype=torch.int64)

    @torch.no_grad()
    def step(self, weights: Tensor, gradient: Tensor, lr: float) -> None:
        s = self.settings
        self.steps += 1
        adam = self._coefficients(lr)
        if (loaded := self._loaded) is not None:
            of = MuonStep(
                s.momentum, s.momentum_share, lr * s.scale, lr * s.weight_decay, EPS, *s.coefficients, s.iterations
            )
            muon(loaded, (weights, gradient, self.m, self.v, self.decays), adam, of, self._places)
            return
        self._clip(gradient)
        done = 0
        for begin, rows, columns in (*self.matrices, (len(weights), 0, 0)):
            self._adamw(slice(done, begin), weights, gradient, adam)
            done = begin + rows * columns
            x, g, m = (t[begin:done].view(rows, columns) for t in (weights, gradient, self.m))
            if not rows:
                return
            m.lerp_(g, 1 - s.momentum)
            update = orthogonalized(g.lerp(m, s.momentum_share), s.coefficients, s.iterations)
            x.mul_(1 - lr * s.weight_decay).sub_(update, alpha=lr * s.scale * max(rows, columns) ** 0.5)


EPS = 1e-7  # beside a matrix's norm: nothing comes of nothing


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], iterations: int) -> Tensor:
    """About UVᵀ of the matrix's UΣVᵀ (2-D): X ← aX + b(XXᵀ)X + c(XXᵀ)²X, from matrix/‖matrix‖ (Frobenius). With
    Jordan's coefficients five iterations bring singular values between 0.01 and 1 to between 0.68 and 1.14, no closer
    to 1."""
    a, b, c = coefficients
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T) / (matrix.norm() + EPS)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T
