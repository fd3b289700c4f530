"""The `deepspeed` block: which keys it may have, and what `"auto"` stands for in it.

DeepSpeed passes over keys that it does not know, and with `gradient_cliping` trains without clipping. Here they are
errors. The names are those that DeepSpeed itself reads, as tests/config/test_deepspeed.py makes sure.
"""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

from geotrain.config.block import nearest

AUTO = "auto"
WARMUP_STEPS = 2000  # at most, for "auto"
COS_MIN_RATIO = 0.1  # for "auto"
DEEPSPEED_WARMUP_MAX_LR = 1e-3  # DeepSpeed's default of warmup_max_lr


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


WSD = "WarmupStableDecayLR"
RATIO_SCHEDULERS = None, "WarmupCosineLR", WSD  # each group of parameters keeps a rate of its own, by a common factor
SCHEDULERS = {  # those whose step can be set → the keys of their `params`
    "LRRangeTest": _keys(
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase"
    ),
    "OneCycle": _keys(
        "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size decay_mom_rate "
        "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom"
    ),
    "WarmupLR": _keys("warmup_min_lr warmup_max_lr warmup_num_steps warmup_type"),
    "WarmupDecayLR": _keys("total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type"),
    "WarmupCosineLR": _keys("total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type"),
    # GeoTrain's own (`geotrain.inner.engine.schedule`), which DeepSpeed lacks
    WSD: _keys("total_num_steps warmup_min_ratio warmup_num_steps warmup_type decay_num_steps decay_type min_ratio"),
}
DECAYS = "linear", "cosine", "sqrt"
BLOCKS = {  # key → the keys of its block, where these are looked into
    "bf16": _keys(
        "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
    ),
    "optimizer": _keys("type params legacy_fusion"),
    "scheduler": _keys("type params"),
    "zero_optimization": _keys(
        "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
        "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
        "elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload_param "
        "cpu_offload_use_pin_memory cpu_offload stage3_prefetch_bucket_size stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
        "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients "
        "parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
        "zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
        "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module"
    ),
}
OURS = _keys("gradient_bits weight_bits")  # of zero_optimization: this engine's own, which DeepSpeed does not get
BLOCKS["zero_optimization"] |= OURS


