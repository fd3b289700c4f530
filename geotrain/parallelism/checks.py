"""Checks of parallel layouts and `deepspeed` blocks, before anything is started: some combinations would train
wrongly without an error (docs/footguns.md), others would fail only after minutes."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

from geotrain.common.names import SHARE_DEVICES
from geotrain.config import AccoConfig, Architecture, ConfigError, ParallelConfig, PrecisionConfig
from geotrain.config.deepspeed import SCHEDULERS
from geotrain.families import family_of
from geotrain.parallelism.local_parameters import first_like, stage_parameters
from geotrain.parallelism.optimizer_settings import MuonSettings, optimizer_settings, uses_muon
from geotrain.parallelism.whole_matrices import ALIGNED, shard_size

_DEEPSPEED_BUCKET = 500_000_000  # DeepSpeed's default of zero_optimization.reduce_bucket_size
# Of ZeRO-1, whose buckets travel during backward: the most, and at least so many of them for a small model.
_OVERLAPPED_BUCKET, _OVERLAPPED_BUCKETS = 40_000_000, 8
CODED_AT_ONCE = 1 << 26  # elements that one launch encodes, beside as many zeros in 16 bits
VERIFIED_RUNS = 2  # of a micro-batch that is computed to verify results
BUCKETS_IN_FLIGHT = 3  # so many are reduced, or gathered, at once: it bounds the memory for what travels


def zero_stage(deepspeed_block: dict[str, Any]) -> int:
    """Read the ZeRO stage from a `deepspeed` block."""
    return int(deepspeed_block.get("zero_optimization", {}).get("stage", 0))


def trains_in_bf16(deepspeed_block: dict[str, Any]) -> bool:
    """Whether weights are bf16 with fp32 masters; else everything is fp32."""
    return bool(deepspeed_block.get("bf16", {}).get("enabled", False))


def attends_without_masks(query_dim: int, value_dim: int, element_bytes: int) -> bool:
    """Whether attention inside documents and windows needs no mask on CUDA: torch's `varlen_attn` knows both, and
    groups of queries, from 2.13 on; in 16 bits, with values as wide as queries, up to 256."""
    torch = tuple(map(int, version("torch").split(".")[:2]))
    return torch >= (2, 13) and element_bytes == 2 and query_dim == value_dim <= 256 and query_dim % 8 == 0


def accumulates_in_fp32(deepspeed_block: dict[str, Any]) -> bool:
    """Whether gradients of several micro-batches are summed in fp32; else in the type of the weights."""
    stated = str(deepspeed_block.get("data_types", {}).get("grad_accum_dtype"))
    return not trains_in_bf16(deepspeed_block) or stated in ("fp32", "float32")


def gradient_wire_bytes(deepspeed_block: dict[str, Any]) -> int:
    """Bytes of a gradient as data-parallel ranks reduce it: of `communication_data_type`, or of the weights' type."""
    stated = deepspeed_block.get("communication_data_type")
    return 2 if stated in ("fp16", "bf16") or (stated is None and trains_in_bf16(deepspeed_block)) else 4


def coded_bits(deepspeed_block: dict[str, Any]) -> tuple[int, int] | None:
    """Bits of a gradient, and of a weight's change, where data-parallel ranks send codes; None: they send values."""
    zero = deepspeed_block.get("zero_optimization", {})
    return (zero["gradient_bits"], zero["weight_bits"]) if "gradient_bits" in zero else None


def code_bytes(numel: int, bits: int) -> int:
    """Bytes of the codes of so many elements; a block of them shares a scale of 16 bits."""
    return math.ceil(numel * (bits + 16 / ALIGNED) / 8)


def wire_bytes(deepspeed_block: dict[str, Any], acco: bool) -> tuple[float, float]:
    """Bytes of a gradient, and of a new weight, as data-parallel ranks send them: values or codes."""
    if (bits := coded_bits(deepspeed_block)) is not None:
        return code_bytes(1 << 20, bits[0]) / (1 << 20), code_bytes(1 << 20, bits[1]) / (1 << 20)
    weight = 2.0 if trains_in_bf16(deepspeed_block) else 4.0
    return (weight if acco else gradient_wire_bytes(deepspeed_block)), weight


