"""Coefficients that kernels take beside tensors: of updates, computed in double precision and applied in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# (a, b, c) of each Newton–Schulz iteration σ ← aσ + bσ³ + cσ⁵ that `orthogonalize` makes, in order.
Coefficients = Sequence[tuple[float, float, float]]

# Muon's (Keller Jordan, https://kellerjordan.github.io/posts/muon, 2024): five times the same quintic. It does not
# converge to 1: its steep start brings every singular value of 0.01 and more into 0.68…1.14 instead.
QUINTIC: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5


@dataclass(frozen=True)
class OuterStep:
    """One server update with the outer gradient Δ (a delta), momentum m, and a buffer acc of deltas:

    acc += Δ ;  x −= from_delta · Δ                                           if not moves_momentum
    acc += Δ ;  m = keep · m + gain · acc ;  x −= from_momentum · m + from_delta · Δ ;  acc = 0      otherwise

    Every rule is such a step; `geotrain.outer.rules` has their coefficients and sources.
    """

    from_delta: float
    keep: float = 0.0
    gain: float = 0.0
    from_momentum: float = 0.0
    moves_momentum: bool = False


@dataclass(frozen=True)
class AdamStep:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) at step `step` ≥ 1, with g = grad_scale · gradient:

    m = β1·m + (1−β1)·g ;  v = β2·v + (1−β2)·g² ;  x = x − lr·wd·x − lr/(1−β1^t) · m / (√v / √(1−β2^t) + ε)
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Coefficients as the kernels take them, in this order.

        grad_scale, β1, 1−β1, β2, 1−β2, scale of √v, ε, rate of the direction, rate of the decay.
        """
        rate, root_scale = self.lr / (1 - self.beta1**self.step), (1 - self.beta2**self.step) ** -0.5
        betas = self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2
        return tuple(map(float, (self.grad_scale, *betas, root_scale, self.eps, rate, self.lr * self.weight_decay)))
