"""Places this process among the ranks of its worker: torch's default process group, or alone."""

from __future__ import annotations

import resource
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from geotrain.kernels.devices import cuda_devices
from geotrain.own_loop.masters import Masters

TIMEOUT_S = 600.0  # how long a rank waits for the others


class TorchRank:
    """One rank of a user's own loop; implements `geotrain.worker.loop.LoopRank`. Every rank must make it: it makes a
    process group of gloo, so that agreeing does not wait for the device."""

    def __init__(self) -> None:
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank()
        self.world_size = 1 if self.alone else dist.get_world_size()
        self._group = None if self.alone else dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
        self.is_metrics_rank = self.rank == 0
        self.masters: Masters  # whoever makes this sets it, before the first exchange

    def agree(self, flag: bool) -> bool:
        """Whether the flag is true on every rank. A collective."""
        return flag if self.alone else all(self.gather(flag))

    def gather(self, value: Any) -> list[Any]:
        """Give every rank the values of all ranks. A collective."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_rank_0(self, text: str) -> str:
        return str(self.gather(text)[0])

    def mean_loss(self, loss: float) -> float:
        return sum(self.gather(loss)) / self.world_size

    def settle(self) -> None:
        """Check that no parameter was moved. Optimizer steps are done when they return, so nothing is waited for."""
        self.masters.check_place()

    def refresh(self, changed: Collection[str]) -> None:
        self.masters.refresh(changed)

    @property
    def peak_memory_bytes(self) -> float:
        if cuda_devices():
            return float(torch.cuda.max_memory_allocated())
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
