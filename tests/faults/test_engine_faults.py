"""A step that fails or never ends, in a real cluster: clear errors for its batch, and one worker that restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tests.soak import soak

from .conftest import STEP_DEADLINE_S
from .injected_faults import InjectedFaults
from .traffic import QUESTION, in_flight_when, serves_again

NOTICED_WITHIN_S = 60.0
"""Half of the time that a router waits for a worker that is merely silent."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("role", "fault"),
    [pytest.param("prefill", "raise", marks=soak), ("decode", "raise"), pytest.param("decode", "hang", marks=soak)],
)
def test_a_lost_engine_fails_its_batch_with_a_clear_error_and_its_worker_restarts(
    role: str, fault: str, pair: Callable[..., Any], engine_faults: InjectedFaults
) -> None:
    cluster = pair()
    other = "decode" if role == "prefill" else "prefill"
    before, bystander = cluster.worker(role), cluster.worker(other)

    streams, broken_at = asyncio.run(in_flight_when(cluster.grpc_address, lambda: engine_faults.order(role, fault)))
    assert not engine_faults.open_orders()
    failed = [stream for stream in streams if stream.code is not grpc.StatusCode.OK]
    assert {stream.code for stream in failed} == {grpc.StatusCode.INTERNAL}, "the others wait for the replacement"
    for words in (stream.words for stream in failed):
        assert f"{role}-0 failed in a step" in words
        assert ("did not end within" if fault == "hang" else "illegal memory access") in words
        assert "\n" not in words
    late = max(stream.ended_at for stream in failed) - broken_at
    assert late < NOTICED_WITHIN_S + (STEP_DEADLINE_S if fault == "hang" else 0)

    assert asyncio.run(serves_again(cluster.grpc_address, 90, QUESTION.request())) == QUESTION.tokens
    after = cluster.worker(role)
    assert after.pid != before.pid
    assert after.restarts == before.restarts + 1
    assert "failed in a step" in after.error
    assert cluster.worker(other).pid == bystander.pid
    cluster.assert_idle_and_sound()
