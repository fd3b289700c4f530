"""Tells whether a port of this machine is free."""

from __future__ import annotations

import errno
import socket


def why_not_bound(host: str, port: int) -> str:
    """Say why nothing could listen at this address of the machine now, and what to do; empty: something could.

    host: a name, an IPv4 or IPv6 address; empty: all of the machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: a port that was closed a moment ago counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        remedy = "stop what uses the port, or choose another"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "no interface of this machine has it; set `bind` where it is that of a NAT or a container's host"
        elif isinstance(error, socket.gaierror):
            remedy = "correct the name"
        return f"{error.strerror or error}; {remedy}"
    return ""
