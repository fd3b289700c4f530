"""How long one inner step of one worker takes, and why.

A step is the pipeline's timetable with tensor-parallel communication inside its stages, then the gradients' reduction
over the data-parallel replicas, then a few words between all ranks. Nothing of it overlaps, as `geotrain.inner` sets
DeepSpeed and Megatron-core; ACCO overlaps the reduction with the computation, but not at an exchange of the outer
loop (`StepTime.settle_s`, `refresh_s`). Left out: the optimizer's arithmetic (it moves some 30 bytes a parameter of
the shard through memory), kernels' launches, input.

Ranks are ordered tensor first, then data, then pipeline. Where several flows use one line, each gets its share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from typing import Any

from geotrain.canonical import Architecture
from geotrain.config import AccoConfig, ParallelConfig
from geotrain.plan.network import Line, Network, Seat
from geotrain.plan.pipeline import Stages, bubble_free_seconds, pipeline_seconds
from geotrain.plan.shares import claimed_shares, even_shares
from geotrain.plan.work import stage_flops
from geotrain.sharing.acco_forms import FORMS, first_part
from geotrain.sharing.checks import accumulation_steps, trains_in_bf16, zero_stage
from geotrain.sharing.mapping import stage_parameters

Sent = defaultdict[tuple[str, str], float]  # (from region, to region) → bytes
SMALL_COLLECTIVES = 3  # of a step, over all ranks: the norm, whether it is finite, the loss


@dataclass(frozen=True)
class Work:
    """What a worker does. deepspeed: its block, with the worker's own keys laid over."""

    architecture: Architecture
    sequence_length: int
    recompute: str
    parallel: ParallelConfig
    deepspeed: dict[str, Any]
    acco: AccoConfig | None

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
    reduction_s: gradients and weights between replicas, as far as nothing hides it. words_s: the small collectives.
    sent_bytes: of one step, over each pair of regions, (from, to).

    No part of the step, but of each time that the outer loop stops it:
    settle_s: ACCO's commit is waited for in the open, and the next window's first part has none to hide.
    refresh_s: the owners' new weights reach all replicas; refresh_bytes: what that sends.
    """

    compute_s: float
    tensor_s: float
    pipeline_s: float
    reduction_s: float
    words_s: float
    sent_bytes: dict[tuple[str, str], float]
    settle_s: float
    refresh_s: float
    refresh_bytes: dict[tuple[str, str], float]

    @property
    def step_s(self) -> float:
        return self.compute_s + self.tensor_s + self.pipeline_s + self.reduction_s + self.words_s


class Mesh:
    """The ranks' seats as a table: at(stage, replica, tensor rank)."""

    def __init__(self, seats: Sequence[Seat], parallel: ParallelConfig) -> None:
        self.seats, self.tp, self.pp = seats, parallel.tensor, parallel.pipeline
        self.dp = len(seats) // (self.tp * self.pp)

    def at(self, stage: int, replica: int, tensor: int) -> Seat:
        return self.seats[(stage * self.dp + replica) * self.tp + tensor]

    def group(self, stage: int, replica: int) -> tuple[Seat, ...]:
        """The tensor-parallel ranks of one stage of one replica."""
        begin = (stage * self.dp + replica) * self.tp
        return tuple(self.seats[begin : begin + self.tp])


def step_time(work: Work, seats: Sequence[Seat], network: Network) -> StepTime:
    """seats: of the worker's ranks, in their order; the layout must be one that `check_layout` allows.

    Raises ConfigError when a link's figure is missing.
    """
    mesh = Mesh(seats, work.parallel)
    micro_batches = accumulation_steps(work.deepspeed, mesh.dp)
    first = micro_batches if work.acco is None else first_part(work.acco, micro_batches)
    sent: Sent = defaultdict(float)
    computing = _computing(work, mesh, network, (first, micro_batches - first), sent)
    replicas = _between_replicas(work, mesh, network)
    reduction, settle, ahead = replicas.reduction_s, 0.0, 0.0
    tied = _tied_ends(work, mesh, network, sent)
    words = SMALL_COLLECTIVES * _words(seats, network)
    if work.acco is not None:
        ahead = FORMS[work.acco.prediction].ahead_traffic(work.bytes_per_weight)
        settle = min(computing.first_s, reduction)  # what the first part would have hidden
        reduction = max(computing.first_s, reduction) + max(computing.second_s, ahead * reduction) - computing.whole_s
    for pair, count in replicas.reduction_bytes.items():
        sent[pair] += (1 + ahead) * count
    return StepTime(
        computing.arithmetic_s,
        computing.tensor_s,
        computing.whole_s - computing.arithmetic_s - computing.tensor_s,
        reduction + tied,
        words,
        dict(sent),
        settle,
        replicas.refresh_s,
        replicas.refresh_bytes,
    )


