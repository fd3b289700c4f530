"""Emulated links for runs on one machine. Each region has its own network namespace, with links of limited bandwidth
and of some delay.

A link consists of two TUN devices. One is in a region's namespace; the other is in this process's namespace, where
the global server is, or in another region's namespace, for a worker that spans both. The kernel's token bucket limits
the rate at which each device hands out packets, and `pump.py` carries them across after half the round trip. (`netem`
would do both, but many kernels lack it.)

Namespaces have no names and devices are not persistent, so the kernel removes both with the last process that uses
them: even a killed run leaves nothing behind. Addresses are of 198.18.0.0/15, which is reserved for such tests (RFC
2544).
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
from geotrain.emulate import pump

TUN_DEVICE = Path("/dev/net/tun")
TUNSETIFF = 0x400454CA
IFF_TUN_WITHOUT_HEADER = 0x1001
CLONE_NEWNET = 0x40000000
DEVICE = "geo"  # in a region's namespace, the device of the link to the global server; others have a number behind it
NETWORKS = 256  # 198.18.n.0/24, one for each run on this machine
COMMAND_S = 30.0  # of ip or tc
PACKET_S = 0.002  # a full packet occupies the link so long: there are few packets, but small ones need not wait long
MTU_BYTES = (1500, 60000)  # the least and the most
QUEUE_S = 0.1  # so much traffic may wait in front of a link before packets are lost

Result = TypeVar("Result")
_libc = ctypes.CDLL(None, use_errno=True)


class EmulationError(RuntimeError):
    """A link cannot be set up. Says which step failed, and why."""


@dataclass(frozen=True)
class Wan:
    """Links that are set up.

    addresses, namespaces (as file descriptors): by region. pump_command: must be started and inherit the file
    descriptors pump_fds, because packets are carried only while it runs.
    """

    global_address: str
    addresses: Mapping[str, str]
    namespaces: Mapping[str, int]
    pump_command: tuple[str, ...]
    pump_fds: tuple[int, ...]


@dataclass(frozen=True)
class LinkShape:
    """The parameters by which a rate and a round trip are emulated. mtu, burst and limit (of the queue) in bytes."""

    rate_bytes_s: int
    one_way_s: float
    mtu: int
    burst: int
    limit: int


def shape(link: LinkConfig) -> LinkShape:
    """Compute the parameters that emulate a link of the cluster file."""
    rate = int(link.gbps * 1e9 / 8)
    mtu = min(max(int(rate * PACKET_S), MTU_BYTES[0]), MTU_BYTES[1])
    burst = max(2 * mtu, rate // 250)  # the kernel refills the bucket once a tick, so it must hold a tick's bytes
    return LinkShape(rate, link.rtt_ms / 2000, mtu, burst, max(8 * mtu, int(rate * QUEUE_S)))


def cannot_emulate() -> str:
    """Return the reason why links cannot be emulated on this machine; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}.items():
        if shutil.which(program) is None:
            return f"program {program!r} is missing; install {package}"
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
    """Set up links during the block, and give what is needed to use them.

    links: by region, its link to the global server in this process's namespace. between: links between two regions.
    control: the path where the pump makes a FIFO for commands, see `pump.py` and `disturb`; None: it takes none.
    There, a link between two regions is called one-other.
    Raises EmulationError; then nothing is left behind.
    """
    regions = tuple(dict.fromkeys((*links, *(region for link in between for region in link.regions))))
    with contextlib.ExitStack() as opened:
        number, near_ends = _free_network(tuple(links), opened)
        global_address = f"198.18.{number}.1"
        addresses = {region: f"198.18.{number}.{index + 2}" for index, region in enumerate(regions)}
        namespaces: dict[str, int] = {}
        pump_arguments: list[str] = []
        pump_fds: list[int] = []
        for region in regions:
            namespaces[region] = _in_own_thread(_new_namespace)
            opened.callback(os.close, namespaces[region])

        def far_end(device: str, region: str, peer: str, shaped: LinkShape) -> int:
            fd = _in_own_thread(partial(_far_end, namespaces[region], device, addresses[region], peer, shaped))
            opened.callback(os.close, fd)
            return fd

        def carry(name: str, first: int, second: int, shaped: LinkShape) -> None:
            pump_fds.extend((first, second))
            pump_arguments.extend((name, str(first), str(second), str(shaped.one_way_s)))

        for index, (region, link) in enumerate(links.items()):
            shaped = shape(link)
            there = far_end(DEVICE, region, global_address, shaped)
            _set_up(_device(number, index), global_address, addresses[region], shaped)
            carry(region, near_ends[region], there, shaped)
        for index, link in enumerate(between):
            (one, other), shaped = link.regions, shape(link)
            first = far_end(f"{DEVICE}{index}", one, addresses[other], shaped)
            carry(f"{one}-{other}", first, far_end(f"{DEVICE}{index}", other, addresses[one], shaped), shaped)
        script = str(Path(pump.__file__).resolve())
        command = (sys.executable, "-I", "-S", script, str(control or "-"), *pump_arguments)
        yield Wan(global_address, addresses, namespaces, command, tuple(pump_fds))


