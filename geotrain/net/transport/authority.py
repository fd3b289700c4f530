"""Makes and renews a run's certificates: the authority's, and those that it signs for each process."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from geotrain.common.files import whole_file
from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, shards_of
from geotrain.net.transport.certs import OPERATOR, CertificateError, Role, identity

AUTHORITY = "ca"
ALWAYS: tuple[tuple[Role, str], ...] = (("global", GLOBAL), ("operator", OPERATOR))  # processes of every run
DEFAULT_DAYS = 730
SOON = datetime.timedelta(days=30)  # before its end a certificate is renewed


def make_certificates(
    cluster: ClusterConfig, folder: Path, days: int = DEFAULT_DAYS, now: datetime.datetime | None = None
) -> list[Path]:
    """Make the authority and every certificate of the cluster that is not there yet, and renew those that have
    expired or soon will, as `make_named`."""
    wanted = [*ALWAYS]
    for region in cluster.regions:
        wanted += [("region", region.name), *(("worker", worker.name) for worker in region.workers)]
    wanted += [
        ("shard", server) for server in (GLOBAL, *(r.name for r in cluster.regions)) if shards_of(cluster, server)
    ]
    return make_named(cluster.name, wanted, folder, days, now)


def make_named(
    of: str,
    wanted: Sequence[tuple[Role, str]],
    folder: Path,
    days: int = DEFAULT_DAYS,
    now: datetime.datetime | None = None,
) -> list[Path]:
    """Make the authority and these certificates, and renew those that have expired or soon will; returns the files
    written.

    What is renewed keeps its key: only its .pem is replaced, so that a kill leaves a whole pair, and old and new
    certificates, the authority's too, go together. of: the authority's name. days: how long they are valid, from
    `now` on; None: from this moment. Raises CertificateError.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    files = _CertificateFolder(folder, now, now + datetime.timedelta(days=days))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        authority = files.lasting(AUTHORITY)
        if authority is None:
            authority = files.make(AUTHORITY, _named(f"GeoTrain {of}"), x509.BasicConstraints(ca=True, path_length=0))
        files.end = min(files.end, authority.not_valid_after_utc)
        for role, name in wanted:
            if files.lasting(f"{role}-{name}") is None:
                own = identity(role, name)
                files.make(f"{role}-{name}", _named(own), *_of_process(own))
    except CertificateError:
        raise
    except (OSError, ValueError) as error:
        raise CertificateError(f"{folder}: certificates cannot be made: {error}") from None
    return files.made


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _of_process(own: str) -> tuple[x509.BasicConstraints, x509.SubjectAlternativeName, x509.ExtendedKeyUsage]:
    """Make the extensions of a certificate of a process of that identity."""
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    return x509.BasicConstraints(ca=False, path_length=None), x509.SubjectAlternativeName([x509.DNSName(own)]), uses


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, none)


class _CertificateFolder:
    """Makes and renews certificates in a folder, valid from `now` to `end`. made: the files written."""

    def __init__(self, folder: Path, now: datetime.datetime, end: datetime.datetime) -> None:
        self.folder, self.now, self.end, self.made = folder, now, end, list[Path]()

    def read(self, stem: str) -> x509.Certificate | None:
        """Read a certificate; None: there is none. Raises CertificateError."""
        path = self.folder / f"{stem}.pem"
        try:
            return x509.load_pem_x509_certificate(path.read_bytes()) if path.exists() else None
        except ValueError as error:
            raise CertificateError(f"{path}: is damaged ({error}); delete it to have it made anew") from None

    def lasting(self, stem: str) -> x509.Certificate | None:
        """Read a certificate; None: there is none, or its end is near. Raises CertificateError."""
        found = self.read(stem)
        return None if found is None or _ends_soon(found, self.now) else found

    def make(self, stem: str, name: x509.Name, basic: x509.BasicConstraints, *more: Any) -> x509.Certificate:
        """Make a certificate, or renew the one that is there for its key. more: extensions. Raises
        CertificateError."""
        old, is_authority = self.read(stem), stem == AUTHORITY
        if old is None:  # the key is written first: every certificate has its key, wherever this is killed
            key: Any = ec.generate_private_key(ec.SECP256R1())
            signer = key if is_authority else self.signer(f"{stem}.pem is missing")
            self._write(f"{stem}.key", _pem(key))
        else:
            signer = self.signer(f"{stem}.pem ends on {old.not_valid_after_utc:%Y-%m-%d}")
        authority = self.read(AUTHORITY)
        subject, public_key = (old.subject, old.public_key()) if old else (name, key.public_key())
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority.subject if authority else name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.now - datetime.timedelta(hours=1))  # clocks of other hosts may be behind
            .not_valid_after(self.end)
            .add_extension(basic, critical=True)
        )
        for extension in more:
            builder = builder.add_extension(extension, critical=False)
        made = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        self._write(f"{stem}.pem", made)
        return x509.load_pem_x509_certificate(made)

    def signer(self, why: str) -> ec.EllipticCurvePrivateKey:
        """Read the authority's key, which need not be here where nothing is left to sign. Raises
        CertificateError."""
        path = self.folder / f"{AUTHORITY}.key"
        if not path.exists():
            raise CertificateError(f"{why}, and {path} is not there to sign it; run this where that key lies")
        key = serialization.load_pem_private_key(path.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key

    def _write(self, name: str, content: bytes) -> None:
        with whole_file(self.folder / name, permissions=0o600) as file:
            file.write(content.decode())
        self.made.append(self.folder / name)


def _ends_soon(certificate: x509.Certificate, now: datetime.datetime) -> bool:
    """Whether less than 30 days, or a third of its life, are left to a certificate."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return end - now < min(SOON, (end - begin) / 3)


def ending_soon(folder: Path) -> dict[str, datetime.datetime]:
    """List the certificates of a folder that `make_certificates` would renew: name of the file → its end."""
    found, now = {}, datetime.datetime.now(datetime.UTC)
    for path in sorted(folder.glob("*.pem")):
        with suppress(OSError, ValueError):  # `load_credentials` reports what is damaged
            if _ends_soon(certificate := x509.load_pem_x509_certificate(path.read_bytes()), now):
                found[path.name] = certificate.not_valid_after_utc
    return found
