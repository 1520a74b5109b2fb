"""The message to the worker that computes a prompt names the worker from which it is to pull the first pages."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tandem.protocol.cost_parameters import UNMEASURED
from tandem.protocol.messages import PrefixSource, TierLoad, WorkerLoad
from tandem.protocol.page_digests import page_digests, root_digest
from tandem.protocol.prefixes import KvTier
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import FakeWorker, channel_to, until
from tests.unit.router.test_generate import Client, ask

PAGE = 16
PROMPT = list(range(5, 5 + 3 * PAGE))
PAGES = page_digests(PROMPT, PAGE, root_digest(""))


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


@pytest.fixture(autouse=True)
def _pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    load: Any = FakeWorker.load

    def with_pulls(worker: FakeWorker) -> WorkerLoad:
        reported: WorkerLoad = load.fget(worker)
        return replace(reported, cost=replace(UNMEASURED, observed=1), pulls=TierLoad(KvTier.PEER, 1e-6))

    monkeypatch.setattr(FakeWorker, "load", property(with_pulls))


async def known(cluster: Cluster, holder: FakeWorker, *others: FakeWorker) -> None:
    """The router knows the pages of `holder`, and how fast the others pull."""
    await until(lambda: all(worker.streams for worker in (holder, *others)), "the router listens")
    holder.cache(PAGES)
    for worker in others:
        worker.cache([])
    fleet = cluster.router._dispatcher.pool.fleet
    await until(lambda: len(fleet.prefixes) == len(PAGES), "the router heard of the pages")
    pulling = {worker.worker_id for worker in others}

    def heard() -> bool:
        return pulling <= {worker.peer.worker_id for worker in fleet.live if worker.pulls is not None}

    await until(heard, "the router heard of the pulls")


async def test_a_prompt_of_another_worker_is_pulled_by_the_prefill_worker(cluster: Cluster, client: Client) -> None:
    await known(cluster, cluster.decode, cluster.prefill)
    _, ids, complete = await client.run(ask(2, prompt=PROMPT))
    assert len(ids) == 2
    source = PrefixSource(cluster.decode.info.peer, cluster.decode.address, 2 * PAGE)
    assert [reservation.source for reservation in cluster.decode.reservations] == [None]
    assert [task.source for task in cluster.prefill.prefills] == [source]
    predicted = complete.timeline.placement.predicted
    assert (predicted.source, predicted.reloaded_tokens, predicted.computed_tokens) == ("decode-0", 2 * PAGE, PAGE)
