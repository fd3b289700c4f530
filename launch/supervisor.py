"""Starts a set of named processes, waits for them and restarts those that die. It stops them all when the run is
over, when it has failed, or when the user says so.

Each process writes one log file, and stops when its standard input ends; `guarded` makes any command do so. The
supervisor holds the other end of that pipe, and the kernel closes it however the supervisor ends. So no process
outlives the supervisor, even if that is killed by SIGKILL. What a *front* speaks for does: see `ProcessSpec.front`.
"""

from __future__ import annotations

import contextlib
import math
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

from geotrain.common.files import out_of_room
from geotrain.config import RestartConfig
from geotrain.launch import guard
from geotrain.launch.backoff import Backoff
from geotrain.monitor.events import ProcessDied, ProcessEnded, ProcessStarted, Trouble
from geotrain.outer.events import Event

STOP_DEADLINE_S = guard.GRACE_S + guard.KILL_DEADLINE_S + 5.0
LEAF_DRAIN_S = 30.0  # for a worker or shard to end after its server: it has saved all before
LOG_TAIL_LINES = 30  # so much of a failed process's log is shown
LOG_TAIL_BYTES = 16384
FULL_RETRY_S = 5.0  # between two attempts to start a process while the disk is full
STOP_ORDER = b"stop\n"  # what a front is told before its standard input ends, where the end alone does not mean it
EXIT_SSH = 255  # of ssh itself, when it made no connection or lost it


class LaunchError(RuntimeError):
    """Something cannot be started or has failed. Says what, where, and what to do."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start.

    command: must stop, with all processes it started, when its standard input ends; see `guarded`.
    env: overrides the supervisor's environment.
    first_input: written to its standard input, which then stays open.
    role: the run is over when all processes but helpers have ended. A server ends by itself once all workers have, a
        shard when its server lets it; a helper (which carries emulated links) never ends by itself.
    inherited_fds: file descriptors that it inherits.
    respawn: gives the process that replaces it after its death; None: its death fails the run.
    front: it only speaks, over a connection, for processes of another machine that live on without it. It stops them
        on STOP_ORDER, and when it loses the connection, nothing has died: it is started again without bound.
    unit: the processes of one unit (such as a worker's, one on each host) live and die together; "": it is a unit by
        itself.
    depends_on: the unit of the server that this process talks to. Once that has ended well, nothing is left to do:
        the process is not restarted, and stopped if it goes on.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    first_input: bytes = b""
    role: Literal["worker", "server", "shard", "helper"] = "worker"
    inherited_fds: tuple[int, ...] = ()
    respawn: Callable[[], ProcessSpec] | None = None
    front: bool = False
    unit: str = ""
    depends_on: str = ""

    @property
    def unit_name(self) -> str:
        return self.unit or self.name


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended. code: the exit code for the shell. reason: empty when all went well."""

    code: int
    reason: str = ""


class RunningProcess:
    """A started process. pidfd: becomes readable when the process ends."""

    def __init__(self, spec: ProcessSpec, log: Path) -> None:
        self.spec = spec
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                spec.command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.env},
                start_new_session=True,
                pass_fds=spec.inherited_fds,
            )
        self.pidfd = os.pidfd_open(self.popen.pid)
        self.started_s = time.monotonic()
        assert self.popen.stdin is not None
        self._stdin = self.popen.stdin
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(spec.first_input)
            self._stdin.flush()

    def ask_to_stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            if self.spec.front and not self._stdin.closed:
                self._stdin.write(STOP_ORDER)
            self._stdin.close()

    def reap(self) -> int:
        """Collect the ended process, or kill it. Gives its exit code, or −n when signal n ended it."""
        # Whatever is left of its process group is killed before wait(), which frees the process's number: afterwards
        # it could belong to another group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        code = self.popen.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        os.close(self.pidfd)
        return code


@dataclass
class RestartGroup:
    """Processes that live and die together.

    specs, running: by the process's name. restart_at_s: the earliest time at which the unit is started again, when
    none of its processes runs any more; None if that is not planned. given_up: why it is not restarted any more, or
    "". no_room: it could not be started, because the disk was full. cut_off: a front that has lost its connection.
    end_by_s: when it is stopped if it still runs, since its server has ended; inf: it has been told to stop.
    """

    role: str
    backoff: Backoff
    specs: dict[str, ProcessSpec] = field(default_factory=dict)
    running: dict[str, RunningProcess] = field(default_factory=dict)
    restart_at_s: float | None = None
    given_up: str = ""
    no_room: bool = False
    cut_off: bool = False
    end_by_s: float | None = None

    @property
    def active(self) -> bool:
        """Whether any of its processes runs or will run again."""
        return bool(self.running) or self.restart_at_s is not None


