"""The region-momentum rule (GeoTrain's own; docs/algorithms.md): momentum in the region, plain averaging at the
global server. The momentum stands where no wide-area delay is in its loop.
"""

from __future__ import annotations

from math import exp

from torch import Tensor

from geotrain.config import RegionMomentumConfig
from geotrain.kernels import OuterStep
from geotrain.outer.rules.rule import AsyncRegion, Counts, Inputs, Vectors, average

# A momentum over fewer updates is no mean of many: it would only lengthen each step, over one by 63 % at a gain of 1,
# and short runs ended several percent higher (docs/log.md).
WHOLE_FROM = 20
WAITING_WHOLE_FROM = 7  # where answers wait for others' deltas: they end lower with longer steps


def momentum_decay(updates: float, share: float) -> float:
    """k = exp(−1 / (share · updates)): the momentum averages over that share of the region's updates in the run.

    A fixed decay an update would average over another share of the text whenever H, the number of workers or the
    run's length changes. updates: those that the region will apply from begin to end.
    """
    # At least one update: in a very short run the share would be a fraction of one, and the momentum forget all.
    return exp(-1 / max(1.0, share * updates))


def momentum_gain(gain: float, decay: float, whole_from: int = WHOLE_FROM) -> float:
    """c, less where the momentum, whose newest delta has a share of 1−k, averages over fewer updates than that."""
    return gain / max(1.0, whole_from * (1 - decay))


def updates_in_run(steps: int, local_steps: int, workers: int, all_workers: int) -> float:
    """Estimate the updates that a region of `workers` of the run's `all_workers` applies from begin to end.

    All workers are taken as equally fast: how much each will train is not known before the run, and may change while
    it goes on.
    steps: inner steps of the run. local_steps: H.
    """
    return steps / local_steps * workers / all_workers


def momentum_average(decay: float, gain: float, weight: float) -> OuterStep:
    """m = k·m + (1−k)·Δ;  x −= w·(Δ + c·m), with k = decay, c = gain, w = weight."""
    return OuterStep(weight, decay, 1 - decay, weight * gain, moves_momentum=True)


class MomentumRegion(AsyncRegion):
    """The region's half of the rule, always with the ledger. A delta weighs one over the number of workers that take
    part. decay: k of one update, from `momentum_decay`. answers: as in `OuterConfig.answers`; α is 1 where they are
    merged."""

    averages, bf16_vectors = True, ("momentum",)

    def __init__(self, config: RegionMomentumConfig, decay: float, answers: str = "at_once") -> None:
        merged, waits = answers != "at_once", answers == "wait"
        alpha = 1.0 if merged else config.merge_alpha
        super().__init__(config.updates_per_send, alpha, True, merged, waits)
        self.decay = decay
        self.gain = momentum_gain(config.gain, decay, WAITING_WHOLE_FROM if waits else WHOLE_FROM)

    def on_delta(self, c: Counts, member: str, weight: int, members: int) -> tuple[Inputs, tuple[str, ...]]:
        _, answered = super().on_delta(c, member, weight, members)
        return {"decay": self.decay, "gain": self.gain, "weight": 1 / members}, answered

    def apply(self, v: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        v.move(delta, momentum_average(**inputs), "momentum")


class AveragingGlobal:
    """The global server's half of the rule: x −= Δ / members, of those that take part."""

    averages, in_rounds, waits = True, False, True

    def on_delta(self, c: Counts, member: str, weight: int, members: int) -> tuple[Inputs, tuple[str, ...]]:
        c.version += 1
        return {"weight": 1 / members}, (member,)

    def apply(self, v: Vectors, member: str, delta: Tensor, inputs: Inputs) -> None:
        average(v.x, delta, inputs["weight"])
