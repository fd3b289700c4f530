"""What happened in a run, for people and tools: typed events, one JSON object a line, the same in every process.

Each line has `time_s` (Unix time), `source` (the process that wrote it: "global", a region, a worker or "launcher"),
`event` (its type) and the fields of that type. The run itself never reads them back; the page, the metrics and
TensorBoard are fed from them. docs/monitoring.md lists all types, from the descriptions here.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, BinaryIO, get_args

MAX_FILE_BYTES = 64 << 20
OLDER_FILES = 3

Member = Annotated[str, "a worker or a region"]
Fragments = Annotated[list[int], "the fragments it is about"]


@dataclass(frozen=True)
class Joined:
    """A member's rank has joined the server that writes this."""

    member: Member
    part: Annotated[int, "its rank"]
    incarnation: Annotated[str, "names this life of the member"]


@dataclass(frozen=True)
class Left:
    """A member has left in good order."""

    member: Member


@dataclass(frozen=True)
class Lost:
    """Nothing was heard of a member for too long; it may be dead, or its link."""

    member: Member
    silent_s: Annotated[float, "seconds since its last sign"]


@dataclass(frozen=True)
class Found:
    """A lost member has been heard of again."""

    member: Member
    silent_s: Annotated[float, "seconds that it was not heard of"]


@dataclass(frozen=True)
class UpdateApplied:
    """A server has applied a member's update. At the global server, this is a merge of a region's progress."""

    member: Member
    sequence: Annotated[int, "number of the update, by member"]
    job: Annotated[int, "the worker's job that it belongs to"]
    fragments: Fragments
    versions: Annotated[list[int], "of every fragment of the model, after it"]
    staleness: Annotated[int, "versions that passed since its anchor; the most of its fragments"]
    samples: Annotated[int, "committed (global server) or trained (region server) with it"]
    payload_bytes: Annotated[int, "its coded deltas"]
    loss: Annotated[float | None, "training loss, mean over the member's workers"]
    metrics: Annotated[dict[str, float], "what else the member says of itself, as in JobTrained"]
    fragment_staleness: Annotated[list[int], "by fragment, in the order of `fragments`"] = field(default_factory=list)
    delta_norms: Annotated[list[float], "2-norm of each fragment's delta"] = field(default_factory=list)
    tokens: Annotated[int | None, "committed in the run so far (global server only)"] = None


@dataclass(frozen=True)
class SentUp:
    """A region's progress has left for the global server."""

    sequence: Annotated[int, "number of the update"]
    fragments: Fragments
    weight: Annotated[int, "workers' deltas that it stands for"]
    payload_bytes: Annotated[int, "its coded deltas"]


@dataclass(frozen=True)
class Merged:
    """A region took in the global weights that came in answer to its update."""

    sequence: Annotated[int, "number of the update"]
    global_versions: Annotated[list[int], "of every fragment, as the region now has them"]
    payload_bytes: Annotated[int, "the coded weights"]


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes on a server's wide-area links since the event before this one (or the server's start), up towards the
    global server and down from it; the peaks are the most within one second."""

    seconds: Annotated[float, "since the event before this one"]
    up_bytes: Annotated[int, "towards the global server"]
    down_bytes: Annotated[int, "from the global server"]
    peak_up_bytes_per_s: Annotated[int, "the most within one second"]
    peak_down_bytes_per_s: Annotated[int, "the most within one second"]


@dataclass(frozen=True)
class UpdatesLost:
    """The global server was restored from a state older than what it had acknowledged."""

    updates: Annotated[int, "how many"]


@dataclass(frozen=True)
class SnapshotWritten:
    """A server's state is on disk."""

    number: Annotated[int, "of the snapshot"]
    seconds: Annotated[float, "from its beginning until it was durable"]


@dataclass(frozen=True)
class SnapshotUploaded:
    """A snapshot's copy is whole at the URL `checkpoint.snapshots`."""

    number: Annotated[int, "of the snapshot"]
    size_bytes: Annotated[int, "of the copy"]
    seconds: Annotated[float, "that it took"]


@dataclass(frozen=True)
class UpdateRefused:
    """A member sent what this server will not take."""

    member: Member
    reason: Annotated[str, "why"]
    offences: Annotated[int, "of its last updates, how many were refused"]


@dataclass(frozen=True)
class Quarantined:
    """A member sent too much that was refused: it is refused itself, and its leases go to others."""

    member: Member
    reason: Annotated[str, "why, the last time"]


@dataclass(frozen=True)
class Pardoned:
    """A quarantined member may come back, in a new life."""

    member: Member


