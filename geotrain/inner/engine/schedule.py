"""The learning-rate schedule that DeepSpeed lacks: warm-up, a constant rate, a decay at the end (WSD)."""

from __future__ import annotations

from math import cos, pi, sqrt
from typing import Any

from geotrain.inner.runtime import platform

with platform.quiet_imports():
    from deepspeed.runtime.lr_schedules import WarmupCosineLR


class WarmupStableDecayLR(WarmupCosineLR):
    """WSD (MiniCPM, arXiv 2404.06395): the rate stays until the last `decay_num_steps` of `total_num_steps`.

    So a run may be made longer while the rate is constant, and the decay may begin from any of its states.
    decay_type: how it falls to `min_ratio` of itself: linear, cosine, or sqrt (1 − √progress, Hägele et al.,
    arXiv 2405.18392). Further settings, and the warm-up, are WarmupCosineLR's; a warm-up of 0 steps is none.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        decay_num_steps: int,
        decay_type: str = "linear",
        min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        **warmup: Any,
    ) -> None:
        self.decay_num_steps, self.decay_type, self.min_ratio = decay_num_steps, decay_type, min_ratio
        self.warms_up = warmup_num_steps > 0
        super().__init__(optimizer, total_num_steps, warmup_num_steps=max(1, warmup_num_steps), **warmup)

    def get_lr_ratio(self) -> float:
        step = self.last_batch_iteration
        if self.warms_up and step < self.warmup_num_steps:
            return float(super().get_lr_ratio())
        left = max(0, self.total_num_steps - step)
        progress = max(0.0, 1 - left / self.decay_num_steps) if self.decay_num_steps else float(left == 0)
        falls = {"linear": progress, "cosine": (1 - cos(pi * progress)) / 2, "sqrt": sqrt(progress)}
        return 1 - (1 - self.min_ratio) * falls[self.decay_type]
