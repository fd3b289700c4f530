"""Runs one command. No process of the command outlives the guard, and the guard does not outlive whoever started it.

    python guard.py [--grace S] [--env] -- command …

The command inherits the guard's file descriptors.

The guard stops the command, with all its descendants, when its own standard input ends. Whoever started it holds the
other end of that pipe, and the kernel closes it however that process dies; ssh carries the end on to another machine.
The guard also stops on SIGTERM. A command that ends with 0 while processes that it started still run has failed
(DeepSpeed's runner ends like that when its launcher was killed), and those processes are stopped. Descendants that
lose their parent become children of the guard, which is their "subreaper". So it finds them whatever sessions they
opened.

If the environment names a job (JOB), there is at most one incarnation of that job on this machine: processes with the
same name, left over from a connection that broke unnoticed, are ended before the command begins.

With `--env` the first line of standard input is a JSON object, the environment to add: a command line, and with it a
key or token there, can be read by everybody on a machine.

It imports nothing of GeoTrain, so that it starts at once.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 10.0  # time between SIGTERM and SIGKILL
KILL_DEADLINE_S = 5.0  # time after SIGKILL in which a process must be gone
SETTLE_S = 2.0  # processes that a command started may end this much later than the command
JOB = "GEOTRAIN_JOB"  # the run's folder and the process's name: descendants inherit it
EXIT_LEFT_BEHIND = 125
EXIT_FORMER_INCARNATION = 126
EXIT_NOT_FOUND = 127
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit code, or 128 + n if signal n ended it or the guard."""
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    grace_s = float(options[options.index("--grace") + 1]) if "--grace" in options else GRACE_S
    if "--env" in options:
        # Anew, since others know a job's processes by the environment with which they began.
        again, at = sys.orig_argv, sys.orig_argv.index("--env")
        os.execve(sys.executable, [*again[:at], *again[at + 1 :]], {**os.environ, **_read_environment()})
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    with wakeups() as woken:
        if not _end(_former_incarnations, grace_s, woken):
            _say(f"{os.environ[JOB]} has not begun; of an earlier incarnation: {_former_incarnations()}")
            return EXIT_FORMER_INCARNATION
        try:
            # PDEATHSIG: if the guard itself is killed by SIGKILL, the kernel kills the command.
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                close_fds=False,
                preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            )
        except OSError as error:
            _say(f"cannot start {command[0]}: {error.strerror}")
            return EXIT_NOT_FOUND
        code = _watch(child.pid, woken)
        child.returncode = code  # subprocess cannot know it, because `_reap` has collected the child
        if code == 0:
            deadline = time.monotonic() + SETTLE_S
            while (alive := _descendants()) and time.monotonic() <= deadline:
                _pause(woken)
            if alive:
                _say(f"{command[0]} ended, but left processes running; a part of it was killed?")
                code = EXIT_LEFT_BEHIND
        _end(_descendants, grace_s, woken)
    return code


def _read_environment() -> dict[str, str]:
    line = b""
    while not line.endswith(b"\n"):  # byte by byte, since the end of what follows is watched
        if not (byte := os.read(0, 1)):
            sys.exit(128 + signal.SIGTERM)  # who started this is gone
        line += byte
    found: dict[str, str] = json.loads(line)
    return found


def _say(what: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on a full disk
        print(f"guard: {what}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def wakeups() -> Iterator[int]:
    """Give a file descriptor that yields the number of each stop signal and SIGCHLD as a byte. During the block these
    signals do nothing else. A stop signal that is ignored stays so, as SIGHUP under nohup."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    # Python writes to the wakeup descriptor only where there is a handler.
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: None) for number in (*numbers, signal.SIGCHLD)}
    woken_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield read_end
    finally:
        signal.set_wakeup_fd(woken_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)


def _watch(child: int, wakeups: int) -> int:
    """Wait until the child ends or a stop is asked for; returns the guard's exit code."""
    while True:
        ready, _, _ = select.select([wakeups, 0], [], [])
        if 0 in ready and not os.read(0, 4096):  # standard input has ended
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


def _end(find: Callable[[], list[int]], grace_s: float, wakeups: int) -> bool:
    """End the processes that `find` gives: SIGTERM to all, SIGKILL to those alive after `grace_s`.

    Returns True when none is left. Returns False after a deadline, or if a stop was asked for meanwhile, which ends
    the grace at once.
    """
    looked_s, waited_s, stopped = time.monotonic(), 0.0, False
    asked: set[int] = set()
    while alive := find():
        before_s, looked_s = looked_s, time.monotonic()
        waited_s += min(looked_s - before_s, 1.0)  # no more: this process was stopped, and perhaps those with it
        if waited_s > grace_s + KILL_DEADLINE_S:
            return False
        for pid in [pid for pid in alive if waited_s > grace_s or pid not in asked]:
            asked.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if waited_s > grace_s else signal.SIGTERM)
        if set(_pause(wakeups)) & set(STOP_SIGNALS):
            grace_s, stopped = 0.0, True
    return not stopped


def _pause(wakeups: int) -> bytes:
    """Wait for a moment or until signals arrive; returns their numbers. Collects ended children."""
    numbers = os.read(wakeups, 4096) if select.select([wakeups], [], [], 0.05)[0] else b""
    _reap()
    return numbers


def _descendants() -> list[int]:
    """Living processes below this one; zombies are left out."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _former_incarnations() -> list[int]:
    """Living processes of an earlier incarnation of this job, known by the job's name in their environment."""
    job = os.environ.get(JOB)
    others = psutil.process_iter(["environ"]) if job else ()  # None: another user's, or gone
    return [p.pid for p in others if p.pid != os.getpid() and (p.info["environ"] or {}).get(JOB) == job]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
