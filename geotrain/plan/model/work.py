"""Counts the arithmetic of a step: floating-point operations, from the architecture alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from geotrain.config import AccoConfig, Architecture, ParallelConfig
from geotrain.families import layer_weights
from geotrain.parallelism.checks import trains_in_bf16

BACKWARD = 2  # times forward: one product for the input's gradient, one for the weight's


@dataclass(frozen=True)
class Work:
    """A worker's share of the training, as the cost model sees it. deepspeed: its block, with the worker's own keys
    laid over. imbalance: of the tokens that are sent to experts, those that the fullest rank gets over the mean; an
    assumption."""

    architecture: Architecture
    sequence_length: int
    recompute: str
    parallel: ParallelConfig
    deepspeed: dict[str, Any]
    acco: AccoConfig | None
    imbalance: float = 1.0

    @property
    def bytes_per_weight(self) -> int:
        return 2 if trains_in_bf16(self.deepspeed) else 4

    @property
    def micro_tokens(self) -> int:
        """Tokens of a replica's micro-batch, which its context ranks divide."""
        return int(self.deepspeed["train_micro_batch_size_per_gpu"]) * self.sequence_length


@dataclass(frozen=True)
class TokenFlops:
    """Forward operations of one token. layer: matrices and attention of one layer, and the head's product where it
    predicts a further token. attention: the part of it that is no matrix of weights. experts: the part in the experts
    that it is sent to. head: the product with the vocabulary."""

    layer: float
    attention: float
    experts: float
    head: float


def token_flops(a: Architecture, sequence_length: int, layer: int) -> TokenFlops:
    """Count the forward operations of one token: 2 for each weight that a token uses (Narayanan et al., arXiv
    2104.04473, appendix).

    Attention: a token's query uses, on average, half of the sequence's keys and as many values, 2 operations for
    each element of either: 2 · (q + v) · sequence/2; with a window w,
    w − w²/(2 · sequence) in place of half. (PaLM, arXiv 2204.02311, appendix B, counts the masked half, too.) Norms,
    rotations and the embedding's look-up are left out: under 1 %.
    """
    window = min(a.window_of(layer) or sequence_length, sequence_length)
    used_keys = window - window**2 / (2 * sequence_length)
    attention = 2.0 * a.heads * (a.query_dim + a.value_dim) * used_keys if a.attends(layer) else 0.0
    if a.net is not None and a.letters(layer)[0] in "GM":
        # A gated delta net's state forgets, is corrected and is read; Mamba-2's is added to and read.
        each = {"gated delta nets": 6.0, "Mamba-2 layers": 4.0}[a.net.name]
        attention = each * a.net.values * a.net.key_dim
    used, chosen = active_weights(a, layer)
    head = 2.0 * a.hidden_size * a.vocab_size
    layer_flops = 2.0 * (used + chosen) + attention + (head if layer >= a.decoder_layers else 0.0)
    return TokenFlops(layer_flops, attention, 2.0 * chosen, head)


def active_weights(a: Architecture, layer: int) -> tuple[int, int]:
    """Elements of the layer's matrices that a token uses: those that every token does, and of chosen experts."""
    used = of_experts = 0
    for weight in layer_weights(a, layer):
        if len(weight.shape) == 2:
            if weight.expert is None:
                used += weight.numel
            else:
                of_experts += weight.numel
    return used, of_experts // a.experts.count * a.experts.per_token if a.experts else 0


@lru_cache(maxsize=64)
def useful_flops(a: Architecture, sequence_length: int) -> float:
    """Operations of one token, forward and backward, nothing computed twice: the unit of utilization."""
    flops = [token_flops(a, sequence_length, layer) for layer in range(a.layers)]
    return (1 + BACKWARD) * (sum(f.layer for f in flops) + flops[0].head)


@lru_cache(maxsize=1024)  # the planner asks for the same stages again and again
def stage_flops(
    a: Architecture, sequence_length: int, layers: range, recompute: str, imbalance: float = 1.0
) -> tuple[float, float]:
    """Count the (forward, backward) operations of one token in a pipeline stage of these layers. Recomputation is
    part of backward: `full` does every layer again, `selective` its attention (Korthikanti et al., arXiv 2205.05198,
    section 5). imbalance: as in `Work`; then of the rank whose experts get most tokens."""
    flops = [token_flops(a, sequence_length, layer) for layer in layers]
    once = sum(f.layer + (imbalance - 1) * f.experts for f in flops)
    forward = once + (flops[0].head if layers.stop == a.layers else 0.0)
    predicted = flops[0].head * max(0, layers.stop - a.decoder_layers)  # logits are not computed again
    again = {"none": 0.0, "selective": sum(f.attention for f in flops), "full": once - predicted}[recompute]
    return forward, BACKWARD * forward + again
