"""Tests of the delay of tokens while more chunks are due than may be sent."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from tandem.settings.slo import BEST_EFFORT, DEFAULT_CLASSES, Overload, SloClass
from tests.unit.router.conftest import WITHOUT_RECOVERY, Cluster
from tests.unit.router.fake_cluster import channel_to, until
from tests.unit.router.placement.test_classes_and_tenants import STRICT, measured
from tests.unit.router.test_generate import Client, ask, expected

WIDE = SloClass("wide", itl_s=10.0)
WORST = SloClass("worst", itl_s=10.0, worst_gap_s=1.0)
LATE = SloClass("late", ttft_s=1e-9, itl_s=1.0, overload=Overload.DEGRADE)
CLASSES = (*DEFAULT_CLASSES, WIDE, WORST, LATE)


@pytest.fixture
async def client(cluster: Cluster) -> Any:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


class TestWhoWaits:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"chunks_per_s": 1e-3, "chunk_delay_max_s": 3.0, "slo_classes": CLASSES, **WITHOUT_RECOVERY}

    async def chunks(self, client: Client, slo: SloClass) -> int:
        """In which eight tokens of such an answer come."""
        messages = [message async for message in client.stub.Generate(ask(8, slo_class=slo.name))]
        tokens = [len(message.chunk.token_ids) for message in messages if message.chunk.token_ids]
        assert sum(tokens) == 8
        return len(tokens)

    async def test_tokens_wait_for_others_only_where_their_class_bears_it(
        self, cluster: Cluster, client: Client
    ) -> None:
        await measured(cluster)
        cluster.decode.switches.step_s = 0.02
        assert await self.chunks(client, STRICT) >= 5, "the first may go with the second"
        assert await self.chunks(client, WORST) >= 5, "of no gap of which more is borne"
        for slo in (BEST_EFFORT, WIDE, LATE):
            assert await self.chunks(client, slo) <= 3, "the first, and the last with the others"

    async def test_chunk_delays_follow_current_step_times(self, cluster: Cluster, client: Client) -> None:
        """Long after it was placed they may take as long as leaves nothing to wait for."""
        await measured(cluster)
        cluster.decode.switches.step_s = 0.02
        chunks = 0
        async for message in client.stub.Generate(ask(20, slo_class="wide")):
            chunks += bool(message.chunk.token_ids)
            cluster.decode.cost = replace(cluster.decode.cost, base_s=8.0)
        assert chunks >= 10

    async def test_what_waits_comes_before_the_error(self, cluster: Cluster, client: Client) -> None:
        cluster.decode.switches.mute_after = 5
        ids: list[int] = []

        async def read() -> None:
            async for message in client.stub.Generate(ask(8)):
                ids.extend(message.chunk.token_ids)

        answer = asyncio.create_task(read())
        dispatcher = cluster.router._dispatcher
        await until(lambda: [request.assembler.count for request in dispatcher._live.values()] == [5], "five are here")
        await cluster.decode.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await answer
        assert ids == expected(5)
