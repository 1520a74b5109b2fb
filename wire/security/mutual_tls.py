"""Mutual TLS between the parts of one cluster, whose only secret is the cluster's token.

The token determines the key of a certificate authority (ECDSA P-256) that exists nowhere but in the memory of those who
know it. Each process signs a certificate of its own with it, for a key that it makes at its start. Both ends of every
connection ask for a certificate of that authority before a byte of a call is sent, so that whoever is given the port of
a worker that left learns nothing that could be shown to others, and traffic cannot be read on its way.
"""

import functools
from dataclasses import dataclass
from datetime import UTC, datetime

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wire.security.credentials import derived_secret

PART_NAME = "tandem-part"
"""The name in every part's certificate. Parts are found by addresses that others tell, and proven by the signature."""

_AUTHORITY_NAME = "tandem-cluster"
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# The clocks of a cluster's hosts may differ, and its processes run for as long as they are wanted: a certificate is as
# good as the token. RFC 5280, 4.1.2.5, has this end for one that has none.
_VALID_FROM = datetime(1970, 1, 1, tzinfo=UTC)
_VALID_UNTIL = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class PartCredentials:
    """A process's side of connections to other parts, `client` of those it opens and `server` of those it accepts."""

    client: grpc.ChannelCredentials
    server: grpc.ServerCredentials


@functools.cache
def credentials_of(token: str) -> PartCredentials:
    """This process's credentials in the cluster of `token`, which is not empty; made once, in about 50 ms."""
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
    """The same for everybody who knows `token`: FIPS 186-5, A.2.1, with 512 bits in place of random ones."""
    scalar = int.from_bytes(derived_secret(token, "certificate authority"), "big") % (_P256_ORDER - 1) + 1
    return ec.derive_private_key(scalar, ec.SECP256R1())


def _certificate(
    name: str, key: ec.EllipticCurvePublicKey, authority_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    """A certificate for `name`, which is the authority's own or a part's."""
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
