"""Wall clocks that can be stepped while the processes that read them run; their monotonic clock stays."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("stepped_clock.c")


def cannot_step() -> str | None:
    """Why this machine can step no clocks; None if it can."""
    return None if shutil.which("cc") else "clock steps need a C compiler: install gcc and libc6-dev"


class Clocks:
    """One clock for each name, below a folder. A process follows one from its start on by `env`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._library = folder, folder / "stepped_clock.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", self._library, SOURCE], check=True)

    def env(self, name: str) -> dict[str, str]:
        path = self._folder / name
        if not path.exists():
            path.write_bytes(bytes(8))
        return {"LD_PRELOAD": str(self._library), "STEPPED_CLOCK": str(path)}

    def set(self, name: str, ahead_s: int) -> None:
        """Step a clock: from now on it is `ahead_s` seconds ahead of the machine's; negative: behind."""
        with (self._folder / name).open("r+b", buffering=0) as file:  # which is mapped: it must not be replaced
            file.write(ahead_s.to_bytes(8, "little", signed=True))


def on_one_clock(
    events: list[dict[str, Any]], begin_s: float, end_s: float, steps: Iterable[int]
) -> list[dict[str, Any]]:
    """A log's events with the times that they would have if its process's clock had not been stepped.

    begin_s, end_s: Unix times between which all of them were. steps: seconds that the clock may have been ahead; for
    a time between the two no step is supposed, so the run should be shorter than a step.
    """
    told = []
    for event in events:
        times_s = (event["time_s"] - step for step in (0, *steps))
        time_s = next((time_s for time_s in times_s if begin_s <= time_s <= end_s), event["time_s"])
        told.append({**event, "time_s": time_s})
    return told
