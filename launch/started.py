"""What a supervisor holds on to: a started process, the signals it was sent, the end of a log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

LOG_TAIL_LINES = 30
LOG_TAIL_BYTES = 16384

What = TypeVar("What")


class Started(Generic[What]):
    """A started process. pidfd: becomes readable when it ends; −1 once it was collected."""

    def __init__(self, process: What, popen: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.popen = popen
        self.pidfd = os.pidfd_open(popen.pid)
        self.began_s = time.monotonic()
        self.asked_to_stop = False

    def say(self, text: bytes) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(text)
            self.popen.stdin.flush()

    def ask_to_stop(self) -> None:
        assert self.popen.stdin is not None
        self.asked_to_stop = True
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()

    def close(self) -> int:
        """Collect it. Gives its exit code, or −n when signal n ended it."""
        code = self.popen.wait()
        self.ask_to_stop()
        os.close(self.pidfd)
        self.pidfd = -1
        return code


class SignalPipe:
    """Ctrl-C, SIGTERM and SIGHUP as bytes in a pipe, while open; then the old handlers are put back."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def open(self) -> None:
        self.fd, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old = {number: signal.signal(number, self._on_signal) for number in self.NUMBERS}

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, bytes([number]))

    def read(self) -> int | None:
        with contextlib.suppress(BlockingIOError):
            return os.read(self.fd, 1)[0]
        return None

    def close(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write_end)


def tail(path: Path, lines: int = LOG_TAIL_LINES) -> list[str]:
    """The last lines of a text file; none when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def indented(lines: list[str]) -> str:
    return "\n".join(f"  | {line}" for line in lines)


def how_it_ended(code: int) -> str:
    """In words. code: as `Started.close` gives it."""
    return f"failed with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def shell_code(code: int) -> int:
    """As a shell would put it; 1 for what ended with 0 but should not have ended."""
    return (code or 1) if code >= 0 else 128 - code
