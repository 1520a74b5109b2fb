"""A step that fails or never ends, in a real cluster: clear errors for its batch, and one worker that starts again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from .engine_fault import EngineFaults
from .traffic import in_flight_when, serves_again

STEP_DEADLINE_S = 10.0
"""Far longer than a step of this model takes, also where other tests share the cores."""
NOTICED_WITHIN_S = 5.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("role", "fault"), [("prefill", "raise"), ("decode", "raise"), ("decode", "hang")])
def test_a_lost_engine(
    role: str,
    fault: str,
    fresh_cluster: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = EngineFaults(tmp_path, monkeypatch)
    cluster = fresh_cluster(dtype="float32", page_tokens=16, max_step_tokens=64, step_deadline_s=STEP_DEADLINE_S)
    other = "decode" if role == "prefill" else "prefill"
    before, bystander = cluster.worker(role), cluster.worker(other)

    results = asyncio.run(in_flight_when(cluster.grpc_address, lambda: faults.order(role, fault)))
    assert not faults.open_orders()
    failed = [result for result in results if result[0] is not grpc.StatusCode.OK]
    assert {code for code, _, _ in failed} <= {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE}
    of_the_batch = [words for code, words, _ in failed if code is grpc.StatusCode.INTERNAL]
    assert of_the_batch
    for words in of_the_batch:
        assert f"{role}-0 failed in a step" in words
        assert ("did not end within" if fault == "hang" else "illegal memory access") in words
        assert "\n" not in words
    assert max(seconds for _, _, seconds in failed) < NOTICED_WITHIN_S + (STEP_DEADLINE_S if fault == "hang" else 0)

    assert asyncio.run(serves_again(cluster.grpc_address, 90)) == 16
    after = cluster.worker(role)
    assert after.pid != before.pid
    assert after.restarts == 1
    assert "failed in a step" in after.error
    assert cluster.worker(other).pid == bystander.pid
    cluster.assert_idle_and_sound()
