"""Keeps strangers from using up a server's connections. They are file descriptors, without which it could neither
answer its members nor write to its disk.

gRPC accepts whoever connects. Its deadline for handshakes ends those who then say nothing, but until it has passed
they are many. So connections over which no member has spoken are counted here, and where there are too many, some are
shut: of the addresses that have the most, by lot. Who floods a server from one address keeps nobody out from others;
members behind one address, shut by lot, come again, whereas by age those would be shut that are next to be answered.
"""

from __future__ import annotations

import os
import random
import resource
import socket
import threading
from collections import Counter
from collections.abc import Callable, Container
from contextlib import suppress
from ipaddress import IPv6Network
from typing import NamedTuple

from geotrain.net.transport.tcp_counters import connections

PERIOD_S = 0.5  # time between two looks
SHARE = 0.25  # connections over which no member has spoken may take so much of the limit on open files
RETRY_S = 0.02  # after a look for which there was no descriptor
SPARES = 4  # descriptors kept for a look, for which strangers may have left none


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Stranger(NamedTuple):
    """Describes a connection over which no member has spoken. address: of IPv6, the half that a host has."""

    inode: str
    address: str


def too_many(strangers: list[Stranger], most: int) -> list[Stranger]:
    """Choose those to be shut, so that `most` are left, of all addresses as many where they have so many."""
    before, ranked = Counter[str](), list[tuple[int, Stranger]]()
    for stranger in random.sample(strangers, len(strangers)):
        ranked.append((before[stranger.address], stranger))
        before[stranger.address] += 1
    return [stranger for _, stranger in sorted(ranked, key=lambda each: each[0])[most:]]


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
        self.shut = 0  # connections so far
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
        strangers = []
        for inode, connection in connections():
            with suppress(OSError):  # not connected, or not any more
                host, port = connection.getpeername()[:2]
                if connection.getsockname()[1] == self.port:
                    address = host.removeprefix("::ffff:")
                    if f"{address}:{port}" not in self.known:
                        of_a_host = str(IPv6Network((address, 64), strict=False)) if ":" in address else address
                        strangers.append(Stranger(inode, of_a_host))
        doomed = {stranger.inode for stranger in too_many(strangers, self.most)}
        if doomed and not self._spell:
            self.on_shut(
                f"port {self.port}: {len(strangers)} connections over which no member has spoken; beyond "
                f"{self.most} those of the addresses with the most are shut"
            )
        self._spell = bool(doomed)
        for inode, connection in connections() if doomed else ():
            if inode in doomed:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                    self.shut += 1
