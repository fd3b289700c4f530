"""Starts a set of named processes, waits for them and restarts those that die. It stops them all when the run is
over, when it has failed, or when the user says so.

Each process writes one log file, and stops when its standard input ends; `guarded` makes any command do so. The
supervisor holds the other end of that pipe, and the kernel closes it however the supervisor ends. So no process
outlives the supervisor, even if that is killed by SIGKILL. The processes behind a *relay*, on another machine, do
(`ProcessSpec.relay`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from geotrain.common.files import out_of_room
from geotrain.common.running_clock import RunningClock
from geotrain.config import EXIT_FOR_GOOD, ConfigError, RestartConfig
from geotrain.emulate.wan import in_network
from geotrain.launch import guard
from geotrain.launch.backoff import RestartBackoff
from geotrain.launch.forming import Forming
from geotrain.launch.launchers.base import EXIT_FORM
from geotrain.monitor.events import ProcessDied, ProcessEnded, ProcessStarted, Trouble
from geotrain.outer.events import Event

STOP_DEADLINE_S = guard.GRACE_S + guard.KILL_DEADLINE_S + 5.0
LEAF_DRAIN_S = 30.0  # for a worker or shard to end after its server: it has saved all before
LOG_TAIL_LINES = 30  # so much of a failed process's log is shown
LOG_TAIL_BYTES = 16384
LOOK_S, STOOD_STILL_S = 1.0, 5.0  # between two looks; more: this process was stopped meanwhile
FULL_RETRY_S = 5.0  # between two attempts to start a process while the disk is full
STOP_COMMAND = b"stop\n"  # for a relay, before its standard input ends: the end alone leaves the site as it is
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
    respawn: gives the processes that replace its restart group after a death in it; None: its death fails the run.
    relay: it only relays, over a connection, between this supervisor and a site on another machine that lives on
        without it. It stops the site on STOP_COMMAND. When it loses the connection, nothing has died: it is started
        again without bound.
    group: the restart group, whose processes (such as a worker's, one on each host) live and die together; "": it is
        a group by itself. All processes of a group are alike in role, respawn, relay and depends_on.
    depends_on: the group of the server that this process talks to. Once that has ended well, nothing is left to do:
        the process is not restarted, and stopped if it goes on.
    host: the host on which it starts ranks; "": this one, or several.
    formation: of the restart group; its `respawn` is called when that is ready. None: it is started again as it was.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    first_input: bytes = b""
    role: Literal["worker", "server", "shard", "helper"] = "worker"
    inherited_fds: tuple[int, ...] = ()
    respawn: Callable[[], list[ProcessSpec]] | None = None
    relay: bool = False
    group: str = ""
    depends_on: str = ""
    host: str = ""
    formation: Forming | None = None

    @property
    def group_name(self) -> str:
        return self.group or self.name


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run. code: the exit code for the shell. reason: empty when all went well."""

    code: int
    reason: str = ""


