"""Starts a set of named processes, waits for them, starts again what dies, and stops them all when the run is over,
when it has failed, or when the user says so.

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
from types import TracebackType
from typing import Literal

from geotrain.config import RestartConfig
from geotrain.launch import guard
from geotrain.launch.restart import Backoff
from geotrain.launch.started import SignalPipe, Started, how_it_ended, indented, shell_code, tail

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
    again: makes what is started in its place when it has died; None: its death fails the run.
    unit: processes of one unit (a worker's, one on each host) live and die together; "": it is one by itself.
    needs: a unit (the server that a worker speaks to): once that has ended well, this one is not started again.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    hello: bytes = b""
    role: Literal["worker", "server", "helper"] = "worker"
    keeps: tuple[int, ...] = ()
    again: Callable[[], Process] | None = None
    unit: str = ""
    needs: str = ""


@dataclass(frozen=True)
class Death:
    """A unit has died. how: in words. pause_s: until it is started again; None: it is given up. restarts: so far."""

    unit: str
    how: str
    pause_s: float | None
    restarts: int


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
    workers have. restart: how often what has an `again` is started again. Then, a worker that is given up fails the
    run only when no other is left, or when `needs_all`; a server that is given up always does.
    tell: told of each death that does not end the run. watch: told of each process that was started (None) or has
    ended (its code).
    """

    def __init__(
        self,
        logs: Path,
        drain_s: float = 120.0,
        restart: RestartConfig | None = None,
        needs_all: bool = False,
        tell: Callable[[Death], None] = lambda death: None,
        watch: Callable[[Process, int | None], None] = lambda *_: None,
    ) -> None:
        self.logs = logs
        self.drain_s = drain_s
        self.restart, self.needs_all, self.tell = restart or RestartConfig(), needs_all, tell
        self.watch = watch
        self._units: dict[str, _Unit] = {}
        self._wakeup = SignalPipe()
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

    @property
    def restarts(self) -> int:
        """How often anything was started again."""
        return sum(unit.backoff.restarts for unit in self._units.values())

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def start(self, process: Process) -> None:
        """Raises LaunchError when its program or its log file cannot be opened."""
        unit = self._units.setdefault(process.unit or process.name, _Unit(process.role, Backoff(self.restart)))
        if process.name in unit.running:
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
        started = Started(process, popen)
        unit.processes[process.name] = process
        unit.running[process.name] = started
        self._selector.register(started.pidfd, selectors.EVENT_READ, started)
        started.say(process.hello)
        self.watch(process, None)

    def stop_on_end_of(self, stdin: int) -> None:
        """Also stop when this file descriptor ends: for a supervisor that somebody else started."""
        self._selector.register(stdin, selectors.EVENT_READ, "stdin")

    def wait(self, tick: Callable[[], None] = lambda: None, every_s: float = 1.0) -> Outcome:
        """Wait for all to end. A death that is not mended, or a stop, decides the outcome; the others are stopped.

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

    # -- waiting

    def _alive(self) -> list[Started[Process]]:
        return [started for unit in self._units.values() for started in unit.running.values()]

    def _of(self, role: str) -> list[_Unit]:
        return [unit for unit in self._units.values() if unit.role == role]

    def _wait_until(self, deadline: float, hurry: bool = False) -> None:
        while self._alive() and time.monotonic() < deadline:
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                if isinstance(key.data, Started):
                    self._reap(key.data)
                elif key.data == "signal" and self._wakeup.read() is not None and hurry:
                    return

    def _reap(self, started: Started[Process]) -> int:
        """Collect an ended process (or kill it), and end what is left of its process group. Gives its code."""
        self._selector.unregister(started.pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.popen.pid, signal.SIGKILL)  # before wait(): then the group's number is still ours
        del self._unit_of(started.process).running[started.process.name]
        code = started.close()
        self.watch(started.process, code)
        return code

    def _unit_of(self, process: Process) -> _Unit:
        return self._units[process.unit or process.name]

    def _wait(self, tick: Callable[[], None], every_s: float) -> Outcome:
        next_tick = time.monotonic() + every_s
        drained_by: float | None = None
        while any(unit.open for unit in self._units.values() if unit.role != "helper"):
            if drained_by is None and self._of("worker") and not any(unit.open for unit in self._of("worker")):
                drained_by = time.monotonic() + self.drain_s
            now = time.monotonic()
            if drained_by is not None and now > drained_by:
                return self._not_drained()
            outcome = self._start_again(now)
            if outcome:
                return outcome
            later = [unit.again_s for unit in self._units.values() if unit.again_s is not None and not unit.running]
            wakes = [next_tick, *([drained_by] if drained_by else []), *later]
            for key, _ in self._selector.select(max(0.0, min(wakes) - now)):
                outcome = self._on_event(key)
                if outcome:
                    return outcome
            if time.monotonic() >= next_tick:
                tick()
                next_tick = time.monotonic() + every_s
        given_up = [unit.given_up for unit in self._units.values() if unit.given_up]
        return Outcome(0, "\n".join(["the others have finished, but", *given_up]) if given_up else "")

    def _start_again(self, now: float) -> Outcome | None:
        """Start what has paused for long enough. What cannot be started has died once more."""
        for unit in self._units.values():
            if unit.again_s is None or unit.running or (unit.again_s > now and not self._needless(unit)):
                continue
            unit.again_s = None
            if self._needless(unit):
                continue
            for process in list(unit.processes.values()):
                assert process.again is not None
                try:
                    self.start(process.again())
                except (LaunchError, OSError) as error:  # no memory, a full disk
                    outcome = self._died(process, 1, 0.0, f"process {process.name!r} cannot be started: {error}")
                    if outcome:
                        return outcome
                    break
        return None

    def _needless(self, unit: _Unit) -> bool:
        """Whether the server that it needs has ended well."""
        servers = [self._units[p.needs] for p in unit.processes.values() if p.needs in self._units]
        return bool(servers) and not any(server.open for server in servers)

    # -- events

    def _on_event(self, key: selectors.SelectorKey) -> Outcome | None:
        if isinstance(key.data, Started):
            return self._on_end(key.data)
        if key.data == "stdin":
            if os.read(key.fd, 4096):
                return None
            self._selector.unregister(key.fd)
            return Outcome(128 + signal.SIGTERM, "stopped: whoever started this has ended")
        number = self._wakeup.read()
        if number is None:
            return None
        return Outcome(128 + number, f"stopped by {signal.Signals(number).name}")

    def _on_end(self, started: Started[Process]) -> Outcome | None:
        code, unit = self._reap(started), self._unit_of(started.process)
        if unit.again_s is not None or unit.given_up or (code == 0 and unit.role != "helper"):
            return None  # stopped for the sake of another of its unit, or ended well
        lived_s = time.monotonic() - started.began_s
        return self._died(started.process, code, lived_s, self._failed(started.process.name, code))

    def _died(self, process: Process, code: int, lived_s: float, text: str) -> Outcome | None:
        """Start its unit again after a pause, or give it up. The outcome, when that ends the run."""
        if process.again is None:
            return Outcome(shell_code(code), text)
        unit, now = self._unit_of(process), time.monotonic()
        pause_s = unit.backoff.pause_s(code, now, lived_s)
        if pause_s is None:
            unit.given_up = text
            others = [other for other in self._of("worker") if not other.given_up]
            if unit.role != "worker" or self.needs_all or not others:
                return Outcome(shell_code(code), text)
        else:
            unit.again_s = now + pause_s
        for other in unit.running.values():
            other.ask_to_stop()
        self.tell(Death(process.unit or process.name, how_it_ended(code), pause_s, unit.backoff.restarts))
        return None

    def _failed(self, name: str, code: int) -> str:
        log = self.log(name)
        return f"process {name!r} {how_it_ended(code)}; the end of its log {log}:\n{indented(tail(log))}"

    def _not_drained(self) -> Outcome:
        alive = [started.process.name for started in self._alive() if started.process.role == "server"]
        names = ", ".join(map(repr, alive)) or "a server"
        log = self.log(alive[0]) if alive else self.logs
        text = (
            f"{names} still running {self.drain_s:g} s after all workers ended: a worker left before its work was "
            f"done; look at the workers' logs in {self.logs}. The end of {log}:\n{indented(tail(log))}"
        )
        return Outcome(1, text)


@dataclass
class _Unit:
    """again_s: when it is started again, once nothing of it runs. given_up: why; "" as long as it is not."""

    role: str
    backoff: Backoff
    processes: dict[str, Process] = field(default_factory=dict)
    running: dict[str, Started[Process]] = field(default_factory=dict)
    again_s: float | None = None
    given_up: str = ""

    @property
    def open(self) -> bool:
        """Something of it runs, or will run again."""
        return bool(self.running) or self.again_s is not None
