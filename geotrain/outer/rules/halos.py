"""HALoS (arXiv 2506.04531): delayed Nesterov in the regions and at the global server. The ledger is GeoTrain's
own."""

from __future__ import annotations

from torch import Tensor

from geotrain.config import HalosConfig, MomentumConfig
from geotrain.kernels import OuterStep
from geotrain.outer.rules.rule import AsyncRegion, Counts, Inputs, Vectors


def delayed_nesterov(arrival: int, settings: MomentumConfig) -> OuterStep:
    """Delayed Nesterov (HALoS, arXiv 2506.04531, Alg. 1; Async Local-SGD, arXiv 2401.09135).

    acc += Δ;  at every N-th arrival: m = β·m + acc/N, x −= lr·(β·m + Δ/N), acc = 0;  else x −= lr·Δ/N,
    with N = buffer and lr = lr_per_update · N. `arrival` counts from 1.
    """
    beta, buffer = settings.beta, settings.buffer
    # The rate is set for one update, so that changing the buffer does not change how far a single delta moves x.
    lr = settings.lr_per_update * buffer
    return OuterStep(lr / buffer, beta, 1 / buffer, lr * beta, moves_momentum=arrival % buffer == 0)


class _Halos:
    """Delayed Nesterov on each delta, with its momentum and accumulator in the shards."""

    bf16_vectors = ("momentum", "accumulated")
    settings: MomentumConfig

    def apply(self, v: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        v.move(delta, delayed_nesterov(int(inputs["arrival"]), self.settings), "momentum", "accumulated")


class HalosRegion(_Halos, AsyncRegion):
    """HALoS's local parameter server: delayed Nesterov on every worker's delta."""

    def __init__(self, config: HalosConfig) -> None:
        super().__init__(config.updates_per_send, config.merge_alpha, config.ledger)
        self.settings = config.region

    def on_delta(self, c: Counts, member: str, weight: int, members: int) -> tuple[Inputs, tuple[str, ...]]:
        _, answered = super().on_delta(c, member, weight, members)
        return _arrival(c), answered


class HalosGlobal(_Halos):
    """HALoS's global server. In a flat run, with workers as its members, it is the one of Async Local-SGD.

    A region's delta counts as one update here, however many workers' updates it stands for.
    """

    in_rounds = False

    def __init__(self, config: HalosConfig) -> None:
        self.settings = config.global_

    def on_delta(self, c: Counts, member: str, weight: int, members: int) -> tuple[Inputs, tuple[str, ...]]:
        c.version += 1
        return _arrival(c), (member,)


def _arrival(c: Counts) -> Inputs:
    # Counted apart from the version, and for each fragment: it says when the momentum is due.
    c.counts["arrivals"] = c.counts.get("arrivals", 0) + 1
    return {"arrival": c.counts["arrivals"]}