class RunningProcess:
    """A started process."""

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
        self.started_s = time.monotonic()
        assert self.popen.stdin is not None
        self._stdin = self.popen.stdin
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(spec.first_input)
            self._stdin.flush()

    def ask_to_stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            if self.spec.relay and not self._stdin.closed:
                self._stdin.write(STOP_COMMAND)
            self._stdin.close()

    def has_ended(self) -> bool:
        """Whether it has ended. It is not collected here: see `reap`."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.popen.returncode is not None or os.waitid(os.P_PID, self.popen.pid, how) is not None

    def reap(self) -> int:
        """Collect the ended process, or kill it. Returns its exit code, or −n when signal n ended it."""
        # Whatever is left of its process group is killed before wait(), which frees the process's number: afterwards
        # it could belong to another group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        code = self.popen.wait()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        return code


@dataclass
class RestartGroup:
    """Processes that live and die together.

    spec: of the process that was started last, for what all have in common. running: by the process's name.
    restart_at_s: the earliest time at which the group is started again, when none of its processes runs any more;
    None if that is not planned. given_up: why it is not restarted any more, or "". no_room: it could not be started,
    because the disk was full. cut_off: a relay that has lost its connection. end_by_s: when it is stopped if it still
    runs, since its server has ended; inf: it has been asked to stop.
    """

    spec: ProcessSpec
    backoff: RestartBackoff
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

    def ask_to_stop(self) -> None:
        for process in self.running.values():
            process.ask_to_stop()


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
        self._now_s = RunningClock(STOOD_STILL_S)  # what is waited for may have stood still with this process
        self._groups: dict[str, RestartGroup] = {}
        self._signals = contextlib.ExitStack()

    def __enter__(self) -> Supervisor:
        self.logs.mkdir(parents=True, exist_ok=True)
        # A signal only ends a pause, so that it is handled between other events instead of in the middle of one.
        self._woken = self._signals.enter_context(guard.wakeups())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        with self._signals:
            self.stop()

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def start(self, spec: ProcessSpec) -> None:
        """Start a process. Raises LaunchError if its program or its log file cannot be opened."""
        group = self._groups.setdefault(spec.group_name, RestartGroup(spec, RestartBackoff(self.restart)))
        if spec.name in group.running:
            raise ValueError(f"two processes are called {spec.name!r}")
        try:
            process = RunningProcess(spec, self.log(spec.name))
        except OSError as error:
            raise LaunchError(f"process {spec.name!r} cannot be started: {error}") from error
        group.spec, group.running[spec.name] = spec, process
        self.on_event(ProcessStarted(spec.name, spec.role))

    def on_event(self, event: Event) -> None:
        """Pass an event on. It may be written to a full disk, which must not end the run."""
        with contextlib.suppress(OSError):
            self._on_event(event)

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
        self._wait_until(self._now_s() + STOP_DEADLINE_S, hurry=True)
        for process in self._alive():
            process.popen.send_signal(signal.SIGTERM)
        self._wait_until(self._now_s() + guard.KILL_DEADLINE_S + 1.0)
        for process in self._alive():
            self._reap(process)
        for name, group in self._groups.items():
            if group.cut_off:
                left = "was not reached when all was stopped: what runs there goes on, and --resume finds it"
                self.on_event(Trouble(f"{name}: {left}"))
                group.cut_off = False

    # -- waiting

    def _alive(self) -> list[RunningProcess]:
        return [process for group in self._groups.values() for process in group.running.values()]

    def _have_ended(self, role: str) -> bool:
        """Whether there were groups of this role, and all of them have ended."""
        groups = self._of_role(role)
        return bool(groups) and not any(group.active for group in groups)

    def _of_role(self, role: str) -> list[RestartGroup]:
        return [group for group in self._groups.values() if group.spec.role == role]

    def _wait_until(self, deadline: float, hurry: bool = False) -> None:
        while self._alive() and self._now_s() < deadline:
            stops, ended = self._pause(deadline)
            for process in ended:
                self._reap(process)
            if stops and hurry:
                return

    def _reap(self, process: RunningProcess) -> int:
        code = process.reap()
        group = self._groups[process.spec.group_name]
        del group.running[process.spec.name]
        group.cut_off = process.spec.relay and (code == EXIT_SSH or code < 0)
        self.on_event(ProcessEnded(process.spec.name, code))
        return code

    def _pause(self, until_s: float) -> tuple[list[int], list[RunningProcess]]:
        """Wait LOOK_S at most for a signal or a process's end; returns the stop signals, and which have ended."""
        ended = any(process.has_ended() for process in self._alive())  # one whose signal was read with another's
        pause_s = 0.0 if ended else min(LOOK_S, max(0.0, until_s - self._now_s()))
        numbers = os.read(self._woken, 4096) if select.select([self._woken], [], [], pause_s)[0] else b""
        return [n for n in numbers if n in guard.STOP_SIGNALS], [p for p in self._alive() if p.has_ended()]

    def _supervise(self, tick: Callable[[], None], every_s: float) -> RunOutcome:
        next_tick = self._now_s() + every_s
        drain_deadline: float | None = None
        groups = self._groups.values()
        while active := {n: g for n, g in self._groups.items() if g.active and g.spec.role != "helper"}:
            now = self._now_s()
            # Once all workers have ended, servers only have to send and write what they hold. A server that goes on
            # for longer waits for a worker that is not there any more; a worker, for a server.
            ended = next((role for role in ("worker", "server") if self._have_ended(role)), "")
            if drain_deadline is None and ended:
                drain_deadline = now + self.drain_s
            self._stop_what_outlives_its_server(now)
            alive = [name for name, group in active.items() if not self._is_unneeded(group)]
            if alive and drain_deadline is not None and now > drain_deadline:
                log = self.log(active[alive[0]].spec.name)
                left = "a worker left before its work was done" if ended == "worker" else "they missed the run's end"
                return RunOutcome(
                    1,
                    f"{', '.join(map(repr, alive))} still running {self.drain_s:g} s after all {ended}s ended: "
                    f"{left}; look at the workers' logs in {self.logs}. The end of {log}:\n{_quoted(tail(log))}",
                )
            if outcome := self._restart_what_is_due(now):
                return outcome
            self._form()
            due = [group for group in groups if not group.running and group.spec.formation is None]
            wakes = [group.restart_at_s for group in due if group.restart_at_s is not None]
            wakes += [group.end_by_s for group in groups if group.end_by_s is not None]
            wakes += [next_tick, *([drain_deadline] if drain_deadline else [])]
            stops, ended_now = self._pause(min(wakes))
            for process in ended_now:
                if outcome := self._on_end(process):
                    return outcome
            if stops:
                return RunOutcome(128 + stops[0], f"stopped by {signal.Signals(stops[0]).name}")
            if self._now_s() >= next_tick:
                with contextlib.suppress(OSError):  # as `on_event`
                    tick()
                next_tick = self._now_s() + every_s
        given_up = [group.given_up for group in groups if group.given_up]
        return RunOutcome(0, "\n".join(["the others have finished, but", *given_up]) if given_up else "")

    def _is_unneeded(self, group: RestartGroup) -> bool:
        """Whether the server that the group talks to has ended well, so that nothing is left for it to do."""
        server = self._groups.get(group.spec.depends_on)
        return server is not None and not server.active

    def _stop_what_outlives_its_server(self, now: float) -> None:
        """Ask groups to stop that have not ended in time after their server did: they came, or came back, when all
        data was trained, and would wait for a server that does not return."""
        for name, group in self._groups.items():
            if not group.running or not self._is_unneeded(group):
                continue
            drain_s = self.drain_s if group.spec.role == "server" else min(self.drain_s, LEAF_DRAIN_S)
            group.end_by_s = now + drain_s if group.end_by_s is None else group.end_by_s
            if now > group.end_by_s:
                group.end_by_s = math.inf
                self.on_event(Trouble(f"{name} goes on though its server has ended, with all data trained: stopped"))
                group.ask_to_stop()

    def _form(self) -> None:
        """Let groups that may be formed otherwise look at their hosts, and pass on what they say. What is left of a
        connection to a host that a group leaves is ended: such a host may answer nothing."""
        for group in self._groups.values():
            formation = group.spec.formation
            if formation is None or group.given_up:
                continue
            if group.restart_at_s is None and group.running:
                if formation.look():
                    group.ask_to_stop()
            elif group.restart_at_s is not None and formation.ready():
                for process in group.running.values():
                    if formation.leaves(process.spec.host):
                        process.popen.kill()
            while formation.events:
                self.on_event(formation.events.popleft())

    def _restart_what_is_due(self, now: float) -> RunOutcome | None:
        """Start the groups again whose pause is over. One that cannot be started counts as dead once more.

        Returns the outcome if that ends the run.
        """
        for name, group in self._groups.items():
            if group.restart_at_s is None or group.running:
                continue
            unneeded = self._is_unneeded(group)
            formation = group.spec.formation
            if (group.restart_at_s > now or (formation is not None and not formation.ready())) and not unneeded:
                continue
            group.restart_at_s = None
            if unneeded:
                continue
            assert group.spec.respawn is not None
            try:
                for spec in group.spec.respawn():
                    self.start(spec)
                group.no_room = False
            except (LaunchError, OSError, ConfigError) as error:  # as without memory or with a full disk
                if not out_of_room(error):
                    code = EXIT_FOR_GOOD if isinstance(error, ConfigError) else 1
                    if outcome := self._died(name, group, code, 0.0, f"{name!r} cannot be started: {error}"):
                        return outcome
                    continue
                # That is no death, and costs no restart. Those of the group that were started wait with it.
                group.ask_to_stop()
                group.restart_at_s = now + FULL_RETRY_S
                if not group.no_room:
                    self.on_event(Trouble(f"{error}; it is started when there is room"))
                group.no_room = True
        return None

    def _on_end(self, process: RunningProcess) -> RunOutcome | None:
        """Handle the end of a process. Returns the outcome if it ends the run."""
        spec, code, lived_s = process.spec, self._reap(process), time.monotonic() - process.started_s
        group, formation = self._groups[spec.group_name], spec.formation
        if group.restart_at_s is not None or group.given_up:
            return None  # it was stopped because another process of its group had died
        if formation is not None and (code == EXIT_FORM or formation.ending) and not self._is_unneeded(group):
            group.restart_at_s = self._now_s()
            formation.again()
            group.ask_to_stop()
            return None
        if code == 0 and spec.role != "helper":
            return None
        if self._is_unneeded(group):
            if group.end_by_s != math.inf:
                how = how_it_ended(code)
                self.on_event(Trouble(f"{spec.name} {how}; its server had ended, with all data trained"))
            return None
        log = self.log(spec.name)
        if group.cut_off:  # it tries again for as long as the run lasts
            pause_s = group.backoff.next_pause_s(lived_s)
            group.restart_at_s = self._now_s() + pause_s
            why = (tail(log) or ["no word"])[-1]
            now = f"no connection ({why}); what runs there goes on; tried again in {pause_s:.3g} s"
            self.on_event(Trouble(f"{spec.name}: {now}"))
            return None
        reason = f"process {spec.name!r} {how_it_ended(code)}; the end of its log {log}:\n{_quoted(tail(log))}"
        if formation is not None:
            formation.again(spec.host, lived_s, how_it_ended(code))
        return self._died(spec.group_name, group, code, lived_s, reason)

    def _died(self, name: str, group: RestartGroup, code: int, lived_s: float, reason: str) -> RunOutcome | None:
        """Plan a restart of the group after a death in it, or give it up. Returns the outcome if that ends the
        run."""
        # The code is as a shell gives it; 1 for a helper that ended with 0, because it should not have ended.
        failure = RunOutcome((code or 1) if code >= 0 else 128 - code, reason)
        if group.spec.respawn is None:
            return failure
        now = self._now_s()
        pause_s = group.backoff.pause_s(code, now, lived_s)
        if pause_s is None:
            group.given_up = reason
            others = [other for other in self._of_role("worker") if not other.given_up]
            if group.spec.role != "worker" or self.needs_all or not others:
                return failure
        else:
            group.restart_at_s = now + pause_s
        group.ask_to_stop()
        self.on_event(ProcessDied(name, how_it_ended(code), pause_s, group.backoff.restarts))
        return None


