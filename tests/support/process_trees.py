"""Process trees for the tests of guard and supervisor, and a way to see what is left of them."""

import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from geotrain.monitor.events import ProcessDied
from geotrain.outer.events import Event

MARK = "GEOTRAIN_TEST_TREE"

# A child, a grandchild that ignores SIGTERM, and a great-grandchild in a session of its own that lost its parent.
STUBBORN = (
    "bash",
    "-c",
    """
    bash -c 'trap "" TERM; (setsid sleep 300 &) ; echo ready; while true; do sleep 1; done' &
    wait
    """,
)


def new_mark() -> dict[str, str]:
    """Environment by which `marked` finds a tree."""
    return {MARK: uuid.uuid4().hex}


def marked(mark: dict[str, str]) -> list[int]:
    """Living processes (no zombies) that carry the mark."""
    ((name, value),) = mark.items()
    wanted = f"{name}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def names(mark: dict[str, str]) -> list[str]:
    """What runs in the processes that carry the mark: a fork has its parent's name until it becomes a program."""
    found = []
    for pid in marked(mark):
        with suppress(OSError):  # it has ended since
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> bool:
    """Whether the condition holds before the deadline. Pauses are as long as a look takes, times four: looks that are
    dear, at a whole run or all processes, leave the processor to what is looked at."""
    begin = now = time.monotonic()
    while now - begin < timeout_s:
        if condition():
            return True
        time.sleep(max(0.02, 4 * (time.monotonic() - now)))
        now = time.monotonic()
    return bool(condition())


def only_deaths(deaths: list[ProcessDied]) -> Callable[[Event], None]:
    """For `Supervisor(on_event=…)`: collects the deaths that are to be mended, or were given up."""
    return lambda event: deaths.append(event) if isinstance(event, ProcessDied) else None
