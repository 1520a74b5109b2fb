"""TLS at both listeners: who is let in, rotation of certificates, and the port for operators beside them."""

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest

from tandem.cli.bench.servers import GrpcServer, find_server
from tandem.cli.connection.router import tls_of, view_of
from tandem.cli.load.run import LoadSettings, shares_of
from tandem.cli.load.workload import Arrival, Block, Workload
from tandem.client import AsyncClient
from tandem.net.security.credentials import metrics_key_of
from tandem.protocol.errors import InvalidArgument, PermissionDenied, Unavailable
from tandem.settings.listeners import ListenerLimits
from tests.certificates import DAY, Authority, files_of
from tests.unit.router.conftest import Cluster
from tests.unit.router.test_generate import Client, ask

BODY: dict[str, Any] = {"model": "fake", "prompt": [5, 6, 7, 8], "max_tokens": 4}
OURS, FOREIGN = Authority("ours"), Authority("foreign")
CLIENTS = Authority("clients")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"tls": files_of(tmp_path, OURS.issue("first"))}


async def answers(cluster: Cluster, context: ssl.SSLContext) -> str:
    """Returns what a request over HTTPS ends with."""
    async with httpx.AsyncClient(base_url=f"https://{cluster.endpoints.http_address}", verify=context) as http:
        try:
            return str((await http.post("/v1/completions", json=BODY)).status_code)
        except httpx.TransportError as error:
            return type(error).__name__


