"""Mutual TLS between the components of a cluster, with the cluster's token as the only secret.

The token determines the key of a certificate authority (ECDSA P-256) that exists only in the memory of the components.
Each process creates its own key when it starts, and signs a certificate for it. Both ends of every connection require a
certificate of that authority before any call is sent. A process that gets the port of a former worker therefore learns
no secret, and nobody else can read the traffic.
"""

import functools
from dataclasses import dataclass
from datetime import UTC, datetime

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tandem.net.security.credentials import derived_secret

PART_NAME = "tandem-part"
"""The name in every component's certificate; the signature, not the name, authenticates a component."""

_AUTHORITY_NAME = "tandem-cluster"
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# The clocks of a cluster's hosts may differ, and its processes have no maximum lifetime, so certificates do not expire.
# RFC 5280, 4.1.2.5, defines this end date for that.
_VALID_FROM = datetime(1970, 1, 1, tzinfo=UTC)
_VALID_UNTIL = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class PartCredentials:
    """A process's credentials for connections that it opens (`client`) and accepts (`server`)."""

    client: grpc.ChannelCredentials
    server: grpc.ServerCredentials


@functools.cache
def credentials_of(token: str) -> PartCredentials:
    """Return this process's credentials in the cluster with the (non-empty) `token`.

    They are created once, in about 50 ms.
    """
    authority_key = _authority_key(token)
    part_key = ec.generate_private_key(ec.SECP256R1())
    authority = _pem(_certificate(_AUTHORITY_NAME, authority_key.public_key(), authority_key))
    part = _pem(_certificate(PART_NAME, part_key.public_key(), authority_key))
    key = part_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return PartCredentials(
        grpc.ssl_channel_credentials(authority, key, part),
        grpc.ssl_server_credentials([(key, part)], authority, require_client_auth=True),
    )


def _authority_key(token: str) -> ec.EllipticCurvePrivateKey:
    """Derive the authority's key from `token`: FIPS 186-5, A.2.1, with 512 derived bits instead of random ones."""
    scalar = int.from_bytes(derived_secret(token, "certificate authority"), "big") % (_P256_ORDER - 1) + 1
    return ec.derive_private_key(scalar, ec.SECP256R1())


def _certificate(
    name: str, key: ec.EllipticCurvePublicKey, authority_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    """Create a certificate for `name`, the authority itself or a component, signed by the authority."""
    is_authority = name == _AUTHORITY_NAME
    builder = (
        x509.CertificateBuilder()
        .subject_name(_x509_name(name))
        .issuer_name(_x509_name(_AUTHORITY_NAME))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
    )
    if not is_authority:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(authority_key, hashes.SHA256())


def _x509_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
