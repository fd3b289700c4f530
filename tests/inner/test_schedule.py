"""The schedule of three parts (WSD), in an engine whose optimizer has two rates."""

from __future__ import annotations

import math
from typing import Any

import pytest

from geotrain.config import ConfigError, ParallelConfig
from geotrain.config.deepspeed import WSD
from geotrain.parallelism.optimizer_settings import optimizer_settings
from tests.support.inner_worlds import LLAMA, deepspeed_block, run_world, start, stop

MUON = {"type": "Muon", "params": {"lr": 2e-2, "adam_lr": 4e-3}}
STEPS = (0, 2, 4, 10, 80, 85, 90, 95, 100, 1000)


def rates(params: dict[str, Any]) -> list[list[float]]:
    """Both rates, at each of STEPS."""
    block = {**deepspeed_block(1), "optimizer": MUON, "scheduler": {"type": WSD, "params": params}}
    engine, found = start(LLAMA, ParallelConfig(), block), []
    for step in STEPS:
        engine._begin_step(step)
        found.append(sorted(set(engine.get_lr())))
    stop(engine)
    return found


def all_rates(*params: dict[str, Any]) -> list[list[list[float]]]:
    return [rates(each) for each in params]


def test_the_rate_stays_until_the_decay_begins() -> None:
    common = {"total_num_steps": 100, "decay_num_steps": 20, "warmup_num_steps": 4, "warmup_type": "linear"}
    linear, cosine, sqrt, none = run_world(
        1,
        all_rates,
        common,
        {**common, "decay_type": "cosine", "min_ratio": 0.1},
        {**common, "decay_type": "sqrt"},
        {**common, "warmup_num_steps": 0},
    )[0]
    before = [0.0, 0.5, 1.0, 1.0, 1.0]
    half = (1 + math.cos(math.pi / 4)) / 2
    ends = {
        "linear": [0.75, 0.5, 0.25, 0.0, 0.0],
        "cosine": [0.1 + 0.9 * x for x in (half, 0.5, 1 - half, 0.0, 0.0)],
        "sqrt": [1 - math.sqrt(x) for x in (0.25, 0.5, 0.75, 1.0, 1.0)],
    }
    for (kind, end), found in zip(ends.items(), (linear, cosine, sqrt), strict=True):
        for ratio, (low, high) in zip(before + end, (r if len(r) == 2 else r * 2 for r in found), strict=True):
            assert (low, high) == pytest.approx((4e-3 * ratio, 2e-2 * ratio)), kind
    assert none[0] == none[3] == pytest.approx([4e-3, 2e-2])  # a decay that begins from a checkpoint has no warm-up


def test_only_schedules_by_a_common_factor_keep_two_rates() -> None:
    with pytest.raises(ConfigError, match="use WarmupCosineLR or WarmupStableDecayLR"):
        optimizer_settings({"optimizer": MUON, "scheduler": {"type": "WarmupLR"}})
    optimizer_settings({"optimizer": MUON, "scheduler": {"type": WSD}})
