"""Momenta and residuals in bf16 between updates (`outer.server_state`)."""

from __future__ import annotations

import pytest
import torch

from geotrain.config import OuterConfig, rule_config
from geotrain.outer.codec import rounding_seed
from geotrain.outer.rules import Vectors
from geotrain.outer.rules.region_momentum import MomentumRegion
from geotrain.outer.rules.rule import NOTHING


def test_a_momentum_that_moves_by_less_than_bf16_can_tell_arrives_all_the_same() -> None:
    """After many updates the mean over elements is that of fp32; rounding to the nearest stops on the way there."""
    v, nearest, exact = Vectors(torch.zeros(4096), in_bf16=["momentum"]), torch.zeros(1, dtype=torch.bfloat16), 0.0
    rule = MomentumRegion(rule_config("region_momentum"), 1, 0.999)  # type: ignore[arg-type]
    for number in range(2000):
        v.seed = rounding_seed("eu", number)
        rule.apply(v, "a", torch.ones(4096), NOTHING)
        nearest = (0.999 * nearest.float() + 0.001).bfloat16()
        exact = 0.999 * exact + 0.001
    kept = v.aux["momentum"]
    assert kept.dtype == torch.bfloat16 and kept.float().mean().item() == pytest.approx(exact, rel=2e-3)
    assert nearest.item() < 0.5 * exact


def test_it_is_refused_where_no_server_has_any_of_them() -> None:
    with pytest.raises(ValueError, match="server_state: without effect with levels = 1"):
        OuterConfig.model_validate({"levels": 1, "server_state": "bf16"})
    assert OuterConfig.model_validate({"levels": 1, "server_state": "bf16", "rule": {"name": "halos"}})
