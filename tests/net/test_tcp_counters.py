"""Bytes counted by the kernel, against a known transfer."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from geotrain.net.transport import tcp_counters
from geotrain.net.transport.tcp_counters import TcpCounters, Traffic
from tests.support.net_worlds import BUSY_S, clusters, outer, wait_for, whole


def moved(counters: TcpCounters) -> dict[str, tuple[int, int]]:
    """peer → (bytes sent, bytes received)."""
    return {peer: (t.sent_bytes, t.received_bytes) for peer, t in counters.traffic().items()}


def test_a_known_transfer_is_counted_on_both_sides_and_kept_when_the_sockets_close(monkeypatch):
    monkeypatch.setattr(tcp_counters, "WINDOW_S", BUSY_S)  # however long it takes, it is one peak
    size = 3_000_000
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        counters = TcpCounters(counted=lambda peer: peer == f"127.0.0.1:{port}")
        counters.start()
        with socket.create_connection(("127.0.0.1", port)) as client:
            far, address = server.accept()
            with far:
                far.settimeout(BUSY_S)
                got = 0
                client.setblocking(False)
                data = memoryview(bytes(size))
                while got < size:
                    with contextlib.suppress(BlockingIOError):
                        data = data[client.send(data) :] if data else data
                    got += len(far.recv(1 << 20))
                far.sendall(b"x" * 1000)
                client.setblocking(True)
                assert len(client.recv(1000, socket.MSG_WAITALL)) == 1000
                # What has been received is counted as sent once it is acknowledged. + 1: the handshake.
                known = {f"127.0.0.1:{port}": (size + 1, 1000), f"127.0.0.1:{address[1]}": (1000, size)}
                totals = wait_for(lambda: moved(counters) if moved(counters).items() >= known.items() else None)
        assert moved(counters) == totals  # both are closed now
        assert (counters.total.sent_bytes, counters.total.received_bytes) == (size + 1, 1000)
        assert counters.total.peak_sent_bytes == size + 1
        counters.stop()


def test_many_sockets_are_sampled_once_a_second(monkeypatch):
    """A sample takes the longer the more sockets there are."""
    counters, now_s, pauses = TcpCounters(), [0.0], list[float]()
    monkeypatch.setattr(tcp_counters.time, "thread_time", lambda: now_s[0])
    costs_s = iter((1e-6, 3e-3, 0.1))

    def sample() -> None:
        now_s[0] += next(costs_s)

    def wait(pause_s: float) -> bool:
        pauses.append(pause_s)
        return len(pauses) == 4

    monkeypatch.setattr(counters, "sample", sample)
    monkeypatch.setattr(counters._stop, "wait", wait)
    counters._run()
    assert pauses == [0.2, 0.2, pytest.approx(0.6), 1.0]


def test_the_peak_is_of_one_second():
    traffic = Traffic()
    for at_s, sent in ((0.0, 10), (0.5, 20), (1.2, 5), (5.0, 12)):
        traffic.add(at_s, sent, 1)
    assert (traffic.sent_bytes, traffic.peak_sent_bytes) == (47, 30)
    assert (traffic.received_bytes, traffic.peak_received_bytes) == (4, 2)


def test_a_member_is_known_by_every_connection_it_speaks_over(tmp_path: Path) -> None:
    """After a loss it comes over a new one, without joining again: its bytes are still its own."""
    with clusters(tmp_path) as make:
        cluster = make(outer(), {"eu": {"a": whole}})
        worker = cluster.joined("a")
        peers = cluster.regions["eu"].service.peers
        assert set(peers.values()) == {"a"}
        peers.clear()
        lease = worker.lease()
        assert lease is not None
        worker.train(lease)
        assert set(peers.values()) == {"a"}
        worker.close()
