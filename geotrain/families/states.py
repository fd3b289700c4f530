"""What families share whose layers pass a state from token to token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any

from geotrain.families.architecture import Architecture
from geotrain.families.reading import must_be
from geotrain.families.weights import Init, Weight, matrix


def unlimited_steps(config: Mapping[str, Any]) -> None:
    """Refuse bounds of Mamba-2's time steps, which transformers 5 writes with an object for infinity."""
    if config.get("time_step_limit") not in (None, [0.0, inf], [0.0, {"__float__": "Infinity"}]):
        must_be(config, {"time_step_limit": [0.0, inf]})


def rows_of(weight: Weight, rows: Iterable[int]) -> Iterator[Weight]:
    """Cut a weight into parts of so many rows, each of which tensor ranks are dealt."""
    begin = 0
    for count in rows:
        part = replace(weight, shape=(count, *weight.shape[1:]), whole=weight.shape, offset=begin)
        yield part
        begin += part.numel


def mamba(a: Architecture, name: str) -> Iterator[Weight]:
    """List the weights of a Mamba-2 mixer.

    Its projection gives gates, values, what groups write and read, and heads' time steps; the middle three are
    convolved.
    """
    net, h, there = a.net, a.hidden_size, "self_attention"
    assert net is not None
    values, state = net.values, net.keys
    rows = values, values, state, state, net.value_heads
    yield from rows_of(matrix(f"{name}.in_proj.weight", sum(rows), h, f"{there}.in_proj.weight", a.init_std), rows)
    shape = values + 2 * state, 1, net.kernel
    convolution = Weight(f"{name}.conv1d.weight", shape, f"{there}.conv1d", "normal", "rows", a.init_std)
    yield from rows_of(convolution, rows[1:4])
    if net.biased:
        bias = Weight(f"{name}.conv1d.bias", shape[:1], f"{there}.conv1d_bias", "zeros", "rows", decays=False)
        yield from rows_of(bias, rows[1:4])
    inits: tuple[tuple[str, Init], ...] = ("dt_bias", "time_steps"), ("A_log", "log_uniform"), ("D", "ones")
    for one, init in inits:
        yield Weight(f"{name}.{one}", (net.value_heads,), f"{there}.{one}", init, "rows", decays=False)
    yield Weight(f"{name}.norm.weight", (values,), f"{there}.norm", "ones", "rows", decays=False)
    yield matrix(f"{name}.out_proj.weight", h, values, f"{there}.out_proj.weight", a.residual_std, "columns")
