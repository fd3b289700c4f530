"""Predicts how long one inner step of one worker takes, and why.

A step is the pipeline's timetable with the communication of tensor, context and expert ranks inside its stages
(`exchanges`), then the reduction of the gradients over the ranks that have the same parameters, then a few small
collectives over all ranks. ZeRO-1 reduces by buckets
during the last micro-batch's backward, and gathers so during the first one's forward (`geotrain.inner.zero`). ACCO
overlaps both with the whole computation, but not at an exchange of the outer loop (`StepTime.settle_s`, `refresh_s`).
Nothing else overlaps, as `geotrain.inner` configures DeepSpeed and Megatron-core. Left out are the optimizer's
arithmetic (it moves some 30 bytes for each parameter of the shard through memory), kernel launches and input.

Where several flows use one line at the same time, each gets an equal share of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, log2

from geotrain.parallelism.acco_forms import first_part
from geotrain.parallelism.checks import (
    accumulation_steps,
    overlaps_reduction,
    reduction_bucket,
    wire_bytes,
    zero_stage,
)
from geotrain.parallelism.local_parameters import expert_parameters, stage_parameters, tied_copies, vocabulary_rows
from geotrain.plan.model.exchanges import Collectives, context_exchanges, expert_exchanges, stage_seconds
from geotrain.plan.model.network import Line, LinkTable, RankDevice, RankTable, Sent
from geotrain.plan.model.pipeline import Stages, claimed_shares, even_shares, pipeline_seconds
from geotrain.plan.model.work import Work, stage_flops

NOTHING = (0.0, 0.0)
PARTS = {  # of a step, in words
    "compute_s": "arithmetic",
    "tensor_s": "tensor parallelism",
    "context_s": "heads for tokens between context ranks",
    "expert_s": "tokens on their way to experts",
    "pipeline_s": "the pipeline's bubble and transfers",
    "reduction_s": "gradients between replicas",
    "small_collectives_s": "words between all ranks",
}
SMALL_COLLECTIVES = 3  # of a step, over all ranks: the norm, whether it is finite, the loss


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they go to; they add up to `step_s`.

    compute_s: arithmetic of the slowest replica's busiest stage. tensor_s, context_s, expert_s: its communication
    between tensor ranks; between context ranks; between expert ranks, and tensor ranks about experts.
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
    context_s: float
    expert_s: float
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
        inside_s = self.compute_s + self.tensor_s + self.context_s + self.expert_s
        return inside_s + self.pipeline_s + self.reduction_s + self.small_collectives_s


def step_time(work: Work, ranks: Sequence[RankDevice], network: LinkTable) -> StepTime:
    """Predict the seconds of a worker's step. ranks: of the worker, in their order; the parallel layout must be one
    that `check_layout` allows.

    Raises ConfigError when a link's figure is missing.
    """
    table = RankTable(ranks, work.parallel)
    micro_batches = accumulation_steps(work.deepspeed, table.replicas)
    # ACCO divides a step: the first part's micro-batches are computed while the last step's commit travels.
    first = micro_batches if work.acco is None else first_part(work.acco, micro_batches)
    sent = Sent(float)
    part_s, busiest, count = _pipelines(work, table, network, (first, micro_batches - first), sent)
    reduction_s, reduced, refresh_s, gathered = _between_replicas(work, table, network)
    exposed_s, settle_s, ahead, gather_s = (
        reduction_s,
        0.0,
        0,
        refresh_s * wire_bytes(work.deepspeed, work.acco is not None)[1] / work.bytes_per_weight,
    )
    if work.acco is None and overlaps_reduction(work.deepspeed):
        buckets, scattered_s = _buckets(work), reduction_s - gather_s
        exposed_s = _exposed(gather_s, busiest.forward_s, buckets)
        exposed_s += _exposed(scattered_s, busiest.backward_s, buckets)
    if work.acco is not None:
        # The reduction hides behind the first part; a prediction, which sends as much, behind the second.
        ahead = int(work.acco.form == "exact")
        settle_s = min(part_s[0], reduction_s)  # what the first part would have hidden
        exposed_s = max(part_s[0], reduction_s) + max(part_s[1], ahead * reduction_s) - sum(part_s)
    for pair, count_bytes in reduced.items():
        sent[pair] += (1 + ahead) * count_bytes
    tied_s = _tied_embedding(work, table, network, sent)
    # An all-reduce of a few bytes goes up and down a tree over all ranks: only the latency counts.
    farthest_s = max(line.latency_s for line in _ring(ranks, network)) if len(ranks) > 1 else 0.0
    return StepTime(
        compute_s=count * busiest.compute_s,
        tensor_s=count * busiest.tensor_s,
        context_s=count * busiest.context_s,
        expert_s=count * busiest.expert_s,
        pipeline_s=sum(part_s) - count * (busiest.forward_s + busiest.backward_s),
        reduction_s=exposed_s + tied_s,
        small_collectives_s=SMALL_COLLECTIVES * 2 * ceil(log2(len(ranks))) * farthest_s,
        sent_bytes=dict(sent),
        settle_s=settle_s,
        refresh_s=refresh_s,
        refresh_bytes=gathered,
        refreshes_all=work.acco is not None and work.acco.form == "delayed",
    )


@dataclass(frozen=True)
class _Stage:
    """A micro-batch in one stage of one replica. compute_s, tensor_s, context_s, expert_s: of both ways."""

    forward_s: float
    backward_s: float
    compute_s: float
    tensor_s: float
    context_s: float
    expert_s: float


def _pipelines(
    work: Work, table: RankTable, network: LinkTable, parts: tuple[int, int], sent: Sent
) -> tuple[tuple[float, ...], _Stage, int]:
    """Compute (seconds of the step's two parts until the slowest replica is done; its busiest stage; how many
    micro-batches it computes). parts: micro-batches of a replica before and after ACCO's commit is adopted.

    An activation of a micro-batch has tokens · hidden elements, of which each context rank has its part; every tensor
    rank sends that whole to its peer, with sequence parallelism its part of it.
    """
    size = work.bytes_per_weight * work.micro_tokens // table.cp * work.architecture.hidden_size
    chunk = size // table.tp if work.parallel.sequence else size
    columns = [(d, t) for d in range(table.copies) for t in range(table.tp)]
    edges = {
        (s, d, t): network.between(table.at(s, d, t), table.at(s + 1, d, t))
        for s in range(table.pp - 1)
        for d, t in columns
    }
    flows = Counter(line.key for line in edges.values())
    crossing = [Sent(float) for _ in range(table.replicas)]  # of a micro-batch, but for activations between stages
    by_stage = [_stages(work, table, network, s, size, crossing) for s in range(table.pp)]
    stages, replicas = list(zip(*by_stage, strict=True)), []
    for r, mine in enumerate(stages):
        own = [(d, t) for d, t in columns if d // table.cp == r]
        times = tuple(
            max(edges[s, d, t].seconds(chunk, _share(flows, edges[s, d, t])) for d, t in own)
            for s in range(table.pp - 1)
        )
        replicas.append(Stages(tuple(x.forward_s for x in mine), tuple(x.backward_s for x in mine), times))
    balance = work.acco is not None and work.acco.balance
    shares = (claimed_shares if balance else even_shares)(tuple(replicas), parts)
    counts = shares.micro_batches
    for s, d, t in edges:
        _count(sent, table.at(s, d, t), table.at(s + 1, d, t), counts[d // table.cp] * chunk, both_ways=True)
    for count, of_replica in zip(counts, crossing, strict=True):
        for pair, count_bytes in of_replica.items():
            sent[pair] += count * count_bytes
    slowest = max(range(table.replicas), key=lambda r: pipeline_seconds(replicas[r], counts[r]))
    busiest = max(stages[slowest], key=lambda stage: stage.forward_s + stage.backward_s)
    return shares.part_s, busiest, counts[slowest]


def _stages(
    work: Work, table: RankTable, network: LinkTable, stage: int, size_bytes: int, crossing: Sequence[Sent]
) -> list[_Stage]:
    """Stages of each replica. crossing: gets what crosses regions for a replica's micro-batch."""
    a, tokens = work.architecture, work.micro_tokens / table.cp
    layers = work.parallel.layers_of(stage, a.layers)
    flops = stage_flops(a, work.sequence_length, layers, work.recompute, work.imbalance if table.ep > 1 else 1.0)
    sparse = sum(map(a.has_experts, layers))

    def seconds(of_layer: Collectives, count: int) -> list[tuple[float, float]]:
        """Return the seconds (forward, backward) of each replica."""
        ways = []
        for exchanges in (of_layer.forward, of_layer.backward):
            took, crossed = stage_seconds(exchanges, table, stage, network)
            ways.append([count * one_s for one_s in took])
            for total, of_replica in zip(crossing, crossed, strict=True):
                for pair, sent_bytes in of_replica.items():
                    total[pair] += count * sent_bytes
        return list(zip(*ways, strict=True))

    context = seconds(context_exchanges(work), len(layers))
    expert = seconds(expert_exchanges(work), sparse)
    found, tensor_groups = [], table.groups(stage, "tensor")  # none where there is no tensor parallelism
    for r in range(table.replicas):
        # All of these wait for each other at every layer: the slowest of them decides.
        speed = min(rank.device.tflops * rank.device.efficiency for rank in table.waiting(stage, r)) * 1e12 * table.tp
        of_replica = tensor_groups[r * table.cp : (r + 1) * table.cp]
        tensor = max(
            (_tensor_seconds(work, network, stage, g.ranks, size_bytes) for g in of_replica), default=NOTHING
        )
        arithmetic = [tokens * one / speed for one in flops]
        forward_s, backward_s = map(sum, zip(arithmetic, tensor, context[r], expert[r], strict=True))
        found.append(_Stage(forward_s, backward_s, sum(arithmetic), sum(tensor), sum(context[r]), sum(expert[r])))
    return found


