"""Strangers who connect and say nothing neither end a server nor keep its members out."""

from __future__ import annotations

import selectors
import socket
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.net.server import listener
from geotrain.net.server.connection_guard import ConnectionGuard, Stranger, too_many
from tests.support.net_worlds import BUSY_S, clusters, outer, side_by_side, wait_for, whole
from tests.support.server_processes import Site

FILES, IDLE = 120, 180  # file descriptors that a server may have, and idle connections to each


class Idlers:
    """Holds `count` idle connections to each address. again: one that is closed is opened again."""

    def __init__(self, addresses: list[str], count: int, again: bool) -> None:
        self.addresses, self.count, self.again = addresses, count, again
        self.opened = self.closed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        open_to: dict[str, set[socket.socket]] = {address: set() for address in self.addresses}
        with selectors.DefaultSelector() as selector:
            while not self._stop.wait(0.02):
                for address, connections in open_to.items():
                    host, _, port = address.rpartition(":")
                    with suppress(OSError):  # nobody listens any more
                        while len(connections) < self.count:
                            connection = socket.create_connection((host, int(port)), 5)
                            connection.setblocking(False)
                            connections.add(connection)
                            selector.register(connection, selectors.EVENT_READ, connections)
                            self.opened += 1
                for key, _ in selector.select(0):
                    with suppress(BlockingIOError):
                        try:
                            gone = not key.fileobj.recv(4096)
                        except ConnectionError:
                            gone = True
                        if gone:
                            selector.unregister(key.fileobj)
                            if self.again:
                                key.data.discard(key.fileobj)
                            key.fileobj.close()
                            self.closed += 1
            for connections in open_to.values():
                for connection in connections:
                    connection.close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)


@pytest.mark.slow
@pytest.mark.parametrize(
    "files, again",
    [
        pytest.param((FILES, FILES), False, marks=pytest.mark.long("geotrain/net/server")),
        ((FILES, 4 * FILES), True),
    ],
)
def test_more_idle_connections_than_files_end_nothing(tmp_path: Path, files: tuple[int, int], again: bool) -> None:
    """A run begins, goes on and ends well: with fewer file descriptors than there are connections, and with enough of
    them, which the server has to ask for, when every connection that is shut is opened again at once."""
    site = Site(tmp_path, train_samples=24)
    servers = {which: site.serve(which, files=files) for which in ("global", "eu")}
    for which in servers:
        wait_for(lambda w=which: (site.folder / w / "listening.json").exists())
    idlers = Idlers([site.address(which) for which in servers], IDLE, again)
    workers = [site.worker("a"), site.worker("b")]

    def told(which: str) -> bool:
        said = [event["what"] for event in site.events(which) if event["event"] == "Trouble"]
        return any("connections over which no member has spoken" in what for what in said)

    try:
        wait_for(lambda: idlers.closed > FILES and all(told(which) for which in servers))
        with side_by_side(workers):
            pass
    finally:
        idlers.stop()
        for server in servers.values():
            server.process.join(BUSY_S)
            server.process.kill()
    for server in servers.values():
        assert server.process.exitcode == 0, server.said.read_text()
    assert sorted(lease.start for worker in workers for lease in worker.trained) == list(range(0, 24, 4))


def test_who_connects_and_says_nothing_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(listener.SERVER_OPTIONS)
    assert options["grpc.server_handshake_timeout_ms"] == 1000 * listener.HANDSHAKE_S
    options["grpc.server_handshake_timeout_ms"] = 300
    monkeypatch.setattr(listener, "SERVER_OPTIONS", tuple(options.items()))
    with clusters(tmp_path) as make:
        cluster = make(outer(), {"eu": {"a": whole}})
        with socket.create_connection(("127.0.0.1", cluster.regions["eu"].port), 5) as idle:
            idle.settimeout(BUSY_S)
            while idle.recv(4096):
                pass  # the server's own greeting


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 10))
def test_of_too_many_those_of_the_busiest_addresses_are_shut(addresses: list[str], most: int) -> None:
    found = [Stranger(str(inode), address) for inode, address in enumerate(addresses)]
    shut = too_many(found, most)
    assert len(shut) == max(0, len(found) - most) and set(shut) <= set(found)
    left = Counter(stranger.address for stranger in found if stranger not in shut)
    assert all(left[stranger.address] + 1 >= max(left.values()) for stranger in shut)


def test_each_flood_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    with socket.create_server(("127.0.0.1", 0)) as server:
        guard = ConnectionGuard(port := server.getsockname()[1], (), 4, told.append)
        for calls, times in ((17, 1), (17, 1), (0, 1), (17, 2)):
            with ExitStack() as stack:
                for _ in range(calls):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    stack.enter_context(server.accept()[0])
                guard.look()
            assert len(told) == times


def test_members_behind_one_address_get_in_though_they_are_too_many() -> None:
    """Who is shut comes again; a busy server answers whoever has stayed for three looks."""
    looks, in_it = dict.fromkeys((Stranger(str(n), "a") for n in range(1000)), 0), 0
    for _ in range(200):
        shut = {*too_many([*looks], 600)}
        looks = {each: 0 if each in shut else age + 1 for each, age in looks.items()}
        in_it += sum(age >= 3 for age in looks.values())
        looks = {each: age for each, age in looks.items() if age < 3}
    assert in_it == 1000
