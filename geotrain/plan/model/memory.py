"""Memory of the fullest rank of a worker, by what it is used for. The dry run and the planner both report it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from geotrain.config import Architecture, ClusterConfig, RunConfig, WorkerConfig, WorkerSetup, codec_config
from geotrain.outer.codec import make_codec
from geotrain.outer.downlink import sends_changes
from geotrain.parallelism.acco_forms import flat_bytes
from geotrain.parallelism.checks import (
    CODED_AT_ONCE,
    accumulates_in_fp32,
    coded_bits,
    offloads_masters,
    trains_in_bf16,
)
from geotrain.parallelism.local_parameters import first_like
from geotrain.parallelism.memory import MemoryPerRank, fp8_weights, memory_of_stages, moment_bytes, saved_bytes
from geotrain.parallelism.optimizer_settings import uses_muon
from geotrain.parallelism.whole_matrices import ShardSize, shard_size
from geotrain.staging.cuda import CHUNK


def rank_memory(run: RunConfig, architecture: Architecture, worker: WorkerConfig) -> dict[str, int]:
    """Estimate the bytes that a rank takes on its device, by what they are used for. Raises ConfigError when the
    worker cannot run this parallel layout.

    outer: what the outer loop keeps for each parameter that the rank owns (`outer_bytes`), unless it lies in host
    memory (`host_memory`).
    """
    return tightest_memory(run, architecture, WorkerSetup.of(run, worker), [0.0] * worker.ranks)[0]


def tightest_rank(
    run: RunConfig, cluster: ClusterConfig, worker: WorkerConfig
) -> tuple[dict[str, int], float, str | None]:
    """Estimate the same of the rank that has least left on its own device; return that device's bytes and kind, too.
    The kind is None where the cluster file names none of the worker's."""
    kinds = [host.device for host in worker.hosts for _ in range(host.slots)]
    unknown = math.inf if any(kinds) else 0.0
    rooms = [unknown if kind is None else 1e9 * cluster.devices[kind].memory_gb for kind in kinds]
    parts, room = tightest_memory(run, run.architecture, WorkerSetup.of(run, worker), rooms)
    return parts, room, kinds[rooms.index(room)]


