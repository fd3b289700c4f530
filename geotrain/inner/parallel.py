"""How the ranks of one worker share the model: layout checks, Megatron's process groups, DeepSpeed's view of them.

`check_layout` is pure: the launcher and the dry run call it without any process group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from geotrain.canonical import Architecture
from geotrain.config import ConfigError, ParallelConfig
from geotrain.inner import platform
from geotrain.inner.optimizer import adamw_settings

SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_DEEPSPEED_BUCKET = 500_000_000  # DeepSpeed's default of zero_optimization.reduce_bucket_size


def zero_stage(deepspeed_block: dict[str, Any]) -> int:
    """The ZeRO stage that a `deepspeed` block asks for."""
    return int(deepspeed_block.get("zero_optimization", {}).get("stage", 0))


def trains_in_bf16(deepspeed_block: dict[str, Any]) -> bool:
    """Whether weights are bf16 with fp32 masters; else everything is fp32."""
    return bool(deepspeed_block.get("bf16", {}).get("enabled", False))


def reduction_bucket(deepspeed_block: dict[str, Any], parameters: int) -> int:
    """Elements of the bucket in which ZeRO reduces gradients, on a rank that holds `parameters`."""
    stated = deepspeed_block["zero_optimization"].get("reduce_bucket_size")
    return int(stated) if stated is not None else min(parameters, _DEEPSPEED_BUCKET)


def check_layout(
    architecture: Architecture,
    parallel: ParallelConfig,
    ranks: int,
    deepspeed_block: dict[str, Any],
    sequence_length: int,
) -> int:
    """The worker's data-parallel size.

    Raises ConfigError, which says what does not fit, where it stands and what to do, if the worker cannot run.
    """
    tp, pp = parallel.tensor, parallel.pipeline
    if ranks % (tp * pp):
        raise ConfigError(
            f"parallel: tensor {tp} × pipeline {pp} = {tp * pp} does not divide the worker's {ranks} ranks; "
            "change parallel.tensor, parallel.pipeline or the slots of its hosts"
        )
    for what, size, parts, key in (
        ("num_attention_heads", architecture.heads, tp, "tensor"),
        ("num_key_value_heads", architecture.kv_heads, tp, "tensor"),
        ("intermediate_size", architecture.ffn_size, tp, "tensor"),
        ("vocab_size", architecture.vocab_size, tp, "tensor"),
        ("num_hidden_layers", architecture.layers, pp, "pipeline"),
    ):
        if size % parts:
            raise ConfigError(
                f"model config: {what} = {size} is not divisible by parallel.{key} = {parts}; "
                f"choose a parallel.{key} that divides it, or a {what} of {math.ceil(size / parts) * parts}"
            )
    if parallel.sequence and tp == 1:
        raise ConfigError("parallel.sequence = true needs parallel.tensor > 1; set one of the two")
    if parallel.sequence and sequence_length % tp:
        raise ConfigError(
            f"data.sequence_length = {sequence_length} is not divisible by parallel.tensor = {tp}, as "
            "parallel.sequence needs; change it or turn parallel.sequence off"
        )
    if sequence_length > architecture.max_positions:
        raise ConfigError(
            f"data.sequence_length = {sequence_length} is above the model's max_position_embeddings = "
            f"{architecture.max_positions}; shorten the sequences or raise it in the model config"
        )
    _check_deepspeed(deepspeed_block, tp, pp)
    dp = ranks // (tp * pp)
    accumulation_steps(deepspeed_block, dp)
    return dp


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
    if stage == 2 and tp > 1 and "offload_optimizer" in block["zero_optimization"]:
        raise ConfigError(
            f"deepspeed.zero_optimization: stage 2 with offload_optimizer does not go with parallel.tensor = {tp}: "
            "gradients leave the device before tensor ranks can sum them; use stage 1"
        )
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
    if str(block.get("optimizer", {}).get("type", "")).lower() not in ("adam", "adamw"):
        raise ConfigError(
            f"deepspeed.optimizer.type = {block.get('optimizer', {}).get('type')!r} is not supported; use 'AdamW'"
        )
    adamw_settings(block)
    scheduler = block.get("scheduler", {}).get("type")
    if scheduler is not None and scheduler not in SCHEDULERS:
        raise ConfigError(
            f"deepspeed.scheduler.type = {scheduler!r} cannot be set to a step of the run; "
            f"use one of {', '.join(SCHEDULERS)}"
        )


def accumulation_steps(deepspeed_block: dict[str, Any], dp: int) -> int:
    """Micro-batches of one data-parallel replica in one optimizer step. Raises ConfigError."""
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


@dataclass(frozen=True)
class Mesh:
    """This rank's place, and the process groups. Also what DeepSpeed calls an `mpu`."""

    rank: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    model_group: dist.ProcessGroup
    embedding_group: dist.ProcessGroup | None
    control_group: dist.ProcessGroup  # all ranks, over gloo: small words between hosts, never on the device

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    # DeepSpeed's interface. "Model parallel" is tensor × pipeline; norms are counted on tensor rank 0.
    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.model_group

    def get_model_parallel_world_size(self) -> int:
        return self.tp_size * self.pp_size

    def get_model_parallel_rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self.tp_group

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tp_size

    def get_tensor_model_parallel_rank(self) -> int:
        return self.tp_rank

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self.pp_group

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.pp_size

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.pp_rank

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.dp_group

    def get_data_parallel_world_size(self) -> int:
        return self.dp_size

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank


def join(timeout_s: float) -> int:
    """Meet the worker's other ranks, as RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* in the environment say.

    Returns how many there are. No collective of the world waits longer than timeout_s. Does nothing when joined.
    """
    with platform.quiet_imports():
        import deepspeed
    platform.compile_no_ops()
    if platform.HAS_CUDA:
        torch.cuda.set_device(platform.device())
    if not dist.is_initialized():
        with platform.quiet_construction():
            deepspeed.init_distributed(
                dist_backend=platform.backend(), timeout=timedelta(seconds=timeout_s), verbose=False
            )
    return dist.get_world_size()


def initialize(parallel: ParallelConfig, timeout_s: float) -> Mesh:
    """Make the process groups of a layout that `check_layout` allows; the world must be joined.

    Ranks are ordered tensor first, then data, then pipeline (Megatron's default): tensor-parallel ranks are
    neighbours. Call it again after `shut_down()` for another layout. No collective waits longer than timeout_s,
    rounded up to minutes.
    """
    from megatron.core import parallel_state

    with platform.megatron_runtime():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
            create_gloo_process_groups=False,
        )
    return Mesh(
        rank=dist.get_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel.tensor,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel.pipeline,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        model_group=parallel_state.get_model_parallel_group(),
        embedding_group=parallel_state.get_embedding_group(check_initialized=False),
        control_group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)),
    )


def shut_down(leave_world: bool = True) -> None:
    """Forget Megatron's process groups and, if leave_world, torch.distributed's as well."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if leave_world and dist.is_initialized():
        dist.destroy_process_group()
