"""Sorts tokens by the experts that they are sent to, without letting the host wait for the device.

Megatron-core 0.16 does it with `masked_select`, twice a layer, and each time the host waits, since only the device
knows how many were chosen; 0.19 sorts all, and nobody waits. A router without capacity sends each token to the same
number of experts: it is known beforehand.
"""

from __future__ import annotations

from torch import Tensor


def permuted(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Sort tokens by their experts, with the bits of Megatron-core's `permute`, where no expert has a capacity.

    tokens: [tokens, hidden]. routing_map: bool [tokens, experts]. probs: of the same shape. num_out_tokens: how often
    the map is true; a tensor must lie on the host. Returns the tokens in the order of their experts, their probs, and
    where they came from.
    """
    assert num_out_tokens is not None and not fused and not drop_and_pad, "the model's configuration has none of this"
    chosen = routing_map.T.reshape(-1).nonzero_static(size=int(num_out_tokens)).view(-1)
    places = chosen % len(tokens)
    return (
        tokens.index_select(0, places),
        None if probs is None else probs.T.reshape(-1).index_select(0, chosen),
        places,
    )