class Supervisor:
    """Supervises the processes of one machine. It is a context manager for the main thread, which may handle signals;
    leaving it stops whatever still runs.

    logs: folder of the log files `<name>.log`, which are appended to. drain_s: how long servers may take to end after
    the workers have, and the others after their server has. restart: when and how often processes with a `respawn`
    are restarted; beyond that they are given up. A worker that is given up fails the run only if no other is left or
    if `needs_all`; a server always does.
    on_event: called for each process that was started or has ended, and for each death that does not end the run.
    """

    def __init__(
        self,
        logs: Path,
        drain_s: float = 120.0,
        restart: RestartConfig | None = None,
        needs_all: bool = False,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.logs = logs
        self.drain_s, self.restart, self.needs_all = drain_s, restart or RestartConfig(), needs_all
        self._on_event = on_event
        self._units: dict[str, RestartGroup] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Supervisor:
        self.logs.mkdir(parents=True, exist_ok=True)
        # A signal only writes a byte to a pipe. That wakes the selector, and the signal is handled between other
        # events instead of in the middle of one.
        self._signals, self._signals_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_handlers = {number: signal.signal(number, self._on_signal) for number in guard.STOP_SIGNALS}
        self._selector.register(self._signals, selectors.EVENT_READ, "signal")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.stop()
        self._selector.close()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        os.close(self._signals)
        os.close(self._signals_in)

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def start(self, spec: ProcessSpec) -> None:
        """Start a process. Raises LaunchError if its program or its log file cannot be opened."""
        unit = self._units.setdefault(spec.unit_name, RestartGroup(spec.role, Backoff(self.restart)))
        if spec.name in unit.running:
            raise ValueError(f"two processes are called {spec.name!r}")
        try:
            process = RunningProcess(spec, self.log(spec.name))
        except OSError as error:
            raise LaunchError(f"process {spec.name!r} cannot be started: {error}") from error
        unit.specs[spec.name], unit.running[spec.name] = spec, process
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        self.on_event(ProcessStarted(spec.name, spec.role))

    def on_event(self, event: Event) -> None:
        """Pass an event on. What is told may go to a full disk, and that must not end the run."""
        with contextlib.suppress(OSError):
            self._on_event(event)

    def watch(self, fd: int, on_readable: Callable[[], RunOutcome | None]) -> None:
        """Call this whenever something can be read there, until `unwatch`. If it returns an outcome, that ends the
        run."""
        self._selector.register(fd, selectors.EVENT_READ, on_readable)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def wait(self, tick: Callable[[], None] = lambda: None, every_s: float = 1.0) -> RunOutcome:
        """Wait until all processes have ended, restarting those that die; returns how the run ended.

        If a process cannot be restarted or a stop is asked for, that is the outcome, and all others are stopped.
        tick: called every `every_s` seconds, for a progress display.
        """
        outcome = self._supervise(tick, every_s)
        self.stop()
        return outcome

    def stop(self) -> None:
        """Stop all processes that still run: their input ends, then SIGTERM, then SIGKILL for what is left.

        Each stage has a deadline. A signal meanwhile, such as another Ctrl-C, ends the first stage at once.
        """
        for process in self._alive():
            process.ask_to_stop()
        self._wait_until(time.monotonic() + STOP_DEADLINE_S, hurry=True)
        for process in self._alive():
            process.popen.send_signal(signal.SIGTERM)
        self._wait_until(time.monotonic() + guard.KILL_DEADLINE_S + 1.0)
        for process in self._alive():
            self._reap(process)
        for name, unit in self._units.items():
            if unit.cut_off:
                told = "was not reached when all was stopped: what runs there goes on, and --resume finds it"
                self.on_event(Trouble(f"{name}: {told}"))
                unit.cut_off = False

    # -- waiting

    def _alive(self) -> list[RunningProcess]:
        return [process for unit in self._units.values() for process in unit.running.values()]

    def _have_ended(self, role: str) -> bool:
        """Whether there were units of this role, and all of them have ended."""
        return bool(self._of_role(role)) and not any(unit.active for unit in self._of_role(role))

    def _of_role(self, role: str) -> list[RestartGroup]:
        return [unit for unit in self._units.values() if unit.role == role]

    def _wait_until(self, deadline: float, hurry: bool = False) -> None:
        while self._alive() and time.monotonic() < deadline:
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                if isinstance(key.data, RunningProcess):
                    self._reap(key.data)
                elif callable(key.data):
                    key.data()  # what it asks for is under way
                elif self._read_signal() is not None and hurry:
                    return

    def _reap(self, process: RunningProcess) -> int:
        self._selector.unregister(process.pidfd)
        code = process.reap()
        unit = self._units[process.spec.unit_name]
        del unit.running[process.spec.name]
        unit.cut_off = process.spec.front and (code == EXIT_SSH or code < 0)
        self.on_event(ProcessEnded(process.spec.name, code))
        return code

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._signals_in, bytes([number]))

    def _read_signal(self) -> int | None:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._signals, 1)[0]
        return None

    def _supervise(self, tick: Callable[[], None], every_s: float) -> RunOutcome:
        next_tick = time.monotonic() + every_s
        drain_deadline: float | None = None
        units = self._units.values()
        while any(unit.active for unit in units if unit.role != "helper"):
            now = time.monotonic()
            # Once all workers have ended, servers only have to send and write what they hold. A server that goes on
            # for longer waits for a worker that is not there any more; a worker, for a server.
            ended = next((role for role in ("worker", "server") if self._have_ended(role)), "")
            if drain_deadline is None and ended:
                drain_deadline = now + self.drain_s
            self._stop_what_outlives_its_server(now)
            alive = [name for name, unit in self._units.items() if unit.active and unit.role != "helper"]
            alive = [name for name in alive if not self._is_unneeded(self._units[name])]
            if alive and drain_deadline is not None and now > drain_deadline:
                log = self.log(next(iter(self._units[alive[0]].specs)))
                left = "a worker left before its work was done" if ended == "worker" else "they missed the run's end"
                return RunOutcome(
                    1,
                    f"{', '.join(map(repr, alive))} still running {self.drain_s:g} s after all {ended}s ended: "
                    f"{left}; look at the workers' logs in {self.logs}. The end of {log}:\n{_quoted(tail(log))}",
                )
            if outcome := self._restart_what_is_due(now):
                return outcome
            wakes = [unit.restart_at_s for unit in units if unit.restart_at_s is not None and not unit.running]
            wakes += [unit.end_by_s for unit in units if unit.end_by_s is not None]
            wakes += [next_tick, *([drain_deadline] if drain_deadline else [])]
            for key, _ in self._selector.select(max(0.0, min(wakes) - now)):
                if outcome := self._handle(key):
                    return outcome
            if time.monotonic() >= next_tick:
                with contextlib.suppress(OSError):  # as `on_event`
                    tick()
                next_tick = time.monotonic() + every_s
        given_up = [unit.given_up for unit in units if unit.given_up]
        return RunOutcome(0, "\n".join(["the others have finished, but", *given_up]) if given_up else "")

    def _is_unneeded(self, unit: RestartGroup) -> bool:
        """Whether the server that the unit talks to has ended well, so that nothing is left for it to do."""
        servers = [self._units[s.depends_on] for s in unit.specs.values() if s.depends_on in self._units]
        return bool(servers) and not any(server.active for server in servers)

    def _stop_what_outlives_its_server(self, now: float) -> None:
        """Tell units to stop that have not ended in time after their server did: they came, or came back, when all
        data was trained, and would wait for a server that does not return."""
        for name, unit in self._units.items():
            if not unit.running or not self._is_unneeded(unit):
                continue
            drain_s = self.drain_s if unit.role == "server" else min(self.drain_s, LEAF_DRAIN_S)
            unit.end_by_s = now + drain_s if unit.end_by_s is None else unit.end_by_s
            if now > unit.end_by_s:
                unit.end_by_s = math.inf
                self.on_event(Trouble(f"{name} goes on though its server has ended, with all data trained: stopped"))
                for process in unit.running.values():
                    process.ask_to_stop()

    def _restart_what_is_due(self, now: float) -> RunOutcome | None:
        """Start the units again whose pause is over. A process that cannot be started counts as dead once more.

        Returns the outcome if that ends the run.
        """
        for unit in self._units.values():
            if unit.restart_at_s is None or unit.running:
                continue
            unneeded = self._is_unneeded(unit)
            if unit.restart_at_s > now and not unneeded:
                continue
            unit.restart_at_s = None
            for spec in [] if unneeded else list(unit.specs.values()):
                assert spec.respawn is not None
                try:
                    self.start(spec.respawn())
                except (LaunchError, OSError) as error:  # as without memory or with a full disk
                    if out_of_room(error):
                        # That is no death, and costs no restart. Those of its unit that were started wait with it.
                        for process in unit.running.values():
                            process.ask_to_stop()
                        unit.restart_at_s = now + FULL_RETRY_S
                        if not unit.no_room:
                            self.on_event(Trouble(f"{error}; it is started when there is room"))
                        unit.no_room = True
                        break
                    outcome = self._died(spec, 1, 0.0, f"process {spec.name!r} cannot be started: {error}")
                    if outcome:
                        return outcome
                    break
            else:
                unit.no_room = False
        return None

    # -- events

    def _handle(self, key: selectors.SelectorKey) -> RunOutcome | None:
        """Handle one event of the selector. Returns the outcome if it ends the run."""
        if callable(key.data):
            on_readable: Callable[[], RunOutcome | None] = key.data
            return on_readable()
        if key.data == "signal":
            number = self._read_signal()
            return None if number is None else RunOutcome(128 + number, f"stopped by {signal.Signals(number).name}")
        process: RunningProcess = key.data
        name, unit, code = process.spec.name, self._units[process.spec.unit_name], self._reap(process)
        if unit.restart_at_s is not None or unit.given_up or (code == 0 and unit.role != "helper"):
            return None  # it ended well, or was stopped because another process of its unit had died
        if self._is_unneeded(unit):
            if unit.end_by_s != math.inf:
                self.on_event(Trouble(f"{name} {how_it_ended(code)}; its server had ended, with all data trained"))
            return None
        if unit.cut_off:
            self._try_again(name, unit, time.monotonic() - process.started_s)
            return None
        log = self.log(name)
        reason = f"process {name!r} {how_it_ended(code)}; the end of its log {log}:\n{_quoted(tail(log))}"
        return self._died(process.spec, code, time.monotonic() - process.started_s, reason)

    def _try_again(self, name: str, unit: RestartGroup, lived_s: float) -> None:
        """A front has lost its connection, or has made none: it tries again for as long as the run lasts."""
        pause_s = unit.backoff.next_pause_s(lived_s)
        unit.restart_at_s = time.monotonic() + pause_s
        why = (tail(self.log(name)) or ["no word"])[-1]
        told = f"{name}: no connection ({why}); what runs there goes on; tried again in {pause_s:.3g} s"
        self.on_event(Trouble(told))

    def _died(self, spec: ProcessSpec, code: int, lived_s: float, reason: str) -> RunOutcome | None:
        """Plan a restart of the process's unit, or give it up. Returns the outcome if that ends the run."""
        # The code is as a shell gives it; 1 for a helper that ended with 0, because it should not have ended.
        failure = RunOutcome((code or 1) if code >= 0 else 128 - code, reason)
        if spec.respawn is None:
            return failure
        unit, now = self._units[spec.unit_name], time.monotonic()
        pause_s = unit.backoff.pause_s(code, now, lived_s)
        if pause_s is None:
            unit.given_up = reason
            others = [other for other in self._of_role("worker") if not other.given_up]
            if unit.role != "worker" or self.needs_all or not others:
                return failure
        else:
            unit.restart_at_s = now + pause_s
        for process in unit.running.values():
            process.ask_to_stop()
        self.on_event(ProcessDied(spec.unit_name, how_it_ended(code), pause_s, unit.backoff.restarts))
        return None


def guarded(command: Sequence[str], netns: int | None = None, grace_s: float = guard.GRACE_S) -> tuple[str, ...]:
    """The command line that runs a command under `guard.py`, on this machine.

    netns: file descriptor of a network namespace to run in. grace_s: time between SIGTERM and SIGKILL, at most
    GRACE_S.
    """
    options = ("--grace", str(grace_s), *(() if netns is None else ("--netns", str(netns))))
    return (sys.executable, "-I", "-S", str(Path(guard.__file__).resolve()), *options, "--", *command)


def tail(path: Path) -> list[str]:
    """The last lines of a log file; an empty list if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        return []


def exit_code(outcome: RunOutcome) -> int:
    """The outcome's exit code, after its reason was printed."""
    if outcome.reason:
        print(f"geotrain: {outcome.reason}", file=sys.stderr, flush=True)
    return outcome.code


def how_it_ended(code: int) -> str:
    """The end of a process in words. code: as `RunningProcess.reap` gives it."""
    return f"failed with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def _quoted(lines: list[str]) -> str:
    return "\n".join(f"  | {line}" for line in lines)
