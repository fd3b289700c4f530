"""How long one inner step of one worker takes, and why.

A step is the pipeline's timetable with tensor-parallel communication inside its stages, then the reduction of the
gradients over the data-parallel replicas, then a few small collectives over all ranks. ZeRO-1 reduces by buckets
during the last micro-batch's backward, and gathers so during the first one's forward (`geotrain.zero`). ACCO overlaps
both with the whole computation, but not at an exchange of the outer loop (`StepTime.settle_s`, `refresh_s`). Nothing
else overlaps, as `geotrain.inner` configures DeepSpeed and Megatron-core. Left out are the optimizer's arithmetic (it
moves some 30 bytes for each parameter of the shard through memory), kernel launches and input.

Where several flows use one line at the same time, each gets an equal share of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

from geotrain.config import AccoConfig, Architecture, ParallelConfig
from geotrain.parallelism.acco_forms import FORMS, first_part
from geotrain.parallelism.checks import (
    accumulation_steps,
    gradient_wire_bytes,
    overlaps_reduction,
    reduction_bucket,
    trains_in_bf16,
    zero_stage,
)
from geotrain.parallelism.local_parameters import stage_parameters
from geotrain.plan.model.network import Line, LinkTable, RankDevice
from geotrain.plan.model.pipeline import Stages, claimed_shares, even_shares, pipeline_seconds
from geotrain.plan.model.work import stage_flops

Sent = defaultdict[tuple[str, str], float]  # (from region, to region) → bytes
SMALL_COLLECTIVES = 3  # of a step, over all ranks: the norm, whether it is finite, the loss


@dataclass(frozen=True)
class Work:
    """What a worker does. deepspeed: its block, with the worker's own keys laid over. fp8: whether layers multiply
    in FP8; only the roofline knows it, since a cluster's devices have one rate."""

    architecture: Architecture
    sequence_length: int
    recompute: str
    parallel: ParallelConfig
    deepspeed: dict[str, Any]
    acco: AccoConfig | None
    fp8: bool = False

    @property
    def bytes_per_weight(self) -> int:
        return 2 if trains_in_bf16(self.deepspeed) else 4

    @property
    def micro_tokens(self) -> int:
        return int(self.deepspeed["train_micro_batch_size_per_gpu"]) * self.sequence_length


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they go to; they add up to `step_s`.

    compute_s: arithmetic of the slowest replica's busiest stage. tensor_s: its tensor-parallel communication.
    pipeline_s: the bubble and the transfers between stages; with `acco.balance` also the wait for the last one.
    reduction_s: gradients and weights between replicas, as far as nothing hides it. small_collectives_s: as named.
    sent_bytes: of one step, over each pair of regions, (from, to).

    No part of the step, but of each time that the outer loop stops it:
    settle_s: ACCO's commit is waited for in the open, and the next window's first part has none to hide.
    refresh_s: the owners' new weights reach all replicas; refresh_bytes: what that sends. Both are of the whole
    model, of which a refresh brings what was adopted; refreshes_all: all, since replicas have weights one step ahead.
    """

    compute_s: float
    tensor_s: float
    pipeline_s: float
    reduction_s: float
    small_collectives_s: float
    sent_bytes: dict[tuple[str, str], float]
    settle_s: float
    refresh_s: float
    refresh_bytes: dict[tuple[str, str], float]
    refreshes_all: bool

    @property
    def step_s(self) -> float:
        return self.compute_s + self.tensor_s + self.pipeline_s + self.reduction_s + self.small_collectives_s


class RankTable:
    """The ranks' devices as a table: at(stage, replica, tensor rank). Ranks are ordered tensor first, then data, then
    pipeline."""

    def __init__(self, ranks: Sequence[RankDevice], parallel: ParallelConfig) -> None:
        self.ranks, self.tp, self.pp = ranks, parallel.tensor, parallel.pipeline
        self.dp = len(ranks) // (self.tp * self.pp)

    def at(self, stage: int, replica: int, tensor: int) -> RankDevice:
        return self.ranks[(stage * self.dp + replica) * self.tp + tensor]

    def group(self, stage: int, replica: int) -> tuple[RankDevice, ...]:
        """The tensor-parallel ranks of one stage of one replica."""
        begin = (stage * self.dp + replica) * self.tp
        return tuple(self.ranks[begin : begin + self.tp])


def step_time(work: Work, ranks: Sequence[RankDevice], network: LinkTable) -> StepTime:
    """ranks: of the worker, in their order; the layout must be one that `check_layout` allows.

    Raises ConfigError when a link's figure is missing.
    """
    table = RankTable(ranks, work.parallel)
    micro_batches = accumulation_steps(work.deepspeed, table.dp)
    # ACCO divides a step: the first part's micro-batches are computed while the last step's commit travels.
    first = micro_batches if work.acco is None else first_part(work.acco, micro_batches)
    sent: Sent = defaultdict(float)
    part_s, compute_s, tensor_s, one_s = _pipelines(work, table, network, (first, micro_batches - first), sent)
    reduction_s, reduced, refresh_s, gathered = _between_replicas(work, table, network)
    exposed_s, settle_s, ahead = reduction_s, 0.0, 0.0
    if work.acco is None and overlaps_reduction(work.deepspeed):
        buckets = _buckets(work)
        exposed_s = _exposed(refresh_s, one_s[0], buckets) + _exposed(reduction_s - refresh_s, one_s[1], buckets)
    if work.acco is not None:
        # The reduction hides behind the first part, what is sent ahead of it behind the second.
        ahead = FORMS[work.acco.prediction].prediction_traffic(work.bytes_per_weight)
        settle_s = min(part_s[0], reduction_s)  # what the first part would have hidden
        exposed_s = max(part_s[0], reduction_s) + max(part_s[1], ahead * reduction_s) - sum(part_s)
    for pair, count in reduced.items():
        sent[pair] += (1 + ahead) * count
    tied_s = _tied_embedding(work, table, network, sent)
    # An all-reduce of a few bytes goes up and down a tree over all ranks: only the latency counts.
    farthest_s = max(line.latency_s for line in _ring(ranks, network)) if len(ranks) > 1 else 0.0
    return StepTime(
        compute_s=compute_s,
        tensor_s=tensor_s,
        pipeline_s=sum(part_s) - compute_s - tensor_s,
        reduction_s=exposed_s + tied_s,
        small_collectives_s=SMALL_COLLECTIVES * 2 * ceil(log2(len(ranks))) * farthest_s,
        sent_bytes=dict(sent),
        settle_s=settle_s,
        refresh_s=refresh_s,
        refresh_bytes=gathered,
        refreshes_all=work.acco is not None and FORMS[work.acco.prediction].predicts_in_commit,
    )


def _pipelines(
    work: Work, table: RankTable, network: LinkTable, parts: tuple[int, int], sent: Sent
) -> tuple[tuple[float, ...], float, float, tuple[float, float]]:
    """(seconds of the step's two parts until the slowest replica is done; of them, the arithmetic and the tensor
    parallelism of its busiest stage; this stage's forward and backward of one micro-batch). parts: micro-batches of a
    replica before and after ACCO's commit is adopted.

    An activation of a micro-batch has tokens · hidden elements; every tensor rank sends it whole to its peer, with
    sequence parallelism its part.
    """
    size = work.bytes_per_weight * work.micro_tokens * work.architecture.hidden_size
    piece = size // table.tp if work.parallel.sequence else size
    edges = {
        (s, d): [network.between(table.at(s, d, t), table.at(s + 1, d, t)) for t in range(table.tp)]
        for s in range(table.pp - 1)
        for d in range(table.dp)
    }
    flows = Counter(line.key for lines in edges.values() for line in lines)
    flops = [
        stage_flops(work.architecture, work.sequence_length, s, table.pp, work.recompute) for s in range(table.pp)
    ]
    replicas: list[Stages] = []
    tensors: list[list[float]] = []
    for d in range(table.dp):
        forward, backward, tensor = [], [], []
        for s in range(table.pp):
            group = table.group(s, d)
            # Tensor-parallel ranks wait for each other at every layer: the slowest of them decides.
            speed = min(rank.device.tflops * rank.device.efficiency for rank in group) * 1e12 * table.tp
            there, back = _tensor_seconds(work, table, network, s, group, size)
            forward.append(work.micro_tokens * flops[s][0] / speed + there)
            backward.append(work.micro_tokens * flops[s][1] / speed + back)
            tensor.append(there + back)
        times = tuple(
            max(line.seconds(piece, _share(flows, line)) for line in edges[s, d]) for s in range(table.pp - 1)
        )
        replicas.append(Stages(tuple(forward), tuple(backward), times))
        tensors.append(tensor)
    balance = work.acco is not None and work.acco.balance
    shares = (claimed_shares if balance else even_shares)(tuple(replicas), parts)
    counts = shares.micro_batches
    for s, d in edges:
        for t in range(table.tp):
            _count(sent, table.at(s, d, t), table.at(s + 1, d, t), counts[d] * piece, both_ways=True)
    slowest = max(range(table.dp), key=lambda d: pipeline_seconds(replicas[d], counts[d]))
    busy_s = [f + b for f, b in zip(replicas[slowest].forward_s, replicas[slowest].backward_s, strict=True)]
    busiest = max(range(table.pp), key=lambda s: busy_s[s])
    tensor_s = counts[slowest] * tensors[slowest][busiest]
    one_s = replicas[slowest].forward_s[busiest], replicas[slowest].backward_s[busiest]
    return shares.part_s, counts[slowest] * busy_s[busiest] - tensor_s, tensor_s, one_s


def _buckets(work: Work) -> int:
    """In how many parts the gradients of the fullest stage travel."""
    stages = range(work.parallel.pipeline)
    parameters = max(stage_parameters(work.architecture, work.parallel, s) for s in stages)
    return ceil(parameters / reduction_bucket(work.deepspeed, parameters))


def _exposed(travel_s: float, compute_s: float, buckets: int) -> float:
    """What is not hidden of travel in equal buckets beside compute that completes, or needs, them one by one: the
    first can leave only when its part is computed, the last when all is."""
    return max(travel_s / buckets, travel_s - compute_s * (1 - 1 / buckets))


def _tensor_seconds(
    work: Work, table: RankTable, network: LinkTable, stage: int, group: tuple[RankDevice, ...], size_bytes: int
) -> tuple[float, float]:
    """(forward, backward) of a micro-batch: two all-reduces a layer each way, of the activations (Megatron-LM, arXiv
    1909.08053, section 3; reduce-scatter and all-gather under sequence parallelism move the same), once more in
    backward when layers are computed again; one for the embedding, one for the head's input."""
    if table.tp == 1:
        return 0.0, 0.0
    once = all_reduce_seconds(_ring(group, network), size_bytes)
    layers = work.architecture.layers // table.pp
    again = 2 * layers if work.recompute == "full" else 0
    return once * (2 * layers + (stage == 0)), once * (2 * layers + again + (stage == table.pp - 1))


def _between_replicas(
    work: Work, table: RankTable, network: LinkTable
) -> tuple[float, Sent, float, dict[tuple[str, str], float]]:
    """(seconds and bytes between regions of a step's gradients and new weights; the same of the weights alone), of
    all stages at once.

    ZeRO-1 and ACCO reduce-scatter gradients, DeepSpeed's other stages all-reduce their buckets
    (`use_multi_rank_bucket_allreduce`; without it, each part goes to its owner only), ZeRO 2 after every micro-batch.
    The new weights are all-gathered where the optimizer is sharded. Rings: a rank hands 1/D of the tensor to the
    next, D − 1 times for either, so the slowest hop decides; with equal links that is DT-FM's data-parallel cost.
    """
    sent: Sent = defaultdict(float)
    if table.dp == 1:
        return 0.0, sent, 0.0, {}
    zero = work.deepspeed.get("zero_optimization", {})
    stage = zero_stage(work.deepspeed)
    gradient_bytes = work.bytes_per_weight if work.acco is not None else gradient_wire_bytes(work.deepspeed)
    scattered = work.acco is not None or overlaps_reduction(work.deepspeed)
    rounds = 1.0 if scattered or not zero.get("use_multi_rank_bucket_allreduce", True) else 2.0
    if stage == 2:
        rounds *= accumulation_steps(work.deepspeed, table.dp)
    gathered_bytes, gathers = (work.bytes_per_weight, 1) if stage else (0, 0)
    per_parameter = rounds * gradient_bytes + gathered_bytes
    rings = {
        (s, t): _ring([table.at(s, d, t) for d in range(table.dp)], network)
        for s in range(table.pp)
        for t in range(table.tp)
    }
    flows = Counter(line.key for ring in rings.values() for line in ring)
    reduction_s = refresh_s = 0.0
    for (s, t), hops in rings.items():
        parameters = stage_parameters(work.architecture, work.parallel, s) / table.dp
        byte_s = max(8e-9 * _share(flows, line) / line.gbps for line in hops)
        latency_s = max(line.latency_s for line in hops)
        hop_s = per_parameter * parameters * byte_s + (rounds + gathers) * latency_s
        gather_s = gathered_bytes * parameters * byte_s + gathers * latency_s
        reduction_s = max(reduction_s, (table.dp - 1) * hop_s)
        refresh_s = max(refresh_s, (table.dp - 1) * gather_s)
        for d in range(table.dp):
            one, other = table.at(s, d, t), table.at(s, (d + 1) % table.dp, t)
            _count(sent, one, other, (table.dp - 1) * (parameters * per_parameter))
    weights = {pair: count * gathered_bytes / per_parameter for pair, count in sent.items() if gathered_bytes}
    return reduction_s, sent, refresh_s, weights


def _tied_embedding(work: Work, table: RankTable, network: LinkTable, sent: Sent) -> float:
    """A tied embedding lies at both ends of a pipeline: their gradients are summed by an all-reduce of two ranks."""
    if table.pp == 1 or not work.architecture.tied_embeddings:
        return 0.0
    a = work.architecture
    size = a.vocab_size * a.hidden_size // table.tp * work.bytes_per_weight
    pairs = [(table.at(0, d, t), table.at(table.pp - 1, d, t)) for d in range(table.dp) for t in range(table.tp)]
    lines = [network.between(*pair) for pair in pairs]
    flows = Counter(line.key for line in lines)
    for pair in pairs:
        _count(sent, *pair, size, both_ways=True)
    return max(all_reduce_seconds([line, line], size, _share(flows, line)) for line in lines)


def _share(flows: Counter[tuple[str, ...]], line: Line) -> int:
    """How many flows use the line at once."""
    return flows[line.key] if line.key else 1


def _ring(ranks: Sequence[RankDevice], network: LinkTable) -> list[Line]:
    """Each rank's line to the next, the last one's to the first."""
    return [network.between(one, other) for one, other in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]


def all_reduce_seconds(ring: Sequence[Line], size_bytes: float, share: int = 1) -> float:
    """n − 1 hops that reduce and n − 1 that gather, each of 1/n of the bytes over every line at once (Patarasuk and
    Yuan, Bandwidth optimal all-reduce algorithms, 2009)."""
    n = len(ring)
    return 2 * (n - 1) * max(line.seconds(size_bytes / n, share) for line in ring)


def _count(sent: Sent, one: RankDevice, other: RankDevice, size_bytes: float, both_ways: bool = False) -> None:
    """Only what crosses regions is counted."""
    if one.region != other.region:
        sent[one.region, other.region] += size_bytes
        if both_ways:
            sent[other.region, one.region] += size_bytes
