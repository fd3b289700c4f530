"""Process trees for the tests of guard and supervisor, and a way to see what is left of them. Whoever imports it
imports nothing of the product."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from geotrain.launch.supervisor import Supervisor
    from geotrain.monitor.events import ProcessDied
    from geotrain.outer.events import Event

MARK = "GEOTRAIN_TEST_TREE"

# A child, a grandchild that writes what it was asked at SIGTERM and goes on, and a great-grandchild in a session of
# its own that lost its parent.
STUBBORN = (
    "bash",
    "-c",
    """
    bash -c 'trap "echo asked" TERM; (setsid sleep 300 &) ; echo ready; while true; do sleep 1; done' &
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


def commands(mark: dict[str, str]) -> list[tuple[psutil.Process, list[str]]]:
    """The living processes that carry the mark, each with its command."""
    found = []
    for pid in marked(mark):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            found.append((process := psutil.Process(pid), process.cmdline()))
    return found


def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> bool:
    """Whether the condition holds before the deadline. Pauses are as long as a look takes, times four, at most half a
    second: looks that are dear, at a whole run or all processes, leave the processor to what is looked at, and one
    that waited for a server that was starting does not miss what comes next."""
    begin = now = time.monotonic()
    while now - begin < timeout_s:
        if condition():
            return True
        time.sleep(min(0.5, max(0.02, 4 * (time.monotonic() - now))))
        now = time.monotonic()
    return bool(condition())


def began_alone(log: Path, former: set[int], mark: dict[str, str]) -> bool:
    """Whether what writes "begins" into the log began again; nothing of its former incarnation may be left then."""
    again = log.read_text().count("begins") == 2
    assert not again or not former & set(marked(mark))
    return again


def stopped_when(running: Supervisor, condition: Callable[[], bool]) -> int:
    """Stop the supervisor, as Ctrl-C does, when the condition holds. Returns its exit code."""

    def stop() -> None:
        if condition():
            signal.raise_signal(signal.SIGTERM)

    return running.wait(stop, every_s=0.05).code


def only_deaths(deaths: list[ProcessDied]) -> Callable[[Event], None]:
    """For `Supervisor(on_event=…)`: collects the deaths that are to be mended, or were given up."""
    from geotrain.monitor.events import ProcessDied

    return lambda event: deaths.append(event) if isinstance(event, ProcessDied) else None
