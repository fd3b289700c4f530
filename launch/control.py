"""The control socket of a site on another machine than the launcher's: a Unix socket in the run's folder, by which
fronts (what ssh runs there) speak with the process that keeps the site.

A front says one line, its `LaunchRequest`, then orders, a line each. It is told lines of JSON:

    {"attached": <process id>}              it speaks with the living site from now on
    {"refused": <reason>}                   it may not
    {"say": <line>}                         what happens to the site's processes
    {"ended": <exit code>, "reason": …}     the site has ended
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from geotrain.config import EXIT_FOR_GOOD, ConfigError
from geotrain.launch.site_processes import LaunchRequest
from geotrain.launch.supervisor import STOP_ORDER, RunOutcome, Supervisor

MOST_FRONTS = 8  # those whose connections are lost count until they are noticed
MOST_LINE_BYTES = 16 << 20
LAST_WORD_S = 2.0  # a front takes the last line in this time, or not at all
STOPPED = 128 + signal.SIGTERM


@contextlib.contextmanager
def _address(folder: Path, site: str) -> Iterator[str]:
    """The socket's address, by a descriptor of its folder: an address has 107 characters at most."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_name(site)}"
    finally:
        os.close(fd)


def _name(site: str) -> str:
    return f".control-{site}"


# ---------------------------------------------------------------------------------------------- the site's end


class ControlSocket:
    """The socket of the process that keeps a site, who alone may make it: it holds the site's lock. A context
    manager.

    Orders count from the front that attached last, since those of earlier ones may come late.
    """

    def __init__(self, folder: Path, request: LaunchRequest) -> None:
        self.folder, self.request = folder, request
        self.site = "-".join(request.sites)
        self._fronts: dict[socket.socket, bytes] = {}  # → the beginning of a line that it has not ended
        self._attached: list[socket.socket] = []
        self._supervisor: Supervisor | None = None

    def __enter__(self) -> ControlSocket:
        (self.folder / _name(self.site)).unlink(missing_ok=True)  # of one who was killed
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        others = os.umask(0o177)  # who may write to the socket may stop the site
        try:
            with _address(self.folder, self.site) as address:
                self._listener.bind(address)
        finally:
            os.umask(others)
        self._listener.listen(MOST_FRONTS)
        self._listener.setblocking(False)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        (self.folder / _name(self.site)).unlink(missing_ok=True)
        for each in (*self._fronts, self._listener):
            each.close()

    def serve_in(self, supervisor: Supervisor) -> None:
        """Serve fronts whenever this supervisor waits."""
        self._supervisor = supervisor
        supervisor.watch(self._listener.fileno(), self._on_front)

    def say(self, line: str) -> None:
        """Tell all fronts, and the log."""
        with contextlib.suppress(OSError):  # the disk may be full
            print(line, flush=True)
        for front in list(self._attached):
            self._tell(front, say=line)

    def end(self, outcome: RunOutcome) -> None:
        """Tell the last word to all fronts, also to those that nobody has served yet."""
        self._supervisor = None
        with contextlib.suppress(BlockingIOError):
            while len(self._fronts) < 2 * MOST_FRONTS:
                self._fronts[self._listener.accept()[0]] = b""
        for front in list(self._fronts):
            front.settimeout(LAST_WORD_S)
            self._tell(front, ended=outcome.code, reason=outcome.reason)

    def _on_front(self) -> None:
        with contextlib.suppress(BlockingIOError):
            front, _ = self._listener.accept()
            front.setblocking(False)
            self._fronts[front] = b""
            assert self._supervisor is not None
            self._supervisor.watch(front.fileno(), partial(self._on_words, front))
            if len(self._fronts) > MOST_FRONTS:
                self._drop(next(iter(self._fronts)))

    def _on_words(self, front: socket.socket) -> RunOutcome | None:
        try:
            words = front.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            words = b""
        *lines, rest = (self._fronts[front] + words).split(b"\n")
        self._fronts[front] = rest
        for line in lines:
            if outcome := self._on_line(front, line + b"\n"):
                return outcome
        if (not words or len(rest) > MOST_LINE_BYTES) and front in self._fronts:
            self._drop(front)
        return None

    def _on_line(self, front: socket.socket, line: bytes) -> RunOutcome | None:
        if front not in self._attached:
            return self._on_request(front, line)
        if line == STOP_ORDER and front is self._attached[-1]:
            return RunOutcome(STOPPED, "stopped by its launcher")
        return None

    def _on_request(self, front: socket.socket, line: bytes) -> RunOutcome | None:
        try:
            asked = LaunchRequest.from_line(line)
            if not asked.resume and asked.launch != self.request.launch:
                raise ConfigError(
                    f"{self.folder}: {self.site} of a run of this name lives here (process {os.getpid()}): attach to "
                    "it with --resume, which also brings it back where it was stopped, or give this run another name"
                )
        except ConfigError as error:
            self._tell(front, refused=str(error))
            return None
        if replace(asked, resume=self.request.resume, launch=self.request.launch) != self.request:
            self.say(f"{self.site} is stopped, and started again as its launcher asks now")
            return RunOutcome(STOPPED, "another configuration was asked for")
        self.request = replace(self.request, launch=asked.launch)
        self._attached.append(front)
        self._tell(front, attached=os.getpid())
        return None

    def _tell(self, front: socket.socket, **what: Any) -> None:
        """A front that does not take its lines is let go: the site must not wait for it."""
        try:
            front.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            self._drop(front)

    def _drop(self, front: socket.socket) -> None:
        if self._supervisor is not None:
            self._supervisor.unwatch(front.fileno())
        del self._fronts[front]
        if front in self._attached:
            self._attached.remove(front)
        front.close()


# ---------------------------------------------------------------------------------------------- the front's end


def attach(folder: Path, site: str) -> socket.socket | None:
    """A connection to the living site; None if none lives here, though one that was killed may have left its
    socket."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(folder, site) as address:
            link.connect(address)
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        link.close()
        return None
    return link


def follow(link: socket.socket, request: bytes, orders: int) -> int | None:
    """Say the request, pass on orders, and print what is told, until the site has ended or `orders` ends.

    request: its line. orders: a file descriptor. Returns the exit code: the site's; 0 if only the orders have ended,
    which leaves the site as it is. None: it has ended before it took this front, and may be started anew.
    """
    link.sendall(request)
    attached = stopping = False
    words, sources = b"", [link.fileno(), orders]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if orders in ready:
            order = os.read(orders, 4096)
            if not order and not stopping:
                return 0
            stopping = stopping or STOP_ORDER in order
            if not order:
                sources.remove(orders)
            with contextlib.suppress(OSError):  # its last word is read below
                link.sendall(order)
        if link.fileno() not in ready:
            continue
        try:
            heard = link.recv(1 << 16)
        except ConnectionResetError:
            heard = b""
        *lines, words = (words + heard).split(b"\n")
        for line in map(json.loads, lines):
            match line:
                case {"attached": process}:
                    attached = True
                    print(f"attached to process {process}", flush=True)
                case {"say": what}:
                    print(what, flush=True)
                case {"refused": reason}:
                    print(f"geotrain: {reason}", file=sys.stderr, flush=True)
                    return EXIT_FOR_GOOD
                case {"ended": code, "reason": reason} if attached or stopping:
                    if reason:
                        print(f"geotrain: {reason}", file=sys.stderr, flush=True)
                    return int(code)
        if not heard:
            if not attached:
                return None
            print("geotrain: the process that kept this site was killed", file=sys.stderr, flush=True)
            return 1
