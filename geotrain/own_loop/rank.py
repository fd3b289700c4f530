"""Places this process among the ranks of its worker: torch's default process group, or alone."""

from __future__ import annotations

import resource
from collections.abc import Collection

import torch

from geotrain.checkpoint.folders import RanksOfWorker
from geotrain.kernels.devices import cuda_devices
from geotrain.own_loop.masters import Masters

TIMEOUT_S = 600.0  # how long a rank waits for the others


class TorchRank(RanksOfWorker):
    """One rank of a user's own loop; implements `geotrain.worker.loop.LoopRank`. Its process group is of gloo, so
    that agreeing does not wait for the device."""

    def __init__(self) -> None:
        super().__init__(TIMEOUT_S)
        self.is_metrics_rank = self.rank == 0
        self.masters: Masters  # whoever makes this sets it, before the first exchange

    def agree(self, flag: bool) -> bool:
        """Whether the flag is true on every rank. A collective."""
        return all(self.gather(flag))

    def from_rank_0(self, text: str) -> str:
        return str(self.gather(text)[0])

    def mean_loss(self, loss: float) -> float:
        return sum(self.gather(loss)) / self.world_size

    def settle(self) -> None:
        """Check that the model is what it was. Optimizer steps are done when they return: nothing is waited for."""
        self.masters.check()

    def refresh(self, changed: Collection[str]) -> None:
        self.masters.refresh(changed)

    @property
    def peak_memory_bytes(self) -> float:
        if cuda_devices():
            return float(torch.cuda.max_memory_allocated())
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
