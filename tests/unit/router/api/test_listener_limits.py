"""Both listeners limit concurrent calls, and end the calls of clients that vanished without closing the connection."""

import asyncio
from typing import Any

import grpc
import httpx
import pytest

from tandem.net.rpc import RETRY_AFTER
from tandem.settings.listeners import ListenerLimits
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import channel_to, until
from tests.unit.router.test_generate import Client, ask

BODY = {"model": "fake", "prompt": [5, 6, 7, 8], "max_tokens": 4}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS_FRAME, HEADERS_FRAME, DATA_FRAME = 4, 1, 0
END_STREAM, END_HEADERS = 1, 4
MAX_CONCURRENT_STREAMS = b"\0\3"


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"listeners": ListenerLimits(max_calls=1, keepalive_s=0.2)}


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Returns an HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def headers(pairs: dict[str, str]) -> bytes:
    """Returns an HPACK header block with every header literal and not indexed."""
    texts = [[name.encode(), value.encode()] for name, value in pairs.items()]
    return b"".join(b"\0" + b"".join(bytes([len(text)]) + text for text in pair) for pair in texts)


async def test_http_calls_are_bounded_and_operators_are_answered_all_the_same(cluster: Cluster) -> None:
    cluster.decode.switches.held_at = 2
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}") as http:
        running = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await until(lambda: len(cluster.router._dispatcher._live) == 1, "it is in progress")
        over = await http.post("/v1/completions", json=BODY)
        assert (over.status_code, over.headers["retry-after"]) == (429, "1")
        assert "the limit is 1" in over.json()["error"]["message"]
        for path in ("/health", "/live", "/metrics"):
            assert (await http.get(path)).status_code == 200
        cluster.decode.go.set()
        assert (await running).status_code == 200
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_grpc_calls_are_bounded(cluster: Cluster) -> None:
    cluster.decode.switches.held_at = 2
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        client = Client(channel)
        running = asyncio.create_task(client.run(ask(4)))
        await until(lambda: len(cluster.router._dispatcher._live) == 1, "it is in progress")
        error = await client.error(ask(4))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(error.trailing_metadata() or ())[RETRY_AFTER] == "1"
        cluster.decode.go.set()
        await running


async def test_a_client_receives_the_limit_of_calls_a_connection(cluster: Cluster) -> None:
    host, port = cluster.endpoints.grpc_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + frame(SETTINGS_FRAME, 0, 0))
    head = await reader.readexactly(9)
    assert head[3] == SETTINGS_FRAME
    sent = await reader.readexactly(int.from_bytes(head[:3], "big"))
    settings = {sent[at : at + 2]: int.from_bytes(sent[at + 2 : at + 6], "big") for at in range(0, len(sent), 6)}
    assert settings[MAX_CONCURRENT_STREAMS] == 1024
    writer.close()


async def test_the_answer_of_a_client_that_is_gone_without_a_word_is_aborted(cluster: Cluster) -> None:
    """The client answers no pings, as if its host had failed, although the kernel keeps its connection open."""
    cluster.decode.switches.held_at = 2
    host, port = cluster.endpoints.grpc_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    asked = ask(40).SerializeToString()
    head = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/tandem.v1.Inference/Generate",
        ":authority": "a",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    message = b"\0" + len(asked).to_bytes(4, "big") + asked
    writer.write(PREFACE + frame(SETTINGS_FRAME, 0, 0) + frame(HEADERS_FRAME, END_HEADERS, 1, headers(head)))
    writer.write(frame(DATA_FRAME, END_STREAM, 1, message))
    await until(lambda: len(cluster.router._dispatcher._live) == 1, "it is in progress")
    await until(lambda: not cluster.router._dispatcher._live, "its answer is aborted")
    cluster.decode.go.set()
    await reader.read()
    writer.close()
