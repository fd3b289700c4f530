"""What happened in a run, for people and tools: one JSON object a line, appended, never read back by the run itself.

Each line has `time_s` (Unix time), `event` (its type) and the fields of that type.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class Joined:
    member: str
    part: int
    incarnation: str


@dataclass(frozen=True)
class Left:
    member: str


@dataclass(frozen=True)
class UpdateApplied:
    """versions: of each fragment, after it. samples: committed (global server) or trained (region server) with it."""

    member: str
    sequence: int
    job: int
    fragments: list[int]
    versions: list[int]
    staleness: int
    samples: int
    payload_bytes: int
    loss: float | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class SentUp:
    """A region's progress has left for the global server."""

    sequence: int
    fragments: list[int]
    weight: int
    payload_bytes: int


@dataclass(frozen=True)
class Merged:
    """A region took in the global weights that came in answer to its update."""

    sequence: int
    global_versions: list[int]
    payload_bytes: int


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes on a server's wide-area links since the event before this one (or the server's start), up towards the
    global server and down from it; the peaks are the most within one second."""

    seconds: float
    up_bytes: int
    down_bytes: int
    peak_up_bytes_per_s: int
    peak_down_bytes_per_s: int


@dataclass(frozen=True)
class UpdatesLost:
    """The global server was restored from a state older than what it had acknowledged."""

    updates: int


@dataclass(frozen=True)
class SnapshotWritten:
    number: int
    seconds: float


@dataclass(frozen=True)
class JobTrained:
    """A worker trained a lease: its inner steps are done, its deltas on their way. start: its first sample.

    waited_s: of its seconds, those spent with training at rest, waiting for an answer.
    """

    worker: str
    job: int
    start: int
    loss: float
    lr: float
    grad_norm: float
    tokens: float
    tokens_per_s: float
    steps: float
    waited_s: float


@dataclass(frozen=True)
class Recovery:
    """A server has started. replayed: messages of its journal that came after its snapshot."""

    replayed: int


@dataclass(frozen=True)
class Trouble:
    """Something that a person should know of."""

    what: str


Event = (
    Joined
    | Left
    | UpdateApplied
    | SentUp
    | Merged
    | LinkTraffic
    | UpdatesLost
    | SnapshotWritten
    | Recovery
    | JobTrained
    | Trouble
)


class EventLog:
    """Appends to `path`. A file that has grown to `max_bytes` is renamed to `<path>.1`, replacing the one before."""

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path, self.max_bytes = path, max_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: Event) -> None:
        """What cannot be written (a full disk) is left out: the run goes on without its diary."""
        line = {"time_s": round(time.time(), 3), "event": type(event).__name__, **asdict(event)}
        with suppress(OSError):
            if self._file.tell() >= self.max_bytes:
                self._file.close()
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._file = self.path.open("a", encoding="utf-8", buffering=1)
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
