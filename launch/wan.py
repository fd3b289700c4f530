"""Emulated links for runs on one machine: each region in a network namespace of its own, with bandwidth and delay.

A link is two TUN devices: one in a region's namespace, one here, where the global server is, or in another region's,
for a worker that spans both. The kernel's token bucket limits the rate at which each hands out packets; `pump.py`
carries them across after half the round trip (many kernels lack `netem`). Namespaces have no names, devices are not
persistent: the kernel removes both with the last process that uses them, so even a killed run leaves nothing behind.
Addresses are of 198.18.0.0/15, kept for such tests (RFC 2544).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from geotrain.config import LinkConfig
from geotrain.launch import pump
from geotrain.launch.supervise import LaunchError, Process, guarded

TUN_DEVICE = Path("/dev/net/tun")
TUNSETIFF = 0x400454CA
IFF_TUN_WITHOUT_HEADER = 0x1001
CLONE_NEWNET = 0x40000000
DEVICE = "geo"  # within a namespace: the one that leads here; those to other regions have a number
NETWORKS = 256  # 198.18.n.0/24, one for each run on this machine
PACKET_S = 0.002  # a packet occupies the link for about this long: few packets, yet small ones wait little
MTU_BYTES = (1500, 60000)
QUEUE_S = 0.1  # what may wait in front of a link before packets are lost

Result = TypeVar("Result")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Wan:
    """Links that are up. namespaces, addresses: by region. process: the pump, to be started."""

    global_address: str
    addresses: Mapping[str, str]
    namespaces: Mapping[str, int]
    process: Process


@dataclass(frozen=True)
class Shape:
    """How a rate and a round trip are set up. Sizes in bytes."""

    rate_bytes_s: int
    one_way_s: float
    mtu: int
    burst: int
    limit: int


def shape(link: LinkConfig) -> Shape:
    rate = int(link.gbps * 1e9 / 8)
    mtu = min(max(int(rate * PACKET_S), MTU_BYTES[0]), MTU_BYTES[1])
    burst = max(2 * mtu, rate // 250)  # the kernel refills the bucket once a tick
    return Shape(rate, link.rtt_ms / 2000, mtu, burst, max(8 * mtu, int(rate * QUEUE_S)))


def cannot_emulate() -> str:
    """Why links cannot be emulated on this machine; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"program {program!r} is missing; install iproute2"
    if not TUN_DEVICE.exists():
        return f"{TUN_DEVICE} is missing; load the kernel module 'tun'"
    try:
        _in_own_thread(_unshare_network)
    except OSError as error:
        return f"the kernel gives no network namespace: {error.strerror}"
    return ""


@contextlib.contextmanager
def emulated(
    links: Mapping[str, LinkConfig], *, between: Sequence[LinkConfig] = (), control: Path | None = None
) -> Iterator[Wan]:
    """Set up the links, by region, to the global server on this side, and those between two regions.

    control: where the pump makes a FIFO for commands, see `pump.py` and `disturb`; None: it takes none. A link
    between two regions is called one-other there.
    Raises LaunchError; then nothing is left.
    """
    regions = tuple(dict.fromkeys((*links, *(region for link in between for region in link.regions))))
    with contextlib.ExitStack() as opened:
        number, here = _free_network(tuple(links), opened)
        global_address = f"198.18.{number}.1"
        addresses = {region: f"198.18.{number}.{index + 2}" for index, region in enumerate(regions)}
        namespaces, pump_arguments, keeps = {}, [], []
        for region in regions:
            namespaces[region] = _in_own_thread(_new_namespace)
            opened.callback(os.close, namespaces[region])

        def far_end(device: str, region: str, peer: str, shaped: Shape) -> int:
            fd = _in_own_thread(partial(_far_end, namespaces[region], device, addresses[region], peer, shaped))
            opened.callback(os.close, fd)
            return fd

        for index, (region, link) in enumerate(links.items()):
            shaped = shape(link)
            there = far_end(DEVICE, region, global_address, shaped)
            _set_up(_device(number, index), global_address, addresses[region], shaped)
            keeps += [here[region], there]
            pump_arguments += [region, str(here[region]), str(there), str(shaped.one_way_s)]
        for index, link in enumerate(between):
            (one, other), shaped = link.regions, shape(link)
            first = far_end(f"{DEVICE}{index}", one, addresses[other], shaped)
            second = far_end(f"{DEVICE}{index}", other, addresses[one], shaped)
            keeps += [first, second]
            pump_arguments += [f"{one}-{other}", str(first), str(second), str(shaped.one_way_s)]
        command = (
            sys.executable,
            "-I",
            "-S",
            str(Path(pump.__file__).resolve()),
            str(control or "-"),
            *pump_arguments,
        )
        process = Process("wan", guarded(command), role="helper", keeps=tuple(keeps))
        yield Wan(global_address, addresses, namespaces, process)


