"""Two workers whose pools are too small: each prompt returns to the worker that has its KV in host memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.test_same_tokens import ask_all

PROMPTS, PROMPT_TOKENS, PAGE_TOKENS = 8, 260, 16
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4
"""Keys and values of SmolLM2-135M's 30 layers, with 3 heads of 64 elements of float32."""
POOL_BYTES = 3 * PROMPT_TOKENS * KV_BYTES_PER_TOKEN
"""A pool has room for three of the prompts, and for half of it answers; the prompts are four for each worker."""


@pytest.mark.timeout(300)
def test_a_prompt_returns_to_the_worker_with_its_kv_in_host_memory(running_cluster: Callable[..., Any]) -> None:
    cluster = running_cluster(
        mode="colocated",
        workers=2,
        dtype="float32",
        page_tokens=PAGE_TOKENS,
        max_step_tokens=128,
        kv_cache_bytes=POOL_BYTES,
        kv_host_bytes=4 * POOL_BYTES,
        max_model_len=512,
    )
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(300, 40_000) for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS)]

    def ask(*chosen: tuple[int, ...]) -> list[tuple[list[int], Any]]:
        return asyncio.run(ask_all(cluster.grpc_address, list(chosen), 3))

    # Two at a time, so that both workers get some of them.
    first = [reply for pair in zip(prompts[::2], prompts[1::2], strict=True) for reply in ask(*pair)]
    workers = [complete.timeline.prefill_worker for _, complete in first]
    assert len(set(workers)) == 2
    again = [ask(prompt)[0] for prompt in prompts]
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in first]
    assert [complete.timeline.prefill_worker for _, complete in again] == workers
    placements = [complete.timeline.placement for _, complete in again]
    assert all(placed.resident_tokens + placed.reloaded_tokens == 256 for placed in placements)
    assert sum(placed.reloaded_tokens for placed in placements) > 0
    assert all(placed.computed_tokens == PROMPT_TOKENS - 256 for placed in placements)
    assert all(placed.ttft_s > 0 for placed in placements)
    cluster.assert_idle_and_sound()
