"""A worker with tiers of the prefix cache and a pool that is too small is killed: its files serve the next one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.metrics import families as f
from tandem.metrics.metrics_server import fetch
from tandem.metrics.scrape import Scrape
from tests.soak import soak

from .conftest import VOCAB
from .moments import kill, restarted
from .streams import Question, undisturbed

PROMPTS, PROMPT_TOKENS, ANSWER = 6, 1000, 20
POOL_BYTES, HOST_BYTES, DISK_BYTES = 16 << 20, 8 << 20, 256 << 20
"""The prompts have 48 MiB of KV."""


def loaded(cluster: Any) -> float:
    """Returns the number of pages that the worker's process has loaded from its disk."""
    exported = Scrape(asyncio.run(fetch(cluster.metrics_address, "/metrics", timeout_s=60.0)), 0.0)
    return exported.total(f.TIER_PAGES, tier="disk", event="loaded")


@soak
@pytest.mark.timeout(300)
def test_a_restarted_worker_reads_its_files(
    running_cluster: Callable[..., Any], small_model: Path, tmp_path: Path
) -> None:
    cluster = running_cluster(
        model=small_model, mode="colocated", workers=1, dtype="float32", kv_cache_bytes=POOL_BYTES,
        kv_host_bytes=HOST_BYTES, kv_disk_bytes=DISK_BYTES, kv_disk_path=tmp_path,
    )  # fmt: skip
    rng = random.Random(5)
    questions = [
        Question(tuple(rng.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)), ANSWER, shares_pages=True)
        for _ in range(PROMPTS)
    ]
    answers = asyncio.run(undisturbed(cluster.grpc_address, questions))
    assert asyncio.run(undisturbed(cluster.grpc_address, questions)) == answers
    dead = cluster.worker("both")
    kill(dead)
    restarted(cluster, dead)
    assert asyncio.run(undisturbed(cluster.grpc_address, questions)) == answers
    assert loaded(cluster) > 0
    cluster.assert_idle_and_sound()