@dataclass(frozen=True)
class _Computing:
    """Seconds of the pipelines' two parts, until the slowest replica is done; and of its busiest stage."""

    first_s: float
    second_s: float
    arithmetic_s: float
    tensor_s: float

    @property
    def whole_s(self) -> float:
        return self.first_s + self.second_s


def _computing(work: Work, mesh: Mesh, network: Network, parts: tuple[int, int], sent: Sent) -> _Computing:
    """parts: micro-batches of a replica before and after ACCO's commit is adopted.

    An activation of a micro-batch has tokens · hidden elements; every tensor rank sends it whole to its peer, with
    sequence parallelism its part.
    """
    size = work.bytes_per_weight * work.micro_tokens * work.architecture.hidden_size
    piece = size // mesh.tp if work.parallel.sequence else size
    edges = {
        (s, d): [network.between(mesh.at(s, d, t), mesh.at(s + 1, d, t)) for t in range(mesh.tp)]
        for s in range(mesh.pp - 1)
        for d in range(mesh.dp)
    }
    flows = Counter(line.key for lines in edges.values() for line in lines)
    compute_of: dict[tuple[int, tuple[float, ...]], tuple[float, float]] = {}
    replicas: list[Stages] = []
    tensors: list[list[float]] = []
    for d in range(mesh.dp):
        forward, backward, tensor = [], [], []
        for s in range(mesh.pp):
            group = mesh.group(s, d)
            speeds = tuple(seat.device.tflops * seat.device.efficiency for seat in group)
            if (s, speeds) not in compute_of:
                flops = stage_flops(work.architecture, work.sequence_length, s, mesh.pp, work.recompute)
                speed = min(speeds) * 1e12 * mesh.tp
                compute_of[s, speeds] = (work.micro_tokens * flops[0] / speed, work.micro_tokens * flops[1] / speed)
            one_way = _tensor_seconds(work, mesh, network, s, group, size)
            forward.append(compute_of[s, speeds][0] + one_way[0])
            backward.append(compute_of[s, speeds][1] + one_way[1])
            tensor.append(sum(one_way))
        times = tuple(
            max(line.seconds(piece, _share(flows, line)) for line in edges[s, d]) for s in range(mesh.pp - 1)
        )
        replicas.append(Stages(tuple(forward), tuple(backward), times))
        tensors.append(tensor)
    balance = work.acco is not None and work.acco.balance
    shares = (claimed_shares if balance else even_shares)(tuple(replicas), parts)
    for s, d in edges:
        moved = shares.micro_batches[d] * piece  # so much each way
        for t in range(mesh.tp):
            _count(sent, mesh.at(s, d, t), mesh.at(s + 1, d, t), 1, moved, both_ways=True)
    counts = shares.micro_batches
    slowest = max(range(mesh.dp), key=lambda d: pipeline_seconds(replicas[d], counts[d]))
    forward_s, backward_s = replicas[slowest].forward_s, replicas[slowest].backward_s
    busiest = max(range(mesh.pp), key=lambda s: forward_s[s] + backward_s[s])
    tensor_s = counts[slowest] * tensors[slowest][busiest]
    first_s, second_s = shares.part_s
    arithmetic_s = bubble_free_seconds(replicas[slowest], counts[slowest]) - tensor_s
    return _Computing(first_s, second_s, arithmetic_s, tensor_s)


def _tensor_seconds(
    work: Work, mesh: Mesh, network: Network, stage: int, group: tuple[Seat, ...], size_bytes: int
) -> tuple[float, float]:
    """(forward, backward) of a micro-batch: two all-reduces a layer each way, of the activations (Megatron-LM, arXiv
    1909.08053, section 3; reduce-scatter and all-gather under sequence parallelism move the same), once more in
    backward when layers are computed again; one for the embedding, one for the head's input."""
    if mesh.tp == 1:
        return 0.0, 0.0
    once = all_reduce_seconds(_ring(group, network), size_bytes)
    layers = work.architecture.layers // mesh.pp
    again = 2 * layers if work.recompute == "full" else 0
    return once * (2 * layers + (stage == 0)), once * (2 * layers + again + (stage == mesh.pp - 1))


@dataclass(frozen=True)
class _Replicas:
    """Seconds, and bytes between regions. reduction: gradients and new weights of a step. refresh: weights alone."""

    reduction_s: float = 0.0
    reduction_bytes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    refresh_s: float = 0.0
    refresh_bytes: dict[tuple[str, str], float] = field(default_factory=dict)