def tightest_memory(
    run: RunConfig, architecture: Architecture, setup: WorkerSetup, room_bytes: Sequence[float]
) -> tuple[dict[str, int], float]:
    """Estimate the same of the rank that has least left, and return the bytes of its device. room_bytes: of each
    rank's device."""
    ranks, stages = len(room_bytes), setup.parallel.pipeline
    rooms = [min(room_bytes[s * ranks // stages : (s + 1) * ranks // stages], default=0.0) for s in range(stages)]
    alike = [*zip(first_like(architecture, setup.parallel), rooms, strict=True)]
    first = {kind: alike.index(kind) for kind in alike}  # which keeps most micro-batches of those
    parts = stage_memory(run, architecture, setup, ranks, first.values())
    return max(
        ((parts, rooms[s]) for s, parts in zip(first.values(), parts, strict=True)),
        key=lambda stage: sum(stage[0].values()) - stage[1],
    )


def stage_memory(
    run: RunConfig, architecture: Architecture, setup: WorkerSetup, ranks: int, stages: Iterable[int]
) -> list[dict[str, int]]:
    """Estimate the same of a rank in each of these pipeline stages."""
    found, block = list[dict[str, int]](), setup.deepspeed
    for memory, shard in _stages(run, architecture, setup, ranks, stages):
        state = {
            "weights": memory.weights_bytes,
            "gradients": memory.gradients_bytes,
            "optimizer": memory.optimizer_bytes,
            "buffers": memory.buffers_bytes,
        }
        if run.acco is not None:
            size, summed = 2 if trains_in_bf16(block) else 4, 4 if accumulates_in_fp32(block) else 2
            in_fp8 = 2 * fp8_weights(architecture, setup.parallel, memory.stage) if setup.precision.fp8 else 0
            state.update(weights=size * shard.total, gradients=summed * shard.total)
            state["optimizer"] = 4 * (shard.adamw + shard.matrices) + moment_bytes(shard.adamw, shard.matrices, block)
            flat = flat_bytes(shard, size, summed, block, _copies(setup, ranks))
            zeros = 2 * min(shard.adamw + shard.matrices, CODED_AT_ONCE) if coded_bits(block) is not None else 0
            state["buffers"] = flat - state["weights"] - state["gradients"] + zeros
            state["weights"] += in_fp8
        outer = 0 if outer_on_host(run, setup) else outer_bytes(run, shard.adamw + shard.matrices)
        found.append({**state, "activations": memory.activations_bytes, "outer": outer})
    return found


def host_memory(run: RunConfig, architecture: Architecture, worker: WorkerConfig) -> dict[str, int]:
    """Bytes of host memory that the same rank takes: the optimizer's where it is offloaded; the outer loop's where it
    is not on the device; the pinned buffers through which the outer loop's data cross, which are fixed where they
    carry chunks of masters, and as large as what is sent and received where that crosses whole; and the copy of a
    checkpoint while it is written, at most, pinned where there is a GPU. What comes and goes with an exchange, and
    the process's own, come on top. Raises ConfigError."""
    setup = WorkerSetup.of(run, worker)
    first = sorted(set(first_like(architecture, setup.parallel)))
    stages = _stages(run, architecture, setup, worker.ranks, first)
    memory, shard = max(stages, key=lambda stage: stage[0].total_bytes)
    block = setup.deepspeed
    owned, offloaded = shard.adamw + shard.matrices, offloads_masters(block)
    up, down = run.outer.worker_codecs
    comes = codec_config("fp32") if sends_changes(down) else down  # the first weights come whole
    pinned = 0 if offloaded else 2 * 4 * CHUNK
    if not outer_on_host(run, setup):
        pinned = sum(make_codec(codec).encoded_bytes(owned) for codec in (up, comes))
    return {
        "optimizer": 4 * owned + moment_bytes(shard.adamw, shard.matrices, block) if offloaded else 0,
        "outer": outer_bytes(run, owned) if outer_on_host(run, setup) else 0,
        "pinned": pinned,
        "checkpoint": memory.checkpoint_bytes if run.acco is None else saved_bytes(shard, block),
    }


def _stages(
    run: RunConfig, architecture: Architecture, setup: WorkerSetup, ranks: int, stages: Iterable[int]
) -> list[tuple[MemoryPerRank, ShardSize]]:
    """The memory of a rank in each of these pipeline stages, and that rank's shard of the optimizer."""
    parallel, block = setup.parallel, setup.deepspeed
    length, recompute, fp8 = run.data.sequence_length, run.model.recompute, setup.precision.fp8 is not None
    documents, dp, muon = run.data.attention == "document", _copies(setup, ranks), uses_muon(block)
    found = memory_of_stages(architecture, parallel, ranks, stages, block, length, recompute, fp8, documents)
    return [(m, shard_size(architecture, parallel, m.stage, dp, muon, run.acco is not None)) for m in found]


def _copies(setup: WorkerSetup, ranks: int) -> int:
    """Count the ranks that have the same parameters."""
    return ranks // (setup.parallel.tensor * setup.parallel.pipeline)


def outer_on_host(run: RunConfig, setup: WorkerSetup) -> bool:
    """Whether the outer loop's vectors lie in host memory: where it is said, and where the masters do."""
    return run.outer.state_device == "host" or offloads_masters(setup.deepspeed)


def outer_bytes(run: RunConfig, owned: int) -> int:
    """Bytes that the outer loop keeps of `owned` parameters (`geotrain.outer.worker.WorkerRank`), all fp32: the
    anchor, a buffer in which deltas are made; where the codec is lossy, the residual of its error feedback; and where
    changes come down, the mirror that they change."""
    up, down = run.outer.worker_codecs
    return 4 * owned * (2 + (up.name != "fp32") + sends_changes(down))
