"""Enrolls a worker with `geotrain serve`: by a token alone it gets a certificate and the run.

Over TLS, where the server shows its authority's own certificate. The token holds the digest of the authority's key,
by which the worker knows the server, and a secret, by which the server knows the worker. Then JSON texts, each behind
its length in 4 bytes:

    worker   {"format", "secret"}
    server   {}, or {"refused": why}
    worker   an `Enrollment`
    server   {"send": true}, {"wait": why}, {"refused": why}, or what a `Welcomed` is made of
    worker   after "send", the values of its parameters in fp32, little endian, in the order of their names
    server   as before, without "send"
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import socket
import ssl
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import Field

from geotrain.config import Address, Block, ClusterConfig, Name, PositiveInt, RunConfig, parse
from geotrain.net.transport.authority import make_request
from geotrain.net.transport.certs import CertificateError, Credentials, Trust, identity
from geotrain.outer.messages import Refused

TOKEN = "GEOTRAIN_TOKEN"  # environment variable
FORMAT = 1  # of tokens and of what is said
MOST_BYTES = 64 << 20  # of a text, once the secret is known
CALL_S = 60.0  # for a text, or a block of values, to come or go
AGAIN_S = 0.5  # until who was told to wait asks again
BLOCK_BYTES = 1 << 20
LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class Token:
    """What lets a worker in. authority: sha256 of the authority's public key, in hex. secret: in hex."""

    authority: str
    secret: str

    def __str__(self) -> str:
        return f"geotrain{FORMAT}.{self.authority}.{self.secret}"

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
    not train. request: for a certificate, as PEM text."""

    region: Name
    every: PositiveInt
    samples_per_step: PositiveInt
    shapes: dict[str, tuple[PositiveInt, ...]] = Field(min_length=1)
    fixed: dict[str, int]
    request: str


@dataclass(frozen=True)
class Welcomed:
    """What an enrolled worker is given: the run, its cluster, and what its links need."""

    run: RunConfig
    cluster: ClusterConfig
    trust: Trust


def key_digest(certificate: x509.Certificate) -> str:
    """Compute the sha256, in hex, of a certificate's public key, which stays when the certificate is renewed."""
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(key).hexdigest()


def encoded(said: Mapping[str, Any]) -> bytes:
    text = json.dumps(said).encode()
    return LENGTH.pack(len(text)) + text


class EnrollmentClient:
    """Speaks with the server at host:port. Raises CertificateError where it is not the token's; OSError."""

    def __init__(self, address: str, token: Token) -> None:
        host, _, port = address.rpartition(":")
        self.host, self._key = host.strip("[]"), b""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the token says whose key it must be
        with ExitStack() as opened:
            plain = opened.enter_context(socket.create_connection((self.host, int(port)), CALL_S))
            self._socket = opened.enter_context(context.wrap_socket(plain))
            shown = x509.load_der_x509_certificate(self._socket.getpeercert(binary_form=True) or b"")
            if not hmac.compare_digest(key_digest(shown), token.authority):
                raise CertificateError(
                    f"the server at {address} is not the one that printed this token: its authority has another key; "
                    "copy the token anew, or see who answers at that address"
                )
            self._say({"format": FORMAT, "secret": token.secret})
            self._hear()
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def ask(self, region: str, said: Mapping[str, Any]) -> Welcomed | None:
        """Enroll as a worker of that region; None: first the parameters' values are to be sent. said: the rest of an
        `Enrollment`. Raises Refused, with `retry_s` where others are waited for."""
        self._key, request = make_request()
        self.region = region
        self._say({"region": region, "request": request.decode(), **said})
        return self.heard()

    def send(self, values: memoryview) -> None:
        """Send the bytes of a parameter's values."""
        for start in range(0, len(values), BLOCK_BYTES):
            self._socket.sendall(values[start : start + BLOCK_BYTES])

    def heard(self) -> Welcomed | None:
        """Read the reply to an enrollment, or to the last of the values; as `ask`."""
        reply = self._hear()
        if "send" in reply:
            return None
        run, cluster = (
            parse(RunConfig, reply["run"], "the run"),
            parse(ClusterConfig, reply["cluster"], "the cluster"),
        )
        there = Address(host=self.host, port=reply["port"])
        own = identity("worker", cluster.worker(self.region, None).name)
        credentials = Credentials(own, self._key, reply["certificate"].encode(), reply["authority"].encode())
        trust = Trust(credentials, identity("global", "global"))
        return Welcomed(run, cluster.model_copy(update={"global_server": there}), trust)

    def _say(self, said: Mapping[str, Any]) -> None:
        self._socket.sendall(encoded(said))

    def _hear(self) -> dict[str, Any]:
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        reply: dict[str, Any] = json.loads(self._exactly(min(length, MOST_BYTES)))
        if why := reply.get("refused") or reply.get("wait"):
            raise Refused(why, AGAIN_S if "wait" in reply else None)
        return reply

    def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            if not (more := self._socket.recv(min(BLOCK_BYTES, count - len(found)))):
                raise ConnectionError("the server closed the connection")
            found += more
        return bytes(found)