async def generates(cluster: Cluster, credentials: grpc.ChannelCredentials) -> str:
    """Returns what a call over gRPC ends with."""
    async with grpc.aio.secure_channel(cluster.endpoints.grpc_address, credentials) as channel:
        try:
            await Client(channel).run(ask(4))
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def test_answers_are_encrypted_and_others_are_refused(cluster: Cluster) -> None:
    async with httpx.AsyncClient(verify=OURS.trusted()) as http:
        base = f"https://{cluster.endpoints.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="unused", http_client=http, max_retries=0) as client:
            stream = await client.completions.create(**BODY, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream])
            assert (await client.models.list()).data[0].id == "fake"
    assert await generates(cluster, OURS.channel()) == "OK"
    assert await answers(cluster, FOREIGN.trusted()) == "ConnectError"
    assert await generates(cluster, FOREIGN.channel()) == "UNAVAILABLE"
    async with httpx.AsyncClient() as plain:
        with pytest.raises(httpx.TransportError):
            await plain.get(f"http://{cluster.endpoints.http_address}/health")
    async with grpc.aio.insecure_channel(cluster.endpoints.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await Client(channel).run(ask(4))


async def test_a_large_body_comes_in_whole(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=f"https://{cluster.endpoints.http_address}", verify=OURS.trusted()) as http:
        body = json.dumps({**BODY, "user": "u" * (1 << 20)})
        assert (await http.post("/v1/completions", content=body)).status_code == 200
        too_large = json.dumps({**BODY, "user": "u" * (5 << 20)})
        assert (await http.post("/v1/completions", content=too_large)).status_code == 400


async def test_a_rotated_certificate_is_used_by_new_connections(
    cluster: Cluster, settings: dict[str, Any], tmp_path: Path
) -> None:
    address = cluster.endpoints.http_address
    async with (
        httpx.AsyncClient(base_url=f"https://{address}", verify=OURS.trusted()) as http,
        grpc.aio.secure_channel(cluster.endpoints.grpc_address, OURS.channel()) as channel,
    ):
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        await Client(channel).run(ask(4))
        FOREIGN.issue("second").save(tmp_path, "server")
        await _until_equal("200", lambda: answers(cluster, FOREIGN.trusted()))
        await _until_equal("OK", lambda: generates(cluster, FOREIGN.channel()))
        assert await answers(cluster, OURS.trusted()) == "ConnectError"
        assert await generates(cluster, OURS.channel()) == "UNAVAILABLE"
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200, "open connections live on"
        await Client(channel).run(ask(4))
        OURS.issue("expired", -DAY).save(tmp_path, "server")
        await asyncio.sleep(1.1)
        assert await answers(cluster, FOREIGN.trusted()) == "200", "what cannot be used changes nothing"
        assert await generates(cluster, FOREIGN.channel()) == "OK"


async def _until_equal(wanted: str, read: Any) -> None:
    for _ in range(300):
        if await read() == wanted:
            return
        await asyncio.sleep(0.1)
    assert await read() == wanted


async def test_operators_have_a_port_without_tls(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.operations_address}") as http:
        for path in ("/live", "/ready", "/metrics", "/traces"):
            assert (await http.get(path)).status_code == 200
        expires = [line for line in (await http.get("/metrics")).text.splitlines() if "tls_certificate_expires" in line]
        assert abs(float(expires[-1].split()[-1]) - time.time() - DAY.total_seconds()) < 3600
        for path in ("/v1/completions", "/v1/models"):
            assert (await http.post(path, json=BODY)).status_code == 404


class TestClientCertificates:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        return {"tls": files_of(tmp_path, OURS.issue("server"), CLIENTS)}

    async def test_a_client_needs_one_of_the_authority(self, cluster: Cluster, tmp_path: Path) -> None:
        for name, pair, let_in in (
            ("good", CLIENTS.issue("good"), True),
            ("expired", CLIENTS.issue("expired", -DAY), False),
            ("foreign", FOREIGN.issue("foreign"), False),
            ("server's", OURS.issue("other"), False),
        ):
            over_http = await answers(cluster, OURS.trusted(pair.save(tmp_path, name)))
            over_grpc = await generates(cluster, OURS.channel(pair))
            assert (over_http == "200", over_grpc) == (let_in, "OK" if let_in else "UNAVAILABLE"), name
        assert await answers(cluster, OURS.trusted()) != "200"
        assert await generates(cluster, OURS.channel()) == "UNAVAILABLE"

    async def test_the_authority_is_rotated_too(
        self, cluster: Cluster, settings: dict[str, Any], tmp_path: Path
    ) -> None:
        newcomer = FOREIGN.issue("newcomer")
        shown = newcomer.save(tmp_path, "newcomer")
        settings["tls"].client_ca.write_bytes(CLIENTS.pem + FOREIGN.pem)
        await _until_equal("200", lambda: answers(cluster, OURS.trusted(shown)))
        await _until_equal("OK", lambda: generates(cluster, OURS.channel(newcomer)))
        assert await generates(cluster, OURS.channel(CLIENTS.issue("old"))) == "OK"


class TestHandshakes:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        limits = ListenerLimits(header_timeout_s=0.3)
        return {"listeners": limits, "tls": files_of(tmp_path, OURS.issue("server"))}

    @pytest.fixture
    async def silent(self, cluster: Cluster) -> AsyncIterator[socket.socket]:
        host, port = cluster.endpoints.http_address.split(":")
        connection = socket.create_connection((host, int(port)))
        connection.setblocking(False)
        with contextlib.closing(connection):
            yield connection

    async def test_a_handshake_that_does_not_come_ends_at_its_deadline(self, silent: socket.socket) -> None:
        async with asyncio.timeout(30):
            assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""


class TestCommands:
    """The commands of `tandem` at such a router."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        return {"tls": files_of(tmp_path, OURS.issue("server"), CLIENTS), "api_keys": ("tenant",)}

    async def test_status_and_answers(self, cluster: Cluster, tmp_path: Path) -> None:
        ca = tmp_path / "ca.crt"
        ca.write_bytes(OURS.pem)
        shown = [str(path) for path in CLIENTS.issue("me").save(tmp_path, "me")]
        tls, address = tls_of(str(ca), *shown), cluster.endpoints.grpc_address
        async with AsyncClient(address, api_key="tenant", tls=tls) as client:
            stream = client.stream_generate("The fox", max_tokens=4, temperature=0)
            pieces = [chunk.text async for chunk in stream]
            answer = await stream.answer()
        assert answer.text == "".join(pieces)
        server = await asyncio.to_thread(
            partial(find_server, f"grpc://{address}", "tenant", "", "", 1, ignore_eos=True, tls=tls)
        )
        assert isinstance(server, GrpcServer)
        assert server.model == "fake"
        await asyncio.to_thread(server.warm_up, 1)
        workload = Workload("one", 1.0, 1.0, 0, (Arrival(0.0, (Block(0, 8),), 4),))
        (share,) = shares_of(server.target, workload, LoadSettings(clients=1))
        assert share.tls == tls
        view = await asyncio.to_thread(view_of, address, metrics_key_of("secret"), tls)
        assert len(view.info.workers) == 2
        with pytest.raises(PermissionDenied, match="has the role tenant"):
            await asyncio.to_thread(view_of, address, "tenant", tls)
        pinned = tls_of("", *shown, pinned=str(tmp_path / "server.crt"))
        async with AsyncClient(address, api_key="tenant", tls=pinned) as client:
            assert (await client.generate("The fox", max_tokens=4, temperature=0)).text == answer.text
        another = tls_of("", *shown, pinned=shown[0])
        for wrong in (None, tls_of(str(ca), "", ""), another):
            with pytest.raises(Unavailable, match="cannot reach the router"):
                await asyncio.to_thread(view_of, address, "tenant", wrong)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("", "c", "k"), "--tls-ca: is missing"),
        (("ca", "c", ""), "--tls-client-key: is missing; it belongs to --tls-client-certificate"),
        (("ca", "", "k"), "--tls-client-certificate: is missing"),
        (("/missing/ca", "", ""), r"--tls-ca: cannot read /missing/ca \(No such file or directory\)"),
    ],
)
def test_files_of_a_client_are_named_by_their_option(files: tuple[str, str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        tls_of(*files)
