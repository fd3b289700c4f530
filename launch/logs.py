"""The log files of a run on this machine, as one stream: each line behind its process's name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from geotrain.config import ConfigError

POLL_S = 0.25
READ_BYTES = 1 << 16  # of one file, before the next one's turn


def stream(folder: Path, names: Sequence[str], lines: int, goes_on: Callable[[], bool]) -> Iterator[str]:
    """The last lines of each file, as far as they lie in its last READ_BYTES; then, for as long as `goes_on` says so,
    what is written to them. Raises ConfigError.
    """
    chosen = choose(folder, names)
    with ExitStack() as opened:
        files = {name: opened.enter_context(path.open("rb")) for name, path in chosen.items()}
        rests = dict.fromkeys(files, b"")
        for name, file in files.items():
            *whole, rests[name] = _end(file, lines)
            yield from (_told(name, line, len(files)) for line in whole)
        more = True
        while more:
            more, quiet = goes_on(), True
            for name, file in files.items():
                while read := file.read(READ_BYTES):
                    quiet = False
                    *whole, rests[name] = (rests[name] + read).split(b"\n")
                    yield from (_told(name, line, len(files)) for line in whole)
            if quiet and more:
                time.sleep(POLL_S)
        yield from (_told(name, rest, len(files)) for name, rest in rests.items() if rest)


def choose(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Name → log file. Raises ConfigError: there is no such log."""
    found = {path.stem: path for path in sorted((folder / "logs").glob("*.log"))}
    if not found:
        raise ConfigError(f"{folder}/logs: no log files here; a far region's lie in the same folder on its machine")
    for name in names:
        if name not in found:
            raise ConfigError(f"{folder}/logs: no log of {name!r}; there are: {', '.join(found)}")
    return {name: found[name] for name in names} if names else found


def _end(file: BinaryIO, lines: int) -> list[bytes]:
    """The last whole lines, and what follows them (often nothing)."""
    size = file.seek(0, 2)
    file.seek(max(0, size - READ_BYTES))
    *whole, rest = file.read().split(b"\n")
    return [*(whole[-lines:] if lines else []), rest]


def _told(name: str, line: bytes, files: int) -> str:
    text = line.decode(errors="replace")
    return text if files == 1 else f"{name}: {text}"
