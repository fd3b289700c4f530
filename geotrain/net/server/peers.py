"""Says who is at the other end of a connection: its address, and whether that is this machine."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from urllib.parse import unquote


def plain_peer(peer: str) -> str:
    """Rewrite gRPC's name of a peer, "ipv4:1.2.3.4:5" or "ipv6:%5B::1%5D:5", as `TcpCounters` has it."""
    plain = unquote(peer.partition(":")[2]).replace("[", "").replace("]", "")
    return plain.removeprefix("::ffff:")


# Never routed: the addresses of links that `geotrain.emulate` makes on this machine.
EMULATED = ipaddress.ip_network("198.18.0.0/15")


def is_this_machine(peer: str) -> bool:
    """Whether a peer, "host:port", has one of this machine's own addresses."""
    host = ipaddress.ip_address(peer.rpartition(":")[0])
    if host.is_loopback or host in EMULATED:
        return True
    with socket.socket(socket.AF_INET6 if host.version == 6 else socket.AF_INET) as probe, suppress(OSError):
        probe.bind((str(host), 0))  # only possible with an address of this machine
        return True
    return False
