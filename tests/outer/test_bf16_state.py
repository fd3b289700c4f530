"""Momenta and residuals in bf16 between updates (`outer.server_state`)."""

from __future__ import annotations

import pytest
import torch

from geotrain.config import OuterConfig
from geotrain.outer.rules import Vectors
from geotrain.outer.rules.region_momentum import momentum_average
from geotrain.outer.shards.bf16_state import in_fp32


def test_a_momentum_that_moves_by_less_than_bf16_can_tell_arrives_all_the_same() -> None:
    """After many updates the mean over elements is that of fp32; rounding to the nearest stops on the way there."""
    v, nearest, exact = Vectors(torch.zeros(4096)), torch.zeros(1, dtype=torch.bfloat16), 0.0
    delta, room = torch.ones(4096), torch.full((5000,), torch.nan)  # larger, and it holds something else
    for number in range(2000):
        with in_fp32(v, ("momentum",), [room], "eu", number, 0) as wide:
            m = wide.vector("momentum")
            momentum_average(wide.x, delta, m, decay=0.999, gain=1.0, weight=1.0)
        nearest = (0.999 * nearest.float() + 0.001).bfloat16()
        exact = 0.999 * exact + 0.001
    kept = v.aux["momentum"]
    assert kept.dtype == torch.bfloat16 and kept.float().mean().item() == pytest.approx(exact, rel=2e-3)
    assert nearest.item() < 0.5 * exact


def test_it_is_refused_where_no_server_has_any_of_them() -> None:
    with pytest.raises(ValueError, match="server_state: without effect with levels = 1"):
        OuterConfig.model_validate({"levels": 1, "server_state": "bf16"})
    assert OuterConfig.model_validate({"levels": 1, "server_state": "bf16", "rule": {"name": "halos"}})