@dataclass(frozen=True)
class JobTrained:
    """A worker trained a lease: its inner steps are done, its deltas on their way.

    compute_s, communication_s and waiting_s are all the time since the last such event, but for checkpoint_s.
    """

    worker: Annotated[str, "its name"]
    job: Annotated[int, "number of the lease, by worker"]
    start: Annotated[int, "the lease's first sample"]
    loss: Annotated[float, "mean training loss over the job"]
    lr: Annotated[float, "learning rate of the last step"]
    grad_norm: Annotated[float, "of the last step, before clipping"]
    tokens: Annotated[float, "trained in this job"]
    tokens_per_s: Annotated[float, "of the whole worker, exchanges included"]
    steps: Annotated[float, "inner steps"]
    waited_s: Annotated[float, "with training at rest, for an answer"]
    compute_s: Annotated[float, "in inner steps"] = 0.0
    communication_s: Annotated[float, "exposed communication: making deltas, waiting for and adopting answers"] = 0.0
    waiting_s: Annotated[float, "for a lease, or for data"] = 0.0
    checkpoint_s: Annotated[float, "saving the optimizer"] = 0.0
    memory_bytes: Annotated[float, "the rank's highest: of its device, or else of the process"] = 0.0
    mfu: Annotated[float | None, "model FLOPs utilization while computing; needs the cluster's `devices`"] = None
    retries: Annotated[float, "attempts of this rank's calls that failed and were repeated, so far"] = 0.0


@dataclass(frozen=True)
class MemberSampled:
    """What a server sees of one member, now and then."""

    member: Member
    silent_s: Annotated[float, "since its last sign"]
    sent_bytes: Annotated[int, "to the member, as the kernel counts them, since the server's start"]
    received_bytes: Annotated[int, "from the member"]
    sent_bytes_per_s: Annotated[float, "since the last sample"]
    received_bytes_per_s: Annotated[float, "since the last sample"]
    refused: Annotated[int, "messages refused for good since the server's start"]
    metrics: Annotated[dict[str, float], "what a region's heartbeat says: workers' numbers, queues, memory"]


@dataclass(frozen=True)
class ServerSampled:
    """What a server sees of itself, now and then."""

    rss_bytes: Annotated[int, "memory of the process"]
    disk_free_bytes: Annotated[int, "where its state is kept"]
    disk_total_bytes: Annotated[int, "where its state is kept"]
    queue: Annotated[int, "messages waiting for the state machine"]
    calls: Annotated[int, "messages that it took, so far"]
    journal_bytes: Annotated[int, "of the open segment"]
    journal_flushes: Annotated[int, "since the last sample"]
    journal_flush_s: Annotated[float, "seconds they took together"]
    versions: Annotated[list[int], "of every fragment"]
    wide_area_sent_bytes: Annotated[int, "on links between regions that end here, since the start"] = 0
    wide_area_received_bytes: Annotated[int, "on these links"] = 0
    in_flight: Annotated[int, "updates without answer (region server)"] = 0
    pending: Annotated[int, "workers' updates not sent up yet (region server)"] = 0
    open_leases: Annotated[int, "given out and not committed (global server)"] = 0
    retries: Annotated[int, "attempts on the link upwards that failed, so far (region server)"] = 0
    connected: Annotated[bool, "the link upwards is there"] = True


@dataclass(frozen=True)
class Acknowledged:
    """A member was told that its update is safe."""

    member: Member
    life: Annotated[str, "of the member, as in Joined"]
    sequence: Annotated[int, "number of the update"]


@dataclass(frozen=True)
class ProcessDied:
    """A server or a worker has died before its time; the launcher starts it again, or gives it up."""

    unit: Annotated[str, "the server or worker"]
    how: Annotated[str, "in words"]
    pause_s: Annotated[float | None, "until it is started again; none: it is given up"]
    restarts: Annotated[int, "of it, so far"]


@dataclass(frozen=True)
class Recovery:
    """A server has started."""

    replayed: Annotated[int, "messages of its journal that came after its snapshot"]


@dataclass(frozen=True)
class ProcessStarted:
    """The launcher has started a process."""

    process: Annotated[str, "its name, as of its log file"]
    role: Annotated[str, "worker, server or helper"]


@dataclass(frozen=True)
class ProcessEnded:
    """A process that the launcher started has ended."""

    process: Annotated[str, "its name"]
    code: Annotated[int, "exit code; −n: ended by signal n"]


@dataclass(frozen=True)
class ValidationDone:
    """A worker has evaluated the global weights."""

    worker: Annotated[str, "who did it"]
    number: Annotated[int, "of the validation, from 1"]
    version: Annotated[int, "the newest of the fragments' global versions"]
    loss: Annotated[float, "nats a token"]
    seconds: Annotated[float, "that it took"]
    tokens: Annotated[int, "committed by then"]


