"""Links that a proxy shapes, where there are no network namespaces."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from geotrain.config import load_cluster
from geotrain.emulate import proxy, wan
from geotrain.launch import launcher
from geotrain.launch.check import free_ports
from geotrain.launch.supervisor import ProcessSpec, Supervisor
from tests.support.small_runs import prepare_text, write_files

RATE, DELAY_S, COUNT = 4_000_000, 0.1, 1_000_000


def test_all_connections_of_a_way_share_its_rate() -> None:
    way = proxy.ShapedWay(1000.0, 5.0)
    assert way.take(500, 10.0) == pytest.approx((15.5, 10.5 - proxy.QUEUE_S))
    assert way.take(1000, 10.0) == pytest.approx((16.5, 11.5 - proxy.QUEUE_S))  # behind what is under way
    assert way.take(100, 20.0) == pytest.approx((25.1, 20.1 - proxy.QUEUE_S))  # the line was free
    assert way.carried_bytes == 1600


def answering(listener: socket.socket) -> None:
    """Send each connection back what it brought, reversed, once it has ended."""

    def answer(connection: socket.socket) -> None:
        with connection:
            connection.sendall(b"".join(iter(lambda: connection.recv(1 << 16), b""))[::-1])

    with listener:
        for _ in range(2):
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


def test_a_link_has_its_rate_its_distance_and_all_its_bytes() -> None:
    """Two connections at a time: what they carry takes at least as long as the link says, each way."""
    near, far, nobody, nothing = free_ports(4)
    threading.Thread(target=answering, args=(socket.create_server(("127.0.0.1", far)),), daemon=True).start()
    command = [str(RATE), str(DELAY_S), "127.0.0.1", f"{near}:{far},{nobody}:{nothing}"]
    process = subprocess.Popen([sys.executable, "-I", "-S", proxy.__file__, *command], stdout=subprocess.PIPE)
    text, ends = bytes(range(250)) * (COUNT // 250), list[socket.socket]()
    try:
        deadline = time.monotonic() + 60.0
        while len(ends) < 2:
            try:
                ends.append(socket.create_connection(("127.0.0.1", near), 60.0))
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        began = time.monotonic()
        for end in ends:
            threading.Thread(target=lambda end=end: (end.sendall(text), end.shutdown(socket.SHUT_WR))).start()
        for end in ends:
            assert b"".join(iter(lambda end=end: end.recv(1 << 16), b"")) == text[::-1]
        # The first has come whole, at the earliest, when half of both has; then it goes back.
        assert time.monotonic() - began >= 2 * DELAY_S + 3 * COUNT / RATE
        with socket.create_connection(("127.0.0.1", nobody), 60.0) as end:  # to a server that is not there
            assert end.recv(1) == b""
    finally:
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60.0)
    assert json.loads(said)["carried_bytes"] == 4 * COUNT


class Noted(Exception):
    """All processes of a launch would have been started."""


def test_a_run_without_namespaces_has_a_proxy_in_the_global_servers_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shards, too. Only regions' servers find the proxy there; the file of the run has the server itself."""
    prepare_text(tmp_path)
    files = write_files(tmp_path, "shaped", 32, {"eu": [1], "us": [1]}, {"rule": {"name": "sync"}}, shards=1)
    links = [{"regions": [region, "global"], "gbps": 0.1, "rtt_ms": 10.0} for region in ("eu", "us")]
    files[1].write_text(json.dumps({**json.loads(files[1].read_text()), "emulate_links": True, "links": links}))
    started: dict[str, ProcessSpec] = {}

    class Noting(Supervisor):
        def start(self, spec: ProcessSpec) -> None:
            started[spec.name] = spec

        def wait(self, *_: Any, **__: Any) -> Any:
            raise Noted

    monkeypatch.setattr(wan, "cannot_emulate", lambda: "network namespaces need root")
    monkeypatch.setattr(launcher, "supervisor_of", lambda request, folder, *_: Noting(folder / "logs"))
    with pytest.raises(Noted):
        launcher.launch(*files)
    folder, command = tmp_path / "shaped", " ".join(started["wan"].command)
    far = load_cluster(folder / "cluster.json")
    for name, spec in started.items():
        region = name.partition(".")[0]
        seen = f"--cluster {folder}/cluster.{region}.json" in " ".join(spec.command)
        assert seen == (region in ("eu", "us")), "workers speak to their region's server, without a proxy"
    for region in ("eu", "us"):
        near = load_cluster(folder / f"cluster.{region}.json")
        pairs = [(near.global_server, far.global_server), *zip(near.global_shards, far.global_shards, strict=True)]
        ports = ",".join(f"{here.port}:{there.port}" for here, there in pairs)
        assert f"12500000 0.005 127.0.0.1 {ports}" in command and len(pairs) == 2
        assert near.regions == far.regions
    assert started["wan"].role == "helper"
