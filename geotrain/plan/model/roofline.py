"""The roofline of a step (Williams et al., CACM 2009) on devices that are not here, from the architecture alone.

Each operation takes the longer of its arithmetic at the matrix peak and its traffic at the memory's bandwidth;
operations follow one another. `EXPECTED` lowers the rates to what kernels are known to reach; `CEILING` does not, so
that no run is faster. Left out are launches, input, stragglers and the outer loop.

Counted of a layer, forward: the products with weights, each of which reads both factors and writes the result;
attention, which reads q, k, v and writes its output (arXiv 2205.14135); and what only moves memory: norms with their
residual sums (8 hidden sizes a token), rotation (2 of q and k), SwiGLU (3 of the MLP's width). Backward: two products
for each of forward's, of which one adds to the accumulated gradients; 2.5 times the attention (arXiv 2307.08691,
section 3.1); twice the rest. Cross entropy: three passes over fp32 logits. AdamW: 30 bytes for each parameter owned.

Ranks of a replica exchange activations four times a layer, hidden behind nothing: tensor ranks all of them, expert
and context ranks what goes to others. Gradients and weights between replicas hide behind one micro-batch, with ACCO
behind all. A pipeline of p stages and m micro-batches takes (m + p − 1) / m as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from geotrain.families import Architecture, family_of
from geotrain.families.weights import Weight
from geotrain.parallelism.checks import accumulation_steps, gradient_wire_bytes, overlaps_reduction, zero_stage
from geotrain.parallelism.local_parameters import stage_parameters
from geotrain.plan.model.exchanges import attended, context_exchanges, expert_exchanges, sent_bytes
from geotrain.plan.model.work import Work, useful_flops

OPTIMIZER_BYTES = 30  # gradient read in fp32; master and two moments read and written; weight written
IN_HOST = 8  # devices that share a host's fast links


@dataclass(frozen=True)
class Accelerator:
    """Rates as NVIDIA's data sheets of the SXM modules say.

    flops: dense bf16, a second. memory_bytes, bandwidth: of the HBM; bytes, bytes a second. link: NVLink, bytes a
    second each way. network: one 400 Gbit/s adapter for each device, bytes a second, each way.
    """

    name: str
    flops: float
    memory_bytes: float
    bandwidth: float
    link: float
    network: float = 50e9


ACCELERATORS = (
    Accelerator("H100", 989.4e12, 80e9, 3.35e12, 450e9),  # H100 Tensor Core GPU data sheet, 2023
    Accelerator("H200", 989.4e12, 141e9, 4.8e12, 450e9),  # H200 Tensor Core GPU data sheet, 2024
    Accelerator(
        "B200", 2250e12, 180e9, 7.7e12, 900e9
    ),  # HGX B200: an eighth of the board's, DGX B200 data sheet, 2024
)


@dataclass(frozen=True)
class RateShares:
    """Parts of the rates that kernels reach. None was measured by this project."""

    products: float
    attention: float
    bandwidth: float
    link: float


CEILING = RateShares(1.0, 1.0, 1.0, 1.0)
# Products: large ones of cuBLAS keep 0.7 to 0.8 of the peak at the power limit. Attention: forward 0.75, backward 0.6
# at long sequences (FlashAttention-3, arXiv 2407.08608, figures 5 and 6). Streaming kernels: nine tenths of HBM.
EXPECTED = RateShares(0.72, 0.55, 0.9, 0.8)


@dataclass(frozen=True)
class Operation:
    """A part of one micro-batch on one rank. flops: executed. bytes: to and from the device's memory."""

    name: str
    flops: float
    bytes: float

    def seconds(self, device: Accelerator, shares: RateShares) -> float:
        rate = shares.attention if self.name == "attention" else shares.products
        return max(self.flops / (rate * device.flops), self.bytes / (shares.bandwidth * device.bandwidth))


@dataclass(frozen=True)
class Roofline:
    """A step of a worker. mfu: useful operations over what all its devices could do meanwhile.

    products_s, attention_s, memory_s, optimizer_s: of the busiest stage. exchange_s: activations that the ranks of a
    replica send each other. pipeline_s: the bubble. exposed_s: of the traffic between replicas, what nothing hides.
    """

    products_s: float
    attention_s: float
    memory_s: float
    optimizer_s: float
    exchange_s: float
    pipeline_s: float
    exposed_s: float
    mfu: float

    @property
    def step_s(self) -> float:
        compute_s = self.products_s + self.attention_s + self.memory_s + self.optimizer_s
        return compute_s + self.exchange_s + self.pipeline_s + self.exposed_s