def without_ours(block: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a `deepspeed` block what DeepSpeed does not know."""
    zero = {key: value for key, value in block.get("zero_optimization", {}).items() if key not in OURS}
    return {**block, "zero_optimization": zero} if "zero_optimization" in block else block


KEYS = frozenset(BLOCKS) | _keys(
    "activation_checkpointing aio autotuning checkpoint comet comms_logger communication_data_type compile "
    "csv_monitor data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather "
    "disable_python_gc dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps "
    "gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine log_level "
    "managed_gradient_accumulation memory_breakdown pipeline prescale_gradients "
    "seq_parallel_communication_data_type steps_per_print tensor_parallel tensorboard timers torch_autocast "
    "train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size "
    "wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
)
_MAY_BE_AUTO = _keys(
    "gradient_accumulation_steps scheduler.params.cos_min_ratio scheduler.params.decay_num_steps "
    "scheduler.params.total_num_steps scheduler.params.warmup_max_lr scheduler.params.warmup_min_lr "
    "scheduler.params.warmup_num_steps zero_optimization.reduce_bucket_size"
)


_REFUSED = {  # what DeepSpeed does elsewhere and cannot do here → what to do instead
    "flops_profiler.enabled": "it does not know this engine's modules; monitoring has speed and utilization",
    "data_efficiency.enabled": "data comes by leases: mixtures and phases are in data.train",
    "tensor_parallel.autotp_size": "write parallel.tensor",
    "zero_optimization.zero_quantized_gradients": "this engine reduces gradients itself",
    "checkpoint.load_universal": "every checkpoint goes on with another layout",
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


_READ: dict[str, tuple[frozenset[str], Callable[[Any], bool]]] = {  # what its value must be → places, the test
    "an object": (
        frozenset(BLOCKS) | _keys("data_types fp16 optimizer.params scheduler.params"),
        lambda value: isinstance(value, dict),
    ),
    "a string": (_keys("optimizer.type scheduler.type"), lambda value: isinstance(value, str)),
    "true or false": (
        _keys("bf16.enabled fp16.enabled zero_optimization.round_robin_gradients"),
        lambda value: isinstance(value, bool),
    ),
    "a positive integer": (
        _keys("train_batch_size train_micro_batch_size_per_gpu"),
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0,
    ),
    "a whole number, 0 or more": (
        _keys(
            "gradient_accumulation_steps scheduler.params.decay_num_steps scheduler.params.total_num_steps "
            "scheduler.params.warmup_num_steps zero_optimization.reduce_bucket_size zero_optimization.stage"
        ),
        lambda value: _is_number(value) and value == int(value),  # DeepSpeed's own examples write 5e8
    ),
    f"one of {', '.join(DECAYS)}": (_keys("scheduler.params.decay_type"), lambda value: value in DECAYS),
    "a number, 0 or more": (
        _keys(
            "gradient_clipping optimizer.params.lr scheduler.params.cos_min_ratio scheduler.params.min_ratio "
            "scheduler.params.warmup_max_lr scheduler.params.warmup_min_lr"
        ),
        _is_number,
    ),
}


def check_block(block: dict[str, Any]) -> dict[str, Any]:
    """Return the block as it is.

    Raises ValueError, a line for each value of the wrong kind among those that GeoTrain itself reads, for each key
    that DeepSpeed would pass over or this engine cannot honour, and for each "auto" that stands where nothing follows
    from the run.
    """
    if faults := [*_misshapen(block), *_no_auto(block)] or [*_unknown(block), *_refused(block)]:
        raise ValueError("; ".join(faults))
    return block


def _misshapen(block: dict[str, Any]) -> Iterator[str]:
    for kind, (places, fits) in _READ.items():
        for place in places:
            *way, last = place.split(".")
            holder: Any = block
            for part in way:
                holder = holder.get(part, {}) if isinstance(holder, dict) else {}
            if not isinstance(holder, dict) or last not in holder:
                continue  # absent, or its holder is reported by itself
            value = holder[last]
            if value != AUTO and not fits(value):
                yield f"{place} = {reprlib.repr(value)}: must be {kind}"


def _refused(block: dict[str, Any]) -> Iterator[str]:
    for place, instead in _REFUSED.items():
        holder, _, key = place.partition(".")
        if isinstance(block.get(holder), dict) and block[holder].get(key):
            yield f"{place} = {reprlib.repr(block[holder][key])}: is not done here: {instead}"


def _unknown(block: dict[str, Any]) -> Iterator[str]:
    looked_into: list[tuple[str, dict[str, Any], frozenset[str]]] = [("", block, KEYS)]
    looked_into += [(f"{key}.", block[key], known) for key, known in BLOCKS.items() if key in block]
    scheduler = block.get("scheduler", {})
    if scheduler.get("type") in SCHEDULERS:
        looked_into.append(("scheduler.params.", scheduler.get("params", {}), SCHEDULERS[scheduler["type"]]))
    for place, inner, known in looked_into:
        for key in inner:
            if key not in known:
                advice = nearest(key, sorted(known), "it would do nothing; leave it out")
                yield f"{place}{key}: DeepSpeed knows no such key; {advice}"


def _no_auto(block: dict[str, Any], place: str = "") -> Iterator[str]:
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _no_auto(value, f"{place}{key}.")
        elif value == AUTO and place + key not in _MAY_BE_AUTO:
            yield f'{place}{key} = "auto": state it; "auto" may stand for {", ".join(sorted(_MAY_BE_AUTO))}'


def completed(block: dict[str, Any], total_steps: int) -> dict[str, Any]:
    """Replace each "auto" in the block. total_steps: inner steps of the whole run, over all workers.

    total_num_steps: total_steps. warmup_num_steps: a tenth of the schedule, at most 2,000 steps. decay_num_steps: a
    fifth of it; of WarmupStableDecayLR these three may be left out. warmup_min_lr: 0.
    warmup_max_lr: the optimizer's lr. cos_min_ratio: 0.1, a tenth of the rate at the end. What else may be "auto" is
    left out: DeepSpeed and the engine find it by themselves.
    """
    block = copy.deepcopy(block)
    for inner, key in (
        (block, "gradient_accumulation_steps"),
        (block.get("zero_optimization"), "reduce_bucket_size"),
    ):
        if inner and inner.get(key) == AUTO:
            del inner[key]
    if block.get("scheduler", {}).get("type") == WSD:
        follows = dict.fromkeys(("total_num_steps", "warmup_num_steps", "decay_num_steps"), AUTO)
        block["scheduler"]["params"] = {**follows, **block["scheduler"].get("params", {})}
    params = block.get("scheduler", {}).get("params", {})
    if params.get("total_num_steps") == AUTO:
        params["total_num_steps"] = total_steps
    schedule_steps = params.get("total_num_steps", total_steps)
    found = {
        "warmup_num_steps": max(1, min(WARMUP_STEPS, int(schedule_steps) // 10)),
        "decay_num_steps": int(schedule_steps) // 5,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": block.get("optimizer", {}).get("params", {}).get("lr", DEEPSPEED_WARMUP_MAX_LR),
        "cos_min_ratio": COS_MIN_RATIO,
    }
    params.update({key: value for key, value in found.items() if params.get(key) == AUTO})
    return block
