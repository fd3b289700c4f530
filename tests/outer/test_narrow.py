"""Momenta and residuals in bf16 between updates (`outer.server_state`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from geotrain.config import OuterConfig, codec_config
from geotrain.narrow import widened
from geotrain.outer.messages import UpdatePart
from geotrain.outer.rules import Vectors
from geotrain.outer.rules.region_momentum import momentum_average
from tests.outer.test_vaults import PIECES, play
from tests.support.outer_world import config, halves, make
from tests.support.recorded_world import same_state


@pytest.mark.parametrize("rule", ["halos", "region_momentum", "sync"])
def test_vaults_and_restarts_change_no_bit(rule: str) -> None:
    every: dict[str, Any] = {} if rule == "sync" else {"updates_per_send": 2}
    settings = config(rule, up=codec_config("int4"), down=codec_config("int8"), server_state="bf16", **every)
    calm, shaken = (make(settings, cut_a=halves, vaults=n, **PIECES) for n in (1, 2))
    said, again = ([u for u in each if isinstance(u, UpdatePart)] for each in (play(calm), play(shaken, restarted=3)))
    assert said == again
    same_state(calm.top, shaken.top)
    tensors = {**calm.regions["eu"].state()[0], **{f"top.{k}": t for k, t in calm.top.state()[0].items()}}
    narrow = {name.split(".")[-1] if "aux" in name else name.split(".")[0] for name, t in tensors.items()
              if t.dtype == torch.bfloat16}  # fmt: skip
    of_rule = {"halos": {"momentum", "accumulated"}, "region_momentum": {"momentum"}, "sync": {"momentum"}}
    assert narrow == {"residual", *of_rule[rule]}


def test_a_momentum_that_moves_by_less_than_bf16_can_tell_arrives_all_the_same() -> None:
    """After many updates the mean over elements is that of fp32; rounding to the nearest stops on the way there."""
    v, nearest, exact = Vectors(torch.zeros(4096)), torch.zeros(1, dtype=torch.bfloat16), 0.0
    delta = torch.ones(4096)
    for number in range(2000):
        with widened(v, ("momentum",), "eu", number, 0) as wide:
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