def roofline(work: Work, replicas: int, device: Accelerator, shares: RateShares = EXPECTED) -> Roofline:
    """replicas: data-parallel ones. The layout must be one that `check_layout` allows."""
    a, parallel = work.architecture, work.parallel
    micro_batches = accumulation_steps(work.deepspeed, replicas)
    stages = parallel.pipeline
    spent = {"products": 0.0, "attention": 0.0, "memory": 0.0}
    for operation in micro_batch(work, stages - 1):  # the last stage has the head, more than the first's look-up
        spent[operation.name] += operation.seconds(device, shares)
    exchange_s = exchanged_bytes(work) / (shares.link * device.link)
    slot_s = sum(spent.values()) + exchange_s
    held = max(stage_parameters(a, parallel, stage) for stage in range(stages))
    owners = replicas * parallel.context
    shard = held / owners if zero_stage(work.deepspeed) else held
    optimizer_s = OPTIMIZER_BYTES * shard / (shares.bandwidth * device.bandwidth)
    ranks = parallel.replica_ranks * replicas
    rate = shares.link * (device.link if ranks <= IN_HOST else device.network)
    each = gradient_wire_bytes(work.deepspeed) + work.bytes_per_weight
    traffic_s = each * held * (owners - 1) / owners / rate
    hidden_s = slot_s * (micro_batches if work.acco else overlaps_reduction(work.deepspeed))
    exposed_s = max(0.0, traffic_s - hidden_s)
    pipeline_s = (stages - 1) * slot_s
    step_s = micro_batches * slot_s + pipeline_s + optimizer_s + exposed_s
    useful = useful_flops(a, work.sequence_length) * work.micro_tokens * micro_batches * replicas
    return Roofline(
        products_s=micro_batches * spent["products"],
        attention_s=micro_batches * spent["attention"],
        memory_s=micro_batches * spent["memory"],
        optimizer_s=optimizer_s,
        exchange_s=micro_batches * exchange_s,
        pipeline_s=pipeline_s,
        exposed_s=exposed_s,
        mfu=useful / (step_s * ranks * device.flops),
    )


def exchanged_bytes(work: Work) -> float:
    """What a rank sends of a micro-batch, all inside a host. Tensor ranks: an all-reduce, or with sequence
    parallelism the two halves of one, after attention, and after an MLP that is no routed expert; backward does it
    again, and so does forward where it is computed again. Context and expert ranks: as in `exchanges`."""
    a, parallel = work.architecture, work.parallel
    tokens, tp = work.micro_tokens / parallel.context, parallel.tensor
    sparse = sum(map(a.has_experts, range(a.layers)))
    shared = a.experts is not None and a.experts.shared_ffn_size > 0
    reductions = 2 * a.layers - (0 if shared else sparse)
    times = 3 if work.recompute == "full" else 2
    sent = times * reductions * 2 * (tp - 1) / tp * a.hidden_size * work.bytes_per_weight * tokens
    for count, exchanges in ((a.layers, context_exchanges(work)), (sparse, expert_exchanges(work))):
        sent += count * sent_bytes(work, exchanges.forward + exchanges.backward)
    return sent / parallel.pipeline


def micro_batch(work: Work, stage: int) -> Iterator[Operation]:
    """What a rank of a pipeline stage does for a micro-batch, forward and backward."""
    a, parallel, size = work.architecture, work.parallel, work.bytes_per_weight
    tokens, tp = work.micro_tokens / parallel.context, parallel.tensor
    layers, last = a.layers // parallel.pipeline, stage == parallel.pipeline - 1
    forward, again = 1 + (work.recompute == "full"), int(work.recompute != "none")

    def product(rows: float, k: float, n: float, weights: float, times: int) -> Iterator[Operation]:
        """[rows, k] · [k, n]. weights: k · n, of all experts together."""
        for _ in range(times + 2):
            yield Operation("products", 2.0 * rows * k * n, size * (rows * k + weights + rows * n))
        yield Operation("memory", 0.0, 2.0 * size * weights)  # the sum of gradients, read and written

    q, key, value, output = attended(a)
    whole = 8 * a.hidden_size / (tp if parallel.sequence else 1)
    for layer in range(stage * layers, (stage + 1) * layers):
        for matrix in _matrices(a, a.has_experts(layer)):
            n = matrix.n / tp if matrix.cut == "rows" else matrix.n
            k = matrix.k / tp if matrix.cut == "columns" else matrix.k
            rows = tokens / tp if matrix.cut == "whole" and parallel.sequence else tokens
            held = matrix.count * k * n
            if a.experts is not None and matrix.count > 1:
                rows, held = rows * a.experts.per_token, held / parallel.expert
            yield from product(rows, k, n, held, forward)
        scores = a.heads * (a.query_dim + a.value_dim) / tp * work.sequence_length * tokens
        moved = size * tokens * (q + key + value + output) / tp
        for times in (1, again, 2.5):
            yield Operation("attention", times * scores, times * moved)
        streamed = whole + (2 * (q + key) + 3 * a.active_ffn_size(a.has_experts(layer))) / tp
        yield Operation("memory", 0.0, (forward + 2) * size * tokens * streamed)
    if last:
        yield from product(tokens, a.hidden_size, a.vocab_size / tp, a.hidden_size * a.vocab_size / tp, 1)
        yield Operation("memory", 0.0, tokens * a.vocab_size / tp * (2 * size + 3 * 4))


@dataclass(frozen=True)
class _Matrix:
    """A layer's matrix [n, k] as one product takes it; count: experts that have one each. cut: as `Weight` has it."""

    n: int
    k: int
    count: int
    cut: str


@lru_cache(maxsize=64)
def _matrices(a: Architecture, sparse: bool) -> tuple[_Matrix, ...]:
    """Of a layer that has experts or has not. What lies in one parameter of Megatron-core's is one product."""
    layer = next(layer for layer in range(a.layers) if a.has_experts(layer) == sparse)
    found: dict[str, list[Weight]] = {}
    for weight in family_of(a.model_type).layer(a, layer):
        if len(weight.shape) == 2:
            found.setdefault(weight.within, []).append(weight)
    matrices = []
    for weights in found.values():
        count = len({weight.expert for weight in weights})
        rows = sum(weight.shape[0] for weight in weights) // count
        matrices.append(_Matrix(rows, weights[0].shape[1], count, weights[0].cut))
    return tuple(matrices)


def fits(memory_bytes: float, device: Accelerator) -> bool:
    """Whether a rank that needs so much fits; 2 GB are the frameworks' own (`parallelism.memory`)."""
    return memory_bytes + 2e9 <= device.memory_bytes
