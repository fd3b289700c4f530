"""Bytes of each fragment, counted frame by frame where they are handed to a connection, or come from it.

Every attempt counts. A fragment's bytes are its payload and that payload's checksums; headers, messages without
fragments, and what gRPC, HTTP/2 and TLS add are in the meter's figures only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from geotrain.net import wire
from geotrain.outer.layout import Layout
from geotrain.outer.messages import Answer, FragmentDelta, FragmentWeights, UpdatePart


@dataclass
class Tally:
    """One link's bytes by fragment: deltas go up, weights come down."""

    up: Counter[int] = field(default_factory=Counter)
    down: Counter[int] = field(default_factory=Counter)

    def sending(self, message: Any, first: int = 0) -> Iterator[bytes]:
        """The message's frames, without its chunks before `first`, each counted when it is taken."""
        frames, counts = wire.frames(message, first), self._counts(message)
        owners = islice(_owners(message), first, None)
        yield next(frames)
        for frame, fragment in zip(frames, owners, strict=True):
            counts[fragment] += len(frame)
            yield frame

    def receiving(self, header: Any, first: int = 0) -> Callable[[bytes], None]:
        """What counts the frames that follow this header (see `wire.Reader.header`), from chunk `first` on."""
        owners, counts = islice(_owners(header), first, None), self._counts(header)

        def count(frame: bytes) -> None:
            counts[next(owners)] += len(frame)

        return count

    def add(self, other: Tally) -> None:
        self.up.update(other.up)
        self.down.update(other.down)

    def status(self, layout: Layout) -> dict[str, dict[str, int]]:
        """By the fragment's name."""
        return {
            fragment.name: {"up_bytes": self.up[fragment.index], "down_bytes": self.down[fragment.index]}
            for fragment in layout.fragments
        }

    def _counts(self, message: Any) -> Counter[int]:
        return self.up if isinstance(message, UpdatePart) else self.down


def _owners(message: Any) -> Iterator[int]:
    """The fragment that each frame after the header belongs to; of a payload only the length is read."""
    pieces: tuple[FragmentDelta | FragmentWeights, ...] = ()
    match message:
        case UpdatePart():
            pieces = message.deltas
        case Answer():
            pieces = message.weights
    for piece in pieces:
        for _ in range(0, len(piece.payload), wire.CHUNK_BYTES):
            yield piece.fragment
