"""SIGKILL of a worker: clear errors at once, and a cluster that heals without a hand, on the same router."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from .traffic import in_flight_when, serves_again

DEADLINE_S = 5.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_sigkill(role: str, fresh_cluster: Callable[..., Any]) -> None:
    cluster = fresh_cluster(dtype="float32", page_tokens=16, max_step_tokens=64)
    before = cluster.worker(role)

    results = asyncio.run(in_flight_when(cluster.grpc_address, lambda: os.kill(before.pid, signal.SIGKILL)))
    if role == "decode":
        assert {code for code, _, _ in results} == {grpc.StatusCode.UNAVAILABLE}
    for code, words, seconds in results:
        if code is not grpc.StatusCode.OK:
            assert code is grpc.StatusCode.UNAVAILABLE
            assert role in words, words
            assert seconds < DEADLINE_S
    assert any(code is grpc.StatusCode.UNAVAILABLE for code, _, _ in results)

    assert asyncio.run(serves_again(cluster.grpc_address, 90)) == 16
    after = cluster.worker(role)
    assert after.incarnation != before.incarnation
    assert after.pid != before.pid
    cluster.assert_idle_and_sound()
