"""Counts the bytes of this process's TCP sockets by the kernel's own counters (Linux).

TCP_INFO gives, for each connection, the payload bytes that the other side has acknowledged, and those received. They
include what gRPC, HTTP/2 and TLS add, but neither retransmissions nor the headers of TCP and IP. On the side that
connects, the kernel counts the opening handshake as one byte.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from geotrain.common.files import out_of_room

PERIOD_S = 0.2  # time between samples
MOST_SHARE = 0.005  # of a processor: where there are many sockets, samples are up to WINDOW_S apart
DESCRIPTORS = "/proc/self/fd"
MAX_PEERS = 16384  # connections that are remembered, closed ones among them
WINDOW_S = 1.0  # peaks are bytes within this time
TCP_INFO_BYTES = 256  # more than struct tcp_info has
COUNTERS = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
COUNTERS_AT = 120  # their offset in struct tcp_info (linux/tcp.h); the kernel only ever appends to it


@dataclass
class Traffic:
    """Sums the bytes with one peer over all connections since the counters began. Peaks: bytes within one second."""

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

    @property
    def counts(self) -> list[int]:
        """The sums and peaks, in the order in which the constructor takes them."""
        return [self.sent_bytes, self.received_bytes, self.peak_sent_bytes, self.peak_received_bytes]

    def join(self, other: Traffic) -> None:
        """Add another connection's bytes (not its peaks, which may not have been at the same time)."""
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes


class TcpCounters:
    """Samples all sockets every PERIOD_S, or less often, on a thread of its own. Peers are named "host:port".

    A socket's counters are gone when it closes, so what it moved after its last sample is not counted.
    counted: which peers belong to the sum `total`, whose peaks are those of the sum. `recent` is the same sum since
    `take_recent` was last called. before: what earlier incarnations of this process counted, with which `total`
    begins.
    """

    def __init__(self, counted: Callable[[str], bool] = lambda peer: True, before: Traffic | None = None) -> None:
        self.total = before or Traffic()
        self.recent = Traffic()
        self._counted = counted
        self._peers: dict[str, Traffic] = {}
        self._last: dict[str, tuple[str, int, int]] = {}  # socket's inode → peer and counters
        self.open: set[str] | None = None  # peers that are connected, as of the last sample; None: it failed
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tcp-counters", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def traffic(self) -> dict[str, Traffic]:
        """Give the traffic of each peer until now."""
        self.sample()
        with self._lock:
            return dict(self._peers)

    def take_recent(self) -> Traffic:
        """Give what the counted peers moved since the last call.

        A peak's window may reach back beyond the last call: a burst at the border shows in both results.
        """
        self.sample()
        with self._lock:
            taken, self.recent = self.recent, Traffic(window=self.recent.window.copy())
        return taken

    def sample(self) -> None:
        try:
            now_s, sockets = time.monotonic(), _sockets()
        except OSError:
            self.open = None
            return  # no file descriptor is free; the next sample counts what this one misses
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
            self._last, self.open = sockets, {peer for peer, _, _ in sockets.values()}
            self._forget(MAX_PEERS, self.open)

    def _forget(self, most: int, live: set[str]) -> None:
        """Forget closed connections beyond a number, those that moved least first: strangers come and go."""
        if len(self._peers) > most:
            closed = sorted(
                self._peers.keys() - live, key=lambda p: self._peers[p].sent_bytes + self._peers[p].received_bytes
            )
            for peer in closed[: len(self._peers) - most // 2]:
                del self._peers[peer]

    def _run(self) -> None:
        took_s = 0.0
        while not self._stop.wait(min(WINDOW_S, max(PERIOD_S, took_s / MOST_SHARE))):
            began_s = time.thread_time()
            self.sample()
            took_s = time.thread_time() - began_s


def connections() -> Iterator[tuple[str, socket.socket]]:
    """Yield (inode, socket) of this process's TCP connections. The socket is a duplicate, closed at the next step.

    Raises OSError if no file descriptor is free.
    """
    found = set()
    for number in os.listdir(DESCRIPTORS):  # noqa: PTH208 (pathlib takes twice as long, five times a second)
        try:
            inode = os.readlink(f"{DESCRIPTORS}/{number}")  # noqa: PTH115
            if not inode.startswith("socket:") or inode in found:
                continue
            found.add(inode)
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    yield inode, connection
        except OSError as error:  # usually it was closed just now
            if out_of_room(error):
                raise


def _sockets() -> dict[str, tuple[str, int, int]]:
    """Read inode → (peer, bytes sent, bytes received) of this process's connected TCP sockets."""
    found: dict[str, tuple[str, int, int]] = {}
    for inode, connection in connections():
        with suppress(OSError):  # not connected, or not any more
            host, port = connection.getpeername()[:2]
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            found[inode] = (f"{host.removeprefix('::ffff:')}:{port}", *COUNTERS.unpack_from(info, COUNTERS_AT))
    return found
