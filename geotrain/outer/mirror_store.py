"""Where a server keeps mirrors, the vectors that it needs only now and then (`outer.mirrors`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class MirrorStore:
    """In memory; `geotrain.net.storage.disk_mirror_store` has one on the disk. What lies on a mirror_store is read
    and changed in place."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new tensor of any content on the mirror_store."""
        return torch.empty(shape, dtype=dtype)

    def put(self, vector: Tensor) -> Tensor:
        """Take over a vector, which nobody else changes; returns it as it lies on the mirror_store."""
        return vector

    def page_in(self, vector: Tensor) -> None:
        """It is about to be used. What is not from a mirror_store does not matter here and in `page_out`."""

    def page_out(self, vector: Tensor) -> None:
        """It is not needed for a while."""
