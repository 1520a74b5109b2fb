"""TLS of the clients, against a server whose certificate is of an authority that nobody knows."""

import asyncio
import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tandem.client import AsyncClient, Client, InvalidArgument, Tls, Unavailable
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc


def write_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Writes a self-signed certificate for the host `name` and its key, and returns their files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / f"{name}.pem", folder / f"{name}.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(*encoding))
    return certificate, private


class Servicer(inference_pb2_grpc.InferenceServicer):
    def GetModelInfo(self, _request: Any, _context: Any) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(model="m")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("server", "client"):
        write_certificate(tmp_path, name)
    return tmp_path


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """The address of a server that asks for the client's certificate, too."""
    pair = (folder / "server.key").read_bytes(), (folder / "server.pem").read_bytes()
    wanted = (folder / "client.pem").read_bytes()
    server = grpc.server(ThreadPoolExecutor(1))
    inference_pb2_grpc.add_InferenceServicer_to_server(Servicer(), server)
    credentials = grpc.ssl_server_credentials([pair], root_certificates=wanted, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


async def model(kind: type[Client | AsyncClient], address: str, tls: Tls | None) -> str:
    client = kind(address, tls=tls)
    try:
        if isinstance(client, Client):
            return (await asyncio.to_thread(client.model)).model
        return (await client.model()).model
    finally:
        await client.close() if isinstance(client, AsyncClient) else client.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_both_sides_show_their_certificates(kind: Any, address: str, folder: Path) -> None:
    roots, certificate, key = (folder / name for name in ("server.pem", "client.pem", "client.key"))
    assert await model(kind, address, Tls(roots, certificate, key, "server")) == "m"
    for tls in (None, Tls(server_name="server"), Tls(roots, certificate, key), Tls(roots, server_name="server")):
        with pytest.raises(Unavailable, match="check that it runs, its address and TLS"):
            await model(kind, address, tls)


def test_files_that_cannot_be_used_are_named(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"tls: .*missing\.pem cannot be read"):
        Client("r:1", tls=Tls(folder / "missing.pem"))
    with pytest.raises(InvalidArgument, match="give both"):
        AsyncClient("r:1", tls=Tls(certificate=folder / "client.pem"))
