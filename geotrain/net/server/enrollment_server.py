"""Lets workers into a run that no file describes: what `geotrain serve` alone has beside the global server.

The first worker to come gives names, shapes and values of the parameters; others are compared with it. The run's
folder gets what files would say: run.json and the weights from the first, cluster.json, which grows, from all. The
call is in `geotrain.net.transport.enrollment`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from grpc import aio

from geotrain.common.files import whole_file, write_whole
from geotrain.common.names import GLOBAL
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
from geotrain.net.server.connection_guard import ConnectionGuard, raise_file_limit
from geotrain.net.server.listener import ENROLL, open_server
from geotrain.net.server.peers import plain_peer
from geotrain.net.transport.authority import ALWAYS, make_named
from geotrain.net.transport.certs import SECRET, load_credentials, password_of
from geotrain.net.transport.deadlines import within
from geotrain.net.transport.enrollment import CALL_S, MOST_BYTES, Enrollment, Token, key_digest
from geotrain.parameters.parameter_file import read_fixed, read_shapes

log = logging.getLogger(__name__)

SHOWN = 3  # differences that a refusal names
GRACE_S = 2.0  # for replies to those that enrolled before the run begins
CERTIFICATES, WEIGHTS = "certificates", "weights.safetensors"  # in the run's folder


class EnrollmentServer:
    """Takes enrollments: alone until the run begins, then as a call of the run's server.

    folder: of the run; what it holds of one already goes on, wherever it lies now. make_run: gives the run for H and
    samples a step. address: of the run's server. workers: so many must have come before the run begins.
    run, cluster: None before the first worker has come. token: what lets workers in.
    Raises CertificateError, OSError; ConfigError: what the folder holds is damaged.
    """

    def __init__(
        self, folder: Path, make_run: Callable[[int, int], RunConfig], address: Address, workers: int
    ) -> None:
        self.folder, self.make_run = folder, make_run
        self.address, self.workers = address, workers
        make_named(folder.name, ALWAYS, folder / CERTIFICATES)
        secret = folder / CERTIFICATES / SECRET
        if not secret.exists():
            with whole_file(secret, permissions=0o600) as file:
                file.write(secrets.token_hex(32))
        self._own = own = load_credentials(folder / CERTIFICATES, "global", GLOBAL)
        assert own.certificate is not None
        self.token = Token(key_digest(own.certificate), password_of("worker", own.secret))
        self.run: RunConfig | None = None
        self.cluster: ClusterConfig | None = None
        self._served: tuple[RegionConfig, ...] = ()
        self._sending = False  # whether a worker sends the first weights
        self._peers = set[str]()  # of enrollments before the run begins
        if (folder / "cluster.json").exists():  # written last
            self.run, cluster = load_run(folder / "run.json"), load_cluster(folder / "cluster.json")
            self.cluster = cluster.model_copy(update={"global_server": address})
            self._write("cluster.json", self.cluster)

    async def first_members(self) -> tuple[RunConfig, ClusterConfig]:
        """Enroll until enough workers have come, as long as that takes; returns what is to be served. Raises
        ListenError."""
        self._enough = asyncio.Event()
        if self._missing():
            server, port = await open_server(self.address, self._own, {ENROLL: self.enroll})
            guard = ConnectionGuard(port, self._peers, raise_file_limit(), log.warning)
            guard.start()
            try:
                await self._enough.wait()
            finally:
                await server.stop(GRACE_S)
                guard.stop()
        assert self.run is not None and self.cluster is not None
        return self.run, self.cluster

    def newest(self, served: ClusterConfig) -> ClusterConfig:
        """Take note of the cluster that is served now; returns that which is to be."""
        self._served = served.regions
        return self.cluster or served

    async def enroll(self, _: Any, context: Any) -> bytes:
        """Answer the call of a worker that enrolls."""
        self._peers.add(plain_peer(context.peer()))
        try:
            reply = await self._reply(context)
        except TimeoutError:
            reply = {"wait": f"nothing came of this worker's enrollment for {CALL_S:g} s"}
        except (ValueError, RecursionError, OSError) as error:  # a ConfigError is a ValueError
            reply = {"refused": str(error)}
        return json.dumps(reply).encode()

    # -- inside

    def _missing(self) -> int:
        return max(0, self.workers - (len(self.cluster.regions) if self.cluster else 0))

    async def _reply(self, context: Any) -> dict[str, Any]:
        text = bytearray()
        while block := await within(CALL_S, context.read()):
            text += block
            if len(text) > MOST_BYTES:
                raise ValueError(f"an enrollment of more than {MOST_BYTES} bytes")
        asked = parse(Enrollment, json.loads(text), "the enrollment")
        run = self._settings(asked)  # before the weights travel
        if self.run is None:
            if self._sending:
                return {"wait": "another worker sends the first weights"}
            if block is aio.EOF:
                return {"send": True}
            self._sending = True
            try:
                await self._take_weights(asked, context)
            finally:
                self._sending = False
        self._enroll(run, asked)
        return self._welcome(asked)

    async def _take_weights(self, asked: Enrollment, context: Any) -> None:
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
                block = await within(CALL_S, context.read())
                if block is aio.EOF or len(block) > end:
                    raise ValueError(f"{end} bytes of the parameters' values were still to come")
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
                "security": {"folder": str(self.folder / CERTIFICATES)},
            }
            grown = parse(ClusterConfig, raw, "the cluster")
            self._write("run.json", run)
            self._write("cluster.json", grown)
            self.run, self.cluster = run, grown
            if not self._missing():
                self._enough.set()

    def _write(self, name: str, config: RunConfig | ClusterConfig) -> None:
        """Write a config into the run's folder, without the folder's own path, since it may be moved."""
        text = config.model_dump_json(by_alias=True, indent=2, exclude_unset=True)
        whole = text.replace(f'"{self.folder}/', '"').replace(f'"{self.folder}"', '"."')
        write_whole(self.folder / name, whole + "\n")

    def _welcome(self, asked: Enrollment) -> dict[str, Any]:
        """Make the reply to a worker that is enrolled: it waits until it is served."""
        assert self.run is not None and self.cluster is not None
        if missing := self._missing():
            return {"wait": f"{missing} more workers are to join before the run begins"}
        if all(region.name != asked.region for region in self._served):
            return {"wait": "the server is starting"}
        plain = self.cluster.model_copy(update={"security": None})  # the certificates' folder lies here
        return {
            "run": self.run.model_dump(by_alias=True, mode="json"),
            "cluster": plain.model_dump(by_alias=True, mode="json", exclude_unset=True),
            "authority": self._own.authority.decode(),
        }


def _compare(asked: Enrollment, what: str, wanted: Any, has: Any) -> None:
    if wanted != has:
        raise ConfigError(
            f"{what} is {has} at {asked.region}, and {wanted} in the run, as its first worker or --set said"
        )


def _differences(what: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """List (name, ours, theirs) of the first few that differ; "missing" where one has none."""
    names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    return [(f"{what} {name}", ours.get(name, "missing"), theirs.get(name, "missing")) for name in names[:SHOWN]]
