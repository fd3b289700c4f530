"""What the fullest rank of a worker needs, by what needs it: for the dry run and the planner alike."""

from __future__ import annotations

from geotrain.canonical import Architecture
from geotrain.config import RunConfig, WorkerConfig
from geotrain.sharing.acco_forms import bytes_per_parameter
from geotrain.sharing.checks import trains_in_bf16
from geotrain.sharing.memory import memory_per_rank


def rank_memory(run: RunConfig, architecture: Architecture, worker: WorkerConfig) -> dict[str, int]:
    """Bytes on the device. Raises ConfigError when the worker cannot run this layout.

    outer: of each parameter that a rank owns, fp32 anchor and staging buffer, and the error feedback's residual where
    the codec is lossy (`geotrain.outer.worker.WorkerRank`); with the masters, on the host if they are offloaded.
    """
    parallel, block = worker.parallel or run.parallel, {**run.deepspeed, **worker.deepspeed}
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
    if run.acco is not None:
        size = 2 if trains_in_bf16(block) else 4
        total = round(memory.parameters * bytes_per_parameter(run.acco.prediction, dp, size))
        optimizer = 12 * -(-memory.parameters // dp)
        state.update(gradients=memory.weights_bytes, optimizer=optimizer)
        state["buffers"] = total - memory.weights_bytes - state["gradients"] - optimizer
    up = run.outer.local if run.outer.levels == 2 else run.outer.up
    each = 8 + (4 if up.name != "fp32" else 0)
    offloaded = "offload_optimizer" in block.get("zero_optimization", {})
    return {
        **state,
        "activations": memory.activations_bytes,
        "outer": 0 if offloaded else each * -(-memory.parameters // dp),
    }