def _buckets(work: Work) -> int:
    """Number of buckets in which the gradients of the fullest stage travel."""
    stages = range(work.parallel.pipeline)
    parameters = max(stage_parameters(work.architecture, work.parallel, s) for s in stages)
    return ceil(parameters / reduction_bucket(work.deepspeed, parameters))


def _exposed(travel_s: float, compute_s: float, buckets: int) -> float:
    """Seconds of travel in equal buckets that are not hidden beside compute that completes, or needs, them one by
    one: the first can leave only when its part is computed, the last when all is."""
    return max(travel_s / buckets, travel_s - compute_s * (1 - 1 / buckets))


def _tensor_seconds(
    work: Work, network: LinkTable, stage: int, group: Sequence[RankDevice], size_bytes: int
) -> tuple[float, float]:
    """Compute the seconds (forward, backward) of tensor ranks' exchanges for a micro-batch: two all-reduces a layer
    each way, of the activations (Megatron-LM, arXiv 1909.08053, section 3; reduce-scatter and all-gather under
    sequence parallelism move the same), once more in backward when layers are computed again; one for the embedding,
    one for the head's input. Of a layer whose only MLPs are routed experts one is left: the other is part of what
    tokens cost on their way to these."""
    a, pp = work.architecture, work.parallel.pipeline
    once = all_reduce_seconds(_ring(group, network), size_bytes)
    layers = work.parallel.layers_of(stage, a.layers)
    shared = a.experts is not None and a.experts.shared_ffn_size > 0
    count = sum(len(a.letters(i)) - (a.has_experts(i) and not shared) for i in layers)
    again = count if work.recompute == "full" else 0
    return once * (count + (stage == 0)), once * (count + again + (stage == pp - 1))


