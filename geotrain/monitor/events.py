"""Events of a run, for people and tools: typed records of what happened, written as one JSON object a line by every
process.

Each line has `time_s` (Unix time), `source` (the process that wrote it: "global", a region, a worker or "launcher"),
`event` (its type) and the fields of that type. A run never reads its own events back to decide anything: they only
feed the status page, the metrics, TensorBoard and Weights & Biases. docs/monitoring.md lists all types, from the
descriptions here.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from io import FileIO
from math import inf
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from geotrain.common.files import out_of_room
from geotrain.outer.events import *  # noqa: F403 (what servers know to have happened: one name space of events)
from geotrain.outer.events import Event, MemberName
from geotrain.outer.metrics import *  # noqa: F403 (the event of a worker's job)
from geotrain.outer.metrics import Metric

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20  # a log file of this size is rotated
FAILED_MARK = "geotrain-device-failed: "  # in a rank's log, before a `DeviceFailed` as JSON
OLDER_FILES = 3  # so many rotated files are kept


class LivenessChanged(Event):
    """A member is otherwise than before."""

    member: MemberName
    state: Annotated[str, "away, up, paused, stalled, cut off, lost, quarantined or left"]
    silent_s: Annotated[float, "seconds without a sign of life"]


class WaitsChanged(Event):
    """A server waits for other things than before; those of the first seconds are left out."""

    waits: Annotated[list[dict[str, Any]], "each with `what`, `whom`, `text`, `since_s` (Unix time)"]


class LinkTraffic(Event):
    """Bytes on a server's wide-area links since the event before this one, or the server's start."""

    seconds: Annotated[float, "since the event before this one"]
    up_bytes: Annotated[int, "towards the global server"]
    down_bytes: Annotated[int, "from the global server"]
    peak_up_bytes_per_s: Annotated[int, "the most within one second"]
    peak_down_bytes_per_s: Annotated[int, "the most within one second"]


class UpdatesLost(Event):
    """The global server was restored from a state older than what it had acknowledged."""

    updates: Annotated[int, "how many"]


class SnapshotWritten(Event):
    """A server's state is on disk."""

    number: Annotated[int, "of the snapshot"]
    seconds: Annotated[float, "from its beginning until it was durable"]


class SnapshotUploaded(Event):
    """A copy of a snapshot, or of a worker's checkpoint, is whole at the URL `checkpoint.snapshots`."""

    number: Annotated[int, "of the snapshot"]
    size_bytes: Annotated[int, "of the copy"]
    seconds: Annotated[float, "that it took"]


class MemberSampled(Event):
    """A server has measured one member; every `monitor.sample_s` seconds."""

    member: MemberName
    silent_s: Annotated[float, "seconds since its last sign"]
    sent_bytes: Annotated[int, "to the member, as the kernel counts them, in the run so far"]
    received_bytes: Annotated[int, "from the member"]
    sent_bytes_per_s: Annotated[float, "since the last sample"]
    received_bytes_per_s: Annotated[float, "since the last sample"]
    refused: Annotated[int, "messages refused for good since the server's start"]
    metrics: Annotated[dict[str, float], "what a region's heartbeat says of its server: workers, queues, memory"]


class ServerSampled(Event):
    """A server has measured itself; every `monitor.sample_s` seconds.

    journal_flushes and journal_flush_s count since the last such event, the other counts since the server's start.
    """

    rss_bytes: Annotated[int, Metric("memory", "Resident memory of this process", unit="bytes")]
    disk_free_bytes: Annotated[int, Metric("disk_free", "Free where this server keeps its state", unit="bytes")]
    disk_total_bytes: Annotated[int, Metric("disk_size", "Size of the disk of this server's state", unit="bytes")]
    queue: Annotated[int, Metric("queue_length", "Messages waiting for the state machine")]
    calls: Annotated[int, Metric("messages", "Messages taken by the state machine", kind="total")]
    journal_bytes: Annotated[int, Metric("journal", "Size of the journal's open segment", unit="bytes")]
    journal_flushes: Annotated[int, Metric("journal_flushes", "Flushes of the journal", kind="counter")]
    journal_flush_s: Annotated[
        float, Metric("journal_flush", "Seconds spent in flushes of the journal", unit="seconds", kind="counter")
    ]
    versions: Annotated[list[int], "of every fragment"]
    wide_area_sent_bytes: Annotated[int, "on links between regions that end here, in the run so far"] = 0
    wide_area_received_bytes: Annotated[int, "on these links"] = 0
    in_flight: Annotated[int, Metric("in_flight_updates", "Updates sent up without answer yet (region server)")] = 0
    pending: Annotated[int, Metric("pending_updates", "Workers' updates not sent up yet (region server)")] = 0
    open_leases: Annotated[int, Metric("open_leases", "Leases given out and not committed (global server)")] = 0
    set_aside_samples: Annotated[int, Metric("set_aside_samples", "Samples nobody shall train (global server)")] = 0
    retries: Annotated[int, Metric("retries", "Failed attempts on the upward link (region server)", kind="total")] = 0
    connected: Annotated[bool, Metric("connected", "1 while the link upwards is there")] = True


