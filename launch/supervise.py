"""Starts a set of named processes, waits for them, and stops them all when one fails or the user says so.

Each process writes one log file and stops when its standard input ends (`guarded` makes any command do so): the
supervisor holds the other end, so nothing survives it, not even its death by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal

from geotrain.launch import guard

LOG_TAIL_LINES = 30
LOG_TAIL_BYTES = 16384
STOP_DEADLINE_S = guard.GRACE_S + guard.KILL_DEADLINE_S + 5.0


class LaunchError(RuntimeError):
    """Something cannot be started or has failed. Says what, where, and what to do."""


@dataclass(frozen=True)
class Process:
    """One process to start.

    command: must stop, with all it started, when its standard input ends; see `guarded`.
    env: laid over the supervisor's environment.
    hello: written to its standard input first.
    role: the run is over when all but helpers have ended. A server ends by itself once all workers have; a helper
        (an emulated link) never does.
    keeps: file descriptors that it inherits.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    hello: bytes = b""
    role: Literal["worker", "server", "helper"] = "worker"
    keeps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How it ended. code: the exit code for the shell. reason: empty when all went well."""

    code: int
    reason: str = ""


def guarded(command: Sequence[str], netns: int | None = None, grace_s: float = guard.GRACE_S) -> tuple[str, ...]:
    """The command under `guard.py`, on this machine.

    netns: file descriptor of a network namespace to run in. grace_s: between SIGTERM and SIGKILL, at most GRACE_S.
    """
    options = ("--grace", str(grace_s), *(() if netns is None else ("--netns", str(netns))))
    return (sys.executable, "-I", "-S", str(Path(guard.__file__).resolve()), *options, "--", *command)


class Supervisor:
    """Use as a context manager, in the main thread: leaving it stops whatever still runs.

    logs: folder of the log files `<name>.log`, appended to. drain_s: how long servers may take to end after the
    workers have. watch: told of each process that was started (None) or has ended (its code).
    """

    def __init__(
        self, logs: Path, drain_s: float = 120.0, watch: Callable[[Process, int | None], None] = lambda *_: None
    ) -> None:
        self.logs = logs
        self.drain_s = drain_s
        self.watch = watch
        self._running: dict[str, _Running] = {}
        self._wakeup = _SignalPipe()
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Supervisor:
        self.logs.mkdir(parents=True, exist_ok=True)
        self._wakeup.open()
        self._selector.register(self._wakeup.fd, selectors.EVENT_READ, "signal")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.stop()
        self._selector.close()
        self._wakeup.close()

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def start(self, process: Process) -> None:
        """Raises LaunchError when its program or its log file cannot be opened."""
        if process.name in self._running:
            raise ValueError(f"two processes are called {process.name!r}")
        try:
            with self.log(process.name).open("ab") as log:
                popen = subprocess.Popen(
                    process.command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **process.env},
                    start_new_session=True,
                    pass_fds=process.keeps,
                )
        except OSError as error:
            raise LaunchError(f"process {process.name!r} cannot be started: {error}") from None
        running = _Running(process, popen)
        self._running[process.name] = running
        self._selector.register(running.pidfd, selectors.EVENT_READ, running)
        running.say(process.hello)
        self.watch(process, None)

    def stop_on_end_of(self, stdin: int) -> None:
        """Also stop when this file descriptor ends: for a supervisor that somebody else started."""
        self._selector.register(stdin, selectors.EVENT_READ, "stdin")

    def wait(self, tick: Callable[[], None] = lambda: None, every_s: float = 1.0) -> Outcome:
        """Wait for all to end. The first one that fails, or a stop, decides the outcome; the others are stopped.

        tick: called every `every_s`, for a progress display.
        """
        outcome = self._wait(tick, every_s)
        self.stop()
        return outcome

    def stop(self) -> None:
        """Stop all that still run: end of input, then SIGTERM, then SIGKILL to what is left. Has a deadline.

        A signal that arrives meanwhile (Ctrl-C once more) cuts the grace short.
        """
        for running in self._alive():
            running.ask_to_stop()
        self._wait_until(time.monotonic() + STOP_DEADLINE_S, hurry=True)
        for running in self._alive():
            running.popen.send_signal(signal.SIGTERM)
        self._wait_until(time.monotonic() + guard.KILL_DEADLINE_S + 1.0)
        for running in self._alive():
            self._reap(running)

    def _alive(self) -> list[_Running]:
        return [r for r in self._running.values() if r.pidfd >= 0]

    def _wait_until(self, deadline: float, hurry: bool = False) -> None:
        while self._alive() and time.monotonic() < deadline:
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                if isinstance(key.data, _Running):
                    self._reap(key.data)
                elif key.data == "signal" and self._wakeup.read() is not None and hurry:
                    return

    def _reap(self, running: _Running) -> int:
        """Collect an ended process (or kill it), and end what is left of its process group. Gives its code."""
        self._selector.unregister(running.pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.popen.pid, signal.SIGKILL)  # before wait(): then the group's number is still ours
        code = running.close()
        self.watch(running.process, code)
        return code

    def _wait(self, tick: Callable[[], None], every_s: float) -> Outcome:
        next_tick = time.monotonic() + every_s
        drained_by: float | None = None
        while alive := [r for r in self._alive() if r.process.role != "helper"]:
            if drained_by is None and all(r.process.role == "server" for r in alive):
                drained_by = time.monotonic() + self.drain_s
            now = time.monotonic()
            if drained_by is not None and now > drained_by:
                return self._not_drained(alive)
            for key, _ in self._selector.select(max(0.0, min(next_tick, drained_by or next_tick) - now)):
                outcome = self._on_event(key)
                if outcome:
                    return outcome
            if time.monotonic() >= next_tick:
                tick()
                next_tick = time.monotonic() + every_s
        return Outcome(0)

    def _on_event(self, key: selectors.SelectorKey) -> Outcome | None:
        if isinstance(key.data, _Running):
            code = self._reap(key.data)
            return self._failed(key.data.process.name, code) if code or key.data.process.role == "helper" else None
        if key.data == "stdin":
            if os.read(key.fd, 4096):
                return None
            self._selector.unregister(key.fd)
            return Outcome(128 + signal.SIGTERM, "stopped: whoever started this has ended")
        number = self._wakeup.read()
        if number is None:
            return None
        return Outcome(128 + number, f"stopped by {signal.Signals(number).name}")

    def _failed(self, name: str, code: int) -> Outcome:
        how = f"failed with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
        log = self.log(name)
        text = f"process {name!r} {how}; the end of its log {log}:\n{_indented(tail(log))}"
        return Outcome((code or 1) if code >= 0 else 128 - code, text)

    def _not_drained(self, alive: list[_Running]) -> Outcome:
        names = ", ".join(repr(r.process.name) for r in alive)
        log = self.log(alive[0].process.name)
        text = (
            f"{names} still running {self.drain_s:g} s after all workers ended: a worker left before its work was "
            f"done; look at the workers' logs in {self.logs}. The end of {log}:\n{_indented(tail(log))}"
        )
        return Outcome(1, text)


class _Running:
    """A started process. pidfd: becomes readable when it ends; −1 once it was collected."""

    def __init__(self, process: Process, popen: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.popen = popen
        self.pidfd = os.pidfd_open(popen.pid)

    def say(self, text: bytes) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(text)
            self.popen.stdin.flush()

    def ask_to_stop(self) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()

    def close(self) -> int:
        """Collect it. Gives its exit code, or −n when signal n ended it."""
        code = self.popen.wait()
        self.ask_to_stop()
        os.close(self.pidfd)
        self.pidfd = -1
        return code


class _SignalPipe:
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


def _indented(lines: list[str]) -> str:
    return "\n".join(f"  | {line}" for line in lines)
