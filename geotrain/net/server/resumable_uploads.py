"""Keeps updates whose streams broke: what came is kept for a while, and the sender goes on from there instead of
beginning again. Over a slow link that saves minutes."""

from __future__ import annotations

import time
from collections.abc import Callable

from geotrain.net.transport import wire

KEEP_S = 900.0
Rank = tuple[str, int]  # member, part


class ResumableUploads:
    """Keeps at most one update of each rank, whose stream broke.

    limit_bytes: bound for all of them together. keep_s: how long an update is kept.
    """

    def __init__(self, limit_bytes: int, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes, self.keep_s, self._clock = limit_bytes, keep_s, clock
        self._kept: dict[Rank, tuple[float, wire.FrameReader]] = {}  # since when, and what came; the oldest first

    def data_frames(self, rank: Rank, header_crc: int) -> int:
        """How many data frames of the rank's update are kept; 0 unless its header has this checksum."""
        _, reader = self._kept.get(rank, (0.0, None))
        return reader.data_frames if reader and wire.crc_of(reader.opening) == header_crc else 0

    def take(self, rank: Rank, reader: wire.FrameReader) -> wire.FrameReader:
        """Keep the rank's update no more; returns the reader that has its data frames if the header is the same as
        this reader's, else this one."""
        _, kept = self._kept.pop(rank, (0.0, reader))
        return kept if kept.opening == reader.opening else reader

    def keep(self, rank: Rank, reader: wire.FrameReader) -> None:
        """Keep what has arrived for the rank's next stream."""
        self._kept.pop(rank, None)
        self._kept[rank] = self._clock(), reader
        self.trim()

    def trim(self) -> None:
        """Forget updates that are too old, and the oldest while all exceed the limit."""
        held_bytes = sum(reader.taken_bytes for _, reader in self._kept.values())
        for rank, (since_s, reader) in list(self._kept.items()):
            if self._clock() - since_s >= self.keep_s or held_bytes > self.limit_bytes:
                del self._kept[rank]
                held_bytes -= reader.taken_bytes
