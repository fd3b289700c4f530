"""The write-ahead journal: what a server was told, on disk before it acts on it.

Plain files, `<folder>/<segment>.journal`; records are numbered through all segments:

    segment  MAGIC (8) · first number (8) · durable (8) · crc32 of the two (4), then records
    record   number (8) · length of the body (8) · crc32 of the two (4), then the body:
             the message's frames as on the wire, each behind its length (4); every frame has its own checksum

`durable` is the newest record known to be on disk. It is written after each flush and reaches the disk with the next
one at the latest; after the death of the process alone it is exact. It tells a torn tail (nothing of it was
acknowledged) from damage to what was acknowledged: the former is cut off and reported, the latter stops the server.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from geotrain.files import sync
from geotrain.net import wire

MAGIC = b"GeoTrnJ1"
PAIR = struct.Struct("<QQ")
CRC = struct.Struct("<I")
LENGTH = struct.Struct("<I")
SEGMENT_HEAD_BYTES = len(MAGIC) + PAIR.size + CRC.size
RECORD_HEAD_BYTES = PAIR.size + CRC.size
SUFFIX = ".journal"


class JournalDamaged(OSError):
    """A record that was acknowledged cannot be read. Says which, where, and what can be done."""


class JournalFull(OSError):
    """There is no room for the record; the journal is as it was before."""


@dataclass(frozen=True)
class Cut:
    """A torn tail that was cut off."""

    path: Path
    at_bytes: int
    lost_bytes: int

    def __str__(self) -> str:
        return f"{self.path}: its last {self.lost_bytes} bytes were never written whole, nor acknowledged; cut off"


class Journal:
    """kinds: the messages that may stand in it. limit_bytes: of one message's payloads.

    First `replay`, to its end; then `append`, `flush`, `rotate`, `drop_before`. One thread at a time.
    """

    def __init__(self, folder: Path, kinds: tuple[type, ...], limit_bytes: int) -> None:
        self.folder, self._kinds, self._limit_bytes = folder, kinds, limit_bytes
        self._file: FileIO | None = None
        self._segment = 0
        self._first = 1  # number of the open segment's first record
        self._number = 0  # of the last record
        self._durable = 0
        self._end = 0  # of the open segment's last record
        self.cut: Cut | None = None

    @property
    def segment_bytes(self) -> int:
        """Size of the open segment."""
        return self._end

    def segments(self) -> list[int]:
        return sorted(int(p.stem) for p in self.folder.glob(f"*{SUFFIX}") if p.stem.isdecimal())

    # -- reading

    def replay(self, first_segment: int) -> Iterator[Any]:
        """Every message from that segment on, in order; then the journal is open for writing.

        Without its folder it begins anew. A torn tail is cut off and told in `cut`. Raises JournalDamaged.
        """
        if not self.folder.exists():
            self._begin_folder(first_segment)
            return
        present = self.segments()
        if not present and first_segment == 1:  # no snapshot was ever taken: nothing can have been acknowledged
            self._begin_segment(first_segment)
            return
        segments = range(first_segment, max(first_segment, *present, 0) + 1)
        for segment in segments:
            if segment not in present:
                raise JournalDamaged(f"{self._path(segment)}: is missing. {_WHAT_TO_DO}")
            yield from self._replay_segment(segment, last=segment == segments[-1])
        self._durable = self._number

    def _replay_segment(self, segment: int, last: bool) -> Iterator[Any]:
        path = self._path(segment)
        file = FileIO(path, "r+")
        size = os.fstat(file.fileno()).st_size
        try:
            first, durable = _segment_head(file)
            if self._number and first != self._number + 1:
                raise wire.WireError(f"it begins with record {first}, after record {self._number}")
        except wire.WireError as error:
            raise JournalDamaged(f"{path}: its head is damaged ({error}). {_WHAT_TO_DO}") from None
        self._segment, self._first, self._number, self._end = segment, first, first - 1, SEGMENT_HEAD_BYTES
        fault: Exception | None = None
        while self._end < size and fault is None:
            try:
                message, end = self._read_record(file, size)
            except wire.WireError as error:
                fault = error
            else:
                self._number, self._end = self._number + 1, end
                yield message
        if self._number < durable or (fault and not last):
            raise JournalDamaged(
                f"{path}: record {self._number + 1}, at byte {self._end}, is damaged "
                f"({fault or 'it is missing'}), and it had been acknowledged. {_WHAT_TO_DO}"
            )
        if fault:
            self.cut = Cut(path, self._end, size - self._end)
            file.truncate(self._end)
        if last:
            self._file = file
        else:
            file.close()

    def _read_record(self, file: FileIO, size: int) -> tuple[Any, int]:
        """(message, end). Raises wire.WireError."""
        file.seek(self._end)
        number, length = _pair(file.read(RECORD_HEAD_BYTES))
        end = self._end + RECORD_HEAD_BYTES + length
        if number != self._number + 1 or end > size:
            raise wire.WireError(f"record {number} of {length} bytes does not belong here")
        reader = wire.Reader(*self._kinds, limit_bytes=self._limit_bytes)
        while not reader.complete:
            frame_bytes = int.from_bytes(file.read(LENGTH.size), "little")
            if file.tell() + frame_bytes > end:
                raise wire.WireError("a frame reaches beyond its record")
            reader.feed(file.read(frame_bytes))
        if file.tell() != end:
            raise wire.WireError("more bytes than its message has")
        return reader.message, end

    # -- writing

    def append(self, message: Any) -> None:
        """Write a record; durable only after `flush`. Raises JournalFull, with the journal as it was."""
        assert self._file is not None
        body = self._end + RECORD_HEAD_BYTES
        position = body
        try:
            for frame in wire.frames(message):
                position = self._write(position, LENGTH.pack(len(frame)) + frame)
            head = PAIR.pack(self._number + 1, position - body)
            self._write(self._end, head + CRC.pack(zlib.crc32(head)))
        except OSError as error:
            self._file.truncate(self._end)
            raise _full(error, self._path(self._segment)) from error
        self._number += 1
        self._end = position

    def flush(self) -> None:
        """All records are on disk when this returns. An error here is final: what the disk holds is unknown then."""
        assert self._file is not None
        if self._durable < self._number:
            os.fdatasync(self._file.fileno())
            self._durable = self._number
            self._write(0, _segment_head_bytes(self._first, self._durable))

    def rotate(self) -> int:
        """Go on in a new segment; returns its number. A snapshot of the state at this moment needs no older one.

        Raises JournalFull, with the journal as it was.
        """
        self.flush()
        older = self._file
        self._begin_segment(self._segment + 1)
        if older is not None:
            older.close()
        return self._segment

    def drop_before(self, segment: int) -> None:
        """Delete older segments."""
        for number in self.segments():
            if number < segment:
                self._path(number).unlink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_folder(self, segment: int) -> None:
        """The folder appears with its first segment: one without any is damaged."""
        final, self.folder = self.folder, self.folder.with_suffix(".partial")
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self._begin_segment(segment)
            self.folder.rename(final)
            sync(final.parent)
        finally:
            self.folder = final

    def _begin_segment(self, segment: int) -> None:
        path = self._path(segment)
        partial = path.with_suffix(".partial")
        try:
            file = FileIO(partial, "w+")
            file.write(_segment_head_bytes(self._number + 1, self._number))
            os.fsync(file.fileno())
            partial.rename(path)
            sync(self.folder)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise _full(error, path) from error
        self._file, self._segment, self._first, self._end = file, segment, self._number + 1, SEGMENT_HEAD_BYTES

    def _write(self, position: int, content: bytes) -> int:
        """Returns the position behind it."""
        assert self._file is not None
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._file.fileno(), rest, position)
            rest, position = rest[written:], position + written
        return position

    def _path(self, segment: int) -> Path:
        return self.folder / f"{segment:08d}{SUFFIX}"


_WHAT_TO_DO = (
    "Bring the file back from a copy; or accept the loss of all that came after the snapshot: "
    "move the journal's folder away and resume"
)


def _segment_head_bytes(first: int, durable: int) -> bytes:
    pair = PAIR.pack(first, durable)
    return MAGIC + pair + CRC.pack(zlib.crc32(pair))


def _segment_head(file: FileIO) -> tuple[int, int]:
    """(first number, durable). Raises wire.WireError."""
    file.seek(0)
    raw = file.read(SEGMENT_HEAD_BYTES)
    if raw[: len(MAGIC)] != MAGIC:
        raise wire.WireError("this is no journal")
    return _pair(raw[len(MAGIC) :])


def _pair(raw: bytes) -> tuple[int, int]:
    """Two numbers with their checksum. Raises wire.WireError."""
    pair, crc = raw[: PAIR.size], raw[PAIR.size :]
    if len(raw) != PAIR.size + CRC.size or CRC.pack(zlib.crc32(pair)) != crc:
        raise wire.WireError("its numbers do not fit their checksum")
    first, second = PAIR.unpack(pair)
    return int(first), int(second)


def _full(error: OSError, path: Path) -> OSError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JournalFull(error.errno, f"no room for the journal {path}")
    return error
