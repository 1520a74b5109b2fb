"""TLS certificates for tests: authorities, and the certificates that they sign."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tandem.settings.tls import TlsFiles

DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, in PEM format."""

    certificate: bytes
    key: bytes

    def save(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Write both files into a folder, each atomically by a rename, and return their paths."""
        paths = folder / f"{name}.crt", folder / f"{name}.key"
        for path, content in zip(paths, (self.certificate, self.key), strict=True):
            partial = path.with_suffix(".partial")
            partial.write_bytes(content)
            partial.replace(path)
        return paths


class Authority:
    """A certificate authority and its private key."""

    def __init__(self, name: str) -> None:
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.pem = _sign(self._name, self._key, self._name, self._key, DAY, authority=True)

    def issue(self, name: str, lasts: timedelta = DAY) -> Pair:
        """Return a certificate for 127.0.0.1 and localhost that expires in `lasts`.

        If `lasts` is negative, the certificate has already expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        pem = _sign(subject, key, self._name, self._key, lasts, authority=False)
        form = serialization.PrivateFormat.PKCS8
        return Pair(pem, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))

    def trusted(self, shown: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Return a client's SSL context that trusts this authority and presents the certificate `shown`."""
        context = ssl.create_default_context(cadata=self.pem.decode())
        if shown is not None:
            context.load_cert_chain(*shown)
        return context

    def channel(self, shown: Pair | None = None) -> grpc.ChannelCredentials:
        """Return gRPC credentials that trust this authority and present the certificate `shown`."""
        if shown is None:
            return grpc.ssl_channel_credentials(self.pem)
        return grpc.ssl_channel_credentials(self.pem, shown.key, shown.certificate)


def files_of(folder: Path, pair: Pair, client_ca: Authority | None = None) -> TlsFiles:
    """Write a server's files, and return their paths."""
    ca = None
    if client_ca is not None:
        ca = folder / "clients.crt"
        ca.write_bytes(client_ca.pem)
    return TlsFiles(*pair.save(folder, "server"), ca)


def _sign(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    lasts: timedelta,
    *,
    authority: bool,
) -> bytes:
    now = datetime.now(UTC)
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 10 * DAY)
        .not_valid_after(now + lasts)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
