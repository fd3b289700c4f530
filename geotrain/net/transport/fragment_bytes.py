"""Counts the bytes of each fragment, frame by frame, where frames are handed to a connection or come from it.

Attempts that fail count as well. A fragment's bytes are its payload and the payload's checksums. Headers, messages
without fragments, and what gRPC, HTTP/2 and TLS add are only in the figures of `geotrain.net.transport.tcp_counters`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from geotrain.net.transport import wire
from geotrain.outer.messages import UpdatePart
from geotrain.parameters.parameter_map import ParameterMap


@dataclass
class FragmentBytes:
    """Counts one link's bytes by chunk: deltas go up, weights come down."""

    up: Counter[int] = field(default_factory=Counter)
    down: Counter[int] = field(default_factory=Counter)

    def sending(self, message: Any, first: int = 0) -> Iterator[bytes]:
        """Yield the message's frames without its data frames before `first`, and count each when it is taken."""
        frames, counts = wire.frames(message, first), self._counts(message)
        owners = islice(_owners(message), first, None)
        yield next(frames)
        for frame, chunk in zip(frames, owners, strict=True):
            counts[chunk] += len(frame)
            yield frame

    def receiving(self, header: Any, first: int = 0) -> Callable[[bytes], None]:
        """Returns a function to be called with each frame that follows the header, which counts it.

        header: the message as `wire.FrameReader.header` gives it. first: the number of the first data frame that will
        come.
        """
        owners, counts = islice(_owners(header), first, None), self._counts(header)

        def count(frame: bytes) -> None:
            counts[next(owners)] += len(frame)

        return count

    def add(self, other: FragmentBytes) -> None:
        self.up.update(other.up)
        self.down.update(other.down)

    def status(self, parameter_map: ParameterMap) -> dict[str, dict[str, int]]:
        """Sum the bytes each way, by the fragment's name."""
        return {
            fragment.name: {
                "up_bytes": sum(self.up[chunk.index] for chunk in chunks),
                "down_bytes": sum(self.down[chunk.index] for chunk in chunks),
            }
            for fragment, chunks in zip(parameter_map.fragments, parameter_map.chunks_of, strict=True)
        }

    def _counts(self, message: Any) -> Counter[int]:
        return self.up if isinstance(message, UpdatePart) else self.down


def _owners(message: Any) -> Iterator[int]:
    """Yield, for each frame after the header, the chunk that it belongs to. Only the length of payloads is read, so
    it works on a header alone, too."""
    chunks = message.deltas if isinstance(message, UpdatePart) else getattr(message, "weights", ())
    for chunk in chunks:
        for _ in range(0, len(chunk.payload), wire.DATA_FRAME_BYTES):
            yield chunk.chunk
