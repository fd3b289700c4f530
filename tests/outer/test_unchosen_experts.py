"""Experts that no token was sent to: their delta is zero, which is no strike and leaves no trace."""

from __future__ import annotations

import pytest
import torch

from geotrain.config import codec_config
from geotrain.kernels.payload_format import FORMATS
from geotrain.outer.codec import make_codec
from tests.support.outer_world import config, make, random_deltas


@pytest.mark.parametrize("name", FORMATS)
def test_a_zero_delta_among_others_stays_zero(name: str) -> None:
    codec = make_codec(codec_config(name))
    values = torch.randn(40 * 128, generator=torch.Generator().manual_seed(3))
    values[7 * 128 : 21 * 128] = 0.0
    residual = torch.zeros_like(values)
    coded = codec.encode(values, residual=residual if codec.error_feedback else None, seed=5)
    assert coded.payload.numel() == codec.encoded_bytes(values.numel()), "it costs as many bytes as any other"
    decoded = codec.decode(coded.payload, values.numel())
    quiet = slice(8 * 128, 20 * 128)  # whole blocks, of whatever size
    assert not decoded[quiet].any() and not residual[quiet].any()
    assert decoded[: 7 * 128].any()


@pytest.mark.parametrize("fragments", [None, 1])
@pytest.mark.parametrize("coded", ["fp32", "int4"])
def test_the_limits_bear_it_and_the_expert_may_be_chosen_later(fragments: int | None, coded: str) -> None:
    codec = codec_config(coded, **({"block": 32} if coded == "int4" else {}))
    world = make(config(up=codec, down=codec), fragments=fragments)
    parameter_map = world.parameter_map
    fragment = parameter_map.fragment_of("layer.1")
    members = parameter_map.fragments[fragment]
    place = [p.name for p in members.parameters].index("layer.1")
    part = slice(members.offsets[place], members.offsets[place] + members.parameters[place].numel)

    def turn(seed: int, chosen: bool) -> None:
        for name in ("a", "b"):
            deltas = random_deltas(world, seed)
            if not chosen:
                deltas[fragment][part] = 0.0
            world.push(name, deltas)
        for region in world.regions:
            world.settle(region)

    begun = world.top.weights(fragment)[part].clone()
    for seed in range(40):  # more than are let through before the limits know what is usual
        turn(seed, chosen=False)
    settled = world.top.weights(fragment)[part].clone()
    if coded == "fp32" or fragments == 1:  # a block of codes that holds others' elements, too, has a rounding error
        assert torch.equal(settled, begun)
    else:
        assert (settled - begun).abs().max() < 0.5
    turn(99, chosen=True)
    turn(100, chosen=True)
    turn(101, chosen=True)
    assert (world.top.weights(fragment)[part] - settled).abs().max() > 0.05
