"""A worker that has lost its cache pulls prefixes from another worker that has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .moments import kill, restarted
from .streams import Question, undisturbed
from .test_kv_tiers import loaded

QUESTION = Question(tuple(3 + n % 4000 for n in range(3000)), 16, shares_pages=True)
WARM = "the way to prefill-0 is warm"


@pytest.mark.timeout(300)
def test_a_restarted_prefill_worker_pulls_from_the_decode_worker(
    running_cluster: Callable[..., Any], small_model: Path
) -> None:
    cluster = running_cluster(
        model=small_model, dtype="float32", page_tokens=16, max_step_tokens=64, kv_cache_bytes=1 << 26
    )
    answers = asyncio.run(undisturbed(cluster.grpc_address, [QUESTION]))
    dead, before = cluster.worker("prefill"), cluster.log("decode-0").count(WARM)
    assert loaded(cluster, "peer") == 0
    kill(dead)
    restarted(cluster, dead)
    deadline_s = time.monotonic() + 120
    while cluster.log("decode-0").count(WARM) == before:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert asyncio.run(undisturbed(cluster.grpc_address, [QUESTION])) == answers
    # All full pages but that of the last token, which is computed.
    assert loaded(cluster, "peer") == 2999 // 16
    cluster.assert_idle_and_sound()
