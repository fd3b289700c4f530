"""The control socket of a site on another machine than the launcher's: a Unix socket in the run's folder, by which
relays (what ssh runs there) speak with the process that keeps the site.

A relay sends one line, its `LaunchRequest`, then commands, a line each. It receives lines of JSON:

    {"attached": <process id>}              it is attached to the living site from now on
    {"refused": <reason>}                   it may not attach
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
from geotrain.launch.supervisor import STOP_COMMAND, RunOutcome, Supervisor

MOST_RELAYS = 8  # those whose connections are lost count until that is noticed
MOST_LINE_BYTES = 16 << 20
LAST_LINE_S = 2.0  # a relay takes the last line in this time, or not at all
STOPPED = 128 + signal.SIGTERM


@contextlib.contextmanager
def _address(folder: Path, site: str) -> Iterator[str]:
    """Give the socket's address, by a descriptor of its folder: an address has 107 characters at most."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_name(site)}"
    finally:
        os.close(fd)


def _name(site: str) -> str:
    return f".control-{site}"


# ---------------------------------------------------------------------------------------------- the site's side


class ControlSocket:
    """The control socket of the process that keeps a site; a context manager. Only the holder of the site's lock may
    make one.

    Only commands of the relay that attached last are executed, since those of earlier ones may come late.
    """

    def __init__(self, folder: Path, request: LaunchRequest) -> None:
        self.folder, self.request = folder, request
        self.site = "-".join(request.sites)
        self._relays: dict[socket.socket, bytes] = {}  # → the beginning of a line that it has not ended
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
        self._listener.listen(MOST_RELAYS)
        self._listener.setblocking(False)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        (self.folder / _name(self.site)).unlink(missing_ok=True)
        for each in (*self._relays, self._listener):
            each.close()

    def serve_in(self, supervisor: Supervisor) -> None:
        """Serve relays while this supervisor waits."""
        self._supervisor = supervisor
        supervisor.watch(self._listener.fileno(), self._on_relay)

    def say(self, line: str) -> None:
        """Send a line to all relays, and print it to the log."""
        with contextlib.suppress(OSError):  # the disk may be full
            print(line, flush=True)
        for relay in list(self._attached):
            self._tell(relay, say=line)

    def end(self, outcome: RunOutcome) -> None:
        """Send how the site ended to all relays, also to those that have not been served yet."""
        self._supervisor = None
        with contextlib.suppress(BlockingIOError):
            while len(self._relays) < 2 * MOST_RELAYS:
                self._relays[self._listener.accept()[0]] = b""
        for relay in list(self._relays):
            relay.settimeout(LAST_LINE_S)
            self._tell(relay, ended=outcome.code, reason=outcome.reason)

    def _on_relay(self) -> None:
        with contextlib.suppress(BlockingIOError):
            relay, _ = self._listener.accept()
            relay.setblocking(False)
            self._relays[relay] = b""
            assert self._supervisor is not None
            self._supervisor.watch(relay.fileno(), partial(self._on_bytes, relay))
            if len(self._relays) > MOST_RELAYS:
                self._drop(next(iter(self._relays)))

    def _on_bytes(self, relay: socket.socket) -> RunOutcome | None:
        try:
            words = relay.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError:
            words = b""
        *lines, rest = (self._relays[relay] + words).split(b"\n")
        self._relays[relay] = rest
        for line in lines:
            if outcome := self._on_line(relay, line + b"\n"):
                return outcome
        if (not words or len(rest) > MOST_LINE_BYTES) and relay in self._relays:
            self._drop(relay)
        return None

    def _on_line(self, relay: socket.socket, line: bytes) -> RunOutcome | None:
        if relay not in self._attached:
            return self._on_request(relay, line)
        if line == STOP_COMMAND and relay is self._attached[-1]:
            return RunOutcome(STOPPED, "stopped by its launcher")
        return None

    def _on_request(self, relay: socket.socket, line: bytes) -> RunOutcome | None:
        try:
            asked = LaunchRequest.from_line(line)
            if not asked.resume and asked.launch != self.request.launch:
                raise ConfigError(
                    f"{self.folder}: {self.site} of a run of this name lives here (process {os.getpid()}): attach to "
                    "it with --resume, which also brings it back where it was stopped, or give this run another name"
                )
        except ConfigError as error:
            self._tell(relay, refused=str(error))
            return None
        if replace(asked, resume=self.request.resume, launch=self.request.launch) != self.request:
            self.say(f"{self.site} is stopped, and started again as its launcher asks now")
            return RunOutcome(STOPPED, "another configuration was asked for")
        self.request = replace(self.request, launch=asked.launch)
        self._attached.append(relay)
        self._tell(relay, attached=os.getpid())
        return None

    def _tell(self, relay: socket.socket, **what: Any) -> None:
        """Send a line to a relay. One that does not take it is dropped: the site must not wait for it."""
        try:
            relay.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            self._drop(relay)

    def _drop(self, relay: socket.socket) -> None:
        if self._supervisor is not None:
            self._supervisor.unwatch(relay.fileno())
        del self._relays[relay]
        if relay in self._attached:
            self._attached.remove(relay)
        relay.close()


# --------------------------------------------------------------------------------------------- the relay's side


def attach(folder: Path, site: str) -> socket.socket | None:
    """Connect to the living site; None if none lives here. One that was killed may have left its socket."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _address(folder, site) as address:
            link.connect(address)
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        link.close()
        return None
    return link


def follow(link: socket.socket, request: bytes, commands: int) -> int | None:
    """Send the request, pass on commands, and print what the site sends, until it has ended or `commands` ends.

    request: its line. commands: a file descriptor. Returns the exit code: the site's; 0 if only the commands have
    ended, which leaves the site as it is. None: it has ended before it took this relay, and may be started anew.
    """
    link.sendall(request)
    attached = stopping = False
    words, sources = b"", [link.fileno(), commands]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if commands in ready:
            command = os.read(commands, 4096)
            if not command and not stopping:
                return 0
            stopping = stopping or STOP_COMMAND in command
            if not command:
                sources.remove(commands)
            with contextlib.suppress(OSError):  # its last word is read below
                link.sendall(command)
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
