"""One place of `geotrain probe`: a process on its machine that answers measurements, and makes them when told to.

It is spoken to in lines of JSON: the first says who it is; each further one is a command, answered by a line. It ends
when its standard input does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from geotrain.config import Address, ConfigError
from geotrain.launch.guard import CLONE_NEWNET
from geotrain.net.certs import Credentials, Role, Trust, identity, load_credentials
from geotrain.net.probe import Limits, ProbeError, ProbeServer, Way, measure

START_S = 60.0  # ssh, and Python's imports on the other machine
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where a site is. command: starts it there. address: what it listens on, and the others reach it by; port 0: it
    picks one. netns: a network namespace (file descriptor) to start it in."""

    name: str
    role: Role
    command: tuple[str, ...]
    address: Address
    security: str | None
    netns: int | None = None
    where: str = "this machine"


class Site:
    """The process of a place, seen from `geotrain probe`. Use as a context manager: leaving it ends the process."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._heard = b""
        self._popen = subprocess.Popen(
            place.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            preexec_fn=None if place.netns is None else partial(_enter, place.netns),
        )
        os.set_blocking(self._out, False)

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        try:
            self._popen.wait(5.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()
        self._errors.close()

    def start(self) -> None:
        """Raises ProbeError."""
        place = self.place
        order = {
            "name": place.name,
            "role": place.role,
            "address": place.address.model_dump(),
            "security": place.security,
        }
        port = int(self.ask(order, START_S)["port"])
        self.reached_at = Address(host=place.address.host, port=port)

    def measure(self, other: Site, limits: Limits) -> Way:
        """Raises ProbeError."""
        there = other.place
        order = {
            "measure": str(other.reached_at),
            "server": identity(there.role, there.name),
            "limits": asdict(limits),
        }
        return Way(**self.ask(order, 2 * limits.seconds + 150.0))

    def ask(self, order: dict[str, Any], within_s: float) -> dict[str, Any]:
        """Raises ProbeError: with what the site says, or what ssh says when there is none."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(order).encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise self._lost("it has ended") from None
        answer: dict[str, Any] = json.loads(self._line(within_s))
        if "error" in answer:
            raise ProbeError(f"{self.place.name} (on {self.place.where}): {answer['error']}")
        return answer

    @property
    def _out(self) -> int:
        assert self._popen.stdout is not None
        return self._popen.stdout.fileno()

    def _line(self, within_s: float) -> bytes:
        deadline = time.monotonic() + within_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._lost(f"no answer within {within_s:g} s")
                read = os.read(self._out, 65536)
                self._heard += read
                if not read or len(self._heard) > MAX_LINE_BYTES:
                    raise self._lost("it has ended" if not read else "what it says is no answer")
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _lost(self, how: str) -> ProbeError:
        self._errors.seek(0)
        said = self._errors.read()[-2000:].decode(errors="replace").strip()
        place = self.place
        advice = "" if place.where == "this machine" else f"; check that `ssh {place.where}` needs no password, and "
        advice += "that GeoTrain is in that folder there" if advice else ""
        return ProbeError(f"{place.name}: the probe on {place.where} is lost: {how}{advice}. It said: {said or '–'}")


def serve_site() -> int:
    """What `geotrain probe-site` does. Gives the exit code."""
    order = json.loads(sys.stdin.readline() or "null")
    if not isinstance(order, dict):
        print("geotrain probe-site: started by `geotrain probe`, not by hand", file=sys.stderr)
        return 2
    try:
        credentials = None
        if order["security"] is not None:
            credentials = load_credentials(Path(order["security"]), order["role"], order["name"])
        server = ProbeServer(Address(**order["address"]), credentials)
    except OSError as error:
        _say({"error": str(error)})
        return 2
    _say({"port": server.port})
    for line in sys.stdin:
        _say(_answer(json.loads(line), credentials))
    server.close()
    return 0


def _answer(order: dict[str, Any], credentials: Credentials | None) -> dict[str, Any]:
    try:
        if "step" in order:
            from geotrain.launch.probe_step import run_step

            return run_step(**order["step"])
        trust = Trust(credentials, order["server"]) if credentials else None
        return asdict(measure(order["measure"], Limits(**order["limits"]), trust))
    except (OSError, ConfigError) as error:
        return {"error": str(error)}


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _enter(netns: int) -> None:
    """In the child."""
    setns: Callable[[int, int], int] = ctypes.CDLL(None, use_errno=True).setns
    if setns(netns, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