def _between_replicas(work: Work, mesh: Mesh, network: Network) -> _Replicas:
    """Gradients and weights between the replicas of each stage, all stages at once.

    DeepSpeed all-reduces the gradients' buckets whatever the ZeRO stage (`use_multi_rank_bucket_allreduce`; without
    it, each part goes to its owner only), in ZeRO 2 after every micro-batch, and all-gathers the new weights where
    the optimizer is sharded. ACCO reduce-scatters and all-gathers. Rings: a rank hands 1/D of the tensor to the next,
    D − 1 times for either, so the slowest hop decides; with equal links that is DT-FM's data-parallel cost.
    """
    if mesh.dp == 1:
        return _Replicas()
    zero = work.deepspeed.get("zero_optimization", {})
    stage = zero_stage(work.deepspeed)
    wide = str(work.deepspeed.get("data_types", {}).get("grad_accum_dtype")) in ("fp32", "float32")
    gradient_bytes = 4 if wide or stage == 0 else work.bytes_per_weight
    rounds = 2.0 if work.acco is None and zero.get("use_multi_rank_bucket_allreduce", True) else 1.0
    if stage == 2:
        rounds *= accumulation_steps(work.deepspeed, mesh.dp)
    gathered, gathers = (work.bytes_per_weight, 1) if stage else (0, 0)
    per_parameter, latencies = rounds * gradient_bytes + gathered, rounds + gathers
    rings = {
        (s, t): _ring([mesh.at(s, d, t) for d in range(mesh.dp)], network)
        for s in range(mesh.pp)
        for t in range(mesh.tp)
    }
    flows = Counter(line.key for ring in rings.values() for line in ring)
    worst = refresh = 0.0
    sent: Sent = defaultdict(float)
    for s in range(mesh.pp):
        parameters = stage_parameters(work.architecture, work.parallel, s) / mesh.dp
        for t in range(mesh.tp):
            hops = rings[s, t]
            byte_s = max(8e-9 * _share(flows, line) / line.gbps for line in hops)
            latency_s = max(line.latency_s for line in hops)
            hop_s = per_parameter * parameters * byte_s + latencies * latency_s
            gather_s = gathered * parameters * byte_s + gathers * latency_s
            worst, refresh = max(worst, (mesh.dp - 1) * hop_s), max(refresh, (mesh.dp - 1) * gather_s)
            for d in range(mesh.dp):
                ends = mesh.at(s, d, t), mesh.at(s, (d + 1) % mesh.dp, t)
                _count(sent, *ends, mesh.dp - 1, parameters * per_parameter)
    weights = {pair: count * gathered / per_parameter for pair, count in sent.items() if gathered}
    return _Replicas(worst, sent, refresh, weights)


def _tied_ends(work: Work, mesh: Mesh, network: Network, sent: Sent) -> float:
    """A tied embedding lies at both ends of a pipeline: their gradients are summed by an all-reduce of two ranks."""
    if mesh.pp == 1 or not work.architecture.tied_embeddings:
        return 0.0
    a = work.architecture
    size = a.vocab_size * a.hidden_size // mesh.tp * work.bytes_per_weight
    pairs = [(mesh.at(0, d, t), mesh.at(mesh.pp - 1, d, t)) for d in range(mesh.dp) for t in range(mesh.tp)]
    lines = [network.between(*pair) for pair in pairs]
    flows = Counter(line.key for line in lines)
    for pair in pairs:
        _count(sent, *pair, 1, size, both_ways=True)
    return max(all_reduce_seconds([line, line], size, _share(flows, line)) for line in lines)


def _share(flows: Counter[tuple[str, ...]], line: Line) -> int:
    return flows[line.key] if line.key else 1


def _words(seats: Sequence[Seat], network: Network) -> float:
    """An all-reduce of a few bytes over a worker: up and down a tree over its ranks."""
    if len(seats) == 1:
        return 0.0
    farthest = max(line.latency_s for line in _ring(seats, network))
    return 2 * ceil(log2(len(seats))) * farthest


def _ring(seats: Sequence[Seat], network: Network) -> list[Line]:
    """Each seat's line to the next, the last one's to the first."""
    return [network.between(one, other) for one, other in zip(seats, (*seats[1:], seats[0]), strict=True)]


def all_reduce_seconds(ring: Sequence[Line], size_bytes: float, share: int = 1) -> float:
    """n − 1 hops that reduce and n − 1 that gather, each of 1/n of the bytes over every line at once (Patarasuk and
    Yuan, Bandwidth optimal all-reduce algorithms, 2009)."""
    n = len(ring)
    return 2 * (n - 1) * max(line.seconds(size_bytes / n, share) for line in ring)


def _count(sent: Sent, one: Seat, other: Seat, times: int, size_bytes: float, both_ways: bool = False) -> None:
    if one.region != other.region:
        sent[one.region, other.region] += times * size_bytes
        if both_ways:
            sent[other.region, one.region] += times * size_bytes