def guarded(command: Sequence[str], netns: int | None = None, grace_s: float = guard.GRACE_S) -> tuple[str, ...]:
    """Wrap a command line in `guard.py`, on this machine.

    netns: file descriptor of a network namespace to run in. grace_s: time between SIGTERM and SIGKILL; when all is
    stopped, STOP_DEADLINE_S at most.
    """
    inside = command if netns is None else in_network(netns, command)
    return (sys.executable, "-I", str(Path(guard.__file__).resolve()), "--grace", str(grace_s), "--", *inside)


def guarded_there(command: Sequence[str], env: Mapping[str, str]) -> tuple[tuple[str, ...], bytes]:
    """Wrap a command line in `guard.py`, on another machine. Returns what runs there, and its environment, the first
    line of its standard input."""
    program = (sys.executable, "-P", "-m", guard.__name__, "--env", "--", *command)
    return program, json.dumps(dict(env)).encode() + b"\n"


def tail(path: Path) -> list[str]:
    """Read the last lines of a log file; an empty list if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        return []


def exit_code(outcome: RunOutcome) -> int:
    """Print the outcome's reason; returns its exit code."""
    if outcome.reason:
        print(f"geotrain: {outcome.reason}", file=sys.stderr, flush=True)
    return outcome.code


def how_it_ended(code: int) -> str:
    """Describe the end of a process. code: as `RunningProcess.reap` gives it."""
    return f"failed with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def _quoted(lines: list[str]) -> str:
    return "\n".join(f"  | {line}" for line in lines)
