"""Cache salts reach the workers, and the number of cached prompt tokens is returned to the client."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import channel_to
from tests.unit.router.test_generate import Client, ask


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


async def test_a_salt_reaches_both_workers(cluster: Cluster, client: Client) -> None:
    await client.run(ask(3, cache_salt="alice"))
    await client.run(ask(3))
    base = f"http://{cluster.endpoints.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as http:
        await http.completions.create(model="fake", prompt="x", max_tokens=3, extra_body={"cache_salt": "bob"})
    for received in (cluster.prefill.prefills, cluster.decode.reservations):
        assert [message.cache_salt for message in received] == ["/alice", "", "/bob"]


async def test_a_salt_has_a_limit(client: Client) -> None:
    error = await client.error(ask(3, cache_salt="x" * 257))
    assert "cache_salt" in str(error.details())
    await client.run(ask(3, cache_salt="é" * 256))


async def test_sessions_and_retention_reach_the_workers(cluster: Cluster, client: Client) -> None:
    await client.run(ask(3, session_id="s1", cache_retention_s=7.5))
    assert cluster.prefill.prefills[-1].retention_s == cluster.decode.reservations[-1].retention_s == 7.5
    error = await client.error(ask(3, cache_retention_s=86401.0))
    assert "cache_retention_s" in str(error.details())
    error = await client.error(ask(3, session_id="x" * 257))
    assert "session" in str(error.details())


HINTS: list[tuple[dict[str, Any], float]] = [
    ({}, 0.0),
    ({"prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}, 0.0),
    ({"prompt_cache_key": None, "prompt_cache_retention": None}, 0.0),
    ({"prompt_cache_retention": "24h"}, 86400.0),
    ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, 1800.0),
    ({"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}, 86400.0),
]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "x"}),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("responses", {"input": "x", "max_output_tokens": 3}),
]


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    base = f"http://{cluster.endpoints.http_address}/v1/"
    async with httpx.AsyncClient(base_url=base, trust_env=False) as http:
        yield http


@pytest.mark.parametrize(("route", "body"), ROUTES)
async def test_openai_hints_are_how_long_the_prompt_is_kept(
    cluster: Cluster, http: httpx.AsyncClient, route: str, body: dict[str, Any]
) -> None:
    limit = {} if route == "responses" else {"max_tokens": 3}
    for hint, retention_s in HINTS:
        reply = await http.post(route, json=body | limit | hint)
        assert reply.status_code == 200, reply.text
        assert "x-tandem-ignored" not in reply.headers
        assert cluster.prefill.prefills[-1].retention_s == retention_s
        usage = reply.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        prompt = len(cluster.prefill.prefills[-1].prompt_token_ids)
        assert details == {"cached_tokens": 0, "cache_write_tokens": prompt // 16 * 16}


@pytest.mark.parametrize(("route", "body"), ROUTES)
@pytest.mark.parametrize(
    ("hint", "field"),
    [
        ({"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": "25h"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_key": "x" * 257}, "prompt_cache_key"),
    ],
)
async def test_openai_hints_are_checked(
    http: httpx.AsyncClient, route: str, body: dict[str, Any], hint: dict[str, Any], field: str
) -> None:
    reply = await http.post(route, json=body | hint)
    assert reply.status_code == 400
    assert field in reply.json()["error"]["message"]


async def test_the_session_header_goes_before_the_cache_key(cluster: Cluster, http: httpx.AsyncClient) -> None:
    admitted = []
    submit = cluster.router._dispatcher.submit
    cluster.router._dispatcher.submit = lambda *some: (admitted.extend(some), submit(*some))[1]  # type: ignore[method-assign]
    body = {"prompt": "x", "max_tokens": 3, "prompt_cache_key": "key"}
    for headers in ({}, {"X-Session-Id": "header"}):
        assert (await http.post("completions", json=body, headers=headers)).status_code == 200
    assert [one.session for one in admitted] == ["key", "header"]


@pytest.mark.parametrize(("cached", "reported"), [(0, 0), (2, 2), (99, 4)])
async def test_usage_says_what_was_cached(cluster: Cluster, client: Client, cached: int, reported: int) -> None:
    cluster.prefill.switches.cached_tokens = cached
    _, _, complete = await client.run(ask(3))
    assert (complete.prompt_tokens, complete.cached_tokens) == (4, reported)
    assert complete.cache_written_tokens == 0, "a prompt of less than a page is not cached"


async def test_a_later_attempt_says_nothing_of_the_prompt(cluster: Cluster, client: Client) -> None:
    """Its cached tokens are those that the first attempt computed."""
    cluster.prefill.switches.fail_transfers = 1
    cluster.prefill.switches.cached_tokens = 1
    _, _, complete = await client.run(ask(9))
    assert len(cluster.prefill.prefills) == 2
    assert cluster.prefill.prefills[1].prior_output_tokens == 1
    assert complete.cached_tokens == 1
