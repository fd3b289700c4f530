"""Secures links by mutual TLS: each run has an authority of its own, which signs a certificate for each process.

    <folder>/ca.pem, ca.key                     the authority; its key should stay where certificates are made
    <folder>/<role>-<name>.pem, .key            one pair for each process; a host needs its own pairs and ca.pem

A certificate carries one name, `<name>.<role>.geotrain`, and no host, so that a process may move to another machine.
Both ends check the name: a client, that it has reached the server that it means; a server, that a member speaks only
for itself.

Where the folder holds a `secret`, as in a run whose workers join by a token, who calls has no certificate: each call
carries a name and its role's password, which follows from the secret.
"""

from __future__ import annotations

import datetime
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from geotrain.config import Address, ClusterConfig, host_port

Role = Literal["global", "region", "worker", "operator", "shard"]
OPERATOR = "operator"
SECRET = "secret"  # in the folder
RENEW = "renew it with `geotrain certs` where ca.key lies, copy the .pem files, and start the process again"


class CertificateError(OSError):
    """Raised when a certificate is missing or cannot be used. Says which file, and what to do."""


def identity(role: Role, name: str) -> str:
    return f"{name}.{role}.geotrain"


def password_of(role: str, secret: str) -> str:
    return hmac.new(secret.encode(), role.encode(), "sha256").hexdigest()[:32]


@dataclass(frozen=True)
class Credentials:
    """Holds one process's key and certificate and the authority that it trusts, each a PEM text.

    key, certificate: None: it only calls, and has a password. secret: a server's, from which passwords follow, or the
    password; "": certificates alone count.
    """

    identity: str
    key: bytes | None
    certificate: bytes | None
    authority: bytes
    secret: str = ""


@dataclass(frozen=True)
class Trust:
    """Says, for a client's end of a link, who it is and who must be at the other end."""

    credentials: Credentials
    server: str


def open_channel(transport: Any, address: str, trust: Trust | None, options: Sequence[tuple[str, Any]]) -> Any:
    """Open a channel to host:port. transport: `grpc` or `grpc.aio`. trust: None means plaintext."""
    if trust is None:
        return transport.insecure_channel(address, options=options)
    own = trust.credentials
    credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    if own.secret:
        password = grpc.access_token_call_credentials(f"{own.identity}:{own.secret}")
        credentials = grpc.composite_channel_credentials(credentials, password)
    # TLS would compare the certificate with the host name in the address; here it is compared with the server's name.
    options = (*options, ("grpc.ssl_target_name_override", trust.server))
    return transport.secure_channel(address, credentials, options=options)


def add_port(server: Any, address: Address, own: Credentials | None) -> int:
    """Let a server of `grpc` or `grpc.aio` listen; returns the port. With credentials only members of the run can
    call it, where they have certificates, and else all, of whom a `Door` refuses those without a password; without
    credentials everyone can, in plaintext. Raises RuntimeError."""
    if own is None:
        return int(server.add_insecure_port(host_port(*address.listening)))
    credentials = grpc.ssl_server_credentials([(own.key, own.certificate)], own.authority, not own.secret)
    return int(server.add_secure_port(host_port(*address.listening), credentials))


def load_credentials(folder: Path, role: Role, name: str) -> Credentials:
    """Read and check the certificate of one process. Raises CertificateError."""
    stem = f"{role}-{name}"
    pair = _read(folder, f"{stem}.key"), _read(folder, f"{stem}.pem")
    secret = _read(folder, SECRET).decode() if (folder / SECRET).exists() else ""
    said = password_of(role, secret) if secret and role != "global" else secret
    credentials = Credentials(identity(role, name), *pair, _read(folder, "ca.pem"), said)
    try:
        certificate = x509.load_pem_x509_certificate(pair[1])
        key = serialization.load_pem_private_key(pair[0], None)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        authority = x509.load_pem_x509_certificate(credentials.authority)
    except (ValueError, TypeError, x509.ExtensionNotFound) as error:
        raise CertificateError(
            f"{folder}: {stem}.pem, {stem}.key or ca.pem is damaged ({error}); make it anew"
        ) from None
    if certificate.public_key() != key.public_key():
        raise CertificateError(
            f"{folder}: {stem}.key is not the key of {stem}.pem; copy both from where they were made"
        )
    if credentials.identity not in names.get_values_for_type(x509.DNSName):
        raise CertificateError(f"{folder / stem}.pem: is not the certificate of {role} {name!r}")
    now = datetime.datetime.now(datetime.UTC)
    for file, checked in ((f"{stem}.pem", certificate), ("ca.pem", authority)):
        begin, end = checked.not_valid_before_utc, checked.not_valid_after_utc
        if now < begin:
            raise CertificateError(
                f"{folder / file}: is valid from {begin:%Y-%m-%d %H:%M} UTC on, this machine's clock is at "
                f"{now:%Y-%m-%d %H:%M}; set the clock"
            )
        if end < now:
            whose = "the authority's own, without which no other counts, " if checked is authority else ""
            raise CertificateError(f"{folder / file}: {whose}expired on {end:%Y-%m-%d}; {RENEW}")
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise CertificateError(
            f"{folder / stem}.pem: is not signed by the authority of ca.pem; copy both anew"
        ) from None
    return credentials


def expiry(error: Any, trust: Trust | None) -> str:
    """Say which certificate has expired where a call failed of that, to follow the failure's own words; else "".
    error: a grpc.RpcError."""
    if trust is None:
        return ""
    own, now = trust.credentials, datetime.datetime.now(datetime.UTC)
    for what, text in ((f"this process's certificate, {own.identity},", own.certificate), ("ca.pem", own.authority)):
        if text and now > (end := x509.load_pem_x509_certificate(text).not_valid_after_utc):
            return f"; {what} expired on {end:%Y-%m-%d}: {RENEW}"
    if "certificate has expired" in str(error.details()):
        return f"; the certificate of {trust.server}, or its ca.pem, has expired: {RENEW}"
    return ""


def trust_between(cluster: ClusterConfig, role: Role, name: str, server_role: Role, server: str) -> Trust | None:
    """Load what a client needs for a link to a server of this cluster; None: the cluster's links are plaintext.

    Raises CertificateError.
    """
    if cluster.security is None:
        return None
    return Trust(load_credentials(Path(cluster.security.folder), role, name), identity(server_role, server))


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise CertificateError(
            f"{folder / name}: cannot be read: {error.strerror}; make certificates with `geotrain certs`, "
            "and copy this host's to it"
        ) from None
