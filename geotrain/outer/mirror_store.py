"""The store of a server's mirrors, the vectors that it needs only now and then (`outer.mirrors`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class MirrorStore:
    """A mirror store in memory; `geotrain.net.storage.disk_mirror_store` has one on the disk. A store ignores vectors
    that are not its own."""

    def put(self, vector: Tensor) -> Tensor:
        """Take over a vector, which nobody else changes; returns it as it lies in the store, to be read only."""
        return vector

    def fetch(self, vectors: Sequence[Tensor]) -> None:
        """Begin to read vectors of which each will be paged in soon, in this order. The next call replaces those that
        were not."""

    def page_in(self, vector: Tensor) -> Tensor:
        """Return the vector as it can be changed in place, until it is paged out."""
        return vector

    def page_out(self, vector: Tensor) -> None:
        """Take back a vector that was paged in, with its changes."""

    def settle(self) -> None:
        """Wait until vectors, as they lie in the store, have all changes."""

    def release(self, vector: Tensor) -> None:
        """Give memory back that it took to read the vector as it lies in the store. Any thread may call it."""
