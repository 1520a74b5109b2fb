"""The header X-Request-Id at the HTTP listener."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.unit.router.conftest import Cluster

TEXT = {"model": "fake", "prompt": "x", "max_tokens": 2}


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"api_keys": ("k",), "allowed_origins": ("https://page.example",)}


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://{cluster.endpoints.http_address}", timeout=60, headers={"authorization": "Bearer k"}
    ) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_s_id_is_echoed_and_never_names_the_request(http: httpx.AsyncClient, stream: bool) -> None:
    body = {**TEXT, "stream": stream}
    replies = [await http.post("/v1/completions", json=body, headers={"x-request-id": "a b/1"}) for _ in range(2)]
    for reply in replies:
        assert reply.status_code == 200
        assert reply.headers.get_list("x-request-id") == ["a b/1"]
        assert "a b/1" not in reply.text
    assert replies[0].text != replies[1].text  # each answer has an id of its own


async def test_an_answer_s_own_id_is_the_header_without_one(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/completions", json=TEXT)
    assert reply.headers["x-request-id"] == reply.json()["id"]
    streamed = await http.post("/v1/completions", json={**TEXT, "stream": True})
    assert f'"id":"{streamed.headers["x-request-id"]}"' in streamed.text


async def test_errors_have_it_too(http: httpx.AsyncClient) -> None:
    known = {"x-request-id": "mine"}
    for reply, status in (
        (await http.post("/v1/completions", json={**TEXT, "n": 0}, headers=known), 400),
        (await http.post("/v1/completions", json=TEXT, headers={**known, "authorization": "Bearer no"}), 401),
        (await http.get("/nothing", headers=known), 404),
    ):
        assert (reply.status_code, reply.headers["x-request-id"]) == (status, "mine")
    fresh = [(await http.get("/nothing")).headers["x-request-id"] for _ in range(2)]
    assert fresh[0] != fresh[1]


@pytest.mark.parametrize("sent", [[b""], [b"x" * 129], [b"caf\xc3\xa9"], [b"a\tb"], [b"a", b"b"]])
async def test_what_is_no_id_is_ignored(http: httpx.AsyncClient, sent: list[bytes]) -> None:
    reply = await http.post("/v1/completions", json=TEXT, headers=[(b"X-Request-Id", value) for value in sent])
    assert reply.status_code == 200
    assert reply.headers["x-request-id"] == reply.json()["id"]


async def test_pages_may_read_it(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/completions", json=TEXT, headers={"origin": "https://page.example"})
    assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
