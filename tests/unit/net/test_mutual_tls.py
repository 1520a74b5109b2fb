"""Processes of one cluster prove to each other that they know its token without revealing it."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.net import rpc
from tandem.net.security import mutual_tls
from tandem.net.security.credentials import metrics_key_of
from tandem.net.security.mutual_tls import credentials_of
from tandem.protocol import errors
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc, types_pb2
from tests.keyed_channel import keyed_channel
from tests.stranger import Stranger

TOKEN = "of-this-cluster"
SECRET_CONTENT = "content-of-a-call"


class Members(cluster_pb2_grpc.ClusterServicer):
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    async def Unregister(self, request: Any, context: Any) -> cluster_pb2.UnregisterResponse:
        self.calls.append((request.peer.worker_id, [key for key, _ in context.invocation_metadata()]))
        return cluster_pb2.UnregisterResponse()


@pytest.fixture
async def members() -> AsyncIterator[tuple[Members, str]]:
    servicer, server = Members(), rpc.open_server()
    cluster_pb2_grpc.add_ClusterServicer_to_server(servicer, server)
    address = f"127.0.0.1:{rpc.listen(server, '127.0.0.1:0', TOKEN)}"
    await server.start()
    yield servicer, address
    await server.stop(None)


async def ask(channel: grpc.aio.Channel) -> errors.TandemError | None:
    """Returns the error of a call, None if it succeeded."""
    async with channel:
        try:
            stub: Any = cluster_pb2_grpc.ClusterStub(channel)
            await stub.Unregister(
                cluster_pb2.UnregisterRequest(peer=types_pb2.PeerRef(worker_id=SECRET_CONTENT)), timeout=20
            )
        except grpc.aio.AioRpcError as error:
            return rpc.error_of(error, "the controller")
    return None


async def test_a_part_is_let_in_and_sends_no_token(members: tuple[Members, str]) -> None:
    servicer, address = members
    assert await ask(rpc.open_channel(address, TOKEN)) is None
    ((content, headers),) = servicer.calls
    assert content == SECRET_CONTENT
    assert rpc.AUTHORIZATION not in headers


async def test_each_process_has_a_certificate_of_its_own_that_the_others_accept(members: tuple[Members, str]) -> None:
    """Two processes create separate certificates from one token, and each accepts the other's."""
    _, address = members
    another = credentials_of.__wrapped__(TOKEN)
    options = [("grpc.ssl_target_name_override", mutual_tls.PART_NAME)]
    assert await ask(grpc.aio.secure_channel(address, another.client, options)) is None
    assert credentials_of(TOKEN) is credentials_of(TOKEN), "a process pays for it once"


async def test_who_has_no_token_is_refused_by_the_server(members: tuple[Members, str]) -> None:
    servicer, address = members
    assert isinstance(await ask(rpc.open_channel(address)), errors.Unavailable)
    assert isinstance(await ask(keyed_channel(address, TOKEN)), errors.Unavailable)
    assert servicer.calls == []


async def test_who_has_another_token_is_refused_though_it_trusts_the_server(members: tuple[Members, str]) -> None:
    servicer, address = members
    ours, theirs = mutual_tls._authority_key(TOKEN), mutual_tls._authority_key("of-another-cluster")
    trusted = mutual_tls._pem(mutual_tls._certificate("tandem-cluster", ours.public_key(), ours))
    key = mutual_tls.ec.generate_private_key(mutual_tls.ec.SECP256R1())
    encoding, container = mutual_tls.serialization.Encoding.PEM, mutual_tls.serialization.PrivateFormat.PKCS8
    private = key.private_bytes(encoding, container, mutual_tls.serialization.NoEncryption())
    shown = mutual_tls._pem(mutual_tls._certificate(mutual_tls.PART_NAME, key.public_key(), theirs))
    options = [("grpc.ssl_target_name_override", mutual_tls.PART_NAME)]
    for credentials in (
        grpc.ssl_channel_credentials(trusted),
        grpc.ssl_channel_credentials(trusted, private, shown),
    ):
        assert isinstance(await ask(grpc.aio.secure_channel(address, credentials, options)), errors.Unavailable)
    assert servicer.calls == []


async def test_a_server_of_another_token_receives_nothing_of_a_call(members: tuple[Members, str]) -> None:
    servicer, address = members
    failure = await ask(rpc.open_channel(address, "of-another-cluster"))
    assert isinstance(failure, errors.Unavailable)
    assert "the TLS handshake failed" in failure.message
    assert "another cluster token" in failure.message
    assert servicer.calls == []


async def test_a_stranger_at_a_parts_address_learns_nothing() -> None:
    stranger = await Stranger().start()
    failure = await ask(rpc.open_channel(stranger.address, TOKEN))
    assert isinstance(failure, errors.Unavailable)
    stranger.assert_learned_nothing(TOKEN)
    assert SECRET_CONTENT.encode() not in stranger.received
    await stranger.stop()


def test_the_metrics_key_is_derived_from_the_token_and_does_not_reveal_it() -> None:
    key = metrics_key_of(TOKEN)
    assert key == metrics_key_of(TOKEN) != metrics_key_of(TOKEN + "2")
    assert len(key) == 64
    assert TOKEN not in key
    assert metrics_key_of("") == ""