@dataclass(frozen=True)
class Steered:
    """A person told the run to pause, resume, drain a region, or stop."""

    what: Annotated[str, "what it was told"]
    region: Annotated[str, "to drain; else empty"]


@dataclass(frozen=True)
class Trouble:
    """Something that a person should know of."""

    what: Annotated[str, "in words"]


Event = (
    Joined
    | Left
    | Lost
    | Found
    | UpdateApplied
    | UpdateRefused
    | Quarantined
    | Pardoned
    | SentUp
    | Merged
    | LinkTraffic
    | UpdatesLost
    | SnapshotWritten
    | SnapshotUploaded
    | JobTrained
    | ValidationDone
    | Steered
    | MemberSampled
    | ServerSampled
    | Recovery
    | Acknowledged
    | ProcessDied
    | ProcessStarted
    | ProcessEnded
    | Trouble
)
KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}


@dataclass(frozen=True)
class Record:
    """An event with when and where."""

    time_s: float
    source: str
    event: Event

    def to_line(self) -> str:
        head = {"time_s": self.time_s, "source": self.source, "event": type(self.event).__name__}
        return json.dumps({**head, **asdict(self.event)}) + "\n"

    @staticmethod
    def from_line(line: str | bytes) -> Record | None:
        """None: it is no event that this version knows."""
        try:
            said: dict[str, Any] = json.loads(line)
            kind = KINDS[said["event"]]
            known = {f.name: said[f.name] for f in fields(kind) if f.name in said}
            return Record(float(said["time_s"]), str(said.get("source", "")), kind(**known))
        except (ValueError, KeyError, TypeError):
            return None


class EventLog:
    """Appends to `path`. A file that has grown to `max_bytes` is renamed to `<path>.1`, that to `<path>.2`, and so
    on; `older` of them are kept.

    source: the process that writes. enabled: False writes nothing and tells nobody.
    subscribers: called with each record, on the writer's thread; they must be quick.
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
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: Event) -> None:
        """What cannot be written (a full disk) is left out: the run goes on without its diary."""
        if not self.enabled:
            return
        record = Record(round(time.time(), 3), self.source, event)
        for subscriber in self.subscribers:
            subscriber(record)
        with self._lock, suppress(OSError):
            if self._file.tell() >= self.max_bytes:
                self._rotate()
            self._file.write(record.to_line())

    def _rotate(self) -> None:
        self._file.close()
        for number in range(self.older, 0, -1):
            newer = older_file(self.path, number - 1)
            if newer.exists():
                newer.replace(older_file(self.path, number))
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def older_file(path: Path, number: int) -> Path:
    """The number-th newest file of a log: `path` itself is number 0."""
    return path.with_name(f"{path.name}.{number}") if number else path


class Follower:
    """Reads a log's events in order, also those of its older files, and goes on when the file is rotated.

    missed: files were rotated away, and perhaps some before they were read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.missed = path, False
        self._file: BinaryIO | None = None  # kept open: so its inode is not given to another file
        self._offset = 0

    def read(self) -> Iterator[Record]:
        """What has been written since the last time. A line that is not whole yet is left for the next time."""
        while True:
            found = self._files()
            inodes = [inode for inode, _ in found]
            mine = os.fstat(self._file.fileno()).st_ino if self._file else None
            at = inodes.index(mine) if mine in inodes else -1
            if self._file:
                self.missed |= at < 0
                yield from self._lines(self._file)  # a file that was not newest before now gets no more lines
            if at == len(found) - 1:
                return
            try:
                file = found[at + 1][1].open("rb")
            except OSError:
                return
            if os.fstat(file.fileno()).st_ino != inodes[at + 1]:
                file.close()  # rotated just now
                continue
            self.close()
            self._file, self._offset = file, 0

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _files(self) -> list[tuple[int, Path]]:
        """(inode, path), oldest first."""
        names = [self.path, *self.path.parent.glob(self.path.name + ".*")]
        numbers = sorted((_number(self.path, name) for name in names), reverse=True)
        found = []
        for path in (older_file(self.path, n) for n in numbers if n >= 0):
            with suppress(OSError):
                found.append((path.stat().st_ino, path))
        return found

    def _lines(self, file: BinaryIO) -> Iterator[Record]:
        file.seek(self._offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            record = Record.from_line(line)
            if record is not None:
                yield record


def _number(path: Path, name: Path) -> int:
    """Which file of the log this is; −1: none."""
    if name == path:
        return 0
    suffix = name.name.removeprefix(path.name + ".")
    return int(suffix) if suffix.isdecimal() else -1
