"""Keeps strangers from using up a server's connections. They are file descriptors, without which it could neither
answer its members nor write to its disk.

gRPC accepts whoever connects. Its deadline for handshakes ends those who then say nothing, but until it has passed
they are many. So connections over which no member has spoken are counted here, by address and all together, and where
there are too many, the oldest of them are shut: a member speaks at once.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass

from geotrain.net.transport.tcp_counters import connections

PERIOD_S = 0.5  # time between two looks
MOST_AN_ADDRESS = 256  # connections of one address over which no member has spoken
SHARE = 0.25  # all such connections may take so much of the limit on open files
RETRY_S = 0.02  # after a look for which there was no descriptor
SPARES = 4  # descriptors kept for a look, for which strangers may have left none


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@dataclass(frozen=True)
class Stranger:
    """Describes a connection over which no member has spoken. since_s: when it was first seen; time.monotonic()."""

    inode: str
    address: str
    since_s: float


def too_many(strangers: list[Stranger], most_an_address: int, most: int) -> list[Stranger]:
    """Choose those to be shut, so that no address has more than `most_an_address` and all have no more than `most`:
    the oldest of each address, then the oldest of all."""
    stay, shut = Counter[str](), list[Stranger]()
    for stranger in sorted(strangers, key=lambda stranger: stranger.since_s, reverse=True):
        if stay[stranger.address] < most_an_address and stay.total() < most:
            stay[stranger.address] += 1
        else:
            shut.append(stranger)
    return shut


class ConnectionGuard:
    """Watches the connections to one port, on a thread of its own, from `start` to `stop`.

    known: the peers, "host:port", over which a member has spoken. on_shut: called at the beginning of each spell in
    which connections are shut, with a sentence. limit: of open files.
    """

    def __init__(
        self,
        port: int,
        known: Container[str],
        limit: int,
        on_shut: Callable[[str], None] = lambda said: None,
    ) -> None:
        self.port, self.known, self.on_shut = port, known, on_shut
        self.most = max(16, int(SHARE * limit))
        self.most_an_address = min(MOST_AN_ADDRESS, self.most)
        self.shut = 0  # connections so far
        self._since_s: dict[str, float] = {}  # inode → when it was first seen
        self._spell = False
        self._spares: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connection-guard", daemon=True)

    def start(self) -> None:
        self._keep_spares()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._release_spares()

    def _run(self) -> None:
        wait_s = PERIOD_S
        while not self._stop.wait(wait_s):
            self._release_spares()
            try:
                self.look()
                wait_s = PERIOD_S
            except OSError:  # somebody was quicker; soon another is free for a moment
                wait_s = RETRY_S
            self._keep_spares()

    def _keep_spares(self) -> None:
        with suppress(OSError):
            while len(self._spares) < SPARES:
                self._spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _release_spares(self) -> None:
        while self._spares:
            os.close(self._spares.pop())

    def look(self) -> None:
        """Shut the connections that are too many. Raises OSError if there is no descriptor to look with."""
        now_s, seen, strangers = time.monotonic(), {}, []
        for inode, connection in connections():
            with suppress(OSError):  # not connected, or not any more
                host, port = connection.getpeername()[:2]
                if connection.getsockname()[1] == self.port:
                    address = host.removeprefix("::ffff:")
                    seen[inode] = self._since_s.get(inode, now_s)
                    if f"{address}:{port}" not in self.known:
                        strangers.append(Stranger(inode, address, seen[inode]))
        self._since_s = seen
        doomed = {stranger.inode for stranger in too_many(strangers, self.most_an_address, self.most)}
        if doomed and not self._spell:
            self.on_shut(
                f"port {self.port}: {len(strangers)} connections over which no member has spoken; beyond "
                f"{self.most_an_address} an address and {self.most} in all the oldest are shut"
            )
        self._spell = bool(doomed)
        for inode, connection in connections() if doomed else ():
            if inode in doomed:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                    self.shut += 1
