"""How many communicators a rank of a large worker makes, counted with torch's fake process group."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from geotrain.config import ParallelConfig
from tests.support.inner_worlds import run_world

RANKS, RANK = 256, 5


def count(parallel: ParallelConfig) -> Any:
    """Joins a world of 256 ranks and lays it out; tells what was asked of torch: the device that the world was bound
    to, how many groups were made, and the ranks of each group in which this one met others."""
    from deepspeed.accelerator import get_accelerator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from geotrain.inner.runtime import parallel as groups

    bound: list[Any] = []
    met: Counter[tuple[int, ...]] = Counter()
    start, new_group, all_reduce = dist.init_process_group, dist.new_group, dist.all_reduce

    def started(backend: str, *, device_id: torch.device | None = None, **options: Any) -> None:
        bound.append(device_id)
        start("fake", rank=RANK, world_size=RANKS, store=FakeStore())

    def reduced(tensor: torch.Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
        met[tuple(dist.get_process_group_ranks(group))] += 1
        return all_reduce(tensor, *args, group=group, **options)

    os.environ.update(RANK=str(RANK), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(RANK))
    made = mock.Mock(side_effect=lambda *args, **options: new_group(*args, **{**options, "backend": "fake"}))
    with (
        mock.patch.object(dist, "init_process_group", started),
        mock.patch.object(dist, "new_group", made),
        mock.patch.object(dist, "all_reduce", reduced),
        # DeepSpeed binds the world to a device only where that is a GPU.
        mock.patch.object(get_accelerator(), "device_name", lambda: "cuda"),
        mock.patch.object(get_accelerator(), "device", lambda local_rank: torch.device("cuda", local_rank)),
    ):
        assert groups.join(60) == RANKS
        groups.initialize(parallel, 60)
    return bound, made.call_count, dict(met)


def test_at_256_ranks_a_rank_makes_the_communicators_that_it_uses() -> None:
    ((bound, groups, met),) = run_world(1, count, ParallelConfig(tensor=8, pipeline=4, sequence=True))
    # Bound to a device, torch makes the communicators of all groups at once, on all ranks: 953 splits of the world's.
    assert bound == [None] and groups > 900
    # The world, tensor, data and pipeline ranks, a replica, both ends of the pipeline. Data ranks once more: as those
    # that have the same experts.
    assert met == {
        tuple(range(RANKS)): 1,
        tuple(range(8)): 1,
        tuple(range(5, 64, 8)): 2,
        (5, 69, 133, 197): 1,
        tuple(stage * 64 + rank for stage in range(4) for rank in range(8)): 1,
        (5, 197): 1,
    }
