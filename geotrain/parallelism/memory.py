"""Estimates a rank's device memory without building anything, for the planner and for dry runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from geotrain.config import Architecture, ParallelConfig
from geotrain.families import layer_weights
from geotrain.parallelism.checks import (
    BUCKETS_IN_FLIGHT,
    CODED_AT_ONCE,
    accumulates_in_fp32,
    accumulation_steps,
    attends_without_masks,
    check_layout,
    code_bytes,
    coded_bits,
    offloads_masters,
    overlaps_reduction,
    reduction_bucket,
    trains_in_bf16,
    zero_stage,
)
from geotrain.parallelism.local_parameters import first_like, stage_parameters, vocabulary_rows
from geotrain.parallelism.optimizer_settings import optimizer_kind, uses_muon
from geotrain.parallelism.whole_matrices import ShardSize, shard_size

_FP32_BYTES = 4


@dataclass(frozen=True)
class MemoryPerRank:
    """Device memory of the fullest rank, in bytes; fragmentation and the frameworks' own (1–2 GB) come on top.

    parameters: held by that rank. stage: its pipeline stage. weights_bytes: as used by forward. gradients_bytes: at
    their peak, in the optimizer's step. optimizer_bytes: fp32 masters and the moments; 0 if offloaded to the host.
    buffers_bytes: of gradients or weights that travel. activations_bytes: an estimate, see `activation_bytes`.
    checkpoint_bytes: on the host, and not in the total: the copy of a checkpoint while it is written, at most (ranks
    that see one file system leave out what another saves); without a GPU it comes on top.
    """

    parameters: int
    stage: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    activations_bytes: int
    checkpoint_bytes: int

    @property
    def total_bytes(self) -> int:
        kept = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return kept + self.buffers_bytes + self.activations_bytes


def memory_per_rank(
    architecture: Architecture,
    parallel: ParallelConfig,
    ranks: int,
    deepspeed_block: dict[str, Any],
    sequence_length: int,
    recompute: str = "none",
    fp8: bool = False,
    documents: bool = False,
) -> MemoryPerRank:
    """Estimate the memory of the worker's fullest rank. Arguments and errors: as of `memory_of_stages`."""
    first = sorted(set(first_like(architecture, parallel)))  # which keeps most micro-batches of those
    settings = deepspeed_block, sequence_length, recompute, fp8, documents
    stages = memory_of_stages(architecture, parallel, ranks, first, *settings)
    return max(stages, key=lambda memory: memory.total_bytes)


def memory_of_stages(
    architecture: Architecture,
    parallel: ParallelConfig,
    ranks: int,
    of: Iterable[int],
    deepspeed_block: dict[str, Any],
    sequence_length: int,
    recompute: str = "none",
    fp8: bool = False,
    documents: bool = False,
) -> list[MemoryPerRank]:
    """Estimate the memory of a rank in each of these pipeline stages of a worker.

    Stages differ: the first has the embedding and keeps activations of more micro-batches, the last has the head and
    the logits. fp8: Transformer Engine keeps the layers' weights twice more, in FP8, as they are and transposed.
    documents: attention stays inside documents. Raises ConfigError if the parallel layout cannot work.
    """
    block = deepspeed_block
    dp = check_layout(architecture, parallel, ranks, block, sequence_length)
    copies = dp * parallel.context  # ranks that have the same parameters, and divide the optimizer's state
    muon = uses_muon(block)
    zero, size = zero_stage(block), 2 if trains_in_bf16(block) else _FP32_BYTES
    kept = _FP32_BYTES if accumulates_in_fp32(block) else size  # bytes of an accumulated gradient
    masked = mask_elements(architecture, block, sequence_length, documents)
    scored = score_bytes(architecture, parallel, block, sequence_length)
    stages = []
    for stage in of:
        parameters = stage_parameters(architecture, parallel, stage)
        shard = shard_size(architecture, parallel, stage, copies if zero else 1, muon, together=False)
        part, held = shard.adamw + shard.matrices, shard.total if zero else parameters
        moments = moment_bytes(shard.adamw, shard.matrices if zero else shard.addressed[1], block)
        if zero == 0:
            # Only fp32 gets here (bf16 needs ZeRO): the weights are their own masters, the moments come on top.
            gradients, optimizer, buffers = _FP32_BYTES * parameters, moments, 0
        else:
            if overlaps_reduction(block):
                bits, bucket = coded_bits(block) if copies > 1 else None, reduction_bucket(block, parameters)
                # A step takes fp32. Where gradients go on to hold what codes lose, their sum has a place of its own.
                gradients = kept * held
                gradients += _FP32_BYTES * (part if kept < _FP32_BYTES else shard.divided if bits is not None else 0)
                # Of each bucket under way, what is sent and what arrives; zeros that a bucket is encoded beside.
                travels = size * bucket if bits is None else code_bytes(bucket, max(bits))
                buffers = 2 * BUCKETS_IN_FLIGHT * travels if copies > 1 else 0
                buffers += 2 * min(bucket, CODED_AT_ONCE) if bits is not None else 0
            else:
                # Its part of the gradients is copied to fp32 for the step.
                gradients = kept * (held if zero == 1 else part) + _FP32_BYTES * part
                buffers = size * reduction_bucket(block, parameters)
            optimizer = 0 if offloads_masters(block) else _FP32_BYTES * part + moments
        in_flight = min(accumulation_steps(block, dp), parallel.pipeline - stage)  # of a 1F1B schedule
        tokens = sequence_length // parallel.context * int(block["train_micro_batch_size_per_gpu"])
        activations = activation_bytes(architecture, parallel, tokens, size, recompute, stage, in_flight, fp8, masked)
        of_layers = in_flight * len(parallel.layers_of(stage, architecture.layers)) if recompute == "none" else 1
        activations += scored * of_layers
        weights = size * held + (2 * fp8_weights(architecture, parallel, stage) if fp8 else 0)
        held_bytes = weights, gradients, optimizer, buffers, activations, saved_bytes(shard, block)
        stages.append(MemoryPerRank(parameters, stage, *held_bytes))
    return stages


