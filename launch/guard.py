"""Runs one command and lets nothing of it outlive the guard, nor the guard outlive whoever started it.

    python guard.py [--netns FD] [--grace S] -- command …

The command inherits the guard's other file descriptors (a network namespace's, `--netns`, is closed once entered).

The guard stops the command, with all its descendants, when its own standard input ends: whoever started it holds
the other end of that pipe, and the kernel closes it however that process dies; ssh carries the end on to another
machine. It also stops on SIGTERM, and clears up what a command leaves behind: a command that ends well before what it
started has failed (DeepSpeed's runner does, when its launcher was killed). Descendants that lost their parent fall to
the guard (it is their "subreaper"), so that it finds them whatever sessions they opened.

Where the environment names a job (JOB), at most one life of it is on this machine: all that carries the same name,
left behind a connection that broke without being told, is ended before the command begins.

Only the standard library, so that it starts in milliseconds: `python -I -S guard.py`.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNET = 0x40000000
GRACE_S = 10.0
KILL_DEADLINE_S = 5.0
SETTLE_S = 2.0  # what a command started may end a little after it
JOB = "GEOTRAIN_JOB"  # the run's folder and the process's name: descendants inherit it
EXIT_LEFT_BEHIND = 125
EXIT_FORMER_LIFE = 126
EXIT_NOT_FOUND = 127
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> int:
    """The command's exit code; 128 + n when signal n ended it, or ended the guard."""
    netns, grace_s, command = _parse(arguments)
    _checked(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
    if netns is not None:
        _checked(_libc.setns(netns, CLONE_NEWNET), "setns")
        os.close(netns)
    with _wakeups() as wakeups:
        if not _end(_former_lives, grace_s, wakeups):
            print(f"guard: {os.environ[JOB]} has not begun; of an earlier life: {_former_lives()}", file=sys.stderr)
            return EXIT_FORMER_LIFE
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False, preexec_fn=_die_with_guard)
        except OSError as error:
            print(f"guard: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
            return EXIT_NOT_FOUND
        code = _watch(child.pid, wakeups)
        child.returncode = code  # it was reaped here, not by subprocess
        if code == 0 and _left_behind(wakeups):
            print(f"guard: {command[0]} ended, but left processes running; a part of it was killed?", file=sys.stderr)
            code = EXIT_LEFT_BEHIND
        _end(_descendants, grace_s, wakeups)
    return code


def _parse(arguments: list[str]) -> tuple[int | None, float, list[str]]:
    split = arguments.index("--")
    options = dict(zip(arguments[:split:2], arguments[1:split:2], strict=True))
    netns = int(options["--netns"]) if "--netns" in options else None
    return netns, float(options.get("--grace", GRACE_S)), arguments[split + 1 :]


def _checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _die_with_guard() -> None:
    """In the child: when even the guard is killed, at least the command itself goes with it."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def _wakeups() -> Iterator[int]:
    """A file descriptor that yields the number of each stop signal and SIGCHLD as a byte."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    yield read_end
    signal.set_wakeup_fd(-1)


def _watch(child: int, wakeups: int) -> int:
    """Wait until the child ends, or a stop is asked for. The exit code for either."""
    while True:
        ready, _, _ = select.select([wakeups, 0], [], [])
        if 0 in ready and not os.read(0, 4096):
            return 128 + signal.SIGTERM
        if wakeups in ready:
            for number in os.read(wakeups, 4096):
                if number in STOP_SIGNALS:
                    return 128 + number
            code = _reap().get(child)
            if code is not None:
                return code


def _reap() -> dict[int, int]:
    """Collect ended children: process id → exit code."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            ended[pid] = code if code >= 0 else 128 - code
    return ended


def _left_behind(wakeups: int) -> bool:
    """Whether processes of the ended command run on."""
    deadline = time.monotonic() + SETTLE_S
    while alive := _descendants():
        if time.monotonic() > deadline:
            break
        _pause(wakeups)
    return bool(alive)


def _end(find: Callable[[], list[int]], grace_s: float, wakeups: int) -> bool:
    """SIGTERM to all that are found, SIGKILL to those alive after `grace_s`. True when none is left; False at a
    deadline, or when a stop was asked for meanwhile: then none was given any more grace."""
    begin, stopped = time.monotonic(), False
    told: set[int] = set()
    while alive := find():
        waited_s = time.monotonic() - begin
        if waited_s > grace_s + KILL_DEADLINE_S:
            return False
        for pid in alive:
            if waited_s > grace_s:
                _signal(pid, signal.SIGKILL)
            elif pid not in told:
                told.add(pid)
                _signal(pid, signal.SIGTERM)
        if set(_pause(wakeups)) & set(STOP_SIGNALS):
            grace_s, stopped = 0.0, True
    return not stopped


def _pause(wakeups: int) -> bytes:
    """Wait a moment, or for signals: their numbers. Collects ended children."""
    numbers = os.read(wakeups, 4096) if select.select([wakeups], [], [], 0.05)[0] else b""
    _reap()
    return numbers


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants() -> list[int]:
    """Living processes below this one, nearest first; zombies are left out."""
    children: dict[int, list[tuple[int, str]]] = {}
    for pid, entry in _processes():
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append((pid, state))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        for pid, state in children.get(queue.pop(0), []):
            queue.append(pid)
            if state != "Z":
                found.append(pid)
    return found


def _former_lives() -> list[int]:
    """Other living processes of this job."""
    found = []
    if JOB in os.environ:
        mark = f"{JOB}={os.environ[JOB]}".encode()
        for pid, entry in _processes():
            with contextlib.suppress(OSError):  # another user's, or gone
                if pid != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(pid)
    return found


def _processes() -> Iterator[tuple[int, Path]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name), entry


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
