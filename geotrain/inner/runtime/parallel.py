"""The process groups of one worker: its ranks' rendezvous, and Megatron-core's groups."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

from geotrain.common.names import OUTAGE_S
from geotrain.config import ParallelConfig
from geotrain.inner.runtime import platform
from geotrain.parallelism.mesh import RankMesh

EXPERTS = "experts"  # DeepSpeed's name for the process group of ranks that have the same experts
# Made by `initialize`. Megatron-core does not know of them, so `shut_down` destroys them from this list.
_control_groups: list[dist.ProcessGroup] = []


class LostRank(RuntimeError):
    """Another rank of the worker died, hangs, or cannot be reached."""


def lost_rank(error: RuntimeError) -> str | None:
    """Describe in a line which collective failed and how; None if the error is not from a collective.

    Over gloo torch raises a plain RuntimeError, which only its text distinguishes from others.
    """
    if isinstance(error, LostRank):
        return str(error)
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        return f"a rank of this worker died, hangs, or cannot be reached: {first_line(error)}"
    return None


def first_line(error: Exception) -> str:
    """Return the error's first line: torch may append a stack to the message of a failed collective."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def join(timeout_s: float) -> int:
    """Join the worker's other ranks, as RANK, WORLD_SIZE, LOCAL_RANK and MASTER_* in the environment say.

    Returns how many ranks the worker has. No collective of the world waits longer than timeout_s. If this process has
    already joined, nothing happens.
    """
    with platform.quiet_imports():
        import deepspeed
    platform.compile_no_ops()
    if platform.HAS_CUDA:
        torch.cuda.set_device(platform.device())
    if not dist.is_initialized():
        with platform.quiet_construction():
            # DeepSpeed would bind the world to this rank's device. torch then makes every group at once, by splitting
            # the world's communicator on all ranks, the group's or not: 953 times where Megatron-core lays out 256.
            dist.init_process_group(platform.backend(), timeout=timedelta(seconds=timeout_s))
            deepspeed.init_distributed(dist_backend=platform.backend(), verbose=False)
    return dist.get_world_size()


def initialize(parallel: ParallelConfig, timeout_s: float) -> RankMesh:
    """Make the process groups of a parallel layout that `check_layout` allows; the world must be joined.

    Ranks are numbered with the tensor rank fastest, then context, data, pipeline (Megatron's default). So
    tensor-parallel ranks, which communicate most, are neighbours. For another layout, call it again after
    `shut_down()`. No collective waits longer than timeout_s, rounded up to whole minutes for Megatron-core.
    """
    with platform.quiet_imports():
        from megatron.core import parallel_state

    with platform.megatron_runtime():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            num_distributed_optimizer_instances=parallel.sites,
            distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
            create_gloo_process_groups=False,
        )
    # In it ranks agree on what one of them may still wait for from a server.
    control_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=OUTAGE_S + timeout_s))
    _control_groups.append(control_group)
    dp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    expert_dp_group, levels = parallel_state.get_expert_data_parallel_group(), {}
    if parallel.sites > 1:
        across = parallel_state.get_inter_distributed_optimizer_instance_group()
        inside = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
        experts = parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
        levels = {dp_group: (inside, across), expert_dp_group: (experts, across)}
    mesh = RankMesh(
        rank=dist.get_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel.tensor,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel.pipeline,
        stage_layers=parallel.stage_layers,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel.context,
        dp_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        dp_size=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp_group=dp_group,
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        model_group=parallel_state.get_model_parallel_group(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel.expert,
        ep_group=parallel_state.get_expert_model_parallel_group(),
        expert_dp_group=expert_dp_group,
        embedding_group=parallel_state.get_embedding_group(check_initialized=False),
        levels=levels,
        control_group=control_group,
    )
    # A group's first collective makes its communicator, and all its ranks must come to that. So they do here, kind by
    # kind; else the first would be a message between two stages, or a collective that another thread holds up.
    every = (dist.group.WORLD, mesh.tp_group, mesh.dp_group, mesh.pp_group, mesh.model_group, mesh.embedding_group)
    for group in (*every, mesh.ep_group, mesh.expert_dp_group, *chain(*levels.values())):
        if group is not None and group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=platform.device()), group=group)
    return mesh


def group_like(group: dist.ProcessGroup, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Make a group of the same ranks, with a backend and a timeout of its own: every rank of the worker must call
    it."""
    return group_of(dist.get_process_group_ranks(group), backend, timeout)


def group_of(ranks: Iterable[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Make a group. Every rank of the worker must call it, each with the ranks of its own."""
    mine = tuple(ranks)
    of_all: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    # torch demands that every rank takes part in making every group, its own or not, and all in the same order.
    groups = {ranks: dist.new_group(list(ranks), timeout, backend) for ranks in sorted(set(of_all))}
    return groups[mine]


def shut_down(leave_world: bool = True) -> None:
    """Destroy the process groups that `initialize` made and, if leave_world, the world as well.

    A group's threads end only when no RankMesh refers to it any more.
    """
    with platform.quiet_imports():
        from megatron.core import parallel_state

    made = {*(parallel_state._global_process_group_list or ()), *_control_groups} - {None, dist.group.WORLD}
    parallel_state.destroy_model_parallel()  # forgets the groups, but leaves them open
    _control_groups.clear()
    if not dist.is_initialized():
        return
    if leave_world:  # this destroys all groups with it
        dist.destroy_process_group()
        return
    for group in made - {dist.GroupMember.NON_GROUP_MEMBER}:
        dist.destroy_process_group(group)