def fp8_weights(a: Architecture, parallel: ParallelConfig, stage: int) -> int:
    """Count the elements of matrices that are multiplied in FP8, on a rank of the stage."""
    return sum(
        weight.numel // (parallel.tensor * (parallel.expert if weight.expert is not None else 1))
        for layer in parallel.layers_of(stage, a.layers)
        for weight in layer_weights(a, layer)
        if len(weight.shape) == 2 and weight.cut != "whole"
    )


def moment_bytes(adamw: int, matrices: int, block: dict[str, Any]) -> int:
    """Bytes of a rank's moments, in fp32: two of what AdamW steps, one of Muon's matrices. Both in elements."""
    return _FP32_BYTES * (len(optimizer_kind(block).moments) * adamw + matrices)


def saved_bytes(shard: ShardSize, block: dict[str, Any]) -> int:
    """Bytes of a rank's part of a checkpoint: moments and, where gradients travel in codes, what these lost."""
    vectors, matrices, divided = shard.addressed
    return moment_bytes(vectors, matrices, block) + _FP32_BYTES * (divided if coded_bits(block) is not None else 0)


def mask_elements(a: Architecture, block: dict[str, Any], length: int, documents: bool) -> int:
    """Count the elements of the mask of one layer's attention over a micro-batch; 0 where it needs none. Transformer
    Engine needs none either, which is not known here."""
    narrow = a.sliding_window is not None and a.sliding_window < length
    size = 2 if trains_in_bf16(block) else _FP32_BYTES
    if not (documents or narrow) or attends_without_masks(a.query_dim, a.value_dim, size):
        return 0
    return length**2 * (int(block["train_micro_batch_size_per_gpu"]) if documents else 1)


def score_bytes(a: Architecture, parallel: ParallelConfig, block: dict[str, Any], length: int) -> int:
    """Count the bytes that one layer's attention keeps of a micro-batch's scores, where it must make them all: what
    caps give, and shares in fp32 and, without sinks, in the type of the weights; 0 where a fused attention makes
    none."""
    if a.score_cap is None and not a.sinks:
        return 0
    size = 2 if trains_in_bf16(block) else _FP32_BYTES
    each = (size if a.score_cap else 0) + _FP32_BYTES + (size if a.sinks or size < _FP32_BYTES else 0)
    heads = a.heads // (parallel.tensor * parallel.context)
    return each * heads * length**2 * int(block["train_micro_batch_size_per_gpu"])


