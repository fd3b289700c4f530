"""Process trees for the tests of guard and supervisor, and a way to see what is left of them."""

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

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


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Whether the condition holds before the deadline."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
