"""Stand-ins for CUDA on a CPU are there for all threads of a rank, while it computes."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from geotrain.inner.runtime import platform


def test_equal_parts_are_gathered_in_the_same_collective_with_and_without_the_stand_in() -> None:
    """ACCO's thread gathers Muon's matrices among tensor ranks. If it met the stand-in on one rank only, both would
    wait for each other in two collectives."""
    received = [torch.empty(3), torch.empty(3)]
    with (
        mock.patch.object(platform, "_all_gather") as of_torch,
        mock.patch.object(dist, "all_to_all_single") as all_to_all,
    ):
        platform._gather_unequal(received, torch.ones(3), group="ranks")
    of_torch.assert_called_once()
    all_to_all.assert_not_called()
