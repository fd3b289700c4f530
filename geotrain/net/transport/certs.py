"""Secures links by mutual TLS: each run has an authority of its own, which signs a certificate for each process.

    <folder>/ca.pem, ca.key                     the authority; its key should stay where certificates are made
    <folder>/<role>-<name>.pem, .key            one pair for each process; a host needs its own pairs and ca.pem

A certificate carries one name, `<name>.<role>.geotrain`, and no host, so that a process may move to another machine.
Both ends check the name: a client, that it has reached the server that it means; a server, that a member speaks only
for itself.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from geotrain.common.files import whole_file
from geotrain.common.names import GLOBAL
from geotrain.config import Address, ClusterConfig, host_port, shards_of

Role = Literal["global", "region", "worker", "operator", "shard"]
OPERATOR = "operator"
AUTHORITY = "ca"
DEFAULT_DAYS = 730


class CertificateError(OSError):
    """Raised when a certificate is missing or cannot be used. Says which file, and what to do."""


def identity(role: Role, name: str) -> str:
    return f"{name}.{role}.geotrain"


@dataclass(frozen=True)
class Credentials:
    """Holds one process's key and certificate and the authority that it trusts, each a PEM text."""

    identity: str
    key: bytes
    certificate: bytes
    authority: bytes


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
    # TLS would compare the certificate with the host name in the address; here it is compared with the server's name.
    options = (*options, ("grpc.ssl_target_name_override", trust.server))
    return transport.secure_channel(address, credentials, options=options)


def add_port(server: Any, address: Address, own: Credentials | None) -> int:
    """Let a server of `grpc` or `grpc.aio` listen; returns the port. With credentials only members of the run can
    call it; without them everyone can, in plaintext. Raises RuntimeError."""
    if own is None:
        return int(server.add_insecure_port(host_port(*address.listening)))
    credentials = grpc.ssl_server_credentials(
        [(own.key, own.certificate)], root_certificates=own.authority, require_client_auth=True
    )
    return int(server.add_secure_port(host_port(*address.listening), credentials))


def load_credentials(folder: Path, role: Role, name: str) -> Credentials:
    """Read and check the certificate of one process. Raises CertificateError."""
    stem = f"{role}-{name}"
    credentials = Credentials(
        identity(role, name), _read(folder, f"{stem}.key"), _read(folder, f"{stem}.pem"), _read(folder, "ca.pem")
    )
    try:
        certificate = x509.load_pem_x509_certificate(credentials.certificate)
        key = serialization.load_pem_private_key(credentials.key, None)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        x509.load_pem_x509_certificate(credentials.authority)
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
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now = datetime.datetime.now(datetime.UTC)
    if now < begin:
        raise CertificateError(
            f"{folder / stem}.pem: is valid from {begin:%Y-%m-%d %H:%M} UTC on, this machine's clock is at "
            f"{now:%Y-%m-%d %H:%M}; set the clock"
        )
    if end < now:
        raise CertificateError(f"{folder / stem}.pem: expired on {end:%Y-%m-%d}; make it anew with `geotrain certs`")
    return credentials


def trust_between(cluster: ClusterConfig, role: Role, name: str, server_role: Role, server: str) -> Trust | None:
    """Load what a client needs for a link to a server of this cluster; None: the cluster's links are plaintext.

    Raises CertificateError.
    """
    if cluster.security is None:
        return None
    return Trust(load_credentials(Path(cluster.security.folder), role, name), identity(server_role, server))


def make_certificates(cluster: ClusterConfig, folder: Path, days: int = DEFAULT_DAYS) -> list[Path]:
    """Make the authority and every certificate of the cluster that is not there yet; returns the new files.

    Raises CertificateError.
    """
    wanted: list[tuple[Role, str]] = [("global", GLOBAL), ("operator", OPERATOR)]
    for region in cluster.regions:
        wanted += [("region", region.name), *(("worker", worker.name) for worker in region.workers)]
    wanted += [
        ("shard", server) for server in (GLOBAL, *(r.name for r in cluster.regions)) if shards_of(cluster, server)
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made: list[Path] = []
        if not (folder / "ca.pem").exists():
            common_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"GeoTrain {cluster.name}")])
            key = ec.generate_private_key(ec.SECP256R1())
            builder = _builder(common_name, common_name, key, days)
            builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            made += _save(folder, AUTHORITY, builder.sign(key, hashes.SHA256()), key)
        issuer = x509.load_pem_x509_certificate(_read(folder, "ca.pem")).subject
        uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        for role, name in wanted:
            if (folder / f"{role}-{name}.pem").exists():
                continue
            # Read only now, because where nothing is left to sign the authority's key need not be present.
            signer = serialization.load_pem_private_key(_read(folder, "ca.key"), None)
            assert isinstance(signer, ec.EllipticCurvePrivateKey)
            own, key = identity(role, name), ec.generate_private_key(ec.SECP256R1())
            builder = _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, own)]), issuer, key, days)
            builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(own)]), critical=False)
            builder = builder.add_extension(uses, critical=False)
            made += _save(folder, f"{role}-{name}", builder.sign(signer, hashes.SHA256()), key)
        return made
    except CertificateError:
        raise
    except (OSError, ValueError) as error:
        raise CertificateError(f"{folder}: certificates cannot be made: {error}") from None


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of other hosts may be behind
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _save(folder: Path, stem: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> list[Path]:
    """Write a pair. The key is written first, so that every certificate in the folder has its key, even when this
    process is killed in between."""
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files = {folder / f"{stem}.key": private, folder / f"{stem}.pem": certificate.public_bytes(encoding)}
    for path, content in files.items():
        with whole_file(path, permissions=0o600) as file:
            file.write(content.decode())
    return list(files)


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise CertificateError(
            f"{folder / name}: cannot be read: {error.strerror}; make certificates with `geotrain certs`, "
            "and copy this host's to it"
        ) from None
