"""Keeps updates that are arriving. When a stream breaks, the data frames that it brought are kept for a while, and
the sender goes on from there instead of beginning again. Over a slow link that saves minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from geotrain.net.transport import wire

KEEP_S = 900.0
Rank = tuple[str, int]  # member, part


@dataclass
class _Upload:
    reader: wire.FrameReader
    touched_s: float
    busy: bool = True  # a stream is feeding it


class ResumableUploads:
    """Holds at most one update of each rank.

    limit_bytes: bound for the updates whose streams broke, all together. keep_s: how long such an update is kept.
    """

    def __init__(self, limit_bytes: int, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes, self.keep_s, self._clock = limit_bytes, keep_s, clock
        self._uploads: dict[Rank, _Upload] = {}

    def data_frames(self, rank: Rank, header_crc: int) -> int:
        """How many data frames of the rank's update have arrived; 0 unless its header has this checksum."""
        upload = self._uploads.get(rank)
        return upload.reader.data_frames if upload and wire.crc_of(upload.reader.opening) == header_crc else 0

    def begin(self, rank: Rank, reader: wire.FrameReader, again: bool) -> wire.FrameReader:
        """Note that a stream begins to bring an update; returns the reader to feed.

        reader: has taken the update's header. again: the stream goes on with an update that was broken off. Then the
        reader is the one that has the data frames that arrived before, if its header is the same; otherwise `reader`.
        """
        upload = self._uploads.get(rank)
        if upload is None or not again or upload.reader.opening != reader.opening:
            upload = self._uploads[rank] = _Upload(reader, self._clock())
        upload.busy, upload.touched_s = True, self._clock()
        return upload.reader

    def end(self, rank: Rank, reader: wire.FrameReader, keep: bool) -> None:
        """Note that the stream that fed this reader has ended.

        keep: keep what arrived for the next stream. Otherwise it is forgotten, because the update has arrived whole
        or its sender broke the rules.
        """
        upload = self._uploads.get(rank)
        if upload is not None and upload.reader is reader:  # otherwise a newer stream has begun anew
            if keep:
                upload.busy, upload.touched_s = False, self._clock()
            else:
                del self._uploads[rank]
        self.trim()

    def trim(self) -> None:
        """Forget updates without a stream that are too old, and the oldest of them while they exceed the limit."""
        idle = sorted((upload.touched_s, rank) for rank, upload in self._uploads.items() if not upload.busy)
        held_bytes = sum(self._uploads[rank].reader.taken_bytes for _, rank in idle)
        for touched_s, rank in idle:
            if self._clock() - touched_s >= self.keep_s or held_bytes > self.limit_bytes:
                held_bytes -= self._uploads.pop(rank).reader.taken_bytes
