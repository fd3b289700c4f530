"""What a rank will need, without building anything: for the dry run of models that do not fit here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from geotrain.canonical import Architecture
from geotrain.config import ParallelConfig
from geotrain.sharing.checks import accumulation_steps, check_layout, reduction_bucket, trains_in_bf16, zero_stage
from geotrain.sharing.mapping import stage_parameters

_FP32_BYTES = 4


@dataclass(frozen=True)
class MemoryPerRank:
    """Device memory of the fullest rank, in bytes; fragmentation and the frameworks' own (1–2 GB) come on top.

    parameters: held by that rank. stage: its pipeline stage. weights_bytes: as used by forward. gradients_bytes: at
    their peak, in the optimizer's step. optimizer_bytes: fp32 masters and both moments; 0 if offloaded to the host.
    buffers_bytes: DeepSpeed's reduction bucket. activations_bytes: an estimate, see `activation_bytes`.
    """

    parameters: int
    stage: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.buffers_bytes
            + self.activations_bytes
        )


def memory_per_rank(
    architecture: Architecture,
    parallel: ParallelConfig,
    ranks: int,
    deepspeed_block: dict[str, Any],
    sequence_length: int,
    recompute: str = "none",
) -> MemoryPerRank:
    """The needs of the worker's fullest rank. Raises ConfigError as `check_layout` does."""
    dp = check_layout(architecture, parallel, ranks, deepspeed_block, sequence_length)
    stages = [
        _of_stage(architecture, parallel, dp, deepspeed_block, sequence_length, recompute, stage)
        for stage in range(parallel.pipeline)
    ]
    return max(stages, key=lambda memory: memory.total_bytes)


def _of_stage(
    a: Architecture,
    parallel: ParallelConfig,
    dp: int,
    block: dict[str, Any],
    sequence_length: int,
    recompute: str,
    stage: int,
) -> MemoryPerRank:
    parameters = stage_parameters(a, parallel, stage)
    size = 2 if trains_in_bf16(block) else _FP32_BYTES
    zero = block.get("zero_optimization", {})
    part = -(-parameters // dp)
    if zero_stage(block) == 0:
        gradients, optimizer, buffers = _FP32_BYTES * parameters, 2 * _FP32_BYTES * parameters, 0
    else:
        wide = size < _FP32_BYTES and str(block.get("data_types", {}).get("grad_accum_dtype")) in ("fp32", "float32")
        kept = _FP32_BYTES if wide else size
        if zero_stage(block) == 1 and wide:  # BF16_Optimizer steps straight from its fp32 gradients
            gradients = kept * parameters
        else:
            gradients = kept * (parameters if zero_stage(block) == 1 else part) + _FP32_BYTES * part
        optimizer = 0 if "offload_optimizer" in zero else 3 * _FP32_BYTES * part
        buffers = 0 if zero_stage(block) == 1 and wide else size * reduction_bucket(block, parameters)
    in_flight = min(accumulation_steps(block, dp), parallel.pipeline - stage)
    tokens = sequence_length * int(block["train_micro_batch_size_per_gpu"])
    activations = activation_bytes(a, parallel, tokens, size, recompute, stage, in_flight)
    return MemoryPerRank(parameters, stage, size * parameters, gradients, optimizer, buffers, activations)


def activation_bytes(
    a: Architecture,
    parallel: ParallelConfig,
    tokens: int,
    size: int,
    recompute: str,
    stage: int,
    in_flight: int,
) -> int:
    """What autograd keeps for backward on a rank of `stage`, with CUDA's fused kernels.

    tokens: of a micro-batch. size: bytes of an element. in_flight: micro-batches whose backward is still to come; a
    1F1B pipeline of p stages holds p − stage. Counted as in Korthikanti et al. (arXiv 2205.05198, section 4), for
    this model's layers: fused attention keeps no scores, SwiGLU has three matrices. Elements a token, of a layer:

    - 4h, divided by sequence parallelism: the inputs of both norms, and of the linear layers behind them
    - 3q + 3kv, divided by tensor parallelism: the fused q, k, v; q and k after rotation; the attention's output
    - q, divided likewise: the input of the query norm, where there is one
    - 3f, divided likewise: gate, up, and the activated product

    `full` recomputation keeps h a layer, and one layer at once in backward; `selective` recomputes the attention,
    which keeps nothing of note here. Logits are kept in fp32, beside a low-precision copy.
    """
    h, q, kv, f = a.hidden_size, a.heads * a.head_dim, a.kv_heads * a.head_dim, a.ffn_size
    tp = parallel.tensor
    whole = h / (tp if parallel.sequence else 1)
    layer = 4 * whole + (3 * q + 3 * kv + (q if a.qk_norm else 0) + 3 * f) / tp
    layers = a.layers // parallel.pipeline
    kept, at_once = (layers * whole, layer) if recompute == "full" else (layers * layer, 0.0)
    total = (in_flight * kept + at_once) * size
    if stage == parallel.pipeline - 1:
        total += 2 * whole * size + a.vocab_size / tp * (_FP32_BYTES + (size if size < _FP32_BYTES else 0))
    return int(tokens * total)
