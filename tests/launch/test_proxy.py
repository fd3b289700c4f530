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
import torch

from geotrain.config import load_cluster
from geotrain.emulate import proxy, wan
from geotrain.launch.check import free_ports
from geotrain.launch.launcher import launch
from tests.support.small_runs import prepare_text, weights, write_files

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


@pytest.mark.slow
def test_a_run_without_namespaces_trains_over_shaped_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With shards, too. Regions' servers find the proxy in the global server's place, and the file of the run the
    server itself; weights are those of a run without links."""
    prepare_text(tmp_path)
    monkeypatch.setattr(wan, "cannot_emulate", lambda: "network namespaces need root")
    made: dict[str, Any] = {}
    for name in ("plain", "shaped"):
        files = write_files(tmp_path, name, 32, {"eu": [1], "us": [1]}, {"rule": {"name": "sync"}}, shards=1)
        if name == "shaped":
            raw = json.loads(files[1].read_text())
            links = [{"regions": [region, "global"], "gbps": 0.1, "rtt_ms": 10.0} for region in ("eu", "us")]
            files[1].write_text(json.dumps({**raw, "emulate_links": True, "links": links}))
        assert launch(*files) == 0
        made[name] = weights(files[0])
    for name, tensor in made["shaped"].items():
        assert torch.equal(tensor, made["plain"][name]), name
    folder = tmp_path / "shaped"
    of_run, of_region = (load_cluster(folder / f"cluster{which}.json") for which in ("", ".eu"))
    assert of_run.global_server.port != of_region.global_server.port
    carried = json.loads((folder / "logs/wan.log").read_text().splitlines()[-1])["carried_bytes"]
    deltas = 2 * 4 * sum(tensor.numel() for tensor in made["plain"].values())  # fp32, once up from each region
    assert carried > deltas