def in_network(namespace: int, command: Sequence[str]) -> tuple[str, ...]:
    """Wrap a command line to run in a network namespace, whose file descriptor it must inherit."""
    return ("nsenter", f"--net=/proc/self/fd/{namespace}", "--", *command)


def disturb(control: Path, region: str, what: str, *numbers: float) -> None:
    """Cut a running link, slow it down or impair its packets. what, numbers: as in `pump.py`.

    Raises OSError, also if no pump is running.
    """
    fifo = os.open(control, os.O_WRONLY | os.O_NONBLOCK)  # fails if nobody reads
    try:
        os.write(fifo, f"{region} {what} {' '.join(map(str, numbers))}\n".encode())
    finally:
        os.close(fifo)


def _free_network(regions: tuple[str, ...], opened: contextlib.ExitStack) -> tuple[int, dict[str, int]]:
    """Find a network number that no other run uses, and for each region the open device at this end of its link.

    That a device's name is taken shows that another run uses the number.
    """
    for number in range(NETWORKS):
        with contextlib.ExitStack() as tried:
            devices: dict[str, int] = {}
            try:
                for index, region in enumerate(regions):
                    devices[region] = _open_tun(_device(number, index))
                    tried.callback(os.close, devices[region])
            except OSError as error:
                if error.errno == errno.EBUSY:  # another run's
                    continue
                raise EmulationError(f"emulated links: no TUN device: {error.strerror}") from None
            opened.enter_context(tried.pop_all())
            return number, devices
    raise EmulationError(f"emulated links: all {NETWORKS} networks are in use by other runs")


def _device(number: int, index: int) -> str:
    return f"geo{number}-{index}"


def _new_namespace() -> int:
    """Make a namespace and return its file descriptor. Must run in a thread of its own."""
    _unshare_network()
    _run("ip link set lo up")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _far_end(namespace: int, name: str, address: str, peer: str, shaped: LinkShape) -> int:
    """Make a device in a namespace and return its file descriptor. Must run in a thread of its own."""
    _checked(_libc.setns(namespace, CLONE_NEWNET))
    device = _open_tun(name)
    try:
        _set_up(name, address, peer, shaped)
    except EmulationError:
        os.close(device)
        raise
    return device


def _set_up(device: str, address: str, peer: str, shaped: LinkShape) -> None:
    packets = max(16, shaped.limit // shaped.mtu)
    _run(f"ip link set {device} mtu {shaped.mtu} txqueuelen {packets} addrgenmode none")
    _run(f"ip addr add {address} peer {peer} dev {device}")
    _run(f"ip link set {device} up")
    bucket = f"rate {shaped.rate_bytes_s}bps burst {shaped.burst} limit {shaped.limit}"
    _run(f"tc qdisc add dev {device} root tbf {bucket}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode != 0:
        raise EmulationError(f"emulated links: {command!r} failed: {done.stderr.strip()}")


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
    """Run something that enters a network namespace.

    Only the calling thread enters it, and what that thread starts later. So the work is done in a thread that ends
    with it, and the rest of the process stays where it was.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()
