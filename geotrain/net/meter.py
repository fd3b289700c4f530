"""Bytes counted where they leave the machine: the kernel's own counters of this process's TCP sockets (Linux).

TCP_INFO gives, for each connection, the payload bytes that the other side has acknowledged and those received: what
gRPC, TLS and HTTP/2 add is in it, headers of TCP and IP and retransmissions are not. (The kernel counts the opening
handshake of the side that connects as one byte.)
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

PERIOD_S = 0.2
DESCRIPTORS = "/proc/self/fd"
WINDOW_S = 1.0
TCP_INFO_BYTES = 256
COUNTERS = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
COUNTERS_AT = 120  # their offset in struct tcp_info (linux/tcp.h); the kernel only ever appends to it


@dataclass
class Traffic:
    """Bytes with one peer over all connections since the meter began; the peaks are bytes within one second."""

    sent_bytes: int = 0
    received_bytes: int = 0
    peak_sent_bytes: int = 0
    peak_received_bytes: int = 0
    window: deque[tuple[float, int, int]] = field(default_factory=deque, repr=False)

    def add(self, now_s: float, sent: int, received: int) -> None:
        self.sent_bytes += sent
        self.received_bytes += received
        self.window.append((now_s, sent, received))
        while self.window[0][0] <= now_s - WINDOW_S:
            self.window.popleft()
        self.peak_sent_bytes = max(self.peak_sent_bytes, sum(s for _, s, _ in self.window))
        self.peak_received_bytes = max(self.peak_received_bytes, sum(r for _, _, r in self.window))

    def join(self, other: Traffic) -> None:
        """Add another connection's bytes (not its peaks, which may not have been at the same time)."""
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes


class Meter:
    """Samples every PERIOD_S on a thread of its own. A socket that closes between two samples loses at most what it
    moved since the last one. Peers are named "host:port".

    counted: which peers belong to the sum that `total` gives (its peaks are those of the sum). `recent` is that sum
    since `take_recent` was last called.
    """

    def __init__(self, counted: Callable[[str], bool] = lambda peer: True) -> None:
        self.total = Traffic()
        self.recent = Traffic()
        self._counted = counted
        self._peers: dict[str, Traffic] = {}
        self._last: dict[str, tuple[str, int, int]] = {}  # socket's inode → peer and counters
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def totals(self) -> dict[str, tuple[int, int]]:
        """peer → (sent_bytes, received_bytes), as of now."""
        return {peer: (t.sent_bytes, t.received_bytes) for peer, t in self.traffic().items()}

    def traffic(self) -> dict[str, Traffic]:
        self.sample()
        with self._lock:
            return dict(self._peers)

    def take_recent(self) -> Traffic:
        """What the counted peers moved since the last call. A peak at the border counts on both of its sides."""
        self.sample()
        with self._lock:
            taken, self.recent = self.recent, Traffic(window=self.recent.window.copy())
        return taken

    def sample(self) -> None:
        now_s, sockets = time.monotonic(), _sockets()
        with self._lock:
            all_sent = all_received = 0
            for inode, (peer, sent, received) in sockets.items():
                _, sent_before, received_before = self._last.get(inode, (peer, 0, 0))
                sent, received = sent - sent_before, received - received_before
                self._peers.setdefault(peer, Traffic()).add(now_s, sent, received)
                if self._counted(peer):
                    all_sent, all_received = all_sent + sent, all_received + received
            self.total.add(now_s, all_sent, all_received)
            self.recent.add(now_s, all_sent, all_received)
            self._last = sockets

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self.sample()


def _sockets() -> dict[str, tuple[str, int, int]]:
    """inode → (peer, bytes sent, bytes received) of this process's connected TCP sockets."""
    found: dict[str, tuple[str, int, int]] = {}
    for number in os.listdir(DESCRIPTORS):  # noqa: PTH208 (pathlib takes twice as long, five times a second)
        with suppress(OSError):
            target = os.readlink(f"{DESCRIPTORS}/{number}")  # noqa: PTH115
            if not target.startswith("socket:") or target in found:
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    continue
                host, port = connection.getpeername()[:2]
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                found[target] = (f"{host.removeprefix('::ffff:')}:{port}", *COUNTERS.unpack_from(info, COUNTERS_AT))
    return found
