"""Emulated links: shapes as numbers; with root, links that are measured."""

import fcntl
import json
import math
import os
import socket
import subprocess
import sys
import termios
import time
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from geotrain.config import LinkConfig
from geotrain.emulate import wan
from geotrain.launch.site_processes import pump_process
from geotrain.launch.supervisor import ProcessSpec, Supervisor, guarded
from tests.support.net_worlds import wait_for
from tests.support.process_trees import until

# In a region's namespace: answers each datagram; takes in what a TCP connection brings, and answers with its CRC-32.
FAR_END = """
import socket, sys, threading, zlib
address = sys.argv[1]
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind((address, 7001))
listener = socket.create_server((address, 7002))
def echo():
    while True:
        data, peer = datagrams.recvfrom(2048)
        datagrams.sendto(data, peer)
threading.Thread(target=echo, daemon=True).start()
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    crc = 0
    while data := connection.recv(1 << 20):
        crc = zlib.crc32(data, crc)
    connection.sendall(crc.to_bytes(4))
    connection.close()
"""

HOLDS_LINKS = """
import sys
from pathlib import Path
from geotrain.config import LinkConfig
from geotrain.emulate import wan
from geotrain.launch.site_processes import pump_process
from geotrain.launch.supervisor import ProcessSpec, Supervisor, guarded
links = {"eu": LinkConfig(regions=("eu", "global"), gbps=1.0, rtt_ms=1.0)}
with wan.emulated(links, control=Path(sys.argv[1]) / "control") as made, Supervisor(Path(sys.argv[1])) as supervisor:
    supervisor.start(pump_process(made))
    namespace = made.namespaces["eu"]
    supervisor.start(ProcessSpec("eu-0", guarded(["sleep", "300"], namespace), inherited_fds=(namespace,)))
    print(made.global_address, flush=True)
    supervisor.wait()
"""


def link(region: str, gbps: float, rtt_ms: float) -> LinkConfig:
    return LinkConfig(regions=(region, "global"), gbps=gbps, rtt_ms=rtt_ms)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def devices() -> set[str]:
    """The emulated devices of this side."""
    return {name for _, name in socket.if_nameindex() if name.startswith("geo")}


@contextmanager
def running(links: dict[str, LinkConfig], logs: Path) -> Iterator[wan.Wan]:
    """Links with the pump and a far end in each region running."""
    with wan.emulated(links, control=logs / "control") as made, Supervisor(logs) as supervisor:
        supervisor.start(pump_process(made))
        for region in links:
            far_end = (sys.executable, "-I", "-S", "-c", FAR_END, made.addresses[region])
            namespace = made.namespaces[region]
            supervisor.start(ProcessSpec(region, guarded(far_end, namespace), inherited_fds=(namespace,)))
        assert until(lambda: all("ready" in (logs / f"{r}.log").read_text() for r in links))
        assert until((logs / "control").exists)
        yield made


def round_trips_ms(address: str, count: int) -> list[float]:
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.settimeout(60.0)
        for _ in range(count):
            begin = time.perf_counter()
            out.sendto(b"x" * 56, (address, 7001))
            out.recvfrom(2048)
            times.append((time.perf_counter() - begin) * 1e3)
    return times


def arrives_whole(address: str, data: bytes) -> bool:
    """Sent over TCP."""
    with socket.create_connection((address, 7002), timeout=60.0) as out:
        out.sendall(data)
        out.shutdown(socket.SHUT_WR)
        return out.recv(4) == zlib.crc32(data).to_bytes(4)


def gbps_up(address: str, size_bytes: int) -> float:
    begin = time.perf_counter()
    assert arrives_whole(address, bytes(size_bytes))
    return size_bytes * 8 / (time.perf_counter() - begin) / 1e9


def echoes(address: str, count: int, least: int = 0) -> list[int]:
    """Numbered datagrams, sent at once: the numbers that come back, in their order, at least so many, until no more
    come."""
    numbers = list[int]()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        for number in range(count):
            out.sendto(number.to_bytes(2), (address, 7001))
        with suppress(TimeoutError):
            while True:
                out.settimeout(60.0 if len(numbers) < least else 1.0)
                numbers.append(int.from_bytes(out.recv(2048)))
    return numbers