def disturb(control: Path, region: str, what: str, *numbers: float) -> None:
    """Cut a running link, slow it down, impair its packets: `what`, `numbers` as in `pump.py`. Raises OSError."""
    fifo = os.open(control, os.O_WRONLY | os.O_NONBLOCK)  # fails where nobody reads
    try:
        os.write(fifo, f"{region} {what} {' '.join(map(str, numbers))}\n".encode())
    finally:
        os.close(fifo)


def _free_network(regions: tuple[str, ...], opened: contextlib.ExitStack) -> tuple[int, dict[str, int]]:
    """A network number that no other run uses, and this side's device of each region."""
    for number in range(NETWORKS):
        devices: dict[str, int] = {}
        try:
            for index, region in enumerate(regions):
                devices[region] = _open_tun(_device(number, index))
        except OSError as error:
            for fd in devices.values():
                os.close(fd)
            if error.errno == errno.EBUSY:  # another run's
                continue
            raise LaunchError(f"emulated links: no TUN device: {error.strerror}") from None
        for fd in devices.values():
            opened.callback(os.close, fd)
        return number, devices
    raise LaunchError(f"emulated links: all {NETWORKS} networks are in use by other runs")


def _device(number: int, index: int) -> str:
    return f"geo{number}-{index}"


def _new_namespace() -> int:
    """In a thread of its own. Gives its file descriptor."""
    _unshare_network()
    _run("ip link set lo up")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _far_end(namespace: int, name: str, address: str, peer: str, shaped: Shape) -> int:
    """In a thread of its own: a new device in a namespace. Gives its file descriptor."""
    _checked(_libc.setns(namespace, CLONE_NEWNET))
    device = _open_tun(name)
    try:
        _set_up(name, address, peer, shaped)
    except LaunchError:
        os.close(device)
        raise
    return device


def _set_up(device: str, address: str, peer: str, shaped: Shape) -> None:
    packets = max(16, shaped.limit // shaped.mtu)
    _run(f"ip link set {device} mtu {shaped.mtu} txqueuelen {packets} addrgenmode none")
    _run(f"ip addr add {address} peer {peer} dev {device}")
    _run(f"ip link set {device} up")
    bucket = f"rate {shaped.rate_bytes_s}bps burst {shaped.burst} limit {shaped.limit}"
    _run(f"tc qdisc add dev {device} root tbf {bucket}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30.0)
    if done.returncode != 0:
        raise LaunchError(f"emulated links: {command!r} failed: {done.stderr.strip()}")


def _open_tun(name: str) -> int:
    fd = os.open(TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN_WITHOUT_HEADER))
    except OSError:
        os.close(fd)
        raise
    return fd


def _unshare_network() -> None:
    _checked(_libc.unshare(CLONE_NEWNET))


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_own_thread(work: Callable[[], Result]) -> Result:
    """A namespace is entered by a thread, and what that thread starts: this one ends with its work."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()
