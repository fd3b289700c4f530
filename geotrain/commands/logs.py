"""The log files of a run on this machine, as one stream: each line behind its process's name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from geotrain.config import ConfigError

POLL_S = 0.25
READ_BYTES = 1 << 16  # of one file, before the next one's turn


def stream(folder: Path, names: Sequence[str], lines: int, goes_on: Callable[[], bool]) -> Iterator[str]:
    """The last lines of each file, as far as they lie in its last READ_BYTES; then, for as long as `goes_on` says so,
    what is written to them. names: of processes; none: all. Raises ConfigError: there is no such log.
    """
    found = {path.stem: path for path in sorted((folder / "logs").glob("*.log"))}
    if not found:
        raise ConfigError(f"{folder}/logs: no log files here; a far region's lie in the same folder on its machine")
    for name in names:
        if name not in found:
            raise ConfigError(f"{folder}/logs: no log of {name!r}; there are: {', '.join(found)}")
    chosen = list(names) or list(found)

    def told(name: str, line: bytes) -> str:
        text = line.decode(errors="replace")
        return text if len(chosen) == 1 else f"{name}: {text}"

    with ExitStack() as opened:
        files = {name: opened.enter_context(found[name].open("rb")) for name in chosen}
        rests = dict.fromkeys(files, b"")  # a line that is not whole yet waits for its end
        for name, file in files.items():
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            *whole, rests[name] = file.read().split(b"\n")
            yield from (told(name, line) for line in (whole[-lines:] if lines else []))
        more = True
        while more:
            more, quiet = goes_on(), True  # asked before reading: what was written until the run ended is still read
            for name, file in files.items():
                while read := file.read(READ_BYTES):
                    quiet = False
                    *whole, rests[name] = (rests[name] + read).split(b"\n")
                    yield from (told(name, line) for line in whole)
            if quiet and more:
                time.sleep(POLL_S)
        yield from (told(name, rest) for name, rest in rests.items() if rest)
