"""Cache salts reach the workers, and the number of cached prompt tokens is returned to the client."""

from collections.abc import AsyncIterator

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


@pytest.mark.parametrize(("cached", "reported"), [(0, 0), (2, 2), (99, 4)])
async def test_usage_says_what_was_cached(cluster: Cluster, client: Client, cached: int, reported: int) -> None:
    cluster.prefill.switches.cached_tokens = cached
    _, _, complete = await client.run(ask(3))
    assert (complete.prompt_tokens, complete.cached_tokens) == (4, reported)


async def test_a_later_attempt_says_nothing_of_the_prompt(cluster: Cluster, client: Client) -> None:
    """Its cached tokens are those that the first attempt computed."""
    cluster.prefill.switches.fail_transfers = 1
    cluster.prefill.switches.cached_tokens = 1
    _, _, complete = await client.run(ask(9))
    assert len(cluster.prefill.prefills) == 2
    assert cluster.prefill.prefills[1].prior_output_tokens == 1
    assert complete.cached_tokens == 1