def _between_replicas(
    work: Work, table: RankTable, network: LinkTable
) -> tuple[float, Sent, float, dict[tuple[str, str], float]]:
    """Compute (seconds and bytes between regions of a step's gradients and new weights; the same of the weights
    alone, whole, as the outer loop has them refreshed), of all stages at once.

    ZeRO-1 and ACCO reduce-scatter gradients, DeepSpeed's other stages all-reduce their buckets
    (`use_multi_rank_bucket_allreduce`; without it, each part goes to its owner only), ZeRO 2 after every micro-batch.
    The new weights are all-gathered where the optimizer is sharded. Rings: a rank hands 1/D of the tensor to the
    next, D − 1 times for either, so the slowest hop decides; with equal links that is DT-FM's data-parallel cost.
    D are all ranks with the same parameters; of divided experts, every EP-th of these. With several sites, rings of a
    site's R ranks hand on 1/R, and then rings of those in one place in each hand on a site's share of that.
    """
    sent = Sent(float)
    zero = work.deepspeed.get("zero_optimization", {})
    stage = zero_stage(work.deepspeed)
    gradient_bytes, weight_bytes = wire_bytes(work.deepspeed, work.acco is not None)
    scattered = work.acco is not None or overlaps_reduction(work.deepspeed)
    rounds = 1.0 if scattered or not zero.get("use_multi_rank_bucket_allreduce", True) else 2.0
    if stage == 2:
        rounds *= accumulation_steps(work.deepspeed, table.replicas)
    refreshed_bytes, gathers = (float(work.bytes_per_weight), 1) if stage else (0.0, 0)
    per_parameter = rounds * gradient_bytes + gathers * weight_bytes
    reduction_s, refresh_s = [0.0] * table.pp, [0.0] * table.pp
    each = table.copies // work.parallel.sites  # ranks in a site
    levels = (each, 1), (table.copies, each)  # inside sites, then across: of so many copies every so many-th
    for apart, (whole, step) in product(sorted({1, table.ep}), levels):  # apart: ranks that divide experts
        step = max(step, apart)
        ranks = whole // step
        if ranks == 1:
            continue
        held = []
        for s in range(table.pp):
            of_experts = expert_parameters(work.architecture, work.parallel, s)
            dense = stage_parameters(work.architecture, work.parallel, s) - of_experts
            held.append((dense if apart == 1 else of_experts) / (whole // apart))
        members = {
            (s, t, first): [table.at(s, d, t) for d in range(first, first + whole, step)]
            for s in range(table.pp)
            for t in range(table.tp)
            for first in range(table.copies)
            if first % whole < step
        }
        rings = {key: _ring(group, network) for key, group in members.items()}
        flows = Counter(line.key for ring in rings.values() for line in ring)
        slowest = [(0.0, 0.0)] * table.pp
        for (s, t, first), hops in rings.items():
            parameters = held[s]
            byte_s = max(8e-9 * _share(flows, line) / line.gbps for line in hops)
            latency_s = max(line.latency_s for line in hops)
            hop_s = per_parameter * parameters * byte_s + (rounds + gathers) * latency_s
            gather_s = refreshed_bytes * parameters * byte_s + gathers * latency_s
            slowest[s] = max(slowest[s], ((ranks - 1) * hop_s, (ranks - 1) * gather_s))
            group = members[s, t, first]
            for one, other in zip(group, (*group[1:], group[0]), strict=True):
                _count(sent, one, other, (ranks - 1) * (parameters * per_parameter))
        reduction_s = [total + one[0] for total, one in zip(reduction_s, slowest, strict=True)]
        refresh_s = [total + one[1] for total, one in zip(refresh_s, slowest, strict=True)]
    weights = {pair: count * refreshed_bytes / per_parameter for pair, count in sent.items() if refreshed_bytes}
    return max(reduction_s), sent, max(refresh_s), weights


def _tied_embedding(work: Work, table: RankTable, network: LinkTable, sent: Sent) -> float:
    """Compute the seconds of reducing embeddings that lie at both ends of a pipeline: their gradients are summed by
    an all-reduce of two ranks."""
    if not tied_copies(work.architecture, table.pp):
        return 0.0
    a = work.architecture
    size = vocabulary_rows(a.vocab_size, table.tp) * a.hidden_size * work.bytes_per_weight
    pairs = [(table.at(0, d, t), table.at(table.pp - 1, d, t)) for d in range(table.copies) for t in range(table.tp)]
    lines = [network.between(*pair) for pair in pairs]
    flows = Counter(line.key for line in lines)
    for pair in pairs:
        _count(sent, *pair, size, both_ways=True)
    return max(all_reduce_seconds([line, line], size, _share(flows, line)) for line in lines)


def _share(flows: Counter[tuple[str, ...]], line: Line) -> int:
    """Count the flows that use the line at once."""
    return flows[line.key] if line.key else 1


def _ring(ranks: Sequence[RankDevice], network: LinkTable) -> list[Line]:
    """List each rank's line to the next, the last one's to the first."""
    return [network.between(one, other) for one, other in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]


def all_reduce_seconds(ring: Sequence[Line], size_bytes: float, share: int = 1) -> float:
    """Compute the seconds of a ring all-reduce: n − 1 hops that reduce and n − 1 that gather, each of 1/n of the
    bytes over every line at once (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009)."""
    n = len(ring)
    return 2 * (n - 1) * max(line.seconds(size_bytes / n, share) for line in ring)


def _count(sent: Sent, one: RankDevice, other: RankDevice, size_bytes: float, both_ways: bool = False) -> None:
    """Count bytes between two ranks, if they cross regions."""
    if one.region != other.region:
        sent[one.region, other.region] += size_bytes
        if both_ways:
            sent[other.region, one.region] += size_bytes
