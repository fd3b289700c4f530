"""Exchanges between ranks that share a layer, for one micro-batch: heads for tokens around attention, among context
ranks; tokens on their way to experts and back, among expert ranks and the tensor ranks that share each expert.

Context (`geotrain.inner.model.context_parallel`): q, k and v in one all-to-all, attention's output in another; the
same backward. As a ring: k and v to each other rank, and their gradients backward.
Experts, as Megatron-core 0.16's dispatchers do. `alltoall`: each chosen token and its weight go to the rank of their
expert, where tensor ranks gather them from each other; the results are summed over tensor ranks, in the type of the
weights, and go back. `allgather`: every rank of the tensor and expert ranks gets all tokens, weights and choices, and
the results are summed and scattered. Backward does the reverse. Weights are fp32, counts of tokens eight bytes.

It is assumed that ranks' experts get equally many tokens, but for `Work.imbalance`, the fullest rank's over the mean.
Left out is what balancing losses and biases count: a number for each expert.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from geotrain.config import Architecture
from geotrain.plan.model.network import Among, Line, LinkTable, RankDevice, RankTable, Sent
from geotrain.plan.model.work import Work

Way = tuple[int, RankDevice, Line, float]  # a sender's number in its group, whom it sends to, over what, bytes
_FP32_BYTES, _COUNT_BYTES = 4, 8


@dataclass(frozen=True)
class Collective:
    """A collective. size_bytes: of an all-to-all, what a rank divides among all; else a rank's part of what is
    gathered, or scattered, and goes around a ring."""

    kind: Literal["all-to-all", "ring"]
    among: Among
    size_bytes: float

    def sent_bytes(self, ranks: int) -> float:
        """Count the bytes that each of `ranks` ranks sends."""
        return (ranks - 1) * (self.size_bytes / ranks if self.kind == "all-to-all" else self.size_bytes)


@dataclass(frozen=True)
class Collectives:
    """Collectives of one layer and micro-batch. Backward repeats those of what is computed again."""

    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]


def ranks_among(work: Work) -> dict[Among, int]:
    tp, ep = work.parallel.tensor, work.parallel.expert
    return {"context": work.parallel.context, "expert": ep, "tensor": tp, "tensor and expert": tp * ep}


def context_exchanges(work: Work) -> Collectives:
    """Exchanges of context ranks around one layer's attention."""
    a, parallel = work.architecture, work.parallel
    if parallel.context == 1:
        return Collectives((), ())
    query, key, value, output = attended(a)
    ring = parallel.context_exchange == "ring"
    each = work.bytes_per_weight * (work.micro_tokens // parallel.context) / parallel.tensor
    widths = (key + value,) if ring else (query + key + value, output)
    forward = tuple(Collective("ring" if ring else "all-to-all", "context", each * width) for width in widths)
    return Collectives(forward, forward * (1 if work.recompute == "none" else 2))


def attended(a: Architecture) -> tuple[int, int, int, int]:
    """Elements of a token's queries, keys, values and attention's output, all heads together."""
    heads = a.heads if a.latent else a.kv_heads
    return a.heads * a.query_dim, heads * a.query_dim, heads * a.value_dim, a.heads * a.value_dim


def expert_exchanges(work: Work) -> Collectives:
    """Exchanges of one layer that has experts."""
    a, parallel = work.architecture, work.parallel
    tp, size = parallel.tensor, work.bytes_per_weight
    if a.experts is None or tp * parallel.expert == 1:
        return Collectives((), ())
    tokens = work.micro_tokens // parallel.context // tp  # tensor ranks have different ones: sequence parallelism
    if parallel.dispatcher == "allgather":
        everyone = [tokens * a.experts.count * _FP32_BYTES, tokens * a.hidden_size * size]
        everyone.append(tokens * a.hidden_size * _FP32_BYTES)  # the results, summed in the type of the weights
        back = tuple(Collective("ring", "tensor and expert", part) for part in everyone)
        there = (Collective("ring", "tensor and expert", tokens * a.experts.count), *back)  # a byte for each choice
    else:
        sent = tokens * a.experts.per_token * work.imbalance
        whole, weights = sent * a.hidden_size * size, sent * _FP32_BYTES
        around = [Collective("all-to-all", "expert", part) for part in (whole, weights, whole)]
        summed = sent * a.hidden_size * _FP32_BYTES
        around += [Collective("ring", "tensor", part) for part in (whole, weights, summed)]
        back = tuple(around)
        there = (Collective("ring", "tensor and expert", a.experts.count * _COUNT_BYTES), *back)
    ranks = ranks_among(work)
    there, back = (tuple(e for e in way if ranks[e.among] > 1) for way in (there, back))
    return Collectives(there, back + (there if work.recompute == "full" else ()))


# ------------------------------------------------------------------------------ how long they take on given ranks


def stage_seconds(
    exchanges: Sequence[Collective], table: RankTable, stage: int, network: LinkTable
) -> tuple[list[float], list[Sent]]:
    """Compute the seconds of these exchanges by replica of a pipeline stage, one after the other, and the bytes that
    cross regions. All groups of the stage exchange at the same time, and their ranks wait for each other."""
    seconds, crossing = [0.0] * table.replicas, [Sent(float) for _ in range(table.replicas)]
    for exchange in exchanges:
        groups = table.groups(stage, exchange.among)
        ways = [_ways(exchange, group.ranks, network) for group in groups]
        shared = defaultdict[tuple[str, ...], float](float)
        for _, _, line, sent in (way for of_group in ways for way in of_group):
            shared[line.key] += sent
        slowest = [0.0] * table.replicas
        for group, of_group in zip(groups, ways, strict=True):
            took_s = _group_seconds(exchange, group.ranks, of_group, shared)
            for replica in group.replicas:
                slowest[replica] = max(slowest[replica], took_s)
            for i, other, _, sent in of_group:
                if group.ranks[i].region != other.region:
                    crossing[group.replicas[0]][group.ranks[i].region, other.region] += sent
        seconds = [total + one for total, one in zip(seconds, slowest, strict=True)]
    return seconds, crossing


def _ways(exchange: Collective, ranks: Sequence[RankDevice], network: LinkTable) -> list[Way]:
    """List who sends what to whom; nothing is listed of ranks that are all on one host."""
    n = len(ranks)
    if len({(rank.region, rank.host) for rank in ranks}) == 1:
        return []
    if exchange.kind == "ring":
        return [
            (i, other, network.between(ranks[i], other), exchange.sent_bytes(n))
            for i, other in enumerate((*ranks[1:], ranks[0]))
        ]
    return [
        (i, ranks[j], network.between(ranks[i], ranks[j]), exchange.size_bytes / n)
        for i in range(n)
        for j in range(n)
        if i != j
    ]


def _group_seconds(
    exchange: Collective, ranks: Sequence[RankDevice], ways: Sequence[Way], shared: Mapping[tuple[str, ...], float]
) -> float:
    """Compute the seconds of one group's exchange. shared: bytes of all groups over lines that ranks share, by the
    lines' keys; a line without a key is the sender's own."""
    n = len(ranks)
    if not ways:
        return 8e-9 * exchange.sent_bytes(n) / min(rank.device.host_gbps for rank in ranks)
    own, longest_s = [0.0] * n, 0.0
    for i, _, line, sent in ways:
        if line.key:
            longest_s = max(longest_s, 8e-9 * shared[line.key] / line.gbps)
        else:
            own[i] += 8e-9 * sent / line.gbps
    rounds = n - 1 if exchange.kind == "ring" else 1
    return rounds * max(line.latency_s for _, _, line, _ in ways) + max(longest_s, *own)
