"""Finds the network interfaces that gloo and NCCL will use on this host, and how fast they are."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

RDMA = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Interface:
    """A network interface that is up. mbit_s: None where its driver does not know, as of a virtual one."""

    name: str
    address: str
    mbit_s: int | None = None

    def __str__(self) -> str:
        rate = "at an unknown rate" if self.mbit_s is None else f"{self.mbit_s:,} Mbit/s"
        return f"{self.name} ({self.address}, {rate})"


@dataclass(frozen=True)
class Networks:
    """The interfaces of a host, and those that the ranks of a worker of several hosts use. None: not known. rdma: by
    which NCCL sends data where there are some, with their rates."""

    interfaces: tuple[Interface, ...] = ()
    gloo: Interface | None = None
    nccl: Interface | None = None
    rdma: tuple[str, ...] = ()

    def __str__(self) -> str:
        data = f", its data over {', '.join(self.rdma)}" if self.rdma else ""
        return f"gloo uses {self.gloo or 'an unknown interface'}, NCCL {self.nccl or 'an unknown one'}{data}"


def networks_to(master: str, env: Mapping[str, str]) -> Networks:
    """Find what ranks would use here whose rank 0 is at this host. env: theirs."""
    found, stats = list[Interface](), psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        usable = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
        if usable and name in stats and stats[name].isup:
            found.append(Interface(name, usable[0], stats[name].speed or None))
    by_name = {each.name: each for each in found}
    gloo = by_name.get(env.get("GLOO_SOCKET_IFNAME", "").partition(",")[0] or interface_to(master) or "")
    nccl = by_name.get(nccl_interface(list(by_name), env.get("NCCL_SOCKET_IFNAME", "")))
    return Networks(tuple(found), gloo, nccl, () if env.get("NCCL_IB_DISABLE") == "1" else _rdma())


def _rdma() -> tuple[str, ...]:
    ports = sorted(RDMA.glob("*/ports/*"))
    active = [port for port in ports if "ACTIVE" in (port / "state").read_text()]
    return tuple(f"{port.parents[1].name} ({(port / 'rate').read_text().strip()})" for port in active)


def nccl_interface(names: Sequence[str], stated: str = "") -> str:
    """The first interface that NCCL takes of these, by its manual; "": none. stated: NCCL_SOCKET_IFNAME, a list of
    beginnings of names, of names after "=", of what to leave out after "^"."""
    for rule in (stated,) if stated else ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
        leaves_out, exact = rule.startswith("^"), rule.lstrip("^").startswith("=")
        parts = rule.lstrip("^=").split(",")
        for name in names:
            if any(name == part if exact else name.startswith(part) for part in parts) != leaves_out:
                return name
    return ""


def address_to(host: str, port: int = 9) -> str | None:
    """This machine's address on the way to a host; None if there is no way. Nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as unsent:
            unsent.connect(target)  # of a UDP socket: it makes the kernel choose the address it would send from
            return str(unsent.getsockname()[0])
    except OSError:
        return None


def interface_to(host: str) -> str | None:
    """The network interface that has this machine's address on the way to a host; None if there is no way."""
    here = (address_to(host) or "").partition("%")[0]
    interfaces = psutil.net_if_addrs().items() if here else ()
    return next(
        (name for name, found in interfaces if here in [each.address.partition("%")[0] for each in found]), None
    )