def overlaps_reduction(deepspeed_block: dict[str, Any]) -> bool:
    """Whether gradients are reduced during the last backward and weights gathered during the next forward.

    So does `geotrain.inner.zero`: with ZeRO-1, unless the optimizer is offloaded, which is left to DeepSpeed.
    """
    return zero_stage(deepspeed_block) == 1 and not offloads_masters(deepspeed_block)


def reduction_bucket(deepspeed_block: dict[str, Any], parameters: int) -> int:
    """Size of the bucket in which ZeRO reduces gradients, in elements, on a rank that holds `parameters`.

    DeepSpeed allocates the bucket whole, and its default is larger than many models: ours is at most the rank's part.
    """
    stated = deepspeed_block["zero_optimization"].get("reduce_bucket_size")
    if stated is not None:
        return int(stated)
    if overlaps_reduction(deepspeed_block):
        return min(-(-parameters // _OVERLAPPED_BUCKETS), _OVERLAPPED_BUCKET)
    return min(parameters, _DEEPSPEED_BUCKET)


def offloads_masters(deepspeed_block: dict[str, Any]) -> bool:
    """Whether masters and moments lie in host memory."""
    offload = deepspeed_block.get("zero_optimization", {}).get("offload_optimizer") or {}
    return bool(offload.get("device", "none") != "none")


def check_state_device(state_device: str, deepspeed_block: dict[str, Any]) -> None:
    """Check `outer.state_device` against the masters' place. Raises ConfigError."""
    if state_device == "device" and offloads_masters(deepspeed_block):
        raise ConfigError(
            "outer.state_device = 'device' does not go with deepspeed.zero_optimization.offload_optimizer: deltas "
            "are made where the masters are, in host memory; leave it out"
        )


def check_deterministic(precision: PrecisionConfig, acco: AccoConfig | None) -> None:
    """Check `precision.deterministic_mode` against ACCO's settings. Raises ConfigError."""
    if precision.deterministic_mode and acco is not None and acco.balance:
        raise ConfigError(
            "precision.deterministic_mode does not go with acco.balance, where the speed of replicas decides which "
            "of them computes a micro-batch; leave one of them out"
        )


def check_shared_devices(parallel: ParallelConfig, shared: bool) -> None:
    """Check a layout for ranks that share GPUs: gloo has collectives of their tensors, but no messages of one rank to
    another. Raises ConfigError."""
    ring = parallel.context_exchange == "ring"
    if shared and (ring or parallel.pipeline > 1):
        raise ConfigError(
            f"parallel.{'context_exchange' if ring else 'pipeline'}: ranks that share GPUs ({SHARE_DEVICES}) "
            "communicate over gloo, which sends no tensor of a GPU from one rank to another; use tensor, expert, or "
            "data parallelism, or give each rank a GPU"
        )


def check_layout(
    architecture: Architecture,
    parallel: ParallelConfig,
    ranks: int,
    deepspeed_block: dict[str, Any],
    sequence_length: int,
) -> int:
    """Check that a worker of `ranks` ranks can run this model in this parallel layout; return its data-parallel size.

    That does not count context ranks: they have the same samples.

    Raises ConfigError, which says what does not fit, where it stands and what to do.
    """
    tp, pp, cp = parallel.tensor, parallel.pipeline, parallel.context
    if ranks % parallel.replica_ranks:
        context, key = (f" × context {cp}", "parallel.context, ") if cp > 1 else ("", "")
        raise ConfigError(
            f"parallel: tensor {tp} × pipeline {pp}{context} = {parallel.replica_ranks} does not divide the worker's "
            f"{ranks} ranks; change parallel.tensor, parallel.pipeline, {key}or the slots of its hosts"
        )
    stacked = "num_hidden_layers" + (" + num_nextn_predict_layers" if architecture.predicting else "")
    for what, size, parts, key in (
        *(
            (key, size, tp, "tensor")
            for key, size in family_of(architecture.model_type).divided(architecture).items()
        ),
        *([(stacked, architecture.layers, pp, "pipeline")] if parallel.stage_layers is None else []),
    ):
        if size % parts:
            raise ConfigError(
                f"model config: {what} = {size} is not divisible by parallel.{key} = {parts}; "
                f"choose a parallel.{key} that divides it, or a {what} of {math.ceil(size / parts) * parts}"
            )
    if parallel.stage_layers is not None and (total := sum(parallel.stage_layers)) != architecture.layers:
        raise ConfigError(
            f"parallel.stage_layers adds up to {total} layers, the model config's {stacked} is "
            f"{architecture.layers}; make them equal"
        )
    if (held := len(parallel.layers_of(pp - 1, architecture.layers))) <= architecture.predicting:
        raise ConfigError(
            f"parallel: the last of {pp} pipeline stages needs {architecture.predicting + 1} layers, one before "
            f"those that predict further tokens, and has {held}; lower parallel.pipeline or set parallel.stage_layers"
        )
    if parallel.sequence and tp == 1:
        raise ConfigError("parallel.sequence = true needs parallel.tensor > 1; set one of the two")
    _check_context(architecture, parallel, sequence_length)
    if parallel.sequence and sequence_length % (tp * cp):
        each = f"parallel.tensor = {tp}" + (f" × parallel.context = {cp}" if cp > 1 else "")
        raise ConfigError(
            f"data.sequence_length = {sequence_length} is not divisible by {each}, as "
            "parallel.sequence needs; change it or turn parallel.sequence off"
        )
    if sequence_length > architecture.max_positions:
        raise ConfigError(
            f"data.sequence_length = {sequence_length} is above the model's max_position_embeddings = "
            f"{architecture.max_positions}; shorten the sequences or raise it in the model config"
        )
    _check_deepspeed(deepspeed_block, tp, pp)
    copies = ranks // (tp * pp)  # ranks that have the same parameters
    _check_experts(architecture, parallel, deepspeed_block, copies)
    sites, two_levels = parallel.sites, overlaps_reduction(deepspeed_block) and not coded_bits(deepspeed_block)
    if sites > 1 and (copies % (sites * math.lcm(cp, parallel.expert)) or copies == sites or not two_levels):
        raise ConfigError(
            f"parallel.sites = {sites} needs equal runs of the worker's {copies} data-parallel ranks, of two or more "
            "each and whole groups of context and expert ranks; and deepspeed.zero_optimization.stage = 1 without "
            "offload_optimizer and gradient_bits; change these, or leave it out"
        )
    accumulation_steps(deepspeed_block, copies // cp)
    if uses_muon(deepspeed_block) and zero_stage(deepspeed_block) and copies > 1:
        _check_shards_are_filled(architecture, parallel, copies)
    return copies // cp


def _check_context(architecture: Architecture, parallel: ParallelConfig, sequence_length: int) -> None:
    """Check context parallelism, which divides tokens and, where it exchanges them, heads. Raises ConfigError."""
    tp, cp, groups = parallel.tensor, parallel.context, architecture.kv_heads
    ring = parallel.context_exchange == "ring"
    if ring and cp == 1:
        raise ConfigError("parallel.context_exchange = 'ring' does nothing with parallel.context = 1; leave it out")
    if sequence_length % (parts := cp * (2 if ring else 1)):
        what = "twice parallel.context" if ring else "parallel.context"
        raise ConfigError(
            f"data.sequence_length = {sequence_length} is not divisible by {what} = {parts}, which cuts "
            f"samples into equal parts; use {math.ceil(sequence_length / parts) * parts} or another parallel.context"
        )
    if cp > 1 and architecture.net:
        raise ConfigError(
            f"parallel.context = {cp} does not go with the {architecture.net.name} of a {architecture.model_type}, "
            "whose state passes from token to token; leave it out"
        )
    if cp > 1 and architecture.latent:
        raise ConfigError(
            f"parallel.context = {cp} does not go with the latent attention of a {architecture.model_type}: its keys "
            "and values differ in size, and would have to travel apart; leave it out"
        )
    if not ring and groups % (tp * cp):  # the query heads are a multiple of these
        each = f"parallel.context = {cp}" + (f" × parallel.tensor = {tp}" if tp > 1 else "")
        raise ConfigError(
            f"model config: num_key_value_heads = {groups} is not divisible by {each}: in attention each of these "
            f"ranks has whole key-value heads; use parallel.context = {math.gcd(groups // tp, cp)} (the other ranks "
            "become data-parallel ones), a smaller parallel.tensor, or, with Transformer Engine on GPUs, "
            "parallel.context_exchange = 'ring'"
        )


def _check_experts(architecture: Architecture, parallel: ParallelConfig, block: dict[str, Any], dp: int) -> None:
    """Check a model with experts, and expert parallelism. Raises ConfigError."""
    ep, experts = parallel.expert, architecture.experts
    if experts is None:
        if ep > 1:
            raise ConfigError(
                f"parallel.expert = {ep}: the model, a {architecture.model_type}, has no experts; leave it out"
            )
        return
    with_context = " (data × context)" if parallel.context > 1 else ""
    if dp % ep:
        raise ConfigError(
            f"parallel.expert = {ep} does not divide the worker's {dp} data-parallel ranks{with_context}, among "
            "which it divides experts; change it or the slots of the worker's hosts"
        )
    if experts.count % ep:
        raise ConfigError(f"model config: {experts.count} experts cannot be divided by parallel.expert = {ep} ranks")
    if parallel.tensor > 1 and not parallel.sequence:
        raise ConfigError(
            f"parallel.tensor = {parallel.tensor} with experts needs parallel.sequence = true: otherwise each tensor "
            "rank would send every token to the experts"
        )
    if ep == 1:
        return
    stages = [parallel.layers_of(stage, architecture.layers) for stage in range(parallel.pipeline)]
    bare = next((layers for layers in stages if not any(map(architecture.has_experts, layers))), None)
    if bare is not None and not (zero_stage(block) == 0 or overlaps_reduction(block)):
        raise ConfigError(
            f"parallel.expert = {ep}: layers {bare.start} to {bare.stop - 1} of {architecture.layers} have no "
            f"experts, so that with parallel.pipeline = {parallel.pipeline} a stage has none, which DeepSpeed's own "
            "ZeRO does not allow for; leave out deepspeed.zero_optimization.offload_optimizer, or lower "
            "parallel.pipeline"
        )
    for key in ("reduce_scatter", "contiguous_gradients"):
        if not block.get("zero_optimization", {}).get(key, True):
            raise ConfigError(
                f"deepspeed.zero_optimization.{key} = false does not go with parallel.expert; leave it out"
            )


def _check_shards_are_filled(architecture: Architecture, parallel: ParallelConfig, dp: int) -> None:
    """Refuse so many ranks that whole matrices leave most of a shard, and of what travels, empty."""
    for stage in sorted(set(first_like(architecture, parallel))):
        held = stage_parameters(architecture, parallel, stage)
        total = shard_size(architecture, parallel, stage, dp, muon=True, together=False).total
        if total > 2 * held:
            raise ConfigError(
                f"the optimizer Muon shards whole matrices, and {dp} data-parallel ranks are too many for them: "
                f"the shards of stage {stage} would hold {total / held:.1f} times its parameters; use fewer ranks a "
                "worker (several workers), a larger parallel.tensor, or AdamW"
            )


def _check_deepspeed(block: dict[str, Any], tp: int, pp: int) -> None:
    stage = zero_stage(block)
    if stage not in (0, 1, 2):
        raise ConfigError(
            f"deepspeed.zero_optimization.stage = {stage} is not supported: the weights are sharded by tensor and "
            "pipeline parallelism instead; use stage 0, 1 or 2"
        )
    if stage == 2 and pp > 1:
        raise ConfigError(
            f"deepspeed.zero_optimization.stage = 2 does not go with parallel.pipeline = {pp}: a pipeline keeps the "
            "gradients of all micro-batches until its end; use stage 1"
        )
    if stage == 2 and tp > 1 and offloads_masters(block):
        raise ConfigError(
            f"deepspeed.zero_optimization: stage 2 with offload_optimizer does not go with parallel.tensor = {tp}: "
            "gradients leave the device before tensor ranks can sum them; use stage 1"
        )
    _check_codes(block)
    if block.get("zero_optimization", {}).get("round_robin_gradients"):
        raise ConfigError(
            "deepspeed.zero_optimization.round_robin_gradients = true is not supported: DeepSpeed 0.19 then links "
            "weights to the wrong masters; leave it out"
        )
    if block.get("fp16", {}).get("enabled", False):
        raise ConfigError("deepspeed.fp16.enabled = true is not supported; use deepspeed.bf16.enabled")
    if trains_in_bf16(block) and stage == 0:
        raise ConfigError(
            "deepspeed.bf16.enabled needs deepspeed.zero_optimization.stage 1 or 2, which keep the fp32 masters of "
            "the weights (also on a single rank); set the stage, or train in fp32"
        )
    if isinstance(optimizer_settings(block), MuonSettings):
        _check_muon(block, stage)
    scheduler = block.get("scheduler", {}).get("type")
    if scheduler is not None and scheduler not in SCHEDULERS:
        raise ConfigError(
            f"deepspeed.scheduler.type = {scheduler!r} cannot be set to a step of the run; "
            f"use one of {', '.join(SCHEDULERS)}"
        )


def _check_codes(block: dict[str, Any]) -> None:
    """Check `gradient_bits` and `weight_bits`, the settings of coded collectives. Raises ConfigError."""
    zero, both = block.get("zero_optimization", {}), ("gradient_bits", "weight_bits")
    stated = {key: zero[key] for key in both if key in zero}
    if not stated:
        return
    where = "deepspeed.zero_optimization." + ", ".join(f"{key} = {value!r}" for key, value in stated.items())
    if len(stated) < 2 or any(type(bits) is not int or bits not in (4, 8) for bits in stated.values()):
        raise ConfigError(
            f"{where}: coded collectives need both, gradient_bits and weight_bits, of 4 or 8 each (8 and 4 lose next "
            "to nothing); set both, or leave both out"
        )
    if not overlaps_reduction(block):
        raise ConfigError(
            f"{where} needs deepspeed.zero_optimization.stage = 1 without offload_optimizer, whose collectives are "
            "the engine's own; change these, or leave the bits out"
        )
    if not accumulates_in_fp32(block):
        raise ConfigError(
            f"{where}: what codes lose of a gradient stays in the sum of the next ones, which must be in fp32; set "
            "deepspeed.data_types.grad_accum_dtype = 'fp32'"
        )


def _check_muon(block: dict[str, Any], stage: int) -> None:
    if stage == 2:
        raise ConfigError(
            "deepspeed.zero_optimization.stage = 2 does not go with the optimizer Muon: it cuts gradients into "
            "slices during backward, and a matrix's update needs all of its gradient; use stage 1, whose shards keep "
            "matrices whole"
        )
    if offloads_masters(block):
        raise ConfigError(
            "deepspeed.zero_optimization.offload_optimizer does not go with the optimizer Muon: its matrix products "
            "would run on the host; leave it out (Muon keeps one moment, not two), or use AdamW"
        )


def micro_batches_between(share: float, stages: int) -> float:
    """Micro-batches of a replica between two verifications, which take this share: one that is computed alone keeps
    each pipeline stage waiting for the others. share: `monitor.verified_share`; 0: there are none."""
    return VERIFIED_RUNS * stages / share if share else math.inf


def accumulation_steps(deepspeed_block: dict[str, Any], dp: int) -> int:
    """Compute the micro-batches of one data-parallel replica in one optimizer step. Raises ConfigError."""
    batch = deepspeed_block["train_batch_size"]
    micro = deepspeed_block["train_micro_batch_size_per_gpu"]
    steps, rest = divmod(batch, micro * dp)
    stated = deepspeed_block.get("gradient_accumulation_steps", steps)
    if rest or not steps or stated != steps:
        raise ConfigError(
            f"deepspeed: train_batch_size = {batch} is not train_micro_batch_size_per_gpu = {micro} × "
            f"gradient_accumulation_steps = {deepspeed_block.get('gradient_accumulation_steps', 'a whole number')} × "
            f"data-parallel size {dp}; change one of them"
        )
    return steps