def activation_bytes(
    a: Architecture,
    parallel: ParallelConfig,
    tokens: int,
    size: int,
    recompute: str,
    stage: int,
    in_flight: int,
    fp8: bool = False,
    masked: int = 0,
) -> int:
    """Estimate the bytes that autograd keeps for backward on a rank of `stage`, with CUDA's fused kernels.

    tokens: of a micro-batch, those of this context rank. size: bytes of an element. in_flight: micro-batches whose
    backward is still to come; a 1F1B pipeline of p stages holds p − stage. Counted as in Korthikanti et al. (arXiv
    2205.05198, section 4), for this model's layers: fused attention keeps no scores, SwiGLU has three matrices.
    Elements a token, of a layer:

    - 4h, divided by sequence parallelism: the inputs of both norms, and of the linear layers behind them; 6h where
      there are norms behind attention and MLP, too
    - 3q + 3kv, divided by tensor parallelism: the fused q, k, v; q and k after rotation; the attention's output
    - q, divided likewise: the input of the query norm, where there is one
    - with context parallelism 3q + 2kv in their place: q, k and v as they were exchanged, and the attention's output
      on both sides of its exchange; the fused ones, q + 2kv, stay only where norms of q and k need them
    - with latent attention 2q + 2v: queries and keys after rotation, values and output, divided likewise; and the
      latents, before and after their norms, divided by sequence parallelism
    - of a gated delta net 8k + 8v of keys and values, divided likewise: projections, their convolution and what its
      activation takes and gives, output and the gated output; queries and keys of each value head; and in fp32 2v, of
      gates
    - of a Mamba-2 mixer 4v + 4k of values and keys, divided likewise: its projection, the
      convolution, the output
    - 3f, divided likewise: gate, up, and the activated product; of a shared expert, too
    - of experts, for each of the k that a token is sent to: 3f as above and 2h, what an expert takes and gives, of
      which tensor ranks divide only the latter: of each expert a rank has a part for the tokens of all; and
      what the router knows of each expert, three fp32 numbers. That each gets its share of the tokens is assumed: the
      fullest rank has more where the balance is poor.
    - of a layer that predicts further tokens, 6h more: inputs of its norms, of its projection and of the head

    With FP8 linear layers keep a copy of their inputs, of one byte an element, in place of the inputs themselves:
    half of 2h and of f. What attention gives is kept by it, too, so that its copy, half of q, comes on top.

    `full` recomputation keeps h a layer, and one layer at once in backward; `selective` recomputes the attention,
    which keeps nothing of note here but its mask. Logits are kept in fp32, beside a low-precision copy.

    masked: elements of the mask of documents or windows (`mask_elements`), which attention keeps in the size of its
    queries; while it is made, there are two more of it, of one byte an element.
    """
    tp, layers = parallel.tensor, parallel.layers_of(stage, a.layers)
    whole = a.hidden_size / (tp if parallel.sequence else 1)
    kinds = Counter(map(a.letters, layers))
    of_a_layer = {kind: _layer_elements(a, parallel, kind, size, recompute, fp8) for kind in kinds}
    predicting = max(0, layers.stop - a.decoder_layers)
    kept = sum(count * of_a_layer[kind] for kind, count in kinds.items())
    kept, at_once = (len(layers) * whole, max(of_a_layer.values())) if recompute == "full" else (kept, 0.0)
    total = (in_flight * kept + at_once) * size
    masks = masked * (size * (in_flight * len(layers) if recompute == "none" else 1) + 2)
    if stage == parallel.pipeline - 1:
        logit_bytes = _FP32_BYTES + (size if size < _FP32_BYTES else 0)
        logit_bytes += size if a.logit_cap is not None else 0
        total += 2 * whole * size + (1 + predicting) * vocabulary_rows(a.vocab_size, tp) * logit_bytes
        total += 6 * predicting * whole * size
    return int(tokens * total) + masks


def _layer_elements(
    a: Architecture, parallel: ParallelConfig, letters: str, size: int, recompute: str, fp8: bool
) -> float:
    """Activation elements kept per token in one layer (listed at `activation_bytes`). letters: as
    `Architecture.letters` has them."""
    h, tp, tokens = a.hidden_size, parallel.tensor, parallel.tensor if parallel.sequence else 1
    q, kv, v = a.heads * a.query_dim, a.kv_heads * a.head_dim, a.heads * a.value_dim
    sparse, net = letters[-1] == "E", a.net
    between = a.active_ffn_size(sparse) if letters[-1] in "-E" else 0
    total = (3 if a.norms == "around" else 2) * len(letters) * h / tokens
    total += (2 if a.activation == "relu2" else 3) * between / tp
    if letters[0] == "G" and net is not None:
        served = net.value_heads // net.key_heads
        total += ((8 + 2 * served) * net.keys + 8 * net.values + 2 * net.values * _FP32_BYTES / size) / tp
    elif letters[0] == "M" and net is not None:
        total += (4 * net.values + 4 * net.keys + net.value_heads) / tp
    elif letters[0] == "*":
        total += (2 * q if a.gated_attention else 0) / tp
        total += (3 * q + 3 * kv + (q if a.qk_norm else 0)) / tp
        if parallel.context > 1 and recompute != "selective":  # that keeps what goes into the exchange instead
            total += (q + kv if a.qk_norm else -kv) / tp
    elif letters[0] == "+" and a.latent is not None:
        latents = 2 * a.latent.query_rank + 2 * a.latent.key_value_rank + a.head_dim
        total += (2 * q + 2 * v) / tp + latents / tokens
    if a.experts is not None and sparse:  # tensor ranks have different tokens
        gated, chosen = h if a.experts.shared_gate else 0, h * a.experts.per_token
        total += chosen + (chosen + gated + 3 * a.experts.count * _FP32_BYTES / size) / tp
    if fp8:
        total += 0.5 * (q - between) / tp - h / tokens
    return total
