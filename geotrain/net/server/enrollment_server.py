"""Lets workers into a run that no file describes: what `geotrain serve` alone has beside the global server.

The first worker to come gives names, shapes and values of the parameters; others are compared with it. The run's
folder gets what files would say: run.json and the weights from the first, cluster.json, which grows, from all. The
protocol is in `geotrain.net.transport.enrollment`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import ssl
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from cryptography import x509

from geotrain.common.files import whole_file, write_whole
from geotrain.config import (
    Address,
    ClusterConfig,
    ConfigError,
    RegionConfig,
    RunConfig,
    load_cluster,
    load_run,
    parse,
)
from geotrain.net.transport.authority import ALWAYS, AUTHORITY, make_named, sign_request
from geotrain.net.transport.deadlines import within
from geotrain.net.transport.enrollment import (
    BLOCK_BYTES,
    CALL_S,
    FORMAT,
    LENGTH,
    MOST_BYTES,
    Enrollment,
    Token,
    encoded,
    key_digest,
)
from geotrain.parameters.parameter_file import read_fixed, read_shapes

MOST_OPEN = 64  # connections at once; more are shut
HELLO_BYTES = 4096
SHOWN = 3  # differences that a refusal names
CERTIFICATES, WEIGHTS = "certificates", "weights.safetensors"  # in the run's folder


class EnrollmentServer:
    """Takes enrollments, on a thread of its own.

    folder: of the run; what it holds of one already goes on. make_run: gives the run for H and samples a step. port,
    bind: of the run's server. workers: so many must have come before the run begins.
    run, cluster: None before the first worker has come. token: what lets workers in.
    Raises CertificateError, OSError; ConfigError: what the folder holds is damaged.
    """

    def __init__(
        self, folder: Path, make_run: Callable[[int, int], RunConfig], port: int, bind: str, workers: int
    ) -> None:
        self.folder, self.certificates, self.make_run = folder, folder / CERTIFICATES, make_run
        self.address, self.workers = Address(port=port, bind=bind), workers
        make_named(folder.name, ALWAYS, self.certificates)
        secret = self.certificates / "secret"
        if not secret.exists():
            with whole_file(secret, permissions=0o600) as file:
                file.write(secrets.token_hex(16))
        authority = x509.load_pem_x509_certificate((self.certificates / f"{AUTHORITY}.pem").read_bytes())
        self.token = Token(key_digest(authority), secret.read_text())
        self.run: RunConfig | None = None
        self.cluster: ClusterConfig | None = None
        self._served: tuple[RegionConfig, ...] = ()
        self._enough, self._sending, self._open = threading.Event(), asyncio.Lock(), 0
        if (folder / "cluster.json").exists():  # written last
            self.run, self.cluster = load_run(folder / "run.json"), load_cluster(folder / "cluster.json")
            self._look()

    def first_members(self) -> tuple[RunConfig, ClusterConfig]:
        """Wait until enough workers have come, as long as that takes; returns what is to be served."""
        self._enough.wait()
        assert self.run is not None and self.cluster is not None
        return self.run, self.cluster

    def newest(self, served: ClusterConfig) -> ClusterConfig:
        """Take note of the cluster that is served now; returns that which is to be."""
        self._served = served.regions
        return self.cluster or served

    def listen(self, port: int) -> None:
        """Listen at a port, from now on. Raises OSError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.certificates / f"{AUTHORITY}.pem", self.certificates / f"{AUTHORITY}.key")
        started: Future[None] = Future()

        async def run() -> None:
            try:
                server = await asyncio.start_server(
                    self._answer, self.address.bind, port, ssl=context, ssl_handshake_timeout=CALL_S
                )
            except OSError as error:
                started.set_exception(error)
                return
            started.set_result(None)
            await server.serve_forever()

        threading.Thread(target=asyncio.run, args=(run(),), name="enrollment", daemon=True).start()
        started.result()

    # -- on the thread

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MOST_OPEN:
                await self._speak(reader, writer)
        except (OSError, EOFError, TimeoutError):
            pass  # who is cut off comes again
        finally:
            self._open -= 1
            writer.close()

    async def _speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def say(said: dict[str, Any]) -> None:
            writer.write(encoded(said))
            await within(CALL_S, writer.drain())

        try:
            hello = await _hear(reader, HELLO_BYTES)
            if hello.get("format") != FORMAT:
                raise ConfigError("the worker's GeoTrain is another version's than the server's; use one for all")
            if not hmac.compare_digest(str(hello.get("secret")).encode(), self.token.secret.encode()):
                raise ConfigError("the token's secret is not this server's; copy the token anew")
            await say({})
            asked = parse(Enrollment, await _hear(reader, MOST_BYTES), "the enrollment")
            if self.run is None and self._sending.locked():
                await say({"wait": "another worker sends the first weights"})
                return
            async with self._sending:
                run = self._settings(asked)  # before the weights travel
                if self.run is None:
                    await say({"send": True})
                    await self._take_weights(asked, reader)
                self._enroll(run, asked)
            await say(self._welcome(asked))
        except (ValueError, OSError) as error:  # a ConfigError is one
            with suppress(OSError, TimeoutError):
                await say({"refused": str(error)})

    async def _take_weights(self, asked: Enrollment, reader: asyncio.StreamReader) -> None:
        """Write the first worker's parameters as the file that `model.weights` names."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "fixed": json.dumps(asked.fixed, sort_keys=True)}}
        end = 0
        for name, shape in sorted(asked.shapes.items()):
            begin, end = end, end + 4 * prod(shape)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with whole_file(self.folder / WEIGHTS, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            while end:
                block = await within(CALL_S, reader.readexactly(min(end, BLOCK_BYTES)))
                file.write(block)
                end -= len(block)

    def _settings(self, asked: Enrollment) -> RunConfig:
        """Give the run, or that which the first worker begins. Raises ConfigError: its settings are others."""
        run = self.run or self.make_run(asked.every, asked.samples_per_step)
        _compare(asked, "every", run.outer.local_steps, asked.every)
        _compare(asked, "samples_per_step", run.samples_per_step, asked.samples_per_step)
        return run

    def _enroll(self, run: RunConfig, asked: Enrollment) -> None:
        """Compare the worker's model with the run's, and put its region into the cluster. Raises ConfigError."""
        cluster = self.cluster
        for what, wanted, has in (
            *_differences("parameter", read_shapes(self.folder / WEIGHTS), asked.shapes),
            *_differences("buffer or frozen parameter", read_fixed(self.folder / WEIGHTS), asked.fixed),
        ):
            _compare(asked, what, wanted, has)
        known = [region.name for region in cluster.regions] if cluster else []
        if asked.region not in known:
            if run.outer.rule.synchronous and len(known) >= self.workers:
                raise ConfigError(
                    f"each round of this run needs every worker, and all are there: {', '.join(known)}; join as one "
                    "of them, or serve with more --workers"
                )
            raw = {
                "name": run.name,
                "global_server": self.address.model_dump(),
                "regions": [{"name": name, "workers": [{"name": f"{name}-0"}]} for name in (*known, asked.region)],
                "security": {"folder": str(self.certificates)},
            }
            grown = parse(ClusterConfig, raw, "the cluster")
            for name, config in (("run.json", run), ("cluster.json", grown)):
                write_whole(self.folder / name, config.model_dump_json(by_alias=True, indent=2) + "\n")
            self.run, self.cluster = run, grown
            self._look()

    def _look(self) -> None:
        assert self.cluster is not None
        if len(self.cluster.regions) >= self.workers:
            self._enough.set()

    def _welcome(self, asked: Enrollment) -> dict[str, Any]:
        """Make the reply to a worker that is enrolled: it waits until it is served."""
        assert self.run is not None and self.cluster is not None
        if (missing := self.workers - len(self.cluster.regions)) > 0:
            return {"wait": f"{missing} more workers are to join before the run begins"}
        if all(region.name != asked.region for region in self._served):
            return {"wait": "the server is starting"}
        name = self.cluster.worker(asked.region, None).name
        plain = self.cluster.model_copy(update={"security": None})  # the certificates' folder lies here
        return {
            "run": self.run.model_dump(by_alias=True, mode="json"),
            "cluster": plain.model_dump(by_alias=True, mode="json"),
            "port": self.address.port,
            "certificate": sign_request(self.certificates, "worker", name, asked.request.encode()).decode(),
            "authority": (self.certificates / f"{AUTHORITY}.pem").read_text(),
        }


async def _hear(reader: asyncio.StreamReader, most_bytes: int) -> dict[str, Any]:
    """Read a text. Raises ValueError, EOFError, TimeoutError."""
    (length,) = LENGTH.unpack(await within(CALL_S, reader.readexactly(LENGTH.size)))
    if length > most_bytes:
        raise ValueError(f"a text of {length} bytes; at most {most_bytes}")
    said = json.loads(await within(CALL_S, reader.readexactly(length)))
    if not isinstance(said, dict):
        raise ValueError("not a JSON object")
    return said


def _compare(asked: Enrollment, what: str, wanted: Any, has: Any) -> None:
    if wanted != has:
        raise ConfigError(
            f"{what} is {has} at {asked.region}, and {wanted} in the run, as its first worker or --set said"
        )


def _differences(what: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """List (name, ours, theirs) of the first few that differ; "missing" where one has none."""
    names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    return [(f"{what} {name}", ours.get(name, "missing"), theirs.get(name, "missing")) for name in names[:SHOWN]]
