"""Processes that benchmarks start on this machine: guarded, waited for, and their memory."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from geotrain.launch.check import free_ports
from geotrain.launch.supervisor import guarded

END_S = 60.0


def start_guarded(
    stack: ExitStack,
    log: Path,
    command: Sequence[str],
    netns: int | None = None,
    keeps: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that ends when its standard input does, at the latest with the stack. netns: the network
    namespace to run it in. keeps: file descriptors that it inherits."""
    kept = (*keeps, *(() if netns is None else (netns,)))
    with log.open("ab") as file:
        process = subprocess.Popen(
            guarded(command, netns), stdin=subprocess.PIPE, stdout=file, stderr=file,
            env={**os.environ, **(env or {})}, pass_fds=kept, cwd=cwd,
        )  # fmt: skip

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)
    return process


def wait_for(
    true: Callable[[], object],
    within_s: float,
    failure: Callable[[], str],
    process: subprocess.Popen[bytes] | None = None,
) -> None:
    """Wait until `true()` is. Raises RuntimeError with what `failure()` says when the time is over, or the process
    has ended before."""
    deadline = time.monotonic() + within_s
    while not true():
        ended = process is not None and process.poll() is not None
        if (ended and not true()) or time.monotonic() > deadline:
            raise RuntimeError(f"{failure()} (waited up to {within_s:g} s)")
        time.sleep(0.02)


def be_only_rank() -> None:
    """Set the environment of a world of one rank, which is this process."""
    port = str(free_ports(1)[0])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def resident_bytes(pid: int | str = "self", kinds: Sequence[str] = ("RssAnon",)) -> int:
    """Resident memory of a process, of these kinds, as /proc/PID/status calls them."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(tuple(kinds)))


class PeakMemory:
    """The most bytes that each reader gives until `close`, looked at every 5 ms on a thread."""

    def __init__(self, readers: dict[str, Callable[[], int]]) -> None:
        self.readers, self.peak_bytes = readers, dict.fromkeys(readers, 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        for name, read in self.readers.items():
            with suppress(OSError):  # the process has ended
                self.peak_bytes[name] = max(self.peak_bytes[name], read())

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self._look()

    def close(self) -> dict[str, int]:
        self._over.set()
        self._thread.join()
        self._look()
        return self.peak_bytes
