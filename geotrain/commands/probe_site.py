"""Runs one place of `geotrain probe`: a process on its machine that answers measurements, and makes them on request.

It is spoken to in lines of JSON: the first says who it is; each further one is a command, answered by a line. It ends
when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from geotrain.config import Address, ConfigError
from geotrain.emulate.wan import in_network
from geotrain.launch.networks import networks_to
from geotrain.net.transport.certs import Role, Trust, identity, load_credentials
from geotrain.net.transport.link_probe import Limits, ProbeError, ProbeServer, Way, measure

START_S = 60.0  # ssh, and Python's imports on the other machine
END_S = 5.0
MAX_LINE_BYTES = 1 << 20


class ProbeSite:
    """The process of a place, seen from `geotrain probe`. Use as a context manager: leaving it ends the process.

    command: starts it. address: what it listens on, and the others reach it by; port 0: it picks one. security: the
    folder of certificates. where: its machine, in words. netns: a network namespace (file descriptor) to start it in.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        command: tuple[str, ...],
        address: Address,
        security: str | None,
        where: str = "this machine",
        netns: int | None = None,
    ) -> None:
        self.name, self.role, self.address, self.security, self.where = name, role, address, security, where
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._popen = subprocess.Popen(
            command if netns is None else in_network(netns, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            pass_fds=() if netns is None else (netns,),
        )
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._stdin, self._stdout = self._popen.stdin, self._popen.stdout

    def __enter__(self) -> ProbeSite:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._popen.wait(END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._stdout.close()
        self._errors.close()

    def start(self) -> None:
        """Send it its name. Raises ProbeError."""
        address = self.address.model_dump()
        request = {"name": self.name, "role": self.role, "address": address, "security": self.security}
        port = int(self.ask(request, START_S)["port"])
        self.address = Address(host=self.address.host, port=self.address.port or port)

    def measure(self, other: ProbeSite, limits: Limits) -> Way:
        """Measure the link from this place to another. Raises ProbeError."""
        server = identity(other.role, other.name)
        request = {"measure": str(other.address), "server": server, "limits": asdict(limits)}
        return Way(**self.ask(request, 2 * limits.seconds + 150.0))

    def ask(self, request: dict[str, Any], within_s: float) -> dict[str, Any]:
        """Send a request and wait for its answer; a site that gives none in time is ended. Raises ProbeError, with
        what the site says, or what ssh says when there is none."""
        timer = threading.Timer(within_s, self._popen.kill)
        timer.start()
        try:
            self._stdin.write(json.dumps(request).encode() + b"\n")
            self._stdin.flush()
            line = self._stdout.readline(MAX_LINE_BYTES)
        except BrokenPipeError:
            line = b""
        finally:
            late = timer.finished.is_set()
            timer.cancel()
        if not line.endswith(b"\n"):
            ended = "what it says is no answer" if line else "it has ended"
            raise self._lost(f"no answer within {within_s:g} s" if late else ended)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ProbeError(f"{self.name} (on {self.where}): {answer['error']}")
        return answer

    def _lost(self, how: str) -> ProbeError:
        self._errors.seek(0)
        said = self._errors.read()[-2000:].decode(errors="replace").strip()
        if self.where != "this machine":
            how += f"; check that `ssh {self.where}` needs no password, and that GeoTrain is in that folder there"
        return ProbeError(f"{self.name}: the probe on {self.where} is lost: {how}. It said: {said or '–'}")


def serve_site() -> int:
    """Answer the lines of standard input, one after another: `geotrain probe-site`. Returns the exit code."""

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), flush=True)

    request = json.loads(sys.stdin.readline() or "null")
    if not isinstance(request, dict):
        print("geotrain probe-site: started by `geotrain probe`, not by hand", file=sys.stderr)
        return 2
    try:
        credentials = None
        if request["security"] is not None:
            credentials = load_credentials(Path(request["security"]), request["role"], request["name"])
        server = ProbeServer(Address(**request["address"]), credentials)
    except OSError as error:
        say({"error": str(error)})
        return 2
    say({"port": server.port})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "step" in request:
                from geotrain.commands.probe_step import run_step  # imports torch

                say(run_step(**request["step"]))
            elif "master" in request:
                say({"said": str(networks_to(request["master"], {**os.environ, **request["env"]}))})
            else:
                trust = Trust(credentials, request["server"]) if credentials else None
                say(asdict(measure(request["measure"], Limits(**request["limits"]), trust)))
        except (OSError, ConfigError) as error:
            say({"error": str(error)})
    server.close()
    return 0
