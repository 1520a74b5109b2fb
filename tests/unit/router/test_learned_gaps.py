"""Which gaps tell a router how much those of a worker err: of decoding alone, and nobody's fault but the machine's."""

from typing import Any

import pytest

from router.answer import Ending
from router.request import Admitted
from router.slo import DEFAULT_CLASSES
from router.worker_books import WorkerBooks
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import channel_to, until
from tests.unit.router.test_classes_and_tenants import PROMPT, measured
from tests.unit.router.test_generate import Client, ask
from wire.messages import SamplingParams
from wire.timeline import Edge, EdgeStamp

STRICT = DEFAULT_CLASSES[0]


@pytest.fixture
async def client(cluster: Cluster) -> Any:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Classes of the gaps that were learned from."""
    found: list[str] = []
    monkeypatch.setattr(WorkerBooks, "note_gap", lambda _self, slo, _gap_s: found.append(slo.name))
    return found


async def read(cluster: Cluster, count: int, *, late: bool) -> None:
    """Such an answer; who is `late` comes for its pieces when they are there."""
    edges = (EdgeStamp.now(Edge.RECEIVED),)
    admitted = Admitted("r", tuple(PROMPT), SamplingParams(count, ignore_eos=True), (), 0, edges, slo=STRICT)
    choices, tokens = cluster.router._dispatcher.submit(admitted), 0
    (answer,) = choices.answers
    while True:
        if late:
            await until(lambda read=tokens: answer.token_count > read or read == count, "more is there")
        _, event = await choices.next()
        if isinstance(event, Ending):
            break
        tokens += len(event.token_ids)
    choices.close()


async def test_who_reads_slowly_says_nothing_of_the_worker(cluster: Cluster, noted: list[str]) -> None:
    """Others of its class would be turned away for it."""
    await measured(cluster)
    cluster.decode.switches.step_s = 0.01
    await read(cluster, 20, late=True)
    assert noted == []
    await read(cluster, 20, late=False)
    assert "strict" in noted


async def test_an_answer_that_goes_on_elsewhere_teaches_nothing_by_that(
    cluster: Cluster, client: Client, noted: list[str]
) -> None:
    """With a token of each worker a try, all gaps are hand-overs or begin before a try."""
    await measured(cluster)
    cluster.decode.switches.preempt_after = 1
    await client.run(ask(12, slo_class="strict"))
    assert len(cluster.decode.reservations) == 6
    assert noted == []


async def test_nothing_is_learned_beside_a_guess(cluster: Cluster, client: Client) -> None:
    decode = next(link.books for link in cluster.router._dispatcher.pool.links if link.books.decodes)
    cluster.decode.switches.step_s = 0.01
    await client.run(ask(6, slo_class="strict"))
    assert not decode.cost.parameters.observed
    assert not decode.noise._factors
