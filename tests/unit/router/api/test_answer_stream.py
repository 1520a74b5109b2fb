"""HTTP streams before their first token: headers are sent at once, and keep-alive comments while the request waits."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import until

ASKED: dict[str, Any] = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 8, "stream": True}


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", timeout=60) as client:
        yield client


async def test_headers_leave_before_the_first_token(cluster: Cluster, http: httpx.AsyncClient) -> None:
    cluster.prefill.switches.silent_prefill = True
    async with http.stream("POST", "/v1/completions", json=ASKED) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        await until(lambda: bool(cluster.prefill.prefills), "it is placed")
    await until(lambda: bool(cluster.decode.aborted), "its client is gone")
    await cluster.settled()


async def test_what_is_refused_at_once_has_a_status(cluster: Cluster, http: httpx.AsyncClient) -> None:
    for change, status in (({"model": "gpt"}, 404), ({"max_tokens": 10**6}, 400), ({"slo_class": "gold"}, 400)):
        assert (await http.post("/v1/completions", json=ASKED | change)).status_code == status
    await cluster.controller.set(cluster.prefill)
    await until(lambda: not cluster.router.ready, "not ready")
    assert (await http.post("/v1/completions", json=ASKED)).status_code == 503


class TestFullQueue:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"max_queued_requests": 1}

    async def test_a_full_queue_has_a_status(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        cluster.decode.switches.refuse_reserve = 10**9
        async with http.stream("POST", "/v1/completions", json=ASKED) as waiting:
            assert waiting.status_code == 200
            await until(lambda: cluster.router._dispatcher.waiting == 1, "it waits")
            assert (await http.post("/v1/completions", json=ASKED)).status_code == 429


class TestComments:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"sse_comment_s": 0.02}

    async def test_comments_come_while_a_request_waits(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        cluster.prefill.switches.silent_prefill = True
        async with http.stream("POST", "/v1/completions", json=ASKED) as reply:
            lines = [line async for _, line in _first(reply.aiter_lines(), 6)]
        assert lines == [": waiting", ""] * 3

    async def test_clients_skip_them(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        cluster.decode.switches.step_s = 0.06
        text = (await http.post("/v1/completions", json=ASKED)).text
        events = text.strip().split("\n\n")
        assert ": waiting" in events
        assert events[-1] == "data: [DONE]"
        whole = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1] if event[:1] != ":")
        base = f"http://{cluster.endpoints.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model="fake", prompt=[5, 6, 7], max_tokens=8, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == whole


async def _first(lines: AsyncIterator[str], count: int) -> AsyncIterator[tuple[int, str]]:
    for number in range(count):
        yield number, await anext(lines)
