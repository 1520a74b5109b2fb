"""A request that scores its prompt ends at its workers as soon as its client leaves."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import until


@pytest.mark.parametrize(
    "scored",
    [
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"echo": True, "logprobs": 1, "max_tokens": 4},
        {"echo": True, "logprobs": 1, "max_tokens": 4, "stream": True},
        {"prompt_logprobs": 1, "max_tokens": 4, "n": 2},
    ],
)
async def test_the_rest_of_the_prompt_is_aborted(cluster: Cluster, scored: dict[str, Any]) -> None:
    cluster.prefill.switches.silent_prefill = True
    async with httpx.AsyncClient(base_url=f"http://{cluster.endpoints.http_address}", timeout=60) as http:
        call = asyncio.create_task(http.post("/v1/completions", json={"prompt": [[5] * 500, [6] * 500], **scored}))
        await until(lambda: len(cluster.prefill.prefills) == 2, "the prompts are at the worker")
        assert all(task.scores_prompt for task in cluster.prefill.prefills)
        call.cancel()
        await until(lambda: cluster.prefill.idle and cluster.decode.idle, "the workers are idle")
    assert not cluster.router._dispatcher._live
