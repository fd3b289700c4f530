"""The roofline of a step (Williams et al., CACM 2009) on devices that are not here, from the architecture alone.

Each operation takes the longer of its arithmetic at the matrix peak and its traffic at the memory's bandwidth;
operations follow one another. `EXPECTED` lowers the rates to what kernels are known to reach; `CEILING` does not, so
that no run is faster. Left out are launches, input, stragglers and the outer loop.

Counted of a layer, forward: the products with weights, each of which reads both factors and writes the result;
attention, which reads q, k, v and writes its output (arXiv 2205.14135); and what only moves memory (`_streamed`).
Backward: two products for each of forward's, one of whose results is added to the accumulated gradients; attention's
scores again and four products (arXiv 2307.08691, section 3.1). Cross entropy: four passes over fp32 logits. The
optimizer: see `optimizer_operations`. A trace of the real engine agrees (`benchmarks.trace`,
tests/inner/test_trace.py).

Ranks of a replica exchange activations four times a layer, hidden behind nothing: tensor ranks all of them, expert
and context ranks what goes to others. Gradients and weights between replicas, or their codes, hide as far as their
way allows (`least_step_s`). A pipeline of p stages and m micro-batches takes (m + p − 1) / m as long.

With FP8 the layers' products go at its peak, and read factors of a byte that were cast before; head, attention and
all else stay in bf16. Utilization is then of FP8's peak. Weights are cast once a step, which is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from geotrain.families import Architecture, layer_weights
from geotrain.families.weights import Weight
from geotrain.parallelism.acco_forms import least_step_s
from geotrain.parallelism.checks import (
    accumulates_in_fp32,
    accumulation_steps,
    overlaps_reduction,
    wire_bytes,
    zero_stage,
)
from geotrain.parallelism.local_parameters import stage_parameters, vocabulary_rows
from geotrain.parallelism.optimizer_settings import MuonSettings, optimizer_settings
from geotrain.plan.model.accelerators import B200, H100, H200, Accelerator
from geotrain.plan.model.exchanges import attended, context_exchanges, expert_exchanges, sent_bytes
from geotrain.plan.model.work import Work, useful_flops

# Of an element that AdamW steps, fp32: its gradient read for the norm, scaled in place, read; master and two moments
# read and written; master read, weight written.
ADAMW_BYTES = 4 + 8 + 4 + 24 + 6
# Of one that Muon steps: gradient, momentum and master gathered and the last two put back, a scaling, two averages,
# decay, the step.
MUON_BYTES = 4 + 8 + 3 * 8 + 8 + 3 * 12 + 8 + 2 * 8 + 6
IN_HOST = 8  # devices that share a host's fast links


COMPARED = (H100, H200, B200)


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
    """A part of one micro-batch on one rank. flops: executed, in FP8 or not. bytes: to and from the device's
    memory."""

    name: str
    flops: float
    bytes: float
    fp8: bool = False

    def seconds(self, device: Accelerator, shares: RateShares) -> float:
        rate = shares.attention if self.name == "attention" else shares.products
        peak = device.fp8_flops if self.fp8 else device.flops
        return max(self.flops / (rate * peak), self.bytes / (shares.bandwidth * device.bandwidth))


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
    """Compute the roofline of a worker's step. replicas: data-parallel ones. The parallel layout must be one that
    `check_layout` allows."""
    a, parallel = work.architecture, work.parallel
    micro_batches = accumulation_steps(work.deepspeed, replicas)
    stages = parallel.pipeline
    spent = {"products": 0.0, "attention": 0.0, "memory": 0.0}
    # The last of the stages with most layers: the head is more than the first one's look-up.
    busiest = max(range(stages), key=lambda s: (len(parallel.layers_of(s, a.layers)), s))
    for operation in micro_batch(work, busiest):
        spent[operation.name] += operation.seconds(device, shares)
    exchange_s = exchanged_bytes(work, busiest) / (shares.link * device.link)
    slot_s = sum(spent.values()) + exchange_s
    held = max(stage_parameters(a, parallel, stage) for stage in range(stages))
    owners = replicas * parallel.context
    optimizer_s = max(
        sum(operation.seconds(device, shares) for operation in optimizer_operations(work, stage, owners))
        for stage in range(stages)
    )
    ranks = parallel.replica_ranks * replicas
    rate = shares.link * (device.link if ranks <= IN_HOST else device.network)
    sent_s = [each * held * (owners - 1) / owners / rate for each in wire_bytes(work.deepspeed, bool(work.acco))]
    exposed_s = sum(sent_s)
    if work.acco or overlaps_reduction(work.deepspeed):
        slots_s = micro_batches * slot_s
        exposed_s = least_step_s(work.acco.form if work.acco else None, micro_batches, slots_s, *sent_s) - slots_s
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
        mfu=useful / (step_s * ranks * (device.fp8_flops if work.fp8 else device.flops)),
    )


def exchanged_bytes(work: Work, stage: int = 0) -> float:
    """Bytes that a rank of a pipeline stage sends for a micro-batch, all inside a host. Tensor ranks: an
    all-reduce, or with sequence parallelism the two halves of one, after attention, and after an MLP that is no
    routed expert; backward does it again, and so does forward where it is computed again. With sequence parallelism
    backward gathers the inputs of both parts once more, for the gradients of weights. Context and expert ranks: as
    in `exchanges`; what attention as a ring may hide is counted as if it did not."""
    a, parallel = work.architecture, work.parallel
    tokens, tp = work.micro_tokens / parallel.context, parallel.tensor
    sparse = sum(map(a.has_experts, range(a.layers)))
    shared = a.experts is not None and a.experts.shared_ffn_size > 0
    reductions = 2 * a.layers - (0 if shared else sparse)
    times = 2 * (3 if work.recompute == "full" else 2) + parallel.sequence
    sent = times * reductions * (tp - 1) / tp * a.hidden_size * work.bytes_per_weight * tokens
    for count, exchanges in ((a.layers, context_exchanges(work)), (sparse, expert_exchanges(work))):
        sent += count * sent_bytes(work, exchanges.forward + exchanges.backward)
    return sent * len(parallel.layers_of(stage, a.layers)) / a.layers


def micro_batch(work: Work, stage: int) -> Iterator[Operation]:
    """Operations of a rank of a pipeline stage for a micro-batch, forward and backward."""
    a, parallel, size = work.architecture, work.parallel, work.bytes_per_weight
    tokens, tp = work.micro_tokens / parallel.context, parallel.tensor
    layers = parallel.layers_of(stage, a.layers)
    last = layers.stop == a.layers
    forward, again = 1 + (work.recompute == "full"), int(work.recompute != "none")
    summed = size + 8 if accumulates_in_fp32(work.deepspeed) else 3 * size  # bytes of a weight's gradient

    def product(
        rows: float, k: float, n: float, weights: float, times: int, size: int, fp8: bool = False
    ) -> Iterator[Operation]:
        """Yield the operations of the product [rows, k] · [k, n], forward and backward. weights: k · n, of all
        experts together. size: bytes of an element. fp8: both factors are cast before."""
        factor = 1 if fp8 else size
        for _ in range(times + 2):
            yield Operation("products", 2.0 * rows * k * n, factor * (rows * k + weights) + size * rows * n, fp8)
        if fp8:  # input and gradient of the output, read, and written twice: as they are and transposed
            yield Operation("memory", 0.0, (size + 2) * rows * (times * k + n))
        yield Operation("memory", 0.0, summed * weights)

    whole = a.hidden_size / (tp if parallel.sequence else 1)
    q, key, value, output = attended(a)
    pairs = a.heads / tp * work.sequence_length * tokens
    for layer in layers:
        for matrix in _matrices(a, a.has_experts(layer)):
            n = matrix.n / tp if matrix.cut == "rows" else matrix.n
            k = matrix.k / tp if matrix.cut == "columns" else matrix.k
            rows = tokens / tp if matrix.cut == "whole" and parallel.sequence else tokens
            held = matrix.count * k * n
            if a.experts is not None and matrix.count > 1:
                rows, held = rows * a.experts.per_token, held / parallel.expert
            yield from product(
                rows, k, n, held, forward, 4 if matrix.wide else size, work.fp8 and matrix.cut != "whole"
            )
        once = size * tokens * (q + key + value + output) / tp
        for _ in range(1 + again):
            yield Operation("attention", pairs * (a.query_dim + a.value_dim), once)
        yield Operation("attention", pairs * (3 * a.query_dim + 2 * a.value_dim), 2 * once)
        ahead, back = _streamed(work, a.has_experts(layer))
        yield Operation("memory", 0.0, tokens * (forward * ahead + back))
    words = vocabulary_rows(a.vocab_size, tp)
    vocabulary = words * a.hidden_size
    if stage == 0:  # the look-up, and a gradient of its whole table; where that is the head's too, both are added
        found: float = (3 + 4 * (tp > 1)) * a.hidden_size  # tensor ranks mask
        if work.micro_tokens > work.sequence_length:  # turned to [sequence, batch], and back
            found += 4 * whole
        added = 3 * size if a.tied_embeddings and last else summed
        yield Operation("memory", 0.0, size * tokens * found + (size + added) * vocabulary)
    if last:
        yield from product(tokens, a.hidden_size, words, vocabulary, 1, size)
        yield Operation("memory", 0.0, tokens * (words * (2 * size + 7 * 4) + 5 * size * whole))


def _streamed(work: Work, sparse: bool) -> tuple[float, float]:
    """Bytes a token that a layer's kernels move beside products and attention, forward and backward. sparse: it has
    experts. As Megatron-core's layers do it without Transformer Engine; torch.compile fuses what it is asked to.
    Elements, forward + backward:

    - norms 2 and 3 of their width; residual sums 3 hidden sizes each and as many; SwiGLU 3 and 5 of the MLP's width
    - rotation of queries and keys 2 and 2 (`inner.rotary`); the angles of a position, in fp32, for each of them; of
      latent attention, which is Megatron-core's and not fused, 12 and 14
    - q as a copy where a rank has several groups of heads; the gradients of q, k, v put together
    - around the exchange of context ranks: q, k, v put together and taken apart, the output turned
    - of latent attention: queries and keys put together of two parts
    - of experts, for each that a token is sent to: sorted by expert, by rank, and back, 9 hidden sizes each way; the
      router's input in fp32, and sums; what the router knows of each expert; at every sorting the index
      of each choice, 64 bits wide, and its weight in fp32
    """
    a, parallel, size = work.architecture, work.parallel, work.bytes_per_weight
    h, tp, cp = a.hidden_size, parallel.tensor, parallel.context
    whole = h / (tp if parallel.sequence else 1)
    q, key, value, output = (width / tp for width in attended(a))
    width = a.active_ffn_size(sparse) / tp
    forward, backward = 10 * whole + 3 * width, 12 * whole + 5 * width
    if a.latent is None:
        forward, backward = forward + 2 * (q + key), backward + 2 * (q + key)
        angles = 8, 8
        forward += 2 * q if a.heads > a.kv_heads > tp else 0
        backward += 2 * (q + key + value)
    else:
        rotated = (a.heads / tp + 1) * a.head_dim
        angles = 96, 8
        forward += 2 * (q + key)
        backward += 2 * q + 2 * a.heads * (a.latent.plain_dim + a.latent.value_dim) / tp + 4 * key
        latents = (a.latent.query_rank + a.latent.key_value_rank) * whole / h
        forward, backward = forward + 2 * latents + 12 * rotated, backward + 3 * latents + 14 * rotated
    if a.qk_norm:
        forward, backward = forward + 2 * (q + key), backward + 3 * (q + key)
    if cp > 1:
        forward += 2 * (q + key + value) + 2 * output
        backward += 2 * (q + key + value) + 4 * output
    of_experts = choices = 0.0
    if a.experts is not None and sparse:
        sent = 9 * h * a.experts.per_token
        shared = 3 * h if a.experts.shared_ffn_size else 0
        forward, backward = forward + (sent + 6 * h + shared) / tp, backward + (sent + 9 * h + shared) / tp
        of_experts, choices = a.experts.count / tp, a.experts.per_token / tp
    positions = a.head_dim * work.sequence_length / work.micro_tokens
    return (
        size * forward + angles[0] * positions + 100 * of_experts + 68 * choices,
        size * backward + angles[1] * positions + 60 * of_experts + 68 * choices,
    )


def optimizer_operations(work: Work, stage: int, owners: int) -> Iterator[Operation]:
    """A rank's share of a step, which ZeRO divides among `owners`. Muon: Newton–Schulz steps of each matrix, r × c
    with r ≤ c; products XXᵀ, AA and BX (`geotrain.kernels.newton_schulz`). Tensor ranks gather matrices and all do
    the same, unless each takes its part for one (`tp_mode`)."""
    a, parallel = work.architecture, work.parallel
    owners = owners if zero_stage(work.deepspeed) else 1
    rest, settings = float(stage_parameters(a, parallel, stage)), optimizer_settings(work.deepspeed)
    if isinstance(settings, MuonSettings):
        weights = (weight for layer in parallel.layers_of(stage, a.layers) for weight in layer_weights(a, layer))
        alike = Counter((w.shape, w.cut == "whole", w.expert is not None) for w in weights if len(w.shape) == 2)
        for ((rows, columns), whole, of_expert), count in alike.items():
            cut = 1 if whole else parallel.tensor
            r, c = sorted((rows / (1 if settings.tp_mode == "duplicated" else cut), columns))
            times = count * settings.ns_steps / owners
            yield Operation("products", times * (4 * r * r * c + 2 * r**3), times * (10 * r * c + 12 * r * r))
            own = rows * columns / cut
            # Norm, the update as bf16, and back; before that, put together of the tensor ranks' parts. Then rows'
            # norms are read, and rows scaled in place.
            again = 12 if settings.normalize_rows else 0
            moved = MUON_BYTES * own + ((24 if r * c > own else 16) + again) * r * c
            yield Operation("memory", 0.0, count * moved / owners)
            rest -= count * own / (parallel.expert if of_expert else 1)
    yield Operation("memory", 0.0, ADAMW_BYTES * rest / owners)


@dataclass(frozen=True)
class _Matrix:
    """A layer's matrix [n, k] as one product takes it; count: experts that have one each. cut: as `Weight` has it.
    wide: computed in fp32."""

    n: int
    k: int
    count: int
    cut: str
    wide: bool


@lru_cache(maxsize=64)
def _matrices(a: Architecture, sparse: bool) -> tuple[_Matrix, ...]:
    """Matrix products of a layer with or without experts; one for each parameter of Megatron-core's."""
    layer = next(layer for layer in range(a.layers) if a.has_experts(layer) == sparse)
    found: dict[str, list[Weight]] = {}
    for weight in layer_weights(a, layer):
        if len(weight.shape) == 2:
            found.setdefault(weight.within, []).append(weight)
    matrices = []
    for name, weights in found.items():
        count = len({weight.expert for weight in weights})
        rows = sum(weight.shape[0] for weight in weights) // count
        matrices.append(_Matrix(rows, weights[0].shape[1], count, weights[0].cut, "router" in name))
    return tuple(matrices)


def fits(memory_bytes: float, device: Accelerator) -> bool:
    """Whether a rank that needs so much fits; 2 GB are the frameworks' own (`parallelism.memory`)."""
    return memory_bytes + 2e9 <= device.memory_bytes
