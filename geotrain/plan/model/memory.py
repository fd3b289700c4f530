"""Memory of the fullest rank of a worker, by what it is used for. The dry run and the planner both report it."""

from __future__ import annotations

from geotrain.config import Architecture, RunConfig, WorkerConfig, WorkerSetup
from geotrain.parallelism.acco_forms import flat_bytes, scratch_bytes
from geotrain.parallelism.checks import accumulates_in_fp32, trains_in_bf16
from geotrain.parallelism.memory import memory_per_rank, moment_bytes
from geotrain.parallelism.optimizer_settings import uses_muon
from geotrain.parallelism.whole_matrices import shard_size


def checkpoint_memory(run: RunConfig, architecture: Architecture, worker: WorkerConfig) -> int:
    """Bytes on the host, pinned where there is a GPU, of the copy of a checkpoint while it is written: at most, of
    the fullest rank. Raises as `rank_memory`."""
    setup = WorkerSetup.of(run, worker)
    parallel, block = setup.parallel, setup.deepspeed
    needs = memory_per_rank(architecture, parallel, worker.ranks, block, run.data.sequence_length)
    if run.acco is None:
        return needs.checkpoint_bytes
    dp = worker.ranks // (parallel.tensor * parallel.pipeline)
    return moment_bytes(shard_size(architecture, parallel, needs.stage, dp, uses_muon(block), together=True), block)


def rank_memory(run: RunConfig, architecture: Architecture, worker: WorkerConfig) -> dict[str, int]:
    """Bytes on the device. Raises ConfigError when the worker cannot run this layout.

    outer: what the outer loop keeps for each parameter that the rank owns (`geotrain.outer.worker.WorkerRank`): the
    fp32 anchor, an fp32 staging buffer and, where the codec is lossy, the residual of the error feedback. It lies
    beside the optimizer's master weights, so it takes no device memory where these are offloaded to the host.
    """
    setup = WorkerSetup.of(run, worker)
    parallel, block = setup.parallel, setup.deepspeed
    memory = memory_per_rank(
        architecture, parallel, worker.ranks, block, run.data.sequence_length, run.model.recompute
    )
    dp = worker.ranks // (parallel.tensor * parallel.pipeline)
    state = {
        "weights": memory.weights_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "buffers": memory.buffers_bytes,
    }
    shard = shard_size(architecture, parallel, memory.stage, dp, uses_muon(block), run.acco is not None)
    if run.acco is not None:
        size, summed = 2 if trains_in_bf16(block) else 4, 4 if accumulates_in_fp32(block) else 2
        state.update(weights=size * shard.total, gradients=summed * shard.total)
        state["optimizer"] = 4 * (shard.adamw + shard.matrices) + moment_bytes(shard, block)
        flat = flat_bytes(run.acco.prediction, shard, size, summed)
        scratch = scratch_bytes(run.acco.prediction, shard, size)
        state["buffers"] = flat - state["weights"] - state["gradients"] + scratch
    up, _ = run.outer.worker_codecs
    each = 8 + (4 if up.name != "fp32" else 0)
    offloaded = "offload_optimizer" in block.get("zero_optimization", {})
    return {
        **state,
        "activations": memory.activations_bytes,
        "outer": 0 if offloaded else each * (shard.adamw + shard.matrices),
    }
