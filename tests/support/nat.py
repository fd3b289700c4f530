"""Stands for a machine that translates addresses: hands on what arrives at a server's address to where it listens."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator

from geotrain.config import Address


@contextlib.contextmanager
def translated(addresses: Iterable[Address]) -> Iterator[None]:
    """Hand on connections to `host` and `port` of these addresses to `bind` and `bind_port`, during the block."""
    with contextlib.ExitStack() as stack:
        for address in addresses:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            listener = stack.enter_context(socket.create_server((address.host, address.port), family=family))
            threading.Thread(target=_accept, args=(listener, address.listening), daemon=True).start()
        yield


def _accept(listener: socket.socket, inside: tuple[str, int]) -> None:
    with contextlib.suppress(OSError):  # the block was left
        while True:
            outer, _ = listener.accept()
            with contextlib.suppress(OSError):  # nobody listens yet
                try:
                    inner = socket.create_connection(inside)
                except OSError:
                    outer.close()
                    raise
                threading.Thread(target=_connect, args=(outer, inner), daemon=True).start()


def _connect(outer: socket.socket, inner: socket.socket) -> None:
    with outer, inner:
        back = threading.Thread(target=_copy, args=(inner, outer), daemon=True)
        back.start()
        _copy(outer, inner)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
