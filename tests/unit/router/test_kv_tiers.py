"""Requests go to workers that have their beginnings in tiers; pages are read ahead, and replies say what was loaded."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tandem.protocol.cost_parameters import UNMEASURED
from tandem.protocol.errors import Unavailable
from tandem.protocol.messages import Role, TierLoad
from tandem.protocol.page_digests import page_digests, root_digest
from tandem.protocol.prefixes import KvTier, PrefixRun
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import FakeWorker, channel_to, until
from tests.unit.router.test_generate import Client, ask

PAGE = 16
PROMPT = list(range(5, 5 + 3 * PAGE))
ROOT = root_digest("")
PAGES = page_digests(PROMPT, PAGE, ROOT)
READABLE = PrefixRun(ROOT, tuple(PAGES[:2]))
"""The page of the last token is computed."""


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


async def keep(cluster: Cluster, worker: FakeWorker) -> None:
    """The worker has the prompt's pages in host memory, and the router knows it."""
    await until(lambda: worker.streams, "the router listens")
    worker.tiers = (TierLoad(KvTier.HOST, 1e-3),)
    worker.cost = replace(UNMEASURED, observed=1)
    worker.keep(PAGES, KvTier.HOST)
    index = cluster.router._dispatcher.pool.fleet.prefixes
    await until(lambda: len(index) == len(PAGES), "the router heard of the pages")


async def test_a_request_goes_to_the_worker_whose_tier_has_its_beginning(cluster: Cluster, client: Client) -> None:
    others = [await FakeWorker(f"prefill-{n}", Role.PREFILL, token="secret").start() for n in (1, 2)]
    await cluster.members(cluster.prefill, *others, cluster.decode)
    await keep(cluster, others[1])
    others[1].switches.cached_tokens, others[1].switches.reloaded_tokens = 2 * PAGE, PAGE
    _, _, complete = await client.run(ask(2, prompt=PROMPT))
    assert [len(worker.prefills) for worker in (cluster.prefill, *others)] == [0, 0, 1]
    assert others[1].read_aheads == [READABLE], "it loads while the decode worker reserves pages"
    placement = complete.timeline.placement
    tokens = placement.resident_tokens, placement.reloaded_tokens, placement.computed_tokens
    assert tokens == (PAGE, PAGE, PAGE), "as the worker has reported"
    predicted = placement.predicted
    assert (predicted.resident_tokens, predicted.reloaded_tokens, predicted.computed_tokens) == (0, 2 * PAGE, PAGE)
    assert predicted.reload_s == pytest.approx(2e-3)
    assert placement.ttft_s > 0


async def test_pages_of_a_waiting_request_are_read_ahead(cluster: Cluster, client: Client) -> None:
    await keep(cluster, cluster.prefill)
    cluster.prefill.switches.silent_prefill = True
    first = asyncio.create_task(client.run(ask(2, prompt=[7] * 1030)))
    await until(lambda: cluster.prefill.prefills, "the worker has as many prompts as the router sends")
    second = asyncio.create_task(client.run(ask(2, prompt=PROMPT)))
    await until(lambda: cluster.prefill.read_aheads, "the request at the head of the queue")
    assert cluster.prefill.read_aheads == [READABLE]
    assert len(cluster.prefill.prefills) == 1
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert len(cluster.prefill.read_aheads) == 1, "asked once"


async def test_a_worker_that_cannot_read_ahead_serves_the_request(
    cluster: Cluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise Unavailable("not now")

    await keep(cluster, cluster.prefill)
    monkeypatch.setattr(FakeWorker, "ReadAhead", fails)
    _, ids, _ = await client.run(ask(2, prompt=PROMPT))
    assert len(ids) == 2
