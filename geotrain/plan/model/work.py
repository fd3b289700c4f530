"""How much arithmetic a step is: floating-point operations, from the architecture alone."""

from __future__ import annotations

from dataclasses import dataclass

from geotrain.config import Architecture

BACKWARD = 2  # times forward: one product for the input's gradient, one for the weight's


@dataclass(frozen=True)
class TokenFlops:
    """Forward operations of one token. layer: matrices and attention of one layer. attention: the part of it that is
    no matrix of weights. head: the product with the vocabulary."""

    layer: float
    attention: float
    head: float


def token_flops(a: Architecture, sequence_length: int) -> TokenFlops:
    """2 operations for each weight that a token meets (Narayanan et al., arXiv 2104.04473, appendix).

    Attention: a token's query meets, on average, half of the sequence's keys and as many values, 2 operations for
    each element of either: 2 · 2 · q · sequence/2. (PaLM, arXiv 2204.02311, appendix B, counts the masked half too.)
    Norms, rotations and the embedding's look-up are left out: under 1 %.
    """
    h, q, kv = a.hidden_size, a.heads * a.head_dim, a.kv_heads * a.head_dim
    attention = 2.0 * q * sequence_length
    weights = 2 * h * q + 2 * h * kv + 3 * h * a.ffn_size * a.active_mlps
    if a.experts is not None:
        weights += h * a.experts.count  # the router
    return TokenFlops(2.0 * weights + attention, attention, 2.0 * h * a.vocab_size)


def useful_flops(a: Architecture, sequence_length: int) -> float:
    """Of one token, forward and backward, nothing computed twice: what utilization is counted in."""
    flops = token_flops(a, sequence_length)
    return (1 + BACKWARD) * (a.layers * flops.layer + flops.head)


def stage_flops(
    a: Architecture, sequence_length: int, stage: int, stages: int, recompute: str
) -> tuple[float, float]:
    """(forward, backward) operations of one token in a pipeline stage. Recomputation is part of backward:
    `full` does every layer again, `selective` its attention (Korthikanti et al., arXiv 2205.05198, section 5)."""
    flops = token_flops(a, sequence_length)
    layers = a.layers // stages
    forward = layers * flops.layer + (flops.head if stage == stages - 1 else 0.0)
    again = {"none": 0.0, "selective": layers * flops.attention, "full": layers * flops.layer}[recompute]
    return forward, BACKWARD * forward + again
