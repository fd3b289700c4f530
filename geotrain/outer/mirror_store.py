"""The store of a server's mirrors, the vectors that it needs only now and then (`outer.mirrors`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class MirrorStore:
    """A mirror store in memory; `geotrain.net.storage.disk_mirror_store` has one on the disk. What lies in a store is
    read and changed in place."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor of any content in the store."""
        return torch.empty(shape, dtype=dtype)

    def put(self, vector: Tensor) -> Tensor:
        """Take over a vector, which nobody else changes; returns it as it lies in the store."""
        return vector

    def page_in(self, vector: Tensor) -> None:
        """Page in before use. Ignores vectors that are not from this store."""

    def page_out(self, vector: Tensor) -> None:
        """Page out a vector that is not needed for a while. Ignores vectors that are not from this store."""
