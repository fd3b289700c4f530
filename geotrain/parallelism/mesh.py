"""A rank's place among the ranks of its worker: numbers and groups, which `geotrain.inner.runtime.parallel` makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RankMesh:
    """This rank's place in the worker's parallel layout, and the process groups it belongs to.

    dp_rank, dp_size, dp_group: among the ranks that have the same parameters, which average gradients and divide the
    optimizer's state; of data and context parallelism together, the context rank fastest. embedding_group: first and
    last pipeline stage, which share a tied embedding; None on the stages between. levels: with several sites, of
    dp_group and expert_dp_group the ranks in this rank's site, and those in the same place in each; else nothing.

    It is also the object that DeepSpeed calls an `mpu` and asks about parallelism.
    """

    rank: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    stage_layers: tuple[int, ...] | None
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    tp_group: ProcessGroup
    dp_group: ProcessGroup
    pp_group: ProcessGroup
    model_group: ProcessGroup
    ep_rank: int
    ep_size: int
    ep_group: ProcessGroup
    expert_dp_group: ProcessGroup
    embedding_group: ProcessGroup | None
    levels: Mapping[ProcessGroup, tuple[ProcessGroup, ProcessGroup]]
    control_group: ProcessGroup  # all ranks, over gloo: small messages that need not wait for the device

    @property
    def replica(self) -> int:
        """Number of this rank's replica: a replica's ranks train the same samples."""
        return self.dp_rank // self.cp_size

    @property
    def replicas(self) -> int:
        return self.dp_size // self.cp_size

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    # The methods that DeepSpeed calls on an `mpu`. To it, "model parallel" means tensor × pipeline, "data parallel"
    # all ranks with the same parameters. It counts the norms of replicated parameters on tensor rank 0 only.

    def get_model_parallel_rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self.tp_size * self.pp_size

    def get_model_parallel_group(self) -> ProcessGroup:
        return self.model_group

    def get_tensor_model_parallel_rank(self) -> int:
        return self.tp_rank

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tp_size

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        return self.tp_group

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.pp_size

    def get_pipeline_model_parallel_group(self) -> ProcessGroup:
        return self.pp_group

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self.dp_size

    def get_data_parallel_group(self) -> ProcessGroup:
        return self.dp_group
