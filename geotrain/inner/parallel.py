"""How the ranks of one worker find each other: Megatron's process groups, and DeepSpeed's view of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from geotrain.config import ParallelConfig
from geotrain.inner import platform

_control_groups: list[dist.ProcessGroup] = []  # made by `initialize` and not shut down


class LostRank(RuntimeError):
    """Another rank of the worker died, hangs, or cannot be reached."""


def lost_rank(error: RuntimeError) -> str | None:
    """In one line, if it is a collective that failed: over gloo torch raises a plain RuntimeError. Else None."""
    if isinstance(error, LostRank):
        return str(error)
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        return f"a rank of this worker died, hangs, or cannot be reached: {first_line(error)}"
    return None


def first_line(error: Exception) -> str:
    """torch's errors of collectives may go on with a stack."""
    return next(iter(str(error).splitlines()), type(error).__name__)


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
    with platform.quiet_imports():
        from megatron.core import parallel_state

    with platform.megatron_runtime():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
            create_gloo_process_groups=False,
        )
    control_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    _control_groups.append(control_group)
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
        control_group=control_group,
    )


def group_like(group: dist.ProcessGroup, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A new group of the same ranks. Every rank of the worker must call it, each with its own group."""
    mine = tuple(dist.get_process_group_ranks(group))
    of_all: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    groups = {ranks: dist.new_group(list(ranks), timeout, backend) for ranks in sorted(set(of_all))}
    return groups[mine]


def shut_down(leave_world: bool = True) -> None:
    """Destroy the process groups that `initialize` made and, if leave_world, the world as well. Their threads end
    when no mesh holds them any more."""
    with platform.quiet_imports():
        from megatron.core import parallel_state

    made = {*(parallel_state._global_process_group_list or ()), *_control_groups} - {None, dist.group.WORLD}
    parallel_state.destroy_model_parallel()
    _control_groups.clear()
    if not dist.is_initialized():
        return
    if leave_world:
        dist.destroy_process_group()
        return
    for group in made - {dist.GroupMember.NON_GROUP_MEMBER}:
        dist.destroy_process_group(group)