SHARD = ("shard",)


class ShardSampled(Event):
    """A server has measured a shard that is a process of its own; every `monitor.sample_s` seconds."""

    shard: Annotated[int, "its place in the server's shards"]
    up: Annotated[bool, Metric("shard_up", "1 while the shard's process asks this server how the run stands", SHARD)]
    facts: Annotated[int, Metric("shard_facts", "Facts that the shard has to say: its updates, mostly", SHARD)]
    behind: Annotated[int, Metric("shard_facts_behind", "Of these, those that the ledger does not know", SHARD)]
    journal_bytes: Annotated[int, Metric("shard_journal", "Size of its journal's open segment", SHARD, unit="bytes")]
    rss_bytes: Annotated[int, Metric("shard_memory", "Resident memory of its process", SHARD, unit="bytes")]


class DeviceSampled(Event):
    """A rank has read its device's state; about every 30 s."""

    worker: Annotated[str, "its name"]
    rank: Annotated[int, "of the worker"]
    numbers: Annotated[dict[str, float], "what the driver knows, as JobTrained has it of all the worker's devices"]


class DeviceFailed(Event):
    """A rank's device is not fit to compute, as after uncorrectable errors of its memory, or wrong results."""

    worker: Annotated[str, "its name"]
    rank: Annotated[int, "of the worker"]
    host: Annotated[str, "its name, as it gives it itself"]
    device: Annotated[str, "its address on the PCI bus, or torch's name for it"]
    what: Annotated[str, "in words"]


class ProcessDied(Event):
    """A server or a worker has died before its time; the launcher starts it again, or gives it up."""

    group: Annotated[str, "the server or worker: processes that are started again together"]
    how: Annotated[str, "in words"]
    pause_s: Annotated[float | None, "until it is started again; none: it is given up"]
    restarts: Annotated[int, "of it, so far"]


class WorkerFormed(Event):
    """A worker is started on other hosts, or in another parallel layout, than before."""

    worker: Annotated[str, "its name"]
    hosts: Annotated[list[str], "in the order of its ranks"]
    layout: Annotated[str, "its parallel layout, in words"]
    why: Annotated[str, "the hosts that it does without, each with why; empty: none"]


class Recovery(Event):
    """A server has started."""

    replayed: Annotated[int, "messages of its journal that came after its snapshot"]


class ProcessStarted(Event):
    """The launcher has started a process."""

    process: Annotated[str, "its name, as of its log file"]
    role: Annotated[str, "worker, server, shard or helper"]


class ProcessEnded(Event):
    """A process that the launcher started has ended."""

    process: Annotated[str, "its name, as of its log file"]
    code: Annotated[int, "exit code; −n: ended by signal n"]


class Trouble(Event):
    """Something that a person should know of."""

    what: Annotated[str, "in words"]


KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


@dataclass(frozen=True)
class Record:
    """An event with its time (Unix time in seconds) and the process that wrote it."""

    time_s: float
    source: str
    event: Event

    def to_line(self) -> str:
        head = {"time_s": self.time_s, "source": self.source, "event": type(self.event).__name__}
        return json.dumps({**head, **asdict(self.event)}) + "\n"

    @staticmethod
    def from_line(line: str | bytes) -> Record | None:
        """The record of a log's line; None if it is no event that this version knows."""
        try:
            said: dict[str, Any] = json.loads(line)
            kind = KINDS[said["event"]]
            known = {f.name: said[f.name] for f in fields(kind) if f.name in said}  # a newer version may say more
            return Record(float(said["time_s"]), str(said.get("source", "")), kind(**known))
        except (ValueError, KeyError, TypeError):
            return None


