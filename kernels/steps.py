"""What kernels are told beside tensors: coefficients of updates, computed in double precision and applied in fp32,
and what the search of placements works on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# (a, b, c) of each Newton–Schulz iteration σ ← aσ + bσ³ + cσ⁵ that `orthogonalize` makes, in order.
Coefficients = Sequence[tuple[float, float, float]]

# Muon's (Keller Jordan, https://kellerjordan.github.io/posts/muon, 2024): five times the same quintic. It does not
# converge to 1: its steep start brings every singular value of 0.01 and more into 0.68…1.14 instead.
QUINTIC: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5

# Of `anneal`, as in csrc/anneal.c: kinds of turns, and how many are a round of them; turns between two temperatures;
# the most that the temperature adds; exponentially distributed numbers to draw from.
ONE_DEVICE, TAILS, RUNS, REORDER = range(4)
TURNS, AT_ONE_HEAT, MOST_HEAT = 32, 64, 1 << 26
LUCK = tuple(-math.log((i + 0.5) / 4096) for i in range(4096))


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


@dataclass(frozen=True)
class Annealing:
    """How a table of stages × replicas of devices is annealed (`geotrain.plan.placement.cost`), in `steps` turns.

    heat, cold: the first and last temperature, in seconds of cost. seed: of the turns. dear_s: links of more count as
    this. What is annealed is the cost + 2^−shift · (the sum over stages of their dearest rows + the sum over devices
    of compute), so that not only the dearest of all pulls.
    """

    stages: int
    replicas: int
    steps: int
    heat: float
    cold: float
    seed: int
    dear_s: float
    shift: int

    @property
    def cool(self) -> float:
        """The factor that AT_ONE_HEAT turns make of the temperature."""
        return float((self.cold / self.heat) ** (AT_ONE_HEAT / max(self.steps, 1))) if self.heat else 1.0

    @property
    def turns(self) -> bytes:
        """The kinds of turns, TURNS of them, evenly mixed: again and again."""
        shares = {ONE_DEVICE: 4.0}
        if self.stages > 1 and self.replicas > 1:
            shares[TAILS] = 0.25
        if self.stages > 1:
            shares[REORDER] = 0.25
        if self.stages > 3:
            shares[RUNS] = 2.0
        turns, due = bytearray(), dict.fromkeys(shares, 0.0)
        for _ in range(TURNS):
            due = {kind: due[kind] + share for kind, share in shares.items()}
            turns.append(max(due, key=due.__getitem__))
            due[turns[-1]] -= sum(shares.values())
        return bytes(turns)


@dataclass(frozen=True)
class StageVectors:
    """Stages as counts of devices by class. vectors: (V, K) int32; sizes: (K,) int32, of the classes; edges: (V, V)
    float64 seconds, inf where two stages cannot follow each other; stage: (V,) float64 seconds of each."""

    vectors: NDArray[np.int32]
    sizes: NDArray[np.int32]
    edges: NDArray[np.float64]
    stage: NDArray[np.float64]


@dataclass(frozen=True)
class Beginnings:
    """Of placements. used: (n, K) int32 devices by class; last: (n,) int32, the last stage; label_stage, label_path:
    (n,) float64, seconds of the dearest stage and of all edges."""

    used: NDArray[np.int32]
    last: NDArray[np.int32]
    label_stage: NDArray[np.float64]
    label_path: NDArray[np.float64]


@dataclass(frozen=True)
class Endings:
    """What is to follow a beginning: `rest` stages of `replicas` devices, of all devices left if uses_all.

    part: (M, K) int32, into which parts of the cluster links above a time divide the classes, for M times from the
    dearest down; over: (M,) float64, seconds by which each time is above the cheapest link.
    """

    part: NDArray[np.int32]
    over: NDArray[np.float64]
    rest: int
    replicas: int
    uses_all: bool


Pairs = tuple[NDArray[np.int32], NDArray[np.int32]]
