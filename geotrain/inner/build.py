"""Builds the engine of this rank from a run: process groups first, then the model, its optimizer and the engine."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

from torch import nn

from geotrain.config import ParallelConfig, PrecisionConfig, RunConfig
from geotrain.config.deepspeed import completed
from geotrain.inner.acco.engine import AccoEngine
from geotrain.inner.acco.flat_buffer import FlatBuffer
from geotrain.inner.engine.engine import GeoEngine
from geotrain.inner.model.context_parallel import Parts
from geotrain.inner.model.model import HAS_TRANSFORMER_ENGINE, build_model, placements
from geotrain.inner.runtime import platform
from geotrain.inner.runtime.parallel import EXPERTS, group_like, initialize, join
from geotrain.optimizers.groups import parameter_groups
from geotrain.optimizers.inner_optimizer import InnerOptimizer
from geotrain.optimizers.muon import owned_matrices, with_gaps
from geotrain.optimizers.updates import TensorRanks
from geotrain.parallelism import checks
from geotrain.parallelism.acco_forms import check_acco
from geotrain.parallelism.local_parameters import tied_copies
from geotrain.parallelism.mesh import RankMesh
from geotrain.parallelism.optimizer_settings import MuonSettings, PluggedOptimizer, optimizer_settings
from geotrain.parallelism.transformer_engine import check_device, check_transformer_engine
from geotrain.parallelism.whole_matrices import ALIGNED, pack


def build_engine(
    run: RunConfig,
    parallel: ParallelConfig,
    deepspeed_block: dict[str, Any],
    timeout_s: float | None = None,
    end_of_document: int | None = None,
    precision: PrecisionConfig | None = None,
) -> GeoEngine:
    """Join the worker and build its engine. All weights are zero until shards() are written and refresh() is called.

    deepspeed_block: the run's `deepspeed` block, overridden by the worker's own keys; it may say "auto". precision:
    None: the run's. timeout_s: the longest that a collective may wait, None: `monitor.collective_s`; ACCO's use
    `acco.timeout_s` instead.
    end_of_document: the id that ends documents, to keep attention inside them; None: it is causal over a sample.
    Raises ConfigError if the parallel layout or the DeepSpeed block cannot work for this model.
    """
    architecture, deepspeed_block = run.architecture, completed(deepspeed_block, run.total_steps)
    sequence_length, bf16 = run.data.sequence_length, checks.trains_in_bf16(deepspeed_block)
    precision = precision or run.precision
    timeout_s = run.monitor.collective_s if timeout_s is None else timeout_s
    ranks = join(timeout_s)
    dp = checks.check_layout(architecture, parallel, ranks, deepspeed_block, sequence_length)
    if run.acco is not None:
        check_acco(run.acco, architecture, parallel, deepspeed_block, checks.accumulation_steps(deepspeed_block, dp))
    checks.check_deterministic(precision, run.acco)
    tokens = sequence_length * int(deepspeed_block["train_micro_batch_size_per_gpu"])
    check_transformer_engine(run, architecture, parallel, precision, bf16, tokens)
    check_device(precision, parallel, HAS_TRANSFORMER_ENGINE, platform.capability())
    checks.check_shared_devices(parallel, platform.HAS_CUDA and platform.backend() == "gloo")
    platform.use_deterministic_algorithms(precision.deterministic_mode)
    mesh, settings = initialize(parallel, timeout_s), optimizer_settings(deepspeed_block)
    with platform.quiet_construction():
        shape = architecture, parallel, mesh, sequence_length, bf16, run.model.recompute, run.seed
        model = build_model(*shape, packed=end_of_document is not None, precision=precision)
        placed = placements(model, architecture, parallel, mesh)
        numel = sum(place.numel for _, place in placed)
        buckets: dict[str, Any] = {}
        if run.acco is None and checks.overlaps_reduction(deepspeed_block):
            late = tied_copies(architecture, mesh.pp_size)
            buckets = {"bucket": checks.reduction_bucket(deepspeed_block, numel), "late": late}
        groups = parameter_groups(placed, settings, EXPERTS, **buckets)
        if isinstance(settings, MuonSettings) and checks.zero_stage(deepspeed_block):
            keep_matrices_whole(groups, mesh, run.acco is not None, model)
        if isinstance(settings, PluggedOptimizer):
            optimizer = settings.optimizer(groups)
        else:
            optimizer = InnerOptimizer(groups, settings)
        config = complete_block(deepspeed_block, numel)
        parts = (model, optimizer, config, mesh, placed, architecture, sequence_length)
        engine = GeoEngine(*parts) if run.acco is None else AccoEngine(*parts, acco=run.acco)
        engine.end_of_document = end_of_document
        engine.parts = Parts(mesh.cp_rank, mesh.cp_size, parallel.context_exchange)
    if isinstance(settings, MuonSettings):
        owned = owned_matrices(placed, architecture, engine.optimizer, bool(checks.zero_stage(deepspeed_block)))
        optimizer.bind(owned, tensor_ranks(mesh, settings, timeout_s))
    return engine


def complete_block(deepspeed_block: dict[str, Any], parameters: int) -> dict[str, Any]:
    """Add to the user's DeepSpeed block what the engine needs.

    Settings that the engine cannot work without replace the user's; for all others the user's win. parameters:
    elements that this rank holds.
    """
    config = copy.deepcopy(deepspeed_block)
    # The engine brings its own optimizer (`InnerOptimizer`), which DeepSpeed would otherwise refuse under ZeRO, and
    # would want replaced by its CPU optimizer where the masters are offloaded.
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    # DeepSpeed's throughput timer waits for the device at each micro-batch.
    config.setdefault("timers", {"throughput": {"enabled": False}})
    if checks.trains_in_bf16(config):
        # DeepSpeed normally adds bf16 gradients to the fp32 ones in `engine.backward`. Megatron's schedule runs
        # backward without the engine, so they must be added by hooks as soon as they are computed.
        config["bf16"]["immediate_grad_update"] = True
    stage = checks.zero_stage(config)
    if stage == 1:
        # With overlap_comm DeepSpeed's own ZeRO-1, which is left where the optimizer is offloaded, expects to have
        # reduced gradients during a backward of its own, and would reduce nothing.
        config["zero_optimization"]["overlap_comm"] = False
    if stage > 0:
        # DeepSpeed allocates the whole bucket, by default of 5e8 elements, however small the model is.
        bucket = checks.reduction_bucket(config, parameters)
        config["zero_optimization"].setdefault("reduce_bucket_size", bucket)
    return config


def keep_matrices_whole(groups: list[dict[str, Any]], mesh: RankMesh, acco: bool, model: nn.Module) -> None:
    """Arrange the groups of matrices, the last ones, so that no data-parallel shard cuts one: DeepSpeed shards each
    group by itself, ACCO all groups as one sequence, in which all matrices become one group."""
    others = [[p.numel() for p in group["params"]] for group in groups if not group["is_matrices"]]
    head = FlatBuffer(others, 1).numel if acco else 0
    if acco:
        groups[len(others) :] = [{**groups[-1], "params": [p for g in groups[len(others) :] for p in g["params"]]}]
    for group in groups[len(others) :]:
        sizes = [parameter.numel() for parameter in group["params"]]
        ranks = mesh.dp_size // mesh.ep_size if "moe" in group else mesh.dp_size
        group["params"] = with_gaps(group["params"], pack(sizes, ranks, head, ALIGNED), model)


def tensor_ranks(mesh: RankMesh, settings: MuonSettings, timeout_s: float) -> TensorRanks | None:
    """Make the process group that gathers matrices, if they are to be: every rank of the worker must call it."""
    if mesh.tp_size == 1 or settings.tp_mode == "blockwise":
        return None
    group = group_like(mesh.tp_group, platform.backend(), timedelta(seconds=timeout_s))
    return TensorRanks(group, mesh.tp_rank, mesh.tp_size)
