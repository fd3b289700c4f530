"""Who speaks: a certificate authority for the run, and a certificate for each of its processes' roles and names.

    <folder>/ca.pem, ca.key                     the authority; its key stays where certificates are made
    <folder>/<role>-<name>.pem, .key            one for each; a host needs its own pair and ca.pem

A certificate carries one name, `<name>.<role>.geotrain`. Both ends check it: a client that it has reached the server
it means, wherever that runs; a server that a member speaks for itself only.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from geotrain.config import ClusterConfig
from geotrain.outer.messages import GLOBAL

Role = Literal["global", "region", "worker", "operator"]
OPERATOR = "operator"
AUTHORITY = "ca"
DEFAULT_DAYS = 730


class CertificateError(OSError):
    """A certificate is missing or cannot be used. Says which file, and what to do."""


def identity(role: Role, name: str) -> str:
    return f"{name}.{role}.geotrain"


@dataclass(frozen=True)
class Credentials:
    """One process's key and certificate, and the authority it trusts: PEM texts."""

    identity: str
    key: bytes
    certificate: bytes
    authority: bytes

    def server(self) -> grpc.ServerCredentials:
        """For a service that only members of the run can call."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.authority, require_client_auth=True
        )

    def channel(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


@dataclass(frozen=True)
class Trust:
    """A client's end of a link: who it is, and who must be at the other end."""

    credentials: Credentials
    server: str


def load_credentials(folder: Path, role: Role, name: str) -> Credentials:
    """Raises CertificateError."""
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
    end = certificate.not_valid_after_utc
    if end < datetime.datetime.now(datetime.UTC):
        raise CertificateError(f"{folder / stem}.pem: expired on {end:%Y-%m-%d}; make it anew with `geotrain certs`")
    return credentials


def trust_between(cluster: ClusterConfig, role: Role, name: str, server_role: Role, server: str) -> Trust | None:
    """What a client needs for a link to a server of this cluster; None: the cluster's links are plaintext.

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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = [] if (folder / "ca.pem").exists() else _make_authority(folder, cluster.name, days)
        authority = x509.load_pem_x509_certificate(_read(folder, "ca.pem"))
        for role, name in wanted:
            if not (folder / f"{role}-{name}.pem").exists():
                key = serialization.load_pem_private_key(_read(folder, "ca.key"), None)
                assert isinstance(key, ec.EllipticCurvePrivateKey)
                made += _make(folder, role, name, authority, key, days)
        return made
    except (OSError, ValueError) as error:
        if isinstance(error, CertificateError):
            raise
        raise CertificateError(f"{folder}: certificates cannot be made: {error}") from None


def _make_authority(folder: Path, run: str, days: int) -> list[Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"GeoTrain {run}")])
    builder = _builder(name, name, key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _save(folder, AUTHORITY, builder.sign(key, hashes.SHA256()), key)


def _make(
    folder: Path, role: Role, name: str, authority: x509.Certificate, signer: ec.EllipticCurvePrivateKey, days: int
) -> list[Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    own = identity(role, name)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, own)])
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(subject, authority.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(own)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return _save(folder, f"{role}-{name}", certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of other hosts may be behind
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _save(folder: Path, stem: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> list[Path]:
    """The key first: a certificate that is there has its key."""
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files = [
        (folder / f"{stem}.key", private),
        (folder / f"{stem}.pem", certificate.public_bytes(serialization.Encoding.PEM)),
    ]
    for path, content in files:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    return [path for path, _ in files]


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise CertificateError(
            f"{folder / name}: cannot be read: {error.strerror}; make certificates with `geotrain certs`, "
            "and copy this host's to it"
        ) from None
