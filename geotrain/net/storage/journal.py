"""Keeps the write-ahead journal: every message to a server is on disk before the server acts on it.

Plain files, `<folder>/<segment>.journal`; records are numbered through all segments:

    segment  MAGIC (7) · format number as text (3) · "." or "+" (1) · first number (8) · durable (8) · crc32 of all
             these (4), the same in every format; then records
    record   number (8) · length of the body (8) · crc32 of the two (4), then the body:
             the message's frames as on the wire, each behind its length (4); every frame has its own checksum

`durable` is the number of the newest record known to be on disk. It is written after each flush, so it reaches the
disk with the next flush at the latest; if only the process dies, it is exact. It distinguishes two kinds of damage. A
torn tail has only records behind `durable`, which were never acknowledged: it is cut off and reported. A damaged
record that was acknowledged stops the server, because going on would silently lose it.

When a segment is followed by another, its "." becomes "+" before anything is written to that other. So the newest
segment is known to be missing if it is; every other one is missed by its number.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import zlib
from collections.abc import Generator, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from geotrain.common.files import make_folder, out_of_room, sync
from geotrain.net.storage.snapshots import OtherFormatError
from geotrain.net.transport import wire

FORMAT = 4  # number of the format; a journal with another one is refused
MAGIC = b"GeoTrnJ"
LAST, CONTINUED = (b"%s%03d%s" % (MAGIC, FORMAT, state) for state in (b".", b"+"))  # how a segment's file begins
PAIR = struct.Struct("<QQ")
CRC = struct.Struct("<I")
# A segment may grow to so many times the model's size in fp32, but always to so many bytes, before a snapshot is due.
JOURNAL_PER_STATE, MIN_JOURNAL_BYTES = 8, 256 << 20
SEGMENT_HEAD_BYTES = len(LAST) + PAIR.size + CRC.size
RECORD_HEAD_BYTES = PAIR.size + CRC.size
SUFFIX = ".journal"


class JournalDamaged(OSError):
    """Raised when a record that was acknowledged cannot be read. Says which, where, and what can be done."""


class JournalFull(OSError):
    """Raised when there is no room for a record; the journal is as it was before."""


class Journal:
    """Reads and writes one server's journal, by one thread at a time. It must be replayed to its end before anything
    is written.

    kinds: the types of messages that may stand in it. limit_bytes: the most that a message's payloads may have.
    read_only: it is replayed only, and nothing in the folder changes.
    """

    def __init__(self, folder: Path, kinds: tuple[type, ...], limit_bytes: int, read_only: bool = False) -> None:
        self.folder, self._kinds, self._limit_bytes, self._read_only = folder, kinds, limit_bytes, read_only
        self._file: FileIO | None = None  # the open segment; unbuffered, so that a write is the kernel's at once
        self._segment = 0
        self._first = 1  # number of the open segment's first record
        self._number = 0  # of the last record
        self._durable = 0  # number of the last record that is known to be on disk
        self._durable_bytes = 0  # size of the open segment up to its end
        self.segment_bytes = 0  # size of the open segment, up to the end of its last record
        self.cut: str | None = None  # a sentence about the torn tail that was cut off, if there was one

    def segments(self) -> list[int]:
        return sorted(int(p.stem) for p in self.folder.glob(f"*{SUFFIX}") if p.stem.isdecimal())

    @property
    def unused(self) -> bool:
        """Whether no record was ever written in this folder."""
        return self._number == 0

    # -- reading

    def replay(self, first_segment: int, is_whole: bool = True) -> Iterator[Any]:
        """Yield every message from that segment on, in order; afterwards the journal is open for writing.

        is_whole: a last segment that says that another one follows it is then a sign of damage. A reader of single
        segments, which an archive holds, passes False.

        If there is no folder, an empty journal begins. A torn tail is cut off and described in `cut`.
        Raises JournalDamaged, OtherFormatError.
        """
        if not self.folder.exists():
            if not self._read_only:
                self._begin_folder(first_segment)
            return
        present = self.segments()
        # Segment 1 is wanted only where no snapshot was ever taken, and a server listens only after its first one. So
        # nothing can have been acknowledged, and an empty folder is no loss.
        if not present and first_segment == 1:
            if not self._read_only:
                self._begin_segment(first_segment)
            return
        segments = list(range(first_segment, max(first_segment, *present, 0) + 1))
        empty = self._empty(segments[-1]) if len(segments) > 1 else None
        while segments:
            segment = segments.pop(0)
            if segment not in present:
                raise JournalDamaged(f"{self._path(segment)}: is missing. {_WHAT_TO_DO}")
            # The next one may be a left-over of a rotation that failed; then this one is the last, and may be torn.
            last = not segments or (len(segments) == 1 and empty is not None)
            continued = yield from self._replay_segment(segment, last)
            if not segments and continued and is_whole:
                raise JournalDamaged(f"{self._path(segment + 1)}: is missing. {_WHAT_TO_DO}")
            if len(segments) == 1 and empty is not None and not continued and self._number >= empty:
                left_over = self._path(segments.pop())
                if not self._read_only:
                    left_over.unlink()
        self._durable, self._durable_bytes = self._number, self.segment_bytes

    def _empty(self, segment: int) -> int | None:
        """Read the number with which a segment's records would begin, if it has none but a good head; else None."""
        with suppress(OSError, wire.WireError):
            content = self._path(segment).read_bytes()[: SEGMENT_HEAD_BYTES + 1]
            if len(content) == SEGMENT_HEAD_BYTES and content.startswith(LAST):
                return _pair(content[len(LAST) :], LAST)[0]
        return None

    def _replay_segment(self, segment: int, last: bool) -> Generator[Any, None, bool]:
        """Yield the segment's messages. The generator returns whether another segment was begun after this one."""
        path = self._path(segment)
        if self._file is not None:  # of a segment that turned out not to be the last
            self._file.close()
        file = self._file = FileIO(path, "r" if self._read_only else "r+")
        size = os.fstat(file.fileno()).st_size
        try:
            begin = file.read(len(LAST))
            if not begin.startswith(MAGIC):
                raise wire.WireError("this is no journal")
            numbers = file.read(RECORD_HEAD_BYTES)
            if begin == CONTINUED and _fits(numbers, LAST):  # a head that was half written when the next one began
                begin = LAST
            first, durable = _pair(numbers, begin)
            if begin not in (LAST, CONTINUED):
                raise OtherFormatError(path, int(begin[len(MAGIC) : -1]), FORMAT)
            if self._number and first != self._number + 1:
                raise wire.WireError(f"it begins with record {first}, after record {self._number}")
        except wire.WireError as error:
            raise JournalDamaged(f"{path}: its head is damaged ({error}). {_WHAT_TO_DO}") from None
        self._segment, self._first, self._number, self.segment_bytes = segment, first, first - 1, SEGMENT_HEAD_BYTES
        fault: Exception | None = None
        while self.segment_bytes < size and fault is None:
            try:
                message, end = self._read_record(file, size)
            except wire.WireError as error:
                fault = error
            else:
                self._number, self.segment_bytes = self._number + 1, end
                yield message
        if self._number < durable or (fault and (begin == CONTINUED or not last)):
            raise JournalDamaged(
                f"{path}: record {self._number + 1}, at byte {self.segment_bytes}, is damaged "
                f"({fault or 'it is missing'}), and it had been acknowledged. {_WHAT_TO_DO}"
            )
        if fault:
            lost_bytes = size - self.segment_bytes
            self.cut = f"{path}: its last {lost_bytes} bytes were never written whole, nor acknowledged; cut off"
            if not self._read_only:
                file.truncate(self.segment_bytes)
        return begin == CONTINUED

    def _read_record(self, file: FileIO, size: int) -> tuple[Any, int]:
        """Read the record at `segment_bytes`: (message, position behind it). Raises wire.WireError."""
        file.seek(self.segment_bytes)
        number, length = _pair(file.read(RECORD_HEAD_BYTES))
        end = self.segment_bytes + RECORD_HEAD_BYTES + length
        if number != self._number + 1 or end > size:
            raise wire.WireError(f"record {number} of {length} bytes does not belong here")
        reader = wire.FrameReader(*self._kinds, limit_bytes=self._limit_bytes)
        while not reader.complete:
            frame_bytes = int.from_bytes(file.read(wire.LENGTH.size), "little")
            if file.tell() + frame_bytes > end:
                raise wire.WireError("a frame reaches beyond its record")
            reader.feed(file.read(frame_bytes))
        if file.tell() != end:
            raise wire.WireError("more bytes than its message has")
        return reader.message, end

    # -- writing

    def append(self, *messages: Any) -> None:
        """Write a record for each; durable only after `flush`. Whatever is raised, the journal is as it was.

        Raises JournalFull; WireError, ValueError if a message cannot be encoded.
        """
        assert self._file is not None
        before = self._number, self.segment_bytes
        try:
            for message in messages:
                body = position = self.segment_bytes + RECORD_HEAD_BYTES
                for content in wire.bodies(message):
                    head = wire.LENGTH.pack(wire.CRC_BYTES + len(content)) + wire.checksum(content)
                    position = self._write(self._write(position, head), content)
                # The record's head goes last: until it is there, the record counts as torn.
                self._write(self.segment_bytes, _head(b"", self._number + 1, position - body))
                self._number, self.segment_bytes = self._number + 1, position
        except Exception as error:
            self._number, self.segment_bytes = before
            self._file.truncate(self.segment_bytes)
            if isinstance(error, OSError):
                raise _full(error, self._path(self._segment)) from error
            raise

    def flush(self) -> None:
        """Put all records on disk. An error here is final: after a failed sync nobody knows what the disk holds, and
        a second one could succeed without the data being there."""
        assert self._file is not None
        if self._durable < self._number:
            try:
                os.fdatasync(self._file.fileno())
            except OSError:
                # The next incarnation would read these records from the kernel's cache and take them for safe. No
                # acknowledgement was sent for them, so they may go.
                with suppress(OSError):
                    self._file.truncate(self._durable_bytes)
                raise
            self._durable, self._durable_bytes = self._number, self.segment_bytes
            # Not synced by itself, which would double the cost: the next flush takes it to the disk.
            self._write(0, _head(LAST, self._first, self._durable))

    def rotate(self) -> int:
        """Go on in a new segment and return its number. A snapshot of the present state needs no older segment.

        Raises JournalFull; then the journal is as it was.
        """
        self.flush()
        older, first = self._file, self._first
        self._begin_segment(self._segment + 1)
        if older is not None:
            # If this fails, all is as it was but for one thing: should the new segment be deleted, nobody notices.
            with suppress(OSError):
                os.pwrite(older.fileno(), _head(CONTINUED, first, self._number), 0)
                os.fdatasync(older.fileno())
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
        """Make the folder under another name and rename it, so that it appears together with its first segment.

        Therefore a folder without any segment beside a snapshot is known to have lost some.
        """
        final, self.folder = self.folder, self.folder.with_suffix(".partial")
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            make_folder(self.folder)
            self._begin_segment(segment)
            self.folder.rename(final)
            sync(final.parent)
        finally:
            self.folder = final

    def _begin_segment(self, segment: int) -> None:
        path = self._path(segment)
        partial = path.with_suffix(".partial")
        file: FileIO | None = None
        try:
            file = FileIO(partial, "w+")
            head = _head(LAST, self._number + 1, self._number)
            if file.write(head) != len(head):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
            partial.rename(path)
            sync(self.folder)
        except OSError as error:
            if file is not None:
                file.close()
            for left in (partial, path):  # a segment that is not used must not be found by the next incarnation
                with suppress(OSError):
                    left.unlink(missing_ok=True)
            raise _full(error, path) from error
        self._file, self._segment, self._first = file, segment, self._number + 1
        self.segment_bytes = self._durable_bytes = SEGMENT_HEAD_BYTES

    def _write(self, position: int, content: wire.Payload) -> int:
        """Write all of the content; returns the position behind it."""
        assert self._file is not None
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._file.fileno(), rest, position)  # may write less than it was given
            rest, position = rest[written:], position + written
        return position

    def _path(self, segment: int) -> Path:
        return self.folder / f"{segment:08d}{SUFFIX}"


_WHAT_TO_DO = (
    "Bring the file back from a copy; or accept the loss of all that came after the snapshot: "
    "move the journal's folder away and resume"
)


def _head(begin: bytes, first: int, second: int) -> bytes:
    """Encode the head of a segment, or with an empty `begin` that of a record: two numbers, and a checksum of all."""
    head = begin + PAIR.pack(first, second)
    return head + CRC.pack(zlib.crc32(head))


def _fits(raw: bytes, begin: bytes) -> bool:
    """Return whether the numbers and the checksum that follow `begin` in a head fit."""
    return raw[PAIR.size :] == CRC.pack(zlib.crc32(begin + raw[: PAIR.size]))


def _pair(raw: bytes, begin: bytes = b"") -> tuple[int, int]:
    """Decode the two numbers that follow `begin` in a head. Raises wire.WireError."""
    if len(raw) != PAIR.size + CRC.size or not _fits(raw, begin):
        raise wire.WireError("its numbers do not fit their checksum")
    first, second = PAIR.unpack(raw[: PAIR.size])
    return int(first), int(second)


def _full(error: OSError, path: Path) -> OSError:
    if out_of_room(error):
        return JournalFull(error.errno, f"no room for the journal {path}")
    return error
