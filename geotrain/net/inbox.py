"""Updates that are on their way in: what came before a stream broke is kept for a while, so that it goes on there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from geotrain.net import wire

KEEP_S = 900.0
Rank = tuple[str, int]  # member, part


@dataclass
class _Half:
    header: bytes  # the frame
    reader: wire.Reader
    touched_s: float
    busy: bool = field(default=True)  # a stream is feeding it


class Inbox:
    """One update of each rank at most. limit_bytes: of those that no stream is feeding, together."""

    def __init__(self, limit_bytes: int, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes, self.keep_s, self._clock = limit_bytes, keep_s, clock
        self._halves: dict[Rank, _Half] = {}

    def chunks(self, rank: Rank, header_crc: int) -> int:
        """How many chunks are here of the update whose header has this checksum."""
        half = self._halves.get(rank)
        return half.reader.chunks if half is not None and wire.crc_of(half.header) == header_crc else 0

    def begin(self, rank: Rank, header: bytes, reader: wire.Reader, again: bool) -> wire.Reader:
        """A stream begins to feed the update of this header (which `reader` has taken), or goes on feeding it
        (`again`): then with the reader that has taken the chunks that are here."""
        half = self._halves.get(rank)
        if half is None or not again or half.header != header:
            half = self._halves[rank] = _Half(header, reader, self._clock())
        half.busy, half.touched_s = True, self._clock()
        return half.reader

    def broke(self, rank: Rank, reader: wire.Reader) -> None:
        """The stream that fed this reader has ended early."""
        half = self._halves.get(rank)
        if half is not None and half.reader is reader:
            half.busy, half.touched_s = False, self._clock()
        self.trim()

    def drop(self, rank: Rank, reader: wire.Reader) -> None:
        """It is whole, or of no use."""
        half = self._halves.get(rank)
        if half is not None and half.reader is reader:
            del self._halves[rank]

    def trim(self) -> None:
        """Forget what is too old, and the oldest of what is too much."""
        idle = sorted((half.touched_s, rank) for rank, half in self._halves.items() if not half.busy)
        held_bytes = sum(self._halves[rank].reader.taken_bytes for _, rank in idle)
        for touched_s, rank in idle:
            if self._clock() - touched_s >= self.keep_s or held_bytes > self.limit_bytes:
                held_bytes -= self._halves.pop(rank).reader.taken_bytes
