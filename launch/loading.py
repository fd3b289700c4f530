"""Loading without Python's garbage collector: half of what a rank's start and end take on a CPU.

    python -m geotrain.launch.loading MODULE arguments…      runs a module that itself needs no collector

While modules are imported, the collector looks through all that they define again and again; then at each full
collection, which is a pause; and once more when the process ends. What is loaded stays: it need not be looked at.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import runpy
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import inside it what a process needs as long as it lives. Whatever is there at its end is never collected."""
    leave_quickly()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_quickly() -> None:
    """Let the last collection of a process that ends find nothing to look at."""
    atexit.register(gc.freeze)


if __name__ == "__main__":
    leave_quickly()
    gc.disable()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