def disturb(control: Path, what: str, *numbers: float) -> None:
    """Link "eu"; returns when the pump has read it, which then obeys before it carries another packet."""
    wan.disturb(control, "eu", what, *numbers)
    fifo, unread = os.open(control, os.O_RDWR | os.O_NONBLOCK), array("i", [1])
    try:
        assert until(lambda: not fcntl.ioctl(fifo, termios.FIONREAD, unread) and unread[0] == 0)
    finally:
        os.close(fifo)


def pump_report(logs: Path) -> dict[str, Any]:
    text = (logs / "wan.log").read_text()
    return dict(json.loads(text.splitlines()[-1]))


def test_the_shape_of_a_link() -> None:
    assert wan.shape(link("eu", 0.2, 100.0)) == wan.LinkShape(25_000_000, 0.05, 50_000, 100_000, 2_500_000)
    slow, fast = wan.shape(link("eu", 0.001, 0.0)), wan.shape(link("eu", 10.0, 1.0))
    assert (slow.mtu, slow.limit) == (1500, 12_500)
    assert (fast.mtu, fast.burst) == (60_000, 5_000_000)


def test_why_links_cannot_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wan.os, "geteuid", lambda: 1000)
    assert wan.cannot_emulate() == "network namespaces need root"
    monkeypatch.undo()
    monkeypatch.setattr(wan.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert wan.cannot_emulate() == "program 'ip' is missing; install iproute2"


@pytest.mark.root
def test_links_have_their_delay_and_rate(tmp_path: Path) -> None:
    assert wan.cannot_emulate() == ""
    links = {"eu": link("eu", 0.05, 60.0), "us": link("us", 0.02, 20.0)}  # which a busy machine can carry, too
    with running(links, tmp_path) as made:
        for region, asked in links.items():
            address = made.addresses[region]
            # What else the machine does makes some later: the quickest have the link's own delay and rate.
            times, rates = list[float](), list[float]()
            while min(times, default=math.inf) > asked.rtt_ms + 8.0 or max(rates, default=0.0) < 0.6 * asked.gbps:
                assert len(rates) < 60, (region, times, rates)
                times += round_trips_ms(address, 5)
                rates.append(gbps_up(address, int(asked.gbps * 1e9 / 8)))  # a second's worth
            assert min(times) >= asked.rtt_ms and max(rates) <= 1.05 * asked.gbps, region
    report = pump_report(tmp_path)
    assert report["carried_bytes"] > 8e6
    assert report["dropped_packets"] == 0
    print(f"\npump: {report}")


@pytest.mark.root
def test_a_link_is_cut_and_slowed_on_command(tmp_path: Path) -> None:
    with running({"eu": link("eu", 1.0, 4.0)}, tmp_path) as made:
        address, control = made.addresses["eu"], tmp_path / "control"
        assert echoes(address, 1, 1) == [0]
        disturb(control, "cut", 600.0)
        assert echoes(address, 1) == []
        disturb(control, "cut", 2.0)  # in place of the former
        wait_for(lambda: echoes(address, 1) == [0])
        disturb(control, "slow", 120.0, 1e6)
        assert gbps_up(address, 1_000_000) < 0.009


@pytest.mark.root
def test_several_runs_at_once_and_nothing_left(tmp_path: Path) -> None:
    before = devices()
    links = {"eu": link("eu", 1.0, 2.0)}
    with running(links, tmp_path / "a") as one, running(links, tmp_path / "b") as other:
        assert one.global_address != other.global_address
        assert len(devices() - before) == 2
        for made in (one, other):
            assert round_trips_ms(made.addresses["eu"], 1)
    assert devices() == before


@pytest.mark.root
def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    before = devices()
    process = subprocess.Popen([sys.executable, "-c", HOLDS_LINKS, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline().startswith(b"198.18.")
    assert len(devices() - before) == 1
    process.kill()
    process.wait()
    assert until(lambda: devices() == before)


@pytest.mark.root
def test_a_link_that_cannot_be_set_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, open_before = devices(), open_files()
    monkeypatch.setattr(wan.LinkShape, "__getattribute__", _no_mtu)
    with (
        pytest.raises(wan.EmulationError, match=r"'ip link set geo mtu -5 .*' failed"),
        wan.emulated({"eu": link("eu", 1, 1)}, control=tmp_path / "control"),
    ):
        pass
    assert devices() == before
    assert open_files() == open_before


def _no_mtu(self: wan.LinkShape, name: str) -> object:
    return -5 if name == "mtu" else object.__getattribute__(self, name)
