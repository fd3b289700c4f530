"""The coefficients of the update kernels: pure numbers, computed in double precision, applied in fp32."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OuterStep:
    """One server update with the outer gradient Δ (a delta), momentum m, and buffer acc of deltas:

    acc += Δ ;  x −= from_delta · Δ                                           if not moves_momentum
    acc += Δ ;  m = keep · m + gain · acc ;  x −= from_momentum · m + from_delta · Δ ;  acc = 0      otherwise
    """

    keep: float
    gain: float
    from_momentum: float
    from_delta: float
    moves_momentum: bool = True

    @staticmethod
    def delayed_nesterov(lr_per_update: float, beta: float, buffer: int, moves_momentum: bool) -> OuterStep:
        """HALoS (arXiv 2506.04531): with lr = lr_per_update · N, every N-th update x −= lr · (β·m + Δ/N)."""
        return OuterStep(beta, 1 / buffer, lr_per_update * buffer * beta, lr_per_update, moves_momentum)

    @staticmethod
    def nesterov(lr: float, beta: float) -> OuterStep:
        """DiLoCo (arXiv 2311.08105): m = β·m + Δ ; x −= lr · (β·m + Δ)."""
        return OuterStep(beta, 1.0, lr * beta, lr)

    @staticmethod
    def region_momentum(weight: float, gain: float, decay: float) -> OuterStep:
        """m = k·m + (1−k)·Δ ; x −= w · (Δ + c·m)."""
        return OuterStep(decay, 1 - decay, weight * gain, weight)


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
    def rate(self) -> float:
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_scale(self) -> float:
        return (1 - self.beta2**self.step) ** -0.5

    @property
    def shrink(self) -> float:
        return self.lr * self.weight_decay
