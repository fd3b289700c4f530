"""Enrolls a worker with `geotrain serve`: by a token alone it gets the run and what its links need.

The token holds the digest of the server's key, by which the worker knows the server before it says anything, and the
password of workers, which goes with each call. One call of the server's gRPC service enrolls: it takes an
`Enrollment` as JSON text in blocks, and answers {"send": true}, {"wait": why}, {"refused": why}, or what a `Welcomed`
is made of. After "send" the call is made again: behind the text and an empty block, the values of the worker's
parameters in fp32, little endian, in the order of their names.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Full, Queue
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import Field

from geotrain.common.names import GLOBAL
from geotrain.config import Address, Block, ClusterConfig, Name, PositiveInt, RunConfig, parse
from geotrain.net.transport import rpc
from geotrain.net.transport.certs import CertificateError, Credentials, Trust, identity, open_channel
from geotrain.outer.messages import Refused

TOKEN = "GEOTRAIN_TOKEN"  # environment variable
FORMAT = 2  # of tokens, and of what is said
ENROLL = f"/{rpc.SERVICE}/enroll"
MOST_BYTES = 64 << 20  # of an enrollment's text
CALL_S = 60.0  # for an enrollment, or a block of values, to come or go
AGAIN_S = 0.5  # until who is to wait asks again
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Token:
    """What lets a worker in. key: sha256 of the server's public key, in hex. password: of workers, in hex."""

    key: str
    password: str

    def __str__(self) -> str:
        return f"geotrain{FORMAT}.{self.key}.{self.password}"

    @classmethod
    def read(cls, text: str) -> Token:
        """Read a token. Raises CertificateError."""
        found = re.fullmatch(rf"geotrain{FORMAT}\.([0-9a-f]{{64}})\.([0-9a-f]{{32}})", text.strip())
        if found is None:
            raise CertificateError(
                f"the token {text[:12]!r}… is not whole, or another version's: copy what `geotrain serve` prints "
                f"into token=, or into the environment as {TOKEN}"
            )
        return cls(*found.groups())


class Enrollment(Block):
    """What a worker says of itself. every: H. shapes: its parameters, by name. fixed: fingerprints of what it does
    not train."""

    region: Name
    every: PositiveInt
    samples_per_step: PositiveInt
    shapes: dict[str, tuple[PositiveInt, ...]] = Field(min_length=1)
    fixed: dict[str, int]


@dataclass(frozen=True)
class Welcomed:
    """What an enrolled worker is given: the run, its cluster, and what its links need."""

    run: RunConfig
    cluster: ClusterConfig
    trust: Trust


def key_digest(certificate: bytes) -> str:
    """Compute the sha256, in hex, of a certificate's public key, which stays when the certificate is renewed.
    certificate: a PEM text."""
    key = x509.load_pem_x509_certificate(certificate).public_key()
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


class EnrollmentClient:
    """Enrolls with the server at host:port. Raises CertificateError where it is not the token's; OSError."""

    def __init__(self, address: str, token: Token) -> None:
        host, _, port = address.rpartition(":")
        self.host, self.port = host.strip("[]"), int(port)
        shown = ssl.get_server_certificate((self.host, self.port), timeout=CALL_S).encode()
        if not hmac.compare_digest(key_digest(shown), token.key):
            raise CertificateError(
                f"the server at {address} is not the one that printed this token: it has another key; copy the token "
                "anew, or see who answers at that address"
            )
        self._credentials = Credentials(identity("worker", ""), None, None, shown, token.password)
        trust = Trust(self._credentials, identity("global", GLOBAL))
        self._channel = open_channel(grpc, address, trust, rpc.OPTIONS)
        self._call = self._channel.stream_unary(ENROLL)
        self._blocks = Queue[bytes | None](2)
        self._reply: Any = None  # to the values, while they are sent

    def close(self) -> None:
        self._channel.close()
        with suppress(Full):
            self._blocks.put_nowait(None)  # gRPC's thread may wait for one

    def ask(self, region: str, said: Mapping[str, Any]) -> Welcomed | None:
        """Enroll as a worker of that region; None: first the parameters' values are to be sent. said: the rest of an
        `Enrollment`. Raises Refused, with `retry_s` where others are waited for."""
        self.region, self._text = region, json.dumps({"region": region, **said}).encode()
        return self._read(self._call.future(_blocks(self._text), timeout=CALL_S))

    def send(self, values: memoryview) -> None:
        """Send the bytes of a parameter's values."""
        if self._reply is None:
            self._reply = self._call.future(iter(self._blocks.get, None))
            for block in (*_blocks(self._text), b""):
                self._put(block)
        for block in _blocks(values):
            self._put(block)

    def finish(self) -> Welcomed | None:
        """Read the reply to the last of the values; as `ask`."""
        self._put(None)
        return self._read(self._reply)

    def _put(self, block: bytes | None) -> None:
        try:
            self._blocks.put(block, timeout=CALL_S)
        except Full:
            raise ConnectionError(f"a block of values was not sent within {CALL_S:g} s") from None
        if self._reply.done():
            self._read(self._reply)
            raise ConnectionError("the server answered before it had all values")

    def _read(self, call: Any) -> Welcomed | None:
        try:
            reply = json.loads(call.result(CALL_S))
        except (grpc.RpcError, grpc.FutureTimeoutError) as error:
            refused = rpc.refusal_of(error) if isinstance(error, grpc.RpcError) else None
            raise refused or ConnectionError(f"the server has not answered: {call.details()}") from None
        if why := reply.get("refused") or reply.get("wait"):
            raise Refused(why, AGAIN_S if "wait" in reply else None)
        if "send" in reply:
            return None
        run, cluster = (
            parse(RunConfig, reply["run"], "the run"),
            parse(ClusterConfig, reply["cluster"], "the cluster"),
        )
        there = Address(host=self.host, port=self.port)
        own = identity("worker", cluster.worker(self.region, None).name)
        # The authority's certificate outlasts the server's own, which was pinned for this.
        credentials = replace(self._credentials, identity=own, authority=reply["authority"].encode())
        trust = Trust(credentials, identity("global", GLOBAL))
        return Welcomed(run, cluster.model_copy(update={"global_server": there}), trust)


def _blocks(content: bytes | memoryview) -> Iterator[bytes]:
    return (bytes(content[start : start + BLOCK_BYTES]) for start in range(0, len(content), BLOCK_BYTES))