class EventLog:
    """A process's log of events. It appends to `path`; a file that has grown to `max_bytes` is renamed to `<path>.1`,
    the former `<path>.1` to `<path>.2`, and so on. `older` of them are kept.

    source: the process that writes. enabled: False writes nothing and calls no subscriber.
    subscribers: called with each record, on the writer's thread; so they must be quick.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int = MAX_FILE_BYTES,
        *,
        source: str = "",
        older: int = OLDER_FILES,
        enabled: bool = True,
    ) -> None:
        self.path, self.max_bytes, self.source, self.older, self.enabled = path, max_bytes, source, older, enabled
        self.subscribers: list[Callable[[Record], None]] = []
        self.dropped = 0  # events that could not be written since the last one that was
        self._lock = threading.Lock()
        self._file: FileIO | None = None  # unbuffered: what could not be written must not come back later
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = FileIO(path, "a")
        except OSError as error:
            if not out_of_room(error):
                raise

    def write(self, event: Event) -> None:
        """Write an event and hand it to the subscribers.

        An event that cannot be written, as on a full disk, is left out, because monitoring must never stop the run.
        The next one that can be written is preceded by a `Trouble` that says how many are missing.
        """
        if not self.enabled:
            return
        record = Record(round(time.time(), 3), self.source, event)
        for subscriber in self.subscribers:
            subscriber(record)
        with self._lock:
            try:
                if self.dropped:
                    missing = Trouble(f"{self.path}: {self.dropped} events could not be written and are missing here")
                    self._append(replace(record, event=missing).to_line())
                    self.dropped = 0
                self._append(record.to_line())
            except OSError:
                self.dropped += 1

    def report(self, trouble: str) -> None:
        """Report trouble: in the process's own log, and by an event."""
        log.error("%s", trouble)
        self.write(Trouble(trouble))

    def _append(self, line: str) -> None:
        """Append a whole line, or nothing. Raises OSError."""
        if self._file is None:
            self._file = FileIO(self.path, "a")
        size = os.fstat(self._file.fileno()).st_size
        if size >= self.max_bytes:
            self._rotate()
            size = 0
        content, written = line.encode(), 0
        try:
            written = self._file.write(content) or 0
            if written < len(content):  # a disk that is almost full takes a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # Ranks of a worker append to one file, so it is cut only if nothing of another's stands behind.
            if written and os.fstat(self._file.fileno()).st_size == size + written:
                self._file.truncate(size)
            raise

    def _rotate(self) -> None:
        """Give the file its number and begin a new one. If that fails, the older file stays open, and the next event
        tries again. Raises OSError."""
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_ino == _inode(self.path):  # not renamed yet by an earlier attempt
            for number in range(self.older, 0, -1):
                newer = older_file(self.path, number - 1)
                if newer.exists():
                    newer.replace(older_file(self.path, number))
        fresh = FileIO(self.path, "a")
        self._file.close()
        self._file = fresh

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
            self.enabled = False  # a thread that still has something to say must not open the file again

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _inode(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_ino
    return None


def older_file(path: Path, number: int) -> Path:
    """The number-th newest file of a log: `path` itself is number 0."""
    return path.with_name(f"{path.name}.{number}") if number else path


class Follower:
    """Reads a log's events in order, those of its older files first, and goes on when the file is rotated.

    past_only: what is written from now on is left out. Times would not show it: clocks are set back.
    missed: whether the file that was being read was rotated away; then others may have been before they were read.
    """

    def __init__(self, path: Path, past_only: bool = False) -> None:
        self.path, self.missed = path, False
        self._file: BinaryIO | None = None  # kept open, so that no new file can get its inode
        self._offset = 0
        self._end: tuple[int, int] | None = None  # inode of the last file to be read, and where in it to stop
        if past_only:
            self._end = (0, 0)  # nothing is there
            with suppress(OSError, IndexError):
                newest = self._files()[-1][1].stat()
                self._end = (newest.st_ino, newest.st_size)

    def read(self) -> Iterator[Record]:
        """Yield what was written since the last call. A line that is not whole yet is left for the next call."""
        # A file is known by its inode, because rotation changes its name. When the open file has been read to its end
        # and a newer one exists, reading goes on in the next newer one.
        while True:
            found = self._files()
            inodes = [inode for inode, _ in found]
            mine = os.fstat(self._file.fileno()).st_ino if self._file else None
            at = inodes.index(mine) if mine in inodes else -1
            if self._file:
                self.missed |= at < 0
                yield from self._lines(self._file)  # if a newer file exists, this one gets no more lines
            if at == len(found) - 1 or (self._end and self._end[0] == (mine or 0)):
                return
            try:
                file = found[at + 1][1].open("rb")
            except OSError:
                return
            if os.fstat(file.fileno()).st_ino != inodes[at + 1]:
                file.close()  # the log was rotated since `_files` looked
                continue
            self.close()
            self._file, self._offset = file, 0

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _files(self) -> list[tuple[int, Path]]:
        """List the log's files as (inode, path), oldest first."""
        suffixes = [name.suffix[1:] for name in self.path.parent.glob(self.path.name + ".*")]
        numbers = sorted({int(suffix) for suffix in suffixes if suffix.isdecimal()}, reverse=True)
        found = []
        for path in (older_file(self.path, n) for n in (*numbers, 0)):
            with suppress(OSError):
                found.append((path.stat().st_ino, path))
        return found

    def _lines(self, file: BinaryIO) -> Iterator[Record]:
        file.seek(self._offset)
        last = self._end[1] if self._end and os.fstat(file.fileno()).st_ino == self._end[0] else inf
        for line in file:
            if not line.endswith(b"\n") or self._offset + len(line) > last:
                return
            self._offset += len(line)
            record = Record.from_line(line)
            if record is not None:
                yield record
